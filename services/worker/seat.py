"""Under which name a worker works: that of the slot that its machine is seated on.

A machine that was ordered for no slot is a spare until the job's
provisioner says in the plans topic whose stream it has. Its worker waits for that before it joins
the consumer group, and again whenever it begins anew: one that was fenced, because its machine was
taken for lost and another has its slot, finds there that the slot is no longer its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from common.core.messages import WorkerId
from common.core.spans import Partition
from common.errors import FutureFormatError, UnknownTopicError, WireError
from common.kafka.names import plans_topic
from common.spot.plans import decode_plan
from common.spot.provisioning.ledger import FleetLedger, Instance
from common.spot.provisioning.records import LaunchRequested, PlanRecord

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.ports.servers import Log

READ_RECORDS = 1000
READ_S = 0.2  # between looks whether the worker is to leave


def seat_of(job: JobRecord, name: str, log: Log, stays: Callable[[], bool]) -> WorkerId | None:
    """Wait for the name to work under; a worker that is no spare has its own at once.

    Args:
        job: The job.
        name: Of this worker, as it was started.
        log: Where the job's plans topic is.
        stays: Asked now and then; where it says no the worker is to leave, and gets no name.

    Raises:
        UnavailableError: If Kafka is unavailable.
        FutureFormatError: If a newer program wrote one of the plans.
    """
    spec = job.spec
    spare = name.startswith(f"{job.id}-m")  # else it was started for a slot, or by hand
    if spec.provisioning is None or spec.on_preemption != "hold" or not spare:
        return WorkerId(name)
    plans = Partition(plans_topic(job.id), 0)
    try:
        bounds = log.bounds(plans)
    except UnknownTopicError:  # nobody rents its machines
        return WorkerId(name)
    ledger, machine = FleetLedger(), None
    with closing(log.tail(plans, bounds.start)) as tail:
        while stays():
            for record in tail.read(READ_RECORDS, READ_S):
                plan = _decoded(record.value)
                if ledger.feed(record.offset, plan):
                    machine = _ordered(ledger, plan, name) or machine
            if machine is None and tail.position() >= bounds.end:
                return WorkerId(name)  # an order stands there before its machine is asked for
            if machine is not None and machine.has_seat:
                return WorkerId(machine.member)
    return None


def _ordered(ledger: FleetLedger, plan: PlanRecord | None, name: str) -> Instance | None:
    """The machine of this worker, where the record orders it."""
    if isinstance(plan, LaunchRequested) and plan.worker == name:
        return ledger.machines[plan.launch]
    return None


def _decoded(value: bytes | None) -> PlanRecord | None:
    try:
        plan: PlanRecord = decode_plan(value or b"")
    except FutureFormatError:
        raise
    except WireError:
        return None
    return plan
