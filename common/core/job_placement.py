"""Which job each worker works for: a plan that all workers compute alone, from what all can see.

There is no scheduler. A job's leader publishes what the job needs (`JobDemand`), a worker where it
is (`WorkerPlacement`); each worker computes the same plan from these records and follows its own
line of it, in two steps: it says where it goes, looks once more, and then goes.

    look      plan: w3 -> b      says "goes b"          others see it, and count it there
    look      still room at b    leaves a, joins b      or: a better placed rival takes it; it stays

Simulated for an hour, with a load of 0.7, preemptions and views up to 3 s old, beside a central
scheduler with the same plan and a fresh view (tests/system/spread_world.py): 4 workers on 10 jobs
train 100 % of what arrives (central: 99.98), and no job with work is without workers for more than
76 s (67); 16 workers on 50 jobs: 99.8 % (99.7) and 77 s (70). Each worker going where need is
greatest trained 80 % and left jobs alone for 40 minutes, as all go at once; hashing workers to jobs
trained 97 %, and left jobs alone for as long, as nobody counts heads.
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

# --- what everybody publishes ----------------------------------------------------------------


class JobDemand(msgspec.Struct, frozen=True):
    """What a job needs, as its leader sees it; durations, no times, as clocks differ."""

    job: NonEmpty[str]
    number: Count = 0  # of this publication: a record that does not change is not heard of
    backlog: Count = 0  # records that an update could be made of now and was not
    arrivals_per_s: PerSecond = 0.0  # records
    worker_records_per_s: PerSecond = 0.0  # what one worker manages here; 0: nobody knows
    most_workers: Ordinal = 1  # that it can use: partitions
    # Share of workers where they are fewer than needed.
    weight: Annotated[float, Meta(gt=0, le=1e12)] = 1.0
    runs: bool = True  # neither paused nor held
    # Workers that its owner asks for (`provisioning.workers`) while there is something to train.
    target: Count = 0
    unserved_s: Seconds = 0.0  # since when it has a backlog and nobody to work on it
    task: str = ""  # name or entrypoint: what a worker must be able to do


class WorkerPlacement(msgspec.Struct, frozen=True):
    """Where a worker is, and where it is about to go."""

    worker: NonEmpty[str]
    number: Count = 0  # of this publication
    job: str = ""  # empty: nowhere yet
    stay_s: Seconds = 0.0  # for how long it has been there
    pinned: bool = False  # it is for this job alone
    tasks: tuple[str, ...] = ()  # that it can do; empty: all
    avoided: tuple[str, ...] = ()  # jobs that failed here: not tried again for a while
    goes: str = ""  # where it has said that it goes

    def can_do(self, demand: JobDemand) -> bool:
        """Whether it could work for a job."""
        return (not self.tasks or demand.task in self.tasks) and demand.job not in self.avoided


@dataclass(frozen=True, slots=True)
class PlacementView:
    """What one process sees of everybody at one moment."""

    jobs: tuple[JobDemand, ...] = ()
    workers: tuple[WorkerPlacement, ...] = ()
    stale: frozenset[str] = frozenset()  # jobs whose leader is not heard of: left as they are


@dataclass(frozen=True, slots=True)
class SpreadSettings:
    """Numbers of the rule; all workers must have the same."""

    shortest_stay_s: float = 30.0  # at a job with work left: a turn, where jobs outnumber workers
    longest_wait_s: float = 60.0  # of a job with work and no worker, by weight; then it goes first
    drain_s: float = 60.0  # a backlog is to be gone in so long: what "needed" means
    # An occupied place ranks as if it were needed by a third more. Without this, two jobs of like
    # backlogs exchange workers for ever.
    occupied: float = 0.75
    # Work left for so long binds a worker to its stay. Bound by less, it would sit out the stay at
    # jobs of a few records, and 12 to 28 % of what arrives at 200 jobs is not trained.
    bound_s: float = 2.0
    unknown_records_per_s: float = 100.0  # of a worker, where no job knows better


SETTINGS = SpreadSettings()
_NAMED = 3  # jobs in one sentence

# --- the plan --------------------------------------------------------------------------------


def workers_needed(
    demand: JobDemand, worker_records_per_s: float, settings: SpreadSettings = SETTINGS
) -> float:
    """How many workers a job can use now; not a whole number.

    As many as keep up with what arrives and have the backlog gone in `drain_s`, no more than it has
    partitions, and at least what its owner asks for; none while it does not run, or has nothing to
    train and nothing arrives.
    """
    records_per_s = demand.arrivals_per_s + demand.backlog / settings.drain_s
    if not demand.runs or not records_per_s:
        return 0.0
    return max(min(records_per_s / worker_records_per_s, demand.most_workers), demand.target)


def plan(view: PlacementView, settings: SpreadSettings = SETTINGS) -> dict[str, str]:
    """Who is to go where, by worker; the same for all who see the same."""
    return _Planning(view, settings).moves()


class _Slot(NamedTuple):
    """A place for one worker at a job; the lowest ranks are filled first."""

    rank: tuple[int, float]
    tie: int  # a hash, so that no job comes first because of its name
    job: str


class _Planning:
    """One plan in the making."""

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
        """By worker, the job to go to."""
        wanted = self._slots()[: len(self._workers)]
        leavers = self._leavers(Counter(slot.job for slot in wanted))
        filled, moves = Counter[str](), dict[str, str]()
        for slot in wanted:
            filled[slot.job] += 1
            if filled[slot.job] <= len(self._at[slot.job]):
                continue  # somebody is there
            taker = next((it for it in leavers if it.can_do(self._jobs[slot.job])), None)
            if taker is not None:
                moves[taker.worker] = slot.job
                leavers.remove(taker)
        return moves | self._warm([it for it in leavers if not self._somewhere(it)], moves)

    def needed(self, job: str) -> int:
        """Workers that a job can use, up to the next whole one."""
        if job not in self._jobs or job in self._stale:
            return 0
        return math.ceil(
            workers_needed(self._jobs[job], self._speeds[job], self._settings)
            - 1e-9  # not one more because of how a quotient was rounded
        )

    def _slots(self) -> list[_Slot]:
        """All that anybody could use, the most urgent first."""
        slots = list[_Slot]()
        for name, demand in self._jobs.items():
            bound = sum(map(self._stays, self._at[name]))
            if not bound and not any(it.can_do(demand) for it in self._workers):
                continue  # nobody could serve it: it would be first for ever
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
            return (2, -waited_s)  # in turn: who has waited longest
        needed = workers_needed(demand, self._speeds[demand.job], settings)
        occupied = settings.occupied if number < len(self._at[demand.job]) else 1.0
        return (3, (number + 1) / (needed * demand.weight) * occupied)

    def _stays(self, worker: WorkerPlacement) -> bool:
        """Whether it may not be asked to leave where it is, or is about to be."""
        if worker.pinned or worker.goes or worker.job in self._stale:
            return True
        demand, settings = self._jobs[worker.job], self._settings
        busy_s = demand.backlog / self._speeds[demand.job]
        return (
            demand.runs and busy_s > settings.bound_s and worker.stay_s < settings.shortest_stay_s
        )

    def _leavers(self, wanted: Mapping[str, int]) -> list[WorkerPlacement]:
        """Who is too many where it is, or nowhere: those first that have nothing to do there."""
        leavers = [it for it in self._workers if not self._somewhere(it) and not it.pinned]
        for name, here in self._at.items():
            free = sorted(
                (it for it in here if not self._stays(it)),
                key=lambda it: (_mixed(it.job, it.worker), it.worker),
            )
            leavers += free[: max(len(here) - wanted[name], 0)]
        # Who can do few of the tasks goes before who can do many, and can take another place.
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
        """Who is nowhere waits for work where the fewest are, by weight."""
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
    """A number that these names determine, and nobody else can foresee."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest())


def elsewhere(view: PlacementView, demand: JobDemand) -> str:
    """Say at which jobs those workers are that could come to this one; empty if there is none."""
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
    return f"it is another job's turn: {who} at {where}"


# --- one worker's line of it -----------------------------------------------------------------


class PlacementStep(NamedTuple):
    """What a worker does after a look."""

    goes: str  # where it says that it goes; empty: nowhere else
    now: bool  # it leaves for there at once
    reason: str


def next_step(view: PlacementView, worker: str) -> PlacementStep:
    """What a worker does now that it has looked.

    Args:
        view: What it sees, itself included as it is now.
        worker: Its name.
    """
    me = next((it for it in view.workers if it.worker == worker), None)
    if me is None or me.pinned:
        return PlacementStep(
            "", now=False, reason="it is for one job alone" if me else "it is not seen"
        )
    if me.goes:
        return _confirmed(view, me)
    job = plan(view).get(worker)
    if job is None or job == me.job:
        return PlacementStep("", now=False, reason="nobody needs it more")
    if not me.job:
        return PlacementStep(job, now=True, reason="it was nowhere")  # and leaves nobody alone
    return PlacementStep(job, now=False, reason="it is needed there more")


def _confirmed(view: PlacementView, me: WorkerPlacement) -> PlacementStep:
    """It has said where it goes; of those who said the same, the first ones by a hash may."""
    there = [it for it in view.workers if me.goes in (it.goes, it.job)]
    over = len(there) - _Planning(view, SETTINGS).needed(me.goes)
    rivals = sorted(
        (it.worker for it in there if it.goes == me.goes), key=lambda it: (_mixed(me.goes, it), it)
    )
    if over > 0 and me.worker in rivals[-over:]:
        return PlacementStep("", now=False, reason="others fill the places there")
    return PlacementStep(me.goes, now=True, reason="it is needed there more")


# --- who is heard of -------------------------------------------------------------------------

# A record that has not changed for so long is stale. Five publications.
_STALE_S = 5.0
# One that has not changed for so long may be removed, by anybody. A takeover takes seconds: until
# then a job whose record is stale, or gone, is left as it is.
_FORGET_S = 60.0


class Sightings:
    """Makes views out of published records: what does not change any more is not heard of.

    By the reader's own clock alone, so that clocks may differ.
    """

    def __init__(self) -> None:
        self._jobs = dict[str, tuple[JobDemand, float]]()  # and when it changed last
        self._workers = dict[str, tuple[WorkerPlacement, float]]()
        self._there = frozenset[str]()  # jobs that had a record at the last look

    def see(self, records: Iterable[JobDemand | WorkerPlacement], now: float) -> PlacementView:
        """Take in all records that there are; returns what to go by.

        A worker without a record has left. A job without one was not deleted thereby: its record
        went with a Redis that came back empty, or its leader gave up; it becomes stale. When such
        a record has just gone, the view is empty: those of workers may have gone with it.
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
        """Names of jobs and of workers whose records nobody keeps any more: remove them."""
        since = now - _FORGET_S
        jobs = tuple(job for job, (_, at) in self._jobs.items() if at <= since)
        workers = tuple(worker for worker, (_, at) in self._workers.items() if at <= since)
        for job in jobs:
            del self._jobs[job]
        return jobs, workers


def with_jobs(view: PlacementView, known: Mapping[str, JobDemand]) -> PlacementView:
    """The view of whoever knows from the jobs topic which jobs there are.

    Args:
        view: What was seen.
        known: By name, all jobs that are not stopped: as much of each as its specification says.
            Where a person has paused one, that is heard before its leader says so. One that nobody
            leads needs nobody, but workers that have nowhere to go may wait for its leader there.
    """
    seen = {it.job: it for it in view.jobs}
    jobs = tuple(_without_unknown(seen.get(name, demand), demand) for name, demand in known.items())
    return replace(view, jobs=jobs, stale=view.stale & known.keys())


def _without_unknown(seen: JobDemand, known: JobDemand) -> JobDemand:
    return seen if known.runs else msgspec.structs.replace(seen, runs=False)
