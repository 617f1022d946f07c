"""What is known of a job's machines and workers, and what its events say, as the API tells it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import asdict

from common.api.answers import EvaluationEvent, Life, MachineEvent, ReviewEvent, WorkerAnswer
from common.core.messages import Drifted, Evaluated, LeaderStatus, WorkerId
from common.spot.api import plan_answer
from common.spot.provisioning.records import Ended, LaunchRequested, Planned, Reviewed, Started
from services.admin.live.evaluations import drift_answer

if TYPE_CHECKING:
    from common.api.answers import Answer, DriftAnswer, MachineKind, WorkerStatus
    from common.spot.provisioning.ledger import FleetLedger
    from common.spot.provisioning.records import PlanRecord

LIVES = 2000  # on a timeline: more could not be told apart


def verdict_event(record: Evaluated | Drifted) -> EvaluationEvent | DriftAnswer:
    """What an evaluator told."""
    if isinstance(record, Drifted):
        return drift_answer(record)
    return EvaluationEvent.model_validate(asdict(record) | record.model._asdict())


def plan_event(ledger: FleetLedger, record: PlanRecord) -> Answer | None:
    """Of a record of the plans topic that counts; None: it is none."""
    match record:
        case Planned():
            return plan_answer(record)
        case Reviewed():
            return ReviewEvent.model_validate(record)
        case LaunchRequested() | Started() | Ended():
            return _machine(ledger, record)
        case _:
            return None


def _machine(ledger: FleetLedger, record: LaunchRequested | Started | Ended) -> MachineEvent:
    rented = ledger.machines[record.launch]
    return MachineEvent(
        launch=rented.launch,
        slot=rented.slot,
        worker=rented.member,
        pool=rented.pool,
        kind=kind_of(ledger, rented.pool),
        state="running" if rented.running else "ordered" if rented.open else "ended",
        cause=rented.cause or "",
        detail=rented.detail,
        at_s=record.at_s,
    )


def kind_of(ledger: FleetLedger, pool: str) -> MachineKind:
    """How machines of a pool are paid, as the plan in force names the pools."""
    if ledger.plan is None or pool not in ledger.plan.pools:
        return "unknown"
    return "on-demand" if ledger.plan.pools.index(pool) == 0 else "spot"


def lives_of(ledger: FleetLedger) -> tuple[Life, ...]:
    """The newest machines that ran, and orders that were refused, by launch."""
    newest = map(ledger.machines.__getitem__, range(ledger.launches, 0, -1))
    ran = (each for each in newest if each.started_s is not None or not each.open)
    lives = [
        Life(
            slot=each.slot,
            worker=each.member,
            pool=each.pool,
            kind=kind_of(ledger, each.pool),
            from_s=each.ordered_s if each.started_s is None else each.started_s,
            to_s=each.ended_s,
            cause=each.cause,
        )
        for each in islice(ran, LIVES)
        if each.slot is not None  # a spare that no stream needed
    ]
    return tuple(reversed(lives))


def workers_of(
    ledger: FleetLedger,
    statuses: Mapping[str, str] | None,
    samples: Mapping[str, int],
    leader_status: LeaderStatus | None = None,
) -> tuple[WorkerAnswer, ...]:
    """Everybody who sends heartbeats, and machines whose worker gives none, by name.

    Args:
        ledger: Of the job's machines.
        statuses: Who sends heartbeats; None: Redis is unavailable, and nobody is known to be.
        samples: By worker, of late.
        leader_status: Says who gets no work, and who adds up among themselves.
    """
    group = UNSET if leader_status is None else leader_status.group
    other_model = {} if leader_status is None else leader_status.left_out
    rented = {each.member: each for each in ledger.open}
    answers = list[WorkerAnswer]()
    for name in sorted({*rented, *(statuses or {})}):
        fields: dict[str, object] = {"name": name, "status": _status(name, statuses)}
        fields["samples"] = samples.get(name, 0)
        fields["left_out"] = other_model.get(WorkerId(name))
        if group:
            left_out = fields["left_out"] or group.left_out.get(WorkerId(name))
            fields |= {"member": name in group.members, "left_out": left_out}
        if (machine := rented.get(name)) is not None:
            fields |= {
                "slot": machine.slot,
                "kind": kind_of(ledger, machine.pool),
                "pool": machine.pool,
                "machine": machine.machine or None,
                "since_s": machine.started_s,
            }
        answers.append(WorkerAnswer.model_validate(fields))
    return tuple(answers)


def _status(worker: str, statuses: Mapping[str, str] | None) -> WorkerStatus:
    if statuses is None:
        return "unknown"
    if worker not in statuses:
        return "silent"
    return "alive" if statuses[worker] == "alive" else "leaving"
