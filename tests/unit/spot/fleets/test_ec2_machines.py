"""Descriptions of EC2 instances become machines of ours."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from common.errors import WireError
from common.spot.fleets.ec2.machines import machine_of, tags_of
from common.spot.machines import LaunchRequest, Machine

if TYPE_CHECKING:
    from types_boto3_ec2.literals import InstanceStateNameType
    from types_boto3_ec2.type_defs import InstanceTypeDef

ORDER = LaunchRequest(7, "doll-7", 3, "spot", "w3-7")
AT_S = 1_800_000_000.0
RUNNING = Machine(
    "i-1", 7, 3, "spot", "w3-7", "running", AT_S, type="c5.xlarge", zone="eu-central-1b"
)


def instance(
    state: InstanceStateNameType, code: str = "", transition: str = "", message: str = ""
) -> InstanceTypeDef:
    return {
        "InstanceId": "i-1",
        "InstanceType": "c5.xlarge",
        "Placement": {"AvailabilityZone": "eu-central-1b"},
        "LaunchTime": datetime.fromtimestamp(AT_S, UTC),
        "State": {"Name": state},
        "StateReason": {"Code": code, "Message": message},
        "StateTransitionReason": transition,
        "Tags": tags_of(ORDER, "digits"),
    }


@pytest.mark.parametrize("state", ["pending", "running"])
def test_pending_and_running_instances_are_running_machines(state: InstanceStateNameType) -> None:
    assert machine_of(instance(state)) == RUNNING


@pytest.mark.parametrize(
    ("state", "becomes"),
    [
        ("shutting-down", "ended"),
        ("terminated", "ended"),
        ("stopping", "stopped"),
        ("stopped", "stopped"),
    ],
)
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("Server.SpotInstanceTermination", "preempted"),
        ("Server.SpotInstanceShutdown", "preempted"),
        ("Client.UserInitiatedShutdown", "released"),
        ("Client.InstanceInitiatedShutdown", "failed"),
        ("Server.InsufficientInstanceCapacity", "failed"),
        ("Server.InternalError", "failed"),
        ("", "failed"),
    ],
)
def test_state_reason_code_determines_the_cause_of_an_end(
    state: InstanceStateNameType, becomes: str, code: str, cause: str
) -> None:
    found = machine_of(instance(state, code))
    # The provisioner releases no machine by a stop.
    by_hand = becomes == "stopped" and cause == "released"
    assert (found.state, found.cause) == (becomes, None if by_hand else cause)
    assert found.ended_s is None
    assert state in found.detail
    assert code in found.detail


@pytest.mark.parametrize("zone", ["GMT", "UTC"])
def test_end_time_is_read_from_the_transition_reason(zone: str) -> None:
    transition = f"User initiated (2027-01-15 08:30:00 {zone})"
    found = machine_of(instance("terminated", "Client.UserInitiatedShutdown", transition))
    assert found.ended_s == datetime(2027, 1, 15, 8, 30, tzinfo=UTC).timestamp()
    assert transition in found.detail


def test_cause_is_read_from_the_reason_text_without_a_code() -> None:
    found = machine_of(instance("terminated", "", "Server.SpotInstanceTermination: no capacity"))
    assert (found.cause, found.ended_s) == ("preempted", None)


@pytest.mark.parametrize("key", ["doll:launch", "doll:slot", "doll:pool", "doll:worker"])
def test_instance_without_order_tags_is_rejected(key: str) -> None:
    stranger = instance("running")
    stranger["Tags"] = [tag for tag in stranger["Tags"] if tag["Key"] != key]
    with pytest.raises(WireError, match="i-1"):
        machine_of(stranger)


def test_instance_with_a_non_numeric_launch_tag_is_rejected() -> None:
    stranger = instance("running")
    stranger["Tags"] = [{"Key": tag["Key"], "Value": "x"} for tag in stranger["Tags"]]
    with pytest.raises(WireError, match="i-1"):
        machine_of(stranger)
