"""The remaining work of a job in Kafka: updates and time left, and arrival rates.

Rates are those of arrivals at Kafka, not of training. They follow from the first and the last
arrival in each batch's indicator. All records of a partition count for the worker that read the
newest of them, so that a worker and its successor count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from common.core.history import History
from common.core.messages import GENESIS, BatchReady, ControlRecord, UpdateApplied
from common.core.spans import Partition
from common.errors import GivenError
from common.jobs.store import JobStore
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.spot.planning.replan import read_ledger
from common.spot.theory.estimates import pooled_prior, rate_from_counts
from common.spot.theory.tallies import TransferTally
from common.wire.messages import decode_audit, decode_claim

if TYPE_CHECKING:
    from common.kafka.port import Log
    from common.spot.theory.work import Rates

# Number of newest indicators to read: about 15 MB. With 10,000 streams, each still has a few.
RECENT = 50_000


@dataclass(frozen=True, slots=True)
class Remaining:
    """Settings of a job; None if they are not set."""

    group_size: int | None = None  # K
    batch_size: int | None = None  # b
    updates: float | None = None  # J, left
    deadline_s: float | None = None  # theta, left
    # Measured by its workers.
    update_mb: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """Workers that receive records, and their arrival rates."""

    workers: tuple[str, ...]
    rates_per_s: Rates  # (N,) lambda_A,n
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Stream:
    """Indicators of one partition."""

    first_s: float
    last_s: float = -math.inf
    records: float = 0.0
    end: int = 0
    worker: str = ""


def remaining(job: str, log: Log, now_s: float) -> Remaining:
    """Return the remaining work of a job. Its deadline counts from its submission.

    Raises:
        NotFoundError: If the job does not exist.
        UnavailableError: If Kafka is unavailable.
    """
    record = JobStore(log).get(job)
    spec, stop = record.spec, record.spec.stop
    updates, deadline_s, notes = None, None, tuple[str, ...]()
    history, progress, transfer = History(), {GENESIS: 0.0}, TransferTally()
    for offset, decided in read_decoded(log, topics.updates_topic(record.id), decode_audit):
        if history.feed(offset, decided) and isinstance(decided, UpdateApplied):
            progress[history.head] = decided.progress
            if decided.moved is not UNSET:
                made = decided.synchrony.group_size if decided.synchrony else spec.group_size
                transfer.add(decided.progress, decided.moved, made / spec.group_size)
    measured = transfer.mean()
    update_mb = None if measured is None else float(measured.value)
    if stop.updates is not None:
        done = progress.get(history.head, float(history.head.version))
        updates = max(math.ceil(stop.updates - done), 0)
    if stop.deadline_s is not None:
        deadline_s = max(record.submitted_s + stop.deadline_s - now_s, 0.0)
    if spec.on_preemption == "reassign":
        note = (
            f"{job} assigns a preempted worker's streams to other workers (on_preemption:"
            " reassign),"
            " so it may finish earlier than this plan, in which the streams wait"
        )
        notes = (note,)
    if spec.mode != "synchronous" or spec.synchronised.rules:
        note = (
            f"{job} is not always synchronous; this plan assumes synchronous updates of"
            f" {spec.group_size} batches"
        )
        notes += (note,)
    return Remaining(spec.group_size, spec.batch_size, updates, deadline_s, update_mb, notes)


def measured(job: str, log: Log) -> dict[str, float]:
    """Return the estimates of a job's provisioner; empty before its first plan.

    Returns:
        Estimates by name, `availability.POOL` and `cycle_s.POOL` among them.

    Raises:
        NotFoundError: If the job does not exist.
        UnavailableError: If Kafka is unavailable.
    """
    plan = read_ledger(log, JobStore(log).get(job).id).plan
    return {} if plan is None else {name: one.value for name, one in plan.believed.items()}


def arriving(job: str, log: Log) -> Arriving:
    """Estimate each worker's rate from the newest indicators of a job.

    Raises:
        NotFoundError: If the job does not exist.
        GivenError: If there are too few indicators.
        UnavailableError: If Kafka is unavailable.
    """
    control = topics.control_topic(JobStore(log).get(job).id)
    claims = read_decoded(log, control, decode_claim, last=RECENT)
    found = rates_of(claim for _, claim in claims)
    if found is None:
        problem = f"the arrival rates of {job} are not known yet; give the rates"
        raise GivenError(("rate_per_s",), problem)
    note = (
        f"the rates are those of {len(found.workers)} workers that read records of {job} recently"
    )
    return Arriving(found.workers, found.rates_per_s, (note,))


def rates_of(claims: Iterable[ControlRecord | None]) -> Arriving | None:
    """Estimate rates from indicators, in the order of the control topic; None if unknown.

    A stream's rate is its records over the time from the first to the last of them. Repeated claims
    are skipped, as in the coordinator.
    """
    streams = dict[Partition, _Stream]()
    for claim in claims:
        # A time of 0 means that the time is unknown.
        if isinstance(claim, BatchReady) and claim.samples and claim.last_arrival_s > 0:
            _take(claim, streams)
    if not any(stream.last_s > stream.first_s for stream in streams.values()):
        return None
    each = list(streams.values())
    # The first record is not counted, because the time begins with it.
    records = np.array([max(stream.records - 1, 0) for stream in each])
    seconds = np.array([max(stream.last_s - stream.first_s, 0.0) for stream in each])
    estimate = rate_from_counts(records, seconds, pooled_prior(records, seconds))
    workers = dict[str, float]()
    for stream, rate in zip(each, np.atleast_1d(estimate.value), strict=True):
        workers[stream.worker] = workers.get(stream.worker, 0.0) + float(rate)
    names = tuple(sorted(workers))
    return Arriving(names, np.array([workers[name] for name in names]))


def _take(claim: BatchReady, streams: dict[Partition, _Stream]) -> None:
    known = [(streams.get(span.place), span.start) for span in claim.address]
    if any(stream is not None and start < stream.end for stream, start in known):
        return
    length = sum(span.end - span.start for span in claim.address)
    for span in claim.address:
        stream = streams.setdefault(span.place, _Stream(claim.first_arrival_s))
        stream.records += claim.samples * (span.end - span.start) / length
        stream.last_s = max(stream.last_s, claim.last_arrival_s)
        stream.end, stream.worker = span.end, claim.worker
