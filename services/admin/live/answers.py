"""Answers of the API about a job, its machines and its events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import asdict

from common.api.answers import (
    CurvesAnswer,
    DriftAnswer,
    EvaluationCurves,
    EvaluationEvent,
    LagCurve,
    Life,
    MachineEvent,
    PrequentialCurve,
    ReviewEvent,
    SwitchAnswer,
    UpdateAnswer,
    UpdatesPage,
    WorkerAnswer,
    WorkersAnswer,
)
from common.core.messages import Drifted, Evaluated, WorkerId
from common.spot.api import plan_answer
from common.spot.provisioning.records import Ended, LaunchRequested, Planned, Reviewed, Started

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.api.answers import Answer, MachineKind, WorkerStatus
    from common.jobs.progress import Evaluations, JobProgress, UpdateRow
    from common.spot.provisioning.fleet_ledger import FleetLedger
    from common.spot.provisioning.records import PlanRecord

# Maximum number of machine lifetimes on a timeline; more could not be told apart.
LIVES = 2000
# Window of the update rate in seconds, the same as in `common.jobs.progress`.
_RATE_S = 10.0


def verdict_event(record: Evaluated | Drifted) -> EvaluationEvent | DriftAnswer:
    """Return an evaluator's record as an event."""
    if isinstance(record, Drifted):
        return _drift(record)
    return EvaluationEvent.model_validate(asdict(record) | record.model._asdict())


def plan_event(ledger: FleetLedger, record: PlanRecord) -> Answer | None:
    """Return the event of an effective record of the plans topic; None if its kind has none."""
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
        kind=_kind(ledger, rented.pool),
        state="running" if rented.running else "ordered" if rented.open else "ended",
        cause=rented.cause or "",
        detail=rented.detail,
        at_s=record.at_s,
    )


def _kind(ledger: FleetLedger, pool: str) -> MachineKind:
    """Return how machines of a pool are paid for, according to the plan in force."""
    if ledger.plan is None or pool not in ledger.plan.pools:
        return "unknown"
    return "on-demand" if ledger.plan.pools.index(pool) == 0 else "spot"


def _lives(ledger: FleetLedger) -> tuple[Life, ...]:
    """Return the newest machines that ran and the newest refused orders, sorted by launch."""
    newest = map(ledger.machines.__getitem__, range(ledger.launches, 0, -1))
    ran = (each for each in newest if each.started_s is not None or not each.open)
    lives = [
        Life(
            slot=each.slot,
            worker=each.member,
            pool=each.pool,
            kind=_kind(ledger, each.pool),
            from_s=each.ordered_s if each.started_s is None else each.started_s,
            to_s=each.ended_s,
            cause=each.cause,
        )
        for each in islice(ran, LIVES)
        # Without a slot, the machine is a spare that no stream needed.
        if each.slot is not None
    ]
    return tuple(reversed(lives))


def updates_page(job: JobProgress, after: int, limit: int) -> UpdatesPage:
    """Return at most `limit` effective updates above a version."""
    first = max(after + 1, job.updates.oldest or 1)
    rows = job.updates.rows(first, first + limit - 1)
    updates = tuple(map(UpdateAnswer.model_validate, rows))
    more = bool(updates) and updates[-1].version < job.version
    return UpdatesPage(
        updates=updates,
        next=updates[-1].version if more else None,
        newest=job.version,
        oldest=job.updates.oldest,
    )


def curves_answer(job: JobProgress, ledger: FleetLedger, now: float) -> CurvesAnswer:
    """Return everything that is plotted over time, thinned."""
    rows, lags, reviews = job.updates.curve(), job.lags.samples(), ledger.reviews.samples()
    times_s = list[float]()
    for row in rows:
        times_s.append(row.at_s or (times_s[-1] if times_s else 0.0))
    names = sorted({name for row in rows for name in row.metrics})
    return CurvesAnswer(
        now_s=now,
        update_at_s=tuple(times_s),
        version=tuple(row.version for row in rows),
        loss=tuple(row.loss for row in rows),
        metrics={name: tuple(row.metrics.get(name) for row in rows) for name in names},
        updates_per_s=tuple(_rates(rows, times_s)),
        lag_at_s=tuple(at_s for at_s, _ in lags),
        lag=tuple(
            LagCurve(stream=name, lag=tuple(lag[index] for _, lag in lags))
            for index, name in enumerate(job.record.spec.streams)
        ),
        lives=_lives(ledger),
        cost_at_s=tuple(review.at_s for review in reviews),
        spent_usd=tuple(review.spent_usd for review in reviews),
        on_demand_only_usd=tuple(review.on_demand_only_usd for review in reviews),
        stability=tuple(review.stability for review in reviews),
        running=tuple(review.running for review in reviews),
        evaluation=_evaluation_curves(job.evaluations),
        switches=tuple(map(SwitchAnswer.model_validate, job.updates.switches)),
    )


def _rates(rows: Sequence[UpdateRow], times_s: Sequence[float]) -> list[float]:
    """Return updates per second over the 10 s before each row, or since the previous row."""
    rates, first = list[float](), 0
    for index, at_s in enumerate(times_s):
        while first < index - 1 and times_s[first] < at_s - _RATE_S:
            first += 1
        span_s = at_s - times_s[first]
        made = rows[index].version - rows[first].version
        rates.append(made / span_s if span_s > 0 else 0.0)
    # The start of the first update is unknown, so it gets the rate of the second one.
    return rates[1:2] + rates[1:] or rates


def _evaluation_curves(found: Evaluations) -> EvaluationCurves:
    return EvaluationCurves(
        at_s=tuple(each.at_s for each in found.tests),
        version=tuple(each.model.version for each in found.tests),
        test=_columns([each.test for each in found.tests]),
        prequential=tuple(
            PrequentialCurve(
                stream=stream,
                at_s=tuple(each.at_s for each in body),
                version=tuple(each.model.version for each in body),
                metrics=_columns([each.prequential[stream] for each in body]),
            )
            for stream, body in found.predictions.items()
        ),
        drifts=tuple(map(_drift, found.drifts)),
    )


def _columns(means: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    """Return the values of each metric, one per version."""
    names = sorted({name for each in means for name in each})
    return {name: tuple(each.get(name) for each in means) for name in names}


def _drift(record: Drifted) -> DriftAnswer:
    return DriftAnswer.model_validate(asdict(record) | {"version": record.model.version})


def workers_answer(job: JobProgress, ledger: FleetLedger, now: float) -> WorkersAnswer:
    """Return all workers that send heartbeats, and machines whose worker sends none, by name."""
    look, samples = job.seen, job.recent.samples_of(now)
    group = UNSET if look.leader_status is None else look.leader_status.group
    other_model = {} if look.leader_status is None else look.leader_status.left_out
    rented = {each.member: each for each in ledger.open}
    answers = list[WorkerAnswer]()
    for name in sorted({*rented, *(look.statuses or {})}):
        fields: dict[str, object] = {"name": name, "status": _status(name, look.statuses)}
        fields["samples"] = samples[name]
        fields["left_out"] = other_model.get(WorkerId(name))
        fields["device"] = look.devices.get(name)
        if group:
            left_out = fields["left_out"] or group.left_out.get(WorkerId(name))
            fields |= {"member": name in group.members, "left_out": left_out}
        if (machine := rented.get(name)) is not None:
            fields |= {
                "slot": machine.slot,
                "kind": _kind(ledger, machine.pool),
                "pool": machine.pool,
                "machine": machine.machine or None,
                "since_s": machine.started_s,
            }
        answers.append(WorkerAnswer.model_validate(fields))
    return WorkersAnswer(workers=tuple(answers), board_away=look.board_away)


def _status(worker: str, statuses: Mapping[str, str] | None) -> WorkerStatus:
    if statuses is None:
        return "unknown"
    if worker not in statuses:
        return "silent"
    return "alive" if statuses[worker] == "alive" else "leaving"
