"""What the events of a job say, as JSON; their names are in `services.admin.routes.events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from common.api.provisioning import planned_told
from common.core.messages import Drifted
from common.provisioning.records import Believed, Ended, Ordered, Planned, Reviewed, Started
from services.admin.live.machines import kind_of

if TYPE_CHECKING:
    from common.api.answers import MachineKind
    from common.core.messages import Evaluated
    from common.jobs.progress import Row
    from common.provisioning.ledger import FleetLedger
    from common.provisioning.records import PlanRecord


class UpdateTold(msgspec.Struct, frozen=True):
    """`update`: the newest update; the fields of `UpdateAnswer`, and one more."""

    version: int
    epoch: int
    at_s: float | None
    samples: int
    batches: int
    loss: float
    gradient_s: float | None
    revision: int
    short: str
    metrics: dict[str, float]
    count: int  # updates since the last such event, this one with them


class MemberTold(msgspec.Struct, frozen=True):
    """`member`: a worker gives other signs of life than before."""

    worker: str
    status: str  # alive, leaving, gone
    at_s: float


class MachineTold(msgspec.Struct, frozen=True):
    """`machine`: a machine was ordered, was seen running, or has ended."""

    launch: int
    slot: int
    worker: str
    pool: str
    kind: MachineKind
    state: Literal["ordered", "running", "ended"]
    cause: str  # of its end; else empty
    detail: str
    at_s: float


class ReviewTold(msgspec.Struct, frozen=True):
    """`review`: how things stand with the job's machines and money."""

    at_s: float
    version: int
    updates_left: float
    running: int
    wanted: int
    spent_usd: float
    on_demand_only_usd: float
    stability: float
    believed: dict[str, Believed]
    warning: str


class EvaluatedTold(msgspec.Struct, frozen=True):
    """`evaluation`: how good a version is; a version may come in two parts."""

    version: int
    epoch: int
    at_s: float
    records: int
    test: dict[str, float]
    prequential: dict[str, dict[str, float]]


class DriftTold(msgspec.Struct, frozen=True):
    """`drift`: a stream's errors have risen; the fields of `DriftAnswer`."""

    stream: str
    version: int
    at_s: float
    before: float
    after: float


def verdict_told(record: Evaluated | Drifted) -> tuple[str, bytes]:
    """An event's name and data, for what an evaluator told."""
    if isinstance(record, Drifted):
        told = DriftTold(
            record.stream, record.model.version, record.at_s, record.before, record.after
        )
        return "drift", msgspec.json.encode(told)
    return "evaluation", msgspec.json.encode(
        EvaluatedTold(
            record.model.version,
            record.model.epoch,
            record.at_s,
            record.records,
            record.test,
            record.prequential,
        )
    )


def update_told(row: Row, count: int) -> bytes:
    """The newest update, and how many new ones it stands for."""
    return msgspec.json.encode(UpdateTold(*row, count))


def member_told(worker: str, status: str, at_s: float) -> bytes:
    """A worker's new status."""
    return msgspec.json.encode(MemberTold(worker, status, at_s))


def record_told(ledger: FleetLedger, record: PlanRecord) -> tuple[str, bytes] | None:
    """An event's name and data, for a record of the plans topic that counts; None: it is none."""
    match record:
        case Planned():
            return "plan", msgspec.json.encode(planned_told(record))
        case Reviewed():
            fields = {name: getattr(record, name) for name in ReviewTold.__struct_fields__}
            return "review", msgspec.json.encode(ReviewTold(**fields))
        case Ordered() | Started() | Ended():
            return "machine", msgspec.json.encode(_machine(ledger, record))
        case _:
            return None


def _machine(ledger: FleetLedger, record: Ordered | Started | Ended) -> MachineTold:
    rented = ledger.machines[record.launch]
    state: Literal["ordered", "running", "ended"] = "ordered"
    if not isinstance(record, Ordered):
        state = "running" if isinstance(record, Started) else "ended"
    return MachineTold(
        launch=rented.launch,
        slot=rented.slot,
        worker=rented.worker,
        pool=rented.pool,
        kind=kind_of(ledger, rented.pool),
        state=state,
        cause=record.cause if isinstance(record, Ended) else "",
        detail=record.detail if isinstance(record, Ended) else "",
        at_s=record.at_s,
    )
