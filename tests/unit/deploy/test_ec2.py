"""Requirements of EC2: the fleet launches from the template, and its rights are minimal."""

from __future__ import annotations

import ast
import base64
import json
import re
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import boto3
import botocore.session
import pytest
from moto import mock_aws

from common.core.messages import ModelId
from common.spot.fleets.ec2.client import connect
from common.spot.fleets.ec2.fleet import Ec2Fleet
from common.spot.fleets.ec2.prices import Ec2Prices
from common.spot.machines import LaunchRequest, by_pool
from common.spot.market.market_file import Market
from common.storage.s3 import S3Blobs
from common.storage.store import CheckpointStore
from tests.unit.deploy.iam import Policy, Request, listed, read_policy
from tests.unit.deploy.rendering import MARKET, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from botocore.model import OperationModel
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import RequestLaunchTemplateDataTypeDef

FOLDER = ROOT / "deploy/ec2"
SCRIPT = FOLDER / "user-data.sh"
REGION, ACCOUNT = "eu-central-1", "111122223333"
PREFIX = f"arn:aws:ec2:{REGION}:{ACCOUNT}"
TEMPLATE_ARN = f"{PREFIX}:launch-template/lt-0123456789abcdef0"
BUCKET, CHECKPOINTS = "doll-example", "checkpoints/"
SMALLEST_PART = 5 << 20  # bytes; S3's minimum
WRITES = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
S3_ACTIONS = {
    **dict.fromkeys(WRITES, "s3:PutObject"),
    "GetObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListObjectsV2": "s3:ListBucket",
}


class Call(NamedTuple):
    """A request to AWS."""

    operation: str
    parameters: Mapping[str, Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Yield the list of requests to AWS, which moto stands in for."""
    found = list[Call]()

    def note(params: Mapping[str, Any], model: OperationModel, **_: object) -> None:
        found.append(Call(model.name, dict(params)))

    make = botocore.session.get_session

    def noted(*arguments: Any) -> botocore.session.Session:  # noqa: ANN401 -- whatever it takes
        session = make(*arguments)
        session.get_component("event_emitter").register("provide-client-params", note)
        return session

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        monkeypatch.setattr(botocore.session, "get_session", noted)
        yield found


def template() -> dict[str, Any]:
    """Create the template with its user data, as the guide does."""
    data: dict[str, Any] = json.loads((FOLDER / "launch-template.json").read_text())
    return data | {"UserData": base64.b64encode(SCRIPT.read_bytes()).decode()}


def put_up(client: EC2Client) -> list[str]:
    """Create the resources that the template and the market name. Returns the subnets."""
    (network,) = client.describe_vpcs()["Vpcs"]
    group = client.create_security_group(
        GroupName="doll-worker", Description="workers", VpcId=network["VpcId"]
    )["GroupId"]
    image = client.describe_images()["Images"][0]["ImageId"]
    data = template() | {"ImageId": image}
    data["NetworkInterfaces"][0]["Groups"] = [group]
    client.create_launch_template(
        LaunchTemplateName="doll-worker",
        LaunchTemplateData=cast("RequestLaunchTemplateDataTypeDef", data),
    )
    return [each["SubnetId"] for each in client.describe_subnets()["Subnets"][:2]]


def use_ec2() -> EC2Client:
    """Call every operation of fleet and prices, with our example of a market."""
    market = Market.load(MARKET)
    assert market.ec2 is not None
    client = connect(market.ec2)
    provider = market.ec2.model_copy(update={"subnets": tuple(put_up(client))})
    with closing(Ec2Fleet(market, provider, "digits", client)) as fleet:
        orders = [
            LaunchRequest(number, f"doll-{number}", number, pool, f"digits-w{number}")
            for number, pool in enumerate((market.on_demand.name, market.spot[0].name))
        ]
        assert fleet.launch(orders) == ()
        machines = fleet.machines()
        assert [machine.worker for machine in machines] == ["digits-w0", "digits-w1"]
        fleet.release([machines[0].id])
        assert [machine.state for machine in fleet.machines()] == ["ended", "running"]
    pools = {pool.name: pool for pool in market.spot}
    found = Ec2Prices(provider, pools, client=client).look()
    assert by_pool(found).keys() == pools.keys()
    return client


def questions(call: Call) -> Iterator[Request]:
    """Yield access management's checks of a call, by AWS's service authorization reference."""
    given = call.parameters
    region = {"aws:RequestedRegion": REGION}
    if call.operation in ("DescribeInstances", "DescribeSpotPriceHistory"):
        yield Request(f"ec2:{call.operation}", "*", region)
    elif call.operation == "TerminateInstances":
        for number in given["InstanceIds"]:
            tags = region | {"aws:ResourceTag/doll:job": "digits"}
            yield Request("ec2:TerminateInstances", f"{PREFIX}:instance/{number}", tags)
    elif call.operation == "CreateFleet":
        (tagged,) = given["TagSpecifications"]
        assert tagged["ResourceType"] == "instance"
        tags = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in tagged["Tags"]}
        keys = tuple(tag["Key"] for tag in tagged["Tags"])
        by_us = region | {"ec2:LaunchTemplate": TEMPLATE_ARN}
        instance = f"{PREFIX}:instance/*"
        others = [TEMPLATE_ARN, f"{PREFIX}:volume/vol-1", f"{PREFIX}:subnet/subnet-1"]
        others.append(f"arn:aws:ec2:{REGION}::image/ami-1")
        launched = [f"{PREFIX}:{kind}/1" for kind in ("network-interface", "security-group")]
        launched.append(f"arn:aws:ec2:{REGION}::snapshot/snap-1")
        for resource in (f"{PREFIX}:fleet/fleet-1", *others):
            yield Request("ec2:CreateFleet", resource, region)
        yield Request("ec2:CreateFleet", instance, region | tags)
        # A fleet of type `instant` launches machines with the rights of its caller.
        for resource in (*others, *launched):
            yield Request("ec2:RunInstances", resource, by_us)
        yield Request("ec2:RunInstances", instance, by_us | tags)
        for action in ("CreateFleet", "RunInstances"):
            context = {"ec2:CreateAction": action, "aws:TagKeys": keys}
            yield Request("ec2:CreateTags", instance, context)
        role = f"arn:aws:iam::{ACCOUNT}:role/{template()['IamInstanceProfile']['Name']}"
        yield Request("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})
    else:
        pytest.fail(f"the rights that {call.operation} needs are not listed")


def storage_question(call: Call) -> Request:
    given, action = call.parameters, S3_ACTIONS[call.operation]
    bucket = f"arn:aws:s3:::{given['Bucket']}"
    if action == "s3:ListBucket":
        return Request(action, bucket, {"s3:prefix": given["Prefix"]})
    return Request(action, f"{bucket}/{given['Key']}")


def operations_in(*adapters: str) -> set[str]:
    """Return the methods of AWS's clients that an adapter names."""
    found = set[str]()
    for adapter in adapters:
        for node in ast.walk(ast.parse((ROOT / "common" / adapter).read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not ast.unparse(node.func.value).endswith("_client"):
                continue
            name = node.func.attr
            if name == "get_paginator":
                name = ast.literal_eval(node.args[0])
            found.add(name)
    return found - {"close"}


def unused(policy: Policy) -> set[tuple[int, str, str]]:
    return set(policy.grants()) - policy.used


# --- the launch template -------------------------------------------------------------------------


def test_fleet_launches_machines_from_the_template(calls: list[Call]) -> None:
    client = use_ec2()
    (found,) = client.describe_launch_template_versions(
        LaunchTemplateName="doll-worker", Versions=["$Default"]
    )["LaunchTemplateVersions"]
    data = found["LaunchTemplateData"]
    assert base64.b64decode(data["UserData"]) == SCRIPT.read_bytes()
    assert "CreateFleet" in {call.operation for call in calls}


def test_machine_is_hardened_and_terminates_on_shutdown() -> None:
    data = template()
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["InstanceMetadataTags"] == "enabled"
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    for interface in data["NetworkInterfaces"]:
        assert interface["AssociatePublicIpAddress"] is False
    for device in data["BlockDeviceMappings"]:
        assert device["Ebs"]["Encrypted"] is True
        assert device["Ebs"]["DeleteOnTermination"] is True
    # The fleet sets tags and spot options.
    assert not data.keys() & {"TagSpecifications", "InstanceMarketOptions", "KeyName"}
    assert len(data["UserData"]) < 16 << 10  # the limit of EC2


# --- rights --------------------------------------------------------------------------------------


def test_provisioner_policy_allows_exactly_what_the_provisioner_does(calls: list[Call]) -> None:
    client = use_ec2()
    named = operations_in("spot/fleets/ec2/fleet.py", "spot/fleets/ec2/prices.py")
    adapters = {client.meta.method_to_api_mapping[name] for name in named}
    done = [call for call in calls if call.operation in adapters]
    # Every operation was called.
    assert {call.operation for call in done} == adapters
    policy = read_policy(FOLDER / "provisioner-policy.json")
    for call in done:
        for question in questions(call):
            assert policy.allows(question), question
    assert unused(policy) == set()


@pytest.mark.parametrize(
    "question",
    [
        Request("ec2:TerminateInstances", f"{PREFIX}:instance/i-1", {}),
        Request("ec2:RunInstances", f"{PREFIX}:instance/*", {"aws:RequestTag/doll:job": "digits"}),
        Request("ec2:RunInstances", f"{PREFIX}:instance/*", {"ec2:LaunchTemplate": TEMPLATE_ARN}),
        Request("ec2:CreateFleet", f"{PREFIX}:instance/*", {}),
        Request("ec2:CreateTags", f"{PREFIX}:instance/i-1", {"aws:TagKeys": ("doll:job",)}),
        Request(
            "ec2:CreateTags",
            f"{PREFIX}:instance/i-1",
            {"ec2:CreateAction": "RunInstances", "aws:TagKeys": ("doll:job", "team")},
        ),
        Request("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/admin", {}),
        Request("ec2:DescribeInstances", "*", {"aws:RequestedRegion": "us-east-1"}),
    ],
)
def test_provisioner_policy_denies_machines_without_a_job(question: Request) -> None:
    assert not read_policy(FOLDER / "provisioner-policy.json").allows(question)


def test_coordinator_policy_allows_writes_and_reader_policy_reads(
    calls: list[Call],
) -> None:
    boto3.client("s3").create_bucket(
        Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
    )
    blobs = S3Blobs(BUCKET, CHECKPOINTS, part_bytes=SMALLEST_PART)
    calls.clear()
    blobs.put("digits/a", b"small")
    blobs.put("digits/b", bytes(SMALLEST_PART + 1))
    assert blobs.get("digits/a") == b"small"
    assert blobs.replace("digits/latest", b"a", None)
    assert blobs.names("digits/") == ["digits/a", "digits/b", "digits/latest"]
    reads = {"GetObject", "ListObjectsV2"}
    blobs.delete("digits/a")
    key = {"Bucket": BUCKET, "Key": f"{CHECKPOINTS}digits/b"}
    # S3Blobs calls it if a part cannot be sent.
    calls.append(Call("AbortMultipartUpload", key))
    assert {call.operation for call in calls} == set(S3_ACTIONS)
    # `upload_fileobj` consists of several operations, and a signed URL is for `get_object`.
    named = operations_in("storage/s3.py") - {"upload_fileobj", "generate_presigned_url"}
    client = boto3.client("s3")
    assert {client.meta.method_to_api_mapping[name] for name in named} <= set(S3_ACTIONS)
    writer = read_policy(FOLDER / "coordinator-policy.json")
    reader = read_policy(FOLDER / "reader-policy.json")
    for call in calls:
        assert writer.allows(storage_question(call)), call
        assert reader.allows(storage_question(call)) == (call.operation in reads), call
    assert unused(writer) == set()
    assert unused(reader) == set()


def test_worker_states_policy_allows_states_base_and_origin_only(
    calls: list[Call],
) -> None:
    boto3.client("s3").create_bucket(
        Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
    )
    blobs = S3Blobs(BUCKET, CHECKPOINTS, part_bytes=SMALLEST_PART)
    store = CheckpointStore(blobs, "digits")
    begins_with = store.put_origin(b"weights")
    calls.clear()
    assert store.put_base("digest", bytes(SMALLEST_PART + 1)) == "digest"
    assert store.base("digest")
    store.put_state(ModelId(1, 2), bytes(SMALLEST_PART + 1))
    assert store.state(ModelId(1, 2))
    assert store.origin(begins_with)
    for name in ("states/1-2", "base/digest"):
        # S3Blobs calls it if a part cannot be sent.
        key = {"Bucket": BUCKET, "Key": f"{CHECKPOINTS}digits/{name}.safetensors"}
        calls.append(Call("AbortMultipartUpload", key))
    policy = read_policy(FOLDER / "worker-states-policy.json")
    for call in calls:
        assert policy.allows(storage_question(call)), call
    assert unused(policy) == set()
    folder = f"arn:aws:s3:::{BUCKET}/{CHECKPOINTS}digits"
    assert not policy.allows(Request("s3:PutObject", f"{folder}/checkpoints/1-2/manifest.json"))
    assert not policy.allows(Request("s3:PutObject", f"{folder}/origin/{begins_with}.safetensors"))


@pytest.mark.parametrize("name", ["coordinator", "reader"])
def test_policies_of_coordinator_and_reader_deny_the_rest_of_the_bucket(name: str) -> None:
    policy = read_policy(FOLDER / f"{name}-policy.json")
    bucket = f"arn:aws:s3:::{BUCKET}"
    assert not policy.allows(Request("s3:GetObject", f"{bucket}/payroll"))
    assert not policy.allows(Request("s3:ListBucket", bucket, {"s3:prefix": "payroll/"}))
    # S3 reports a missing object only to callers that may list. Such a request has no prefix.
    assert policy.allows(Request("s3:ListBucket", bucket))


def test_worker_policy_allows_exactly_what_user_data_does() -> None:
    script = SCRIPT.read_text()
    asked = set(re.findall(r"^\s*aws (\S+ \S+)", script, re.MULTILINE))
    takes = {
        "ssm get-parameters-by-path": {"ssm:GetParametersByPath"},
        "ecr get-login-password": {"ecr:GetAuthorizationToken"},
    }
    assert asked == takes.keys()
    pull = {"ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"}
    policy = read_policy(FOLDER / "worker-policy.json")
    allowed = {each for part in policy.statements for each in listed(part["Action"])}
    assert allowed == set().union(*takes.values()) | pull
    path = re.findall(r"--path (\S+)", script)
    assert path == ["/doll/worker"]
    where = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/doll"
    for resource in (f"{where}/worker", f"{where}/worker/secrets/DOLL_REDIS_PASSWORD"):
        assert policy.allows(Request("ssm:GetParametersByPath", resource))
    assert not policy.allows(Request("ssm:GetParametersByPath", f"{where}/provisioner"))


def test_only_ec2_may_assume_the_worker_role() -> None:
    trust = json.loads((FOLDER / "worker-trust.json").read_text())
    (statement,) = trust["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}
    assert statement["Action"] == "sts:AssumeRole"


def test_markets_of_example_and_guide_name_the_template_of_the_guide(
    tmp_path: Path,
) -> None:
    guide = (ROOT / "docs/howto/ec2.md").read_text()
    shown = tmp_path / "market.yaml"
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    shown.write_text(block)
    for path in (MARKET, shown):
        market = Market.load(path)
        assert market.ec2 is not None
        assert f"--launch-template-name {market.ec2.launch_template}" in guide
