"""Exact requests to EC2, and the interpretation of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.stub import ANY, Stubber

from common.errors import OutsideError, UnavailableError
from common.spot.fleets.ec2.client import asking
from common.spot.fleets.ec2.fleet import Ec2Fleet
from common.spot.machines import LaunchRequest, Refused
from common.spot.market.market_file import Ec2Provider, Market, OnDemandPool, SpotPool
from common.spot.provisioning.records import client_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from types_boto3_ec2 import EC2Client

TOKEN = client_token("digits", 7)
SPOT = LaunchRequest(7, TOKEN, 3, "spot", "w3-7")
ON_DEMAND = SPOT._replace(pool="on-demand")
TAGS = [
    {"Key": "doll:job", "Value": "digits"},
    {"Key": "doll:token", "Value": TOKEN},
    {"Key": "doll:launch", "Value": "7"},
    {"Key": "doll:slot", "Value": "3"},
    {"Key": "doll:pool", "Value": "spot"},
    {"Key": "doll:worker", "Value": "w3-7"},
]
A_MACHINE = {"FleetId": "fleet-1", "Instances": [{"InstanceIds": ["i-1"], "Lifecycle": "spot"}]}
NO_MACHINES: dict[str, list[object]] = {"Reservations": []}


@pytest.fixture(scope="module")
def client() -> EC2Client:
    return boto3.client(
        "ec2",
        region_name="eu-central-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106 -- no secret
    )


@pytest.fixture
def ec2(client: EC2Client) -> Iterator[Stubber]:
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def fleet_of(client: EC2Client, subnets: tuple[str, ...] = (), **spot: tuple[str, ...]) -> Ec2Fleet:
    provider = Ec2Provider(
        region="eu-central-1",
        launch_template="doll-worker",
        launch_template_version="4",
        subnets=subnets,
    )
    pool = SpotPool.model_validate({"usd_per_hour": 0.1, **spot})
    market = Market(
        fleet="ec2", on_demand=OnDemandPool(usd_per_hour=0.3), spot=(pool,), ec2=provider
    )
    return Ec2Fleet(market, provider, "digits", client)


@pytest.fixture
def fleet(client: EC2Client) -> Ec2Fleet:
    return fleet_of(client)


def nothing_yet(ec2: Stubber) -> None:
    ec2.add_response("describe_instances", NO_MACHINES, ANY_FILTERS)


ANY_FILTERS = {"Filters": ANY}


# --- requests ------------------------------------------------------------------------------------


def test_spot_machine_is_requested_with_its_token(ec2: Stubber, client: EC2Client) -> None:
    ec2.add_response(
        "describe_instances",
        NO_MACHINES,
        {
            "Filters": [
                {"Name": "tag:doll:job", "Values": ["digits"]},
                {"Name": "tag:doll:token", "Values": [TOKEN]},
            ]
        },
    )
    ec2.add_response(
        "create_fleet",
        A_MACHINE,
        {
            "ClientToken": TOKEN,
            "Type": "instant",
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {
                        "LaunchTemplateName": "doll-worker",
                        "Version": "4",
                    },
                    "Overrides": [
                        {"InstanceType": "c5.xlarge", "SubnetId": "subnet-a"},
                        {"InstanceType": "c5.xlarge", "SubnetId": "subnet-b"},
                        {"InstanceType": "c6i.xlarge", "SubnetId": "subnet-a"},
                        {"InstanceType": "c6i.xlarge", "SubnetId": "subnet-b"},
                    ],
                }
            ],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": 1,
                "SpotTargetCapacity": 1,
                "DefaultTargetCapacityType": "spot",
            },
            "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
            "TagSpecifications": [{"ResourceType": "instance", "Tags": TAGS}],
        },
    )
    fleet = fleet_of(client, ("subnet-a", "subnet-b"), instance_types=("c5.xlarge", "c6i.xlarge"))
    assert fleet.launch([SPOT]) == ()


def test_on_demand_machine_is_requested_at_the_lowest_price(ec2: Stubber, fleet: Ec2Fleet) -> None:
    nothing_yet(ec2)
    ec2.add_response(
        "create_fleet",
        A_MACHINE,
        {
            "ClientToken": TOKEN,
            "Type": "instant",
            "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": ANY}],  # no overrides
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": 1,
                "OnDemandTargetCapacity": 1,
                "DefaultTargetCapacityType": "on-demand",
            },
            "OnDemandOptions": {"AllocationStrategy": "lowest-price"},
            "TagSpecifications": ANY,
        },
    )
    assert fleet.launch([ON_DEMAND]) == ()


@pytest.mark.parametrize(
    ("subnets", "spot", "overrides"),
    [
        (("subnet-a",), {}, [{"SubnetId": "subnet-a"}]),
        ((), {"instance_types": ("c5.xlarge",)}, [{"InstanceType": "c5.xlarge"}]),
        (
            (),
            {"instance_types": ("c5.xlarge",), "zones": ("eu-central-1a",)},
            [{"InstanceType": "c5.xlarge", "AvailabilityZone": "eu-central-1a"}],
        ),
        (("subnet-a",), {"zones": ("eu-central-1a",)}, [{"SubnetId": "subnet-a"}]),
    ],
)
def test_machine_is_requested_in_subnets_or_else_in_zones(
    ec2: Stubber,
    client: EC2Client,
    subnets: tuple[str, ...],
    spot: dict[str, tuple[str, ...]],
    overrides: list[dict[str, str]],
) -> None:
    nothing_yet(ec2)
    template = {"LaunchTemplateSpecification": ANY, "Overrides": overrides}
    rest = ("TargetCapacitySpecification", "SpotOptions", "TagSpecifications")
    ec2.add_response(
        "create_fleet",
        A_MACHINE,
        {
            "ClientToken": TOKEN,
            "Type": "instant",
            "LaunchTemplateConfigs": [template],
            **dict.fromkeys(rest, ANY),
        },
    )
    assert fleet_of(client, subnets, **spot).launch([SPOT]) == ()


def test_order_for_an_offer_requests_its_type_zone_and_maximum_price(
    ec2: Stubber, client: EC2Client
) -> None:
    nothing_yet(ec2)
    one = {"InstanceType": "c5.large", "AvailabilityZone": "eu-central-1b", "MaxPrice": "0.041000"}
    template = {"LaunchTemplateSpecification": ANY, "Overrides": [one]}
    ec2.add_response(
        "create_fleet",
        A_MACHINE,
        {
            "ClientToken": TOKEN,
            "Type": "instant",
            "LaunchTemplateConfigs": [template],
            "TargetCapacitySpecification": ANY,
            "SpotOptions": ANY,
            "TagSpecifications": [
                {
                    "ResourceType": "instance",
                    "Tags": [
                        {**tag, "Value": ""} if tag["Key"] == "doll:slot" else tag for tag in TAGS
                    ],
                }
            ],
        },
    )
    pool = {"instance_types": ("c5.xlarge", "c5.large"), "zones": ("eu-central-1a",)}
    order = SPOT._replace(slot=None, type="c5.large", zone="eu-central-1b", bid_usd_per_hour=0.041)
    assert fleet_of(client, **pool).launch([order]) == ()


def test_order_whose_token_a_machine_has_is_not_sent_again(ec2: Stubber, fleet: Ec2Fleet) -> None:
    ec2.add_response("describe_instances", {"Reservations": [{"Instances": [{"Tags": TAGS}]}]})
    assert fleet.launch([SPOT]) == ()


def test_many_tokens_are_looked_up_in_batches(ec2: Stubber, fleet: Ec2Fleet) -> None:
    orders = [SPOT._replace(launch=number, token=f"doll-{number:04}") for number in range(450)]
    for start in (0, 200, 400):
        tokens = [order.token for order in orders[start : start + 200]]
        carriers = [{"Tags": [{"Key": "doll:token", "Value": token}]} for token in tokens]
        ec2.add_response(
            "describe_instances",
            {"Reservations": [{"Instances": carriers}]},
            {"Filters": [ANY, {"Name": "tag:doll:token", "Values": tokens}]},
        )
    assert fleet.launch(orders) == ()


def test_machines_are_read_from_all_pages(ec2: Stubber, fleet: Ec2Fleet) -> None:
    for page, more in (("", "next"), ("next", "")):
        ec2.add_response(
            "describe_instances",
            NO_MACHINES | ({"NextToken": more} if more else {}),
            ANY_FILTERS | ({"NextToken": page} if page else {}),
        )
    assert fleet.machines() == ()


def test_machine_of_another_job_is_never_terminated(ec2: Stubber, fleet: Ec2Fleet) -> None:
    ec2.add_response(
        "describe_instances",
        NO_MACHINES,
        {
            "Filters": [
                {"Name": "tag:doll:job", "Values": ["digits"]},
                {"Name": "instance-id", "Values": ["i-somebody-elses"]},
            ]
        },
    )
    fleet.release(["i-somebody-elses"])


# --- answers -------------------------------------------------------------------------------------


def answered(ec2: Stubber, *codes: str) -> None:
    errors = [{"ErrorCode": code, "ErrorMessage": "because", "Lifecycle": "spot"} for code in codes]
    nothing_yet(ec2)
    ec2.add_response("create_fleet", {"FleetId": "fleet-1", "Errors": errors, "Instances": []})


@pytest.mark.parametrize(
    ("codes", "capacity"),
    [
        (["InsufficientInstanceCapacity"], True),
        (["UnfulfillableCapacity"], True),
        (["SpotMaxPriceTooLow"], True),
        (["MaxSpotInstanceCountExceeded"], True),
        (["VcpuLimitExceeded"], True),
        (["RequestLimitExceeded"], True),
        (["InvalidParameterValue", "InsufficientInstanceCapacity"], True),
        (["InvalidLaunchTemplateName.NotFoundException"], False),
        (["UnauthorizedOperation"], False),
        ([], True),
    ],
)
def test_answer_without_a_machine_is_a_refusal(
    ec2: Stubber, fleet: Ec2Fleet, codes: list[str], *, capacity: bool
) -> None:
    answered(ec2, *codes)
    (refused,) = fleet.launch([SPOT])
    assert refused[:2] == (7, capacity)
    assert all(f"{code}: because" in refused.reason for code in codes)


def test_answer_with_a_machine_and_errors_is_a_success(ec2: Stubber, fleet: Ec2Fleet) -> None:
    nothing_yet(ec2)
    error = {"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "in one zone"}
    ec2.add_response("create_fleet", A_MACHINE | {"Errors": [error]})
    assert fleet.launch([SPOT]) == ()


@pytest.mark.parametrize(
    ("code", "status", "capacity"),
    [
        # EC2 reports missing capacity with the status of a server's fault.
        ("InsufficientInstanceCapacity", 500, True),
        ("MaxSpotInstanceCountExceeded", 400, True),
        ("InvalidLaunchTemplateName.NotFoundException", 400, False),
        ("InvalidLaunchTemplateId.VersionNotFound", 400, False),
        ("InvalidSubnetID.NotFound", 400, False),
        ("InvalidParameterValue", 400, False),
    ],
)
def test_error_of_the_order_is_a_refusal(
    ec2: Stubber, fleet: Ec2Fleet, code: str, status: int, *, capacity: bool
) -> None:
    nothing_yet(ec2)
    ec2.add_client_error("create_fleet", code, "because", http_status_code=status)
    (refused,) = fleet.launch([SPOT])
    assert refused[:2] == (7, capacity)
    assert code in refused.reason


@pytest.mark.parametrize("code", ["IdempotentParameterMismatch", "IdempotentInstanceTerminated"])
def test_token_mismatch_means_that_the_order_was_already_sent(
    ec2: Stubber, fleet: Ec2Fleet, code: str
) -> None:
    nothing_yet(ec2)
    ec2.add_client_error("create_fleet", code)
    assert fleet.launch([SPOT]) == ()


@pytest.mark.parametrize("call", ["create_fleet", "describe_instances"])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("RequestLimitExceeded", 503, UnavailableError),
        ("Throttling", 400, UnavailableError),
        ("InternalError", 500, UnavailableError),
        ("Unavailable", 503, UnavailableError),
        ("UnauthorizedOperation", 403, OutsideError),
        ("AuthFailure", 401, OutsideError),
        ("RequestExpired", 400, OutsideError),
    ],
)
def test_unavailable_ec2_and_denied_requests_raise_different_errors(
    ec2: Stubber, fleet: Ec2Fleet, call: str, code: str, status: int, kind: type[OutsideError]
) -> None:
    if call == "create_fleet":
        nothing_yet(ec2)
    ec2.add_client_error(call, code, "because", http_status_code=status)
    with pytest.raises(OutsideError, match=code) as caught:
        fleet.launch([SPOT])
    assert type(caught.value) is kind


def test_missing_credentials_are_not_retriable() -> None:
    with pytest.raises(OutsideError, match="credentials") as caught, asking("a machine"):
        raise NoCredentialsError
    assert not caught.value.retriable
    with pytest.raises(UnavailableError, match="a machine"), asking("a machine"):
        raise EndpointConnectionError(endpoint_url="http://nowhere")


def test_order_for_an_unknown_pool_is_refused_without_a_request(
    ec2: Stubber, fleet: Ec2Fleet
) -> None:
    nothing_yet(ec2)
    refused = Refused(7, capacity=False, reason="the market has no pool 'gpu'")
    assert fleet.launch([SPOT._replace(pool="gpu")]) == (refused,)


def test_instance_with_only_the_job_tag_is_ignored(ec2: Stubber, fleet: Ec2Fleet) -> None:
    stranger = {"InstanceId": "i-9", "State": {"Name": "running"}, "Tags": TAGS[:1]}
    for _ in range(2):
        ec2.add_response("describe_instances", {"Reservations": [{"Instances": [stranger]}]})
    assert fleet.machines() == ()
    fleet.release(["i-9"])
