"""What the events of a job say, as JSON; their names are in `services.admin.routes.events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import asdict

from common.api.answers import EvaluationEvent, MachineEvent, MemberEvent, ReviewEvent, UpdateEvent
from common.api.provisioning import plan_answer
from common.core.messages import Drifted
from common.provisioning.records import Ended, LaunchRequested, Planned, Reviewed, Started
from services.admin.live.evaluations import drift_answer
from services.admin.live.machines import kind_of

if TYPE_CHECKING:
    from common.api.answers import Answer
    from common.core.messages import Evaluated
    from common.jobs.progress import Row
    from common.provisioning.ledger import FleetLedger
    from common.provisioning.records import PlanRecord

Event: TypeAlias = tuple[str, bytes]  # its name and its data


def verdict_event(record: Evaluated | Drifted) -> Event:
    """What an evaluator told."""
    if isinstance(record, Drifted):
        return _event("drift", drift_answer(record))
    fields = asdict(record) | record.model._asdict()
    return _event("evaluation", EvaluationEvent.model_validate(fields))


def update_event(row: Row, count: int) -> Event:
    """The newest update, and how many new ones it stands for."""
    return _event("update", UpdateEvent(**row._asdict(), count=count))


def member_event(worker: str, status: str, at_s: float) -> Event:
    """A worker's new status."""
    fields = {"worker": worker, "status": status, "at_s": at_s}
    return _event("member", MemberEvent.model_validate(fields))


def plan_event(ledger: FleetLedger, record: PlanRecord) -> Event | None:
    """Of a record of the plans topic that counts; None: it is none."""
    match record:
        case Planned():
            return _event("plan", plan_answer(record))
        case Reviewed():
            return _event("review", ReviewEvent.model_validate(record))
        case LaunchRequested() | Started() | Ended():
            return _event("machine", _machine(ledger, record))
        case _:
            return None


def _machine(ledger: FleetLedger, record: LaunchRequested | Started | Ended) -> MachineEvent:
    rented = ledger.machines[record.launch]
    return MachineEvent(
        launch=rented.launch,
        slot=rented.slot,
        worker=rented.worker,
        pool=rented.pool,
        kind=kind_of(ledger, rented.pool),
        state="running" if rented.running else "ordered" if rented.open else "ended",
        cause=rented.cause or "",
        detail=rented.detail,
        at_s=record.at_s,
    )


def _event(name: str, data: Answer) -> Event:
    return name, data.model_dump_json().encode()
