"""An EC2 instance as a machine: the tags of its order, and the cause of its end."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from common.errors import WireError
from common.spot.machines import Machine

if TYPE_CHECKING:
    from types_boto3_ec2.type_defs import InstanceTypeDef, TagTypeDef

    from common.spot.machines import EndCause, LaunchRequest

JOB = "doll:job"
TOKEN = "doll:token"  # noqa: S105 -- a tag's name
_LAUNCH, _SLOT, _POOL, _WORKER = "doll:launch", "doll:slot", "doll:pool", "doll:worker"
# States that are paid for: started, or about to start.
_RUNNING = {"pending", "running"}
# States of a machine that somebody has stopped, and whose disk is still paid for.
_STOPPED = {"stopping", "stopped"}
# Keyed by the code of the state's reason. Machines with other codes ended by themselves.
_CAUSES: dict[str, EndCause] = {
    "Server.SpotInstanceTermination": "preempted",
    "Server.SpotInstanceShutdown": "preempted",
    "Client.UserInitiatedShutdown": "released",
}
_ENDED_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def tags_of(order: LaunchRequest, job: str) -> list[TagTypeDef]:
    """Return the tags of an order's machine."""
    values = {
        JOB: job,
        TOKEN: order.token,
        _LAUNCH: str(order.launch),
        _SLOT: "" if order.slot is None else str(order.slot),
        _POOL: order.pool,
        _WORKER: order.worker,
    }
    return [{"Key": key, "Value": value} for key, value in values.items()]


def machine_of(instance: InstanceTypeDef) -> Machine:
    """Convert an instance.

    Raises:
        WireError: If its tags are not those of an order.
    """
    tags = {tag.get("Key", ""): tag.get("Value", "") for tag in instance.get("Tags", ())}
    number = instance.get("InstanceId", "")
    try:
        machine = Machine(
            id=number,
            launch=int(tags[_LAUNCH]),
            slot=int(tags[_SLOT]) if tags[_SLOT] else None,
            pool=tags[_POOL],
            worker=tags[_WORKER],
            state="running",
            started_s=instance["LaunchTime"].timestamp(),
            type=instance.get("InstanceType", ""),
            zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
        )
    except (KeyError, ValueError) as error:
        raise WireError(f"{number} has the tag of the job, but not the tags of an order") from error
    state = instance.get("State", {}).get("Name", "")
    if state in _RUNNING:
        return machine
    transition = instance.get("StateTransitionReason", "")
    reason = instance.get("StateReason", {})
    words = (state, reason.get("Code", ""), reason.get("Message", ""), transition)
    cause, stopped = _cause(reason.get("Code", ""), transition), state in _STOPPED
    return machine._replace(
        state="stopped" if stopped else "ended",
        ended_s=_ended_s(transition),
        # The provisioner terminates machines and never stops them.
        cause=None if stopped and cause == "released" else cause,
        detail="; ".join(dict.fromkeys(filter(None, words))),
    )


def _cause(code: str, transition: str) -> EndCause:
    """Return the cause by the reason's code, or by the transition in older answers."""
    if not code:
        code = transition.partition(":")[0]
    return _CAUSES.get(code, "failed")


def _ended_s(transition: str) -> float | None:
    found = _ENDED_AT.search(transition)
    if found is None:
        return None
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
