"""Placement of workers on jobs: every worker computes the same plan from shared records.

There is no scheduler. A job's leader publishes its demand (`JobDemand`), and a worker publishes its
place (`WorkerPlacement`). Each worker computes the same plan from these records and executes its
own part in two steps: it announces its next job, polls once more, and then moves.

    poll      plan: w3 -> b      announces "goes b"     others read it, and count w3 at b
    poll      b needs w3         leaves a, joins b      or: a better placed rival goes, and w3 stays

A simulation of one hour with a load of 0.7, preemptions and views up to 3 s old, compared with a
central scheduler with the same plan and a fresh view (tests/system/spread_world.py): 4 workers on
10 jobs train 100 % of what arrives (central: 99.98), and no job with work is without workers for
more than 76 s (67). 16 workers on 50 jobs: 99.8 % (99.7) and 77 s (70). If each worker goes to the
job with the greatest need, they train 80 % and leave jobs alone for 40 minutes, because all move at
once. If a hash assigns workers to jobs, they train 97 % and leave jobs alone as long, because
nothing balances the numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from common.core.field_types import Count, NonEmpty, Ordinal, PerSecond, Seconds

# --- published records ------------------------------------------------------------------------


class JobDemand(msgspec.Struct, frozen=True):
    """A job's demand, published by its leader. It has no times of day, because clocks differ."""

    job: NonEmpty[str]
    # Publication number. A record that does not change becomes stale.
    number: Count = 0
    # Records that could be part of an update now.
    backlog: Count = 0
    arrivals_per_s: PerSecond = 0.0  # records
    # Throughput of one worker on this job. 0 if unknown.
    worker_records_per_s: PerSecond = 0.0
    # Number of workers that it can use: its partitions.
    most_workers: Ordinal = 1
    # Share of the workers if there are fewer than needed.
    weight: Annotated[float, Meta(gt=0, le=1e12)] = 1.0
    # False if the job is paused or held.
    runs: bool = True
    # Number of workers requested by the owner (`provisioning.workers`) while there is work.
    target: Count = 0
    # Time that the job has had a backlog and no worker.
    unserved_s: Seconds = 0.0
    # Name or entrypoint of the task, which a worker must support.
    task: str = ""


class WorkerPlacement(msgspec.Struct, frozen=True):
    """A worker's current job and its next one."""

    worker: NonEmpty[str]
    # Publication number.
    number: Count = 0
    # Current job, or empty.
    job: str = ""
    # Time since the worker joined that job.
    stay_s: Seconds = 0.0
    # True if the worker may only work for this job.
    pinned: bool = False
    # Tasks that the worker supports. Empty for all.
    tasks: tuple[str, ...] = ()
    # Jobs that failed on this worker, which it avoids for a while.
    avoided: tuple[str, ...] = ()
    # Announced next job.
    goes: str = ""

    def can_do(self, demand: JobDemand) -> bool:
        """True if the worker could work for a job."""
        return (not self.tasks or demand.task in self.tasks) and demand.job not in self.avoided


@dataclass(frozen=True, slots=True)
class PlacementView:
    """All jobs and workers as one process sees them at one moment."""

    jobs: tuple[JobDemand, ...] = ()
    workers: tuple[WorkerPlacement, ...] = ()
    # Jobs without a recent record. They keep their workers.
    stale: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SpreadSettings:
    """Parameters of the plan. All workers must use the same ones."""

    # Minimum stay at a job with work: the length of a turn if jobs outnumber workers.
    shortest_stay_s: float = 30.0
    # A job with work and without a worker goes first after this time, divided by its weight.
    longest_wait_s: float = 60.0
    # Time that the needed workers take to clear the backlog.
    drain_s: float = 60.0
    # Factor on the rank of an occupied slot. Without it, two jobs with similar backlogs would
    # exchange workers for ever.
    occupied: float = 0.75
    # A worker completes its minimum stay only while the job has more work than this, in seconds of
    # one worker. Without this limit, workers would stay at jobs with few records, and 12 to 28 % of
    # the arrivals at 200 jobs would not be trained.
    bound_s: float = 2.0
    # Throughput of a worker if no job knows better.
    unknown_records_per_s: float = 100.0


SETTINGS = SpreadSettings()
# Maximum number of jobs in one sentence.
_NAMED = 3

# --- the plan --------------------------------------------------------------------------------


def workers_needed(
    demand: JobDemand, worker_records_per_s: float, settings: SpreadSettings = SETTINGS
) -> float:
    """Return the number of workers that a job can use now, as a fraction.

    They keep up with the arrivals and clear the backlog in `drain_s`, but are at most the number of
    partitions and at least what the owner requests. 0 if the job does not run, or has no backlog
    and no arrivals.
    """
    records_per_s = demand.arrivals_per_s + demand.backlog / settings.drain_s
    if not demand.runs or not records_per_s:
        return 0.0
    return max(min(records_per_s / worker_records_per_s, demand.most_workers), demand.target)


def plan(view: PlacementView, settings: SpreadSettings = SETTINGS) -> dict[str, str]:
    """Return the next job of each worker that should move. Equal views give equal plans."""
    return _Planning(view, settings).moves()


class _Slot(NamedTuple):
    """A slot for one worker at a job. The lowest ranks are filled first."""

    rank: tuple[int, float]
    # A hash, so that no job is preferred because of its name.
    tie: int
    job: str


class _Planning:
    """Computation of one plan."""

    def __init__(self, view: PlacementView, settings: SpreadSettings) -> None:
        self._settings = settings
        self._workers = sorted(view.workers, key=lambda it: it.worker)
        self._jobs = {it.job: it for it in sorted(view.jobs, key=lambda it: it.job)}
        self._stale = view.stale
        known = [it.worker_records_per_s for it in view.jobs if it.worker_records_per_s > 0]
        mean = math.fsum(known) / len(known) if known else settings.unknown_records_per_s
        self._speeds = {name: it.worker_records_per_s or mean for name, it in self._jobs.items()}
        self._at = dict[str, list[WorkerPlacement]]((name, []) for name in self._jobs)
        for worker in self._workers:
            place = worker.goes or worker.job
            if place in self._at:
                self._at[place].append(worker)

    def moves(self) -> dict[str, str]:
        """Return the next job of each worker that should move."""
        wanted = self._slots()[: len(self._workers)]
        leavers = self._leavers(Counter(slot.job for slot in wanted))
        filled, moves = Counter[str](), dict[str, str]()
        for slot in wanted:
            filled[slot.job] += 1
            if filled[slot.job] <= len(self._at[slot.job]):
                # A worker is there already.
                continue
            taker = next((it for it in leavers if it.can_do(self._jobs[slot.job])), None)
            if taker is not None:
                moves[taker.worker] = slot.job
                leavers.remove(taker)
        return moves | self._warm([it for it in leavers if not self._somewhere(it)], moves)

    def needed(self, job: str) -> int:
        """Return the number of workers that a job can use, rounded up."""
        if job not in self._jobs or job in self._stale:
            return 0
        return math.ceil(
            workers_needed(self._jobs[job], self._speeds[job], self._settings)
            # Tolerates rounding errors of the quotient.
            - 1e-9
        )

    def _slots(self) -> list[_Slot]:
        """Return the slots of all jobs, the most urgent first."""
        slots = list[_Slot]()
        for name, demand in self._jobs.items():
            bound = sum(map(self._stays, self._at[name]))
            if not bound and not any(it.can_do(demand) for it in self._workers):
                # No worker can serve it, so it would be first for ever.
                continue
            slots += (
                _Slot(self._rank(demand, number, bound), _mixed(name), name)
                for number in range(max(self.needed(name), bound))
            )
        return sorted(slots)

    def _rank(self, demand: JobDemand, number: int, bound: int) -> tuple[int, float]:
        settings = self._settings
        if number < bound:
            return (0, 0.0)
        if number < demand.target:
            return (1, number / demand.target)
        waited_s = demand.unserved_s * demand.weight
        if number == 0 and waited_s > settings.longest_wait_s:
            # The job that has waited longest goes first.
            return (2, -waited_s)
        needed = workers_needed(demand, self._speeds[demand.job], settings)
        occupied = settings.occupied if number < len(self._at[demand.job]) else 1.0
        return (3, (number + 1) / (needed * demand.weight) * occupied)

    def _stays(self, worker: WorkerPlacement) -> bool:
        """True if the worker must stay at its current or announced job."""
        if worker.pinned or worker.goes or worker.job in self._stale:
            return True
        demand, settings = self._jobs[worker.job], self._settings
        busy_s = demand.backlog / self._speeds[demand.job]
        return (
            demand.runs and busy_s > settings.bound_s and worker.stay_s < settings.shortest_stay_s
        )

    def _leavers(self, wanted: Mapping[str, int]) -> list[WorkerPlacement]:
        """Return workers without a job or beyond the plan, idle ones first."""
        leavers = [it for it in self._workers if not self._somewhere(it) and not it.pinned]
        for name, here in self._at.items():
            free = sorted(
                (it for it in here if not self._stays(it)),
                key=lambda it: (_mixed(it.job, it.worker), it.worker),
            )
            leavers += free[: max(len(here) - wanted[name], 0)]
        # Workers that support few tasks go first, because the others can fill more slots.
        return sorted(
            leavers,
            key=lambda it: (
                self._is_busy(it),
                sum(it.can_do(self._jobs[job]) for job in wanted),
                _mixed(it.worker),
                it.worker,
            ),
        )

    def _warm(self, idle: list[WorkerPlacement], moves: Mapping[str, str]) -> dict[str, str]:
        """Send workers without a job to the jobs with the fewest workers for their weight."""
        there = Counter({name: len(here) for name, here in self._at.items()})
        there.update(moves.values())
        warm = dict[str, str]()
        for worker in idle:
            able = [it for it in self._jobs.values() if it.runs and worker.can_do(it)]
            if able:
                least = min(able, key=lambda it: (there[it.job] / it.weight, _mixed(it.job)))
                warm[worker.worker] = least.job
                there[least.job] += 1
        return warm

    def _somewhere(self, worker: WorkerPlacement) -> bool:
        return bool(worker.goes) or worker.job in self._jobs

    def _is_busy(self, worker: WorkerPlacement) -> bool:
        demand = self._jobs.get(worker.job)
        return demand is not None and demand.backlog > self._speeds[demand.job]


def _mixed(*names: str) -> int:
    """Return a hash of these names."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest())


def elsewhere(view: PlacementView, demand: JobDemand) -> str:
    """Return where the workers are that could serve this job. Empty if there are none."""
    places = Counter(
        it.job
        for it in view.workers
        if it.job not in {"", demand.job} and not it.pinned and it.can_do(demand)
    )
    if not places:
        return ""
    names = [f"`{job}`" for job, _ in places.most_common(_NAMED)]
    if more := len(places) - len(names):
        names.append(f"{more} other jobs" if more > 1 else "another job")
    *first, last = names
    where = f"{', '.join(first)} and {last}" if first else last
    workers = places.total()
    who = "the worker is" if workers == 1 else f"the {workers:,} workers are"
    return f"another job has its turn: {who} working for {where}"


# --- one worker's part ------------------------------------------------------------------------


class PlacementStep(NamedTuple):
    """Decision of a worker after a poll."""

    # The announced job. Empty to stay.
    goes: str
    # True if the worker leaves for it immediately.
    now: bool
    reason: str


def next_step(view: PlacementView, worker: str) -> PlacementStep:
    """Return a worker's decision after a poll.

    Args:
        view: The current view, which contains the worker itself.
        worker: Name of the worker.
    """
    me = next((it for it in view.workers if it.worker == worker), None)
    if me is None or me.pinned:
        return PlacementStep(
            "",
            now=False,
            reason="the worker is reserved for one job" if me else "the worker is not registered",
        )
    if me.goes:
        return _confirmed(view, me)
    job = plan(view).get(worker)
    if job is None or job == me.job:
        return PlacementStep("", now=False, reason="no job needs the worker more")
    if not me.job:
        # No job loses a worker, so no announcement is needed.
        return PlacementStep(job, now=True, reason="the worker had no job")
    return PlacementStep(job, now=False, reason="the job needs the worker more")


def _confirmed(view: PlacementView, me: WorkerPlacement) -> PlacementStep:
    """Decide on an announced move. A hash chooses among the workers that announced the same job."""
    there = [it for it in view.workers if me.goes in (it.goes, it.job)]
    over = len(there) - _Planning(view, SETTINGS).needed(me.goes)
    rivals = sorted(
        (it.worker for it in there if it.goes == me.goes), key=lambda it: (_mixed(me.goes, it), it)
    )
    if over > 0 and me.worker in rivals[-over:]:
        return PlacementStep("", now=False, reason="other workers fill the job's places")
    return PlacementStep(me.goes, now=True, reason="the job needs the worker more")


# --- freshness of records ---------------------------------------------------------------------

# Age of an unchanged record at which it is stale: five publications.
_STALE_S = 5.0
# Age of an unchanged record at which any process may remove it. A takeover takes seconds. Until
# then, a job with a stale or missing record keeps its workers.
_FORGET_S = 60.0


class Sightings:
    """Builds views from published records, and recognises records that no longer change.

    It only uses the reader's own clock, because clocks differ.
    """

    def __init__(self) -> None:
        # Each record with the time of its last change.
        self._jobs = dict[str, tuple[JobDemand, float]]()
        self._workers = dict[str, tuple[WorkerPlacement, float]]()
        # Jobs with a record in the last poll.
        self._there = frozenset[str]()

    def see(self, records: Iterable[JobDemand | WorkerPlacement], now: float) -> PlacementView:
        """Add the records of a poll and return the view.

        A worker without a record has left. A job without a record is not deleted: Redis was wiped,
        or its leader gave up. Such a job becomes stale. The first view after a job's record
        disappeared is empty, because the records of workers may have disappeared, too.
        """
        records = tuple(records)
        before = self._there
        self._there = frozenset(it.job for it in records if isinstance(it, JobDemand))
        workers = dict[str, tuple[WorkerPlacement, float]]()
        for record in records:
            if isinstance(record, JobDemand):
                known = self._jobs.get(record.job)
                if known is None or known[0] != record:
                    self._jobs[record.job] = (record, now)
            else:
                there = self._workers.get(record.worker)
                workers[record.worker] = (
                    there if there is not None and there[0] == record else (record, now)
                )
        self._workers = workers
        if before - self._there:
            return PlacementView()
        stale_since = now - _STALE_S
        return PlacementView(
            tuple(it for it, changed_at in self._jobs.values() if changed_at > now - _FORGET_S),
            tuple(it for it, changed_at in workers.values() if changed_at > stale_since),
            frozenset(job for job, (_, at) in self._jobs.items() if at <= stale_since),
        )

    def forget(self, now: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return and forget the names of jobs and workers whose records can be removed."""
        since = now - _FORGET_S
        jobs = tuple(job for job, (_, at) in self._jobs.items() if at <= since)
        workers = tuple(worker for worker, (_, at) in self._workers.items() if at <= since)
        for job in jobs:
            del self._jobs[job]
        return jobs, workers


def with_jobs(view: PlacementView, known: Mapping[str, JobDemand]) -> PlacementView:
    """Return the view with the jobs that the jobs topic lists.

    Args:
        view: The view from Redis.
        known: All jobs that are not stopped, by name, with the demand that follows from the
            specification. A pause is visible here before the leader reports it. A job without a
            leader needs no workers, but workers without a job may join it and wait for its leader.
    """
    seen = {it.job: it for it in view.jobs}
    jobs = tuple(_without_unknown(seen.get(name, demand), demand) for name, demand in known.items())
    return replace(view, jobs=jobs, stale=view.stale & known.keys())


def _without_unknown(seen: JobDemand, known: JobDemand) -> JobDemand:
    return seen if known.runs else msgspec.structs.replace(seen, runs=False)
