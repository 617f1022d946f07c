"""Selects the job that this worker works for; `common.core.job_placement` decides which.

One thread follows the jobs topic, and the demand and the places that others publish. It does so
even while the worker leaves one job and joins another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from common.core.job_placement import (
    JobDemand,
    PlacementView,
    Sightings,
    WorkerPlacement,
    next_step,
    with_jobs,
)
from common.errors import OutsideError, UnavailableError
from common.kafka.names import job_name
from common.runtime.faults import Patience, kind_of, passes, reason_of
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord, JobStore
    from common.redis.port import Roster
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics

JOBS_S = 0.5  # between looks at the jobs topic
# Between looks at the others. Simulated with two seconds, 100 small jobs take 215 s on four workers
# instead of 190; for 64 workers and 200 jobs, a look a second is 1.7 MB/s through Redis.
LOOK_S = 1.0
JITTER = 0.25  # of it, either way: workers that were started together do not look together
# What ends the part in a job by itself soon; a job that fails otherwise is left alone for longer.
UNAVAILABLE_S = 1.0
PATIENCE = Patience(first_s=5.0, longest_s=300.0, healthy_s=60.0)


@dataclass(frozen=True, slots=True)
class SelectingWorker:
    """Who selects."""

    name: str
    only: str = ""  # name or id of the only job that it is for; empty: any
    tasks: tuple[str, ...] = ()  # that it can do: built in, or in its DOLL_TASKS


@dataclass(slots=True)
class _Failing:
    """A job that failed here."""

    failures: int  # in a row
    until: float  # it is not tried before


class JobSelector:
    """Selects jobs; `turn` belongs to one thread, the rest is for any.

    Args:
        roster: What others publish.
        random: Numbers from 0 to 1.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        worker: SelectingWorker,
        job_store: JobStore,
        roster: Roster,
        metrics: ProcessMetrics,
        logger: EventLogger,
        random: Callable[[], float],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._me = worker
        self._job_store = job_store
        self._roster = roster
        self._metrics = metrics
        self._log = logger
        self._random = random
        self._clock = clock
        self._lock = threading.Lock()  # guards what the next four lines hold
        self._pinned: Callable[[], bool] = _free
        self._job = ""  # that it works for, or is to join
        self._since = 0.0
        self._jobs: dict[str, JobRecord] = {}  # all that are not stopped
        self._failing = dict[str, _Failing]()
        self._reported = set[tuple[str, ...]]()  # kinds of failures, each by job
        self._left = set[str]()  # jobs that were told to be left to others
        self._goes = ""
        self._number = 0
        self._look_at = 0.0
        # True once all jobs were read: by the first records alone, a stopped one seems to run.
        self._has_read = False
        self._sightings = Sightings()
        self._kafka_outage = Outage(logger, "kafka")
        self._roster_outage = Outage(logger, "redis")
        self._spoke = False  # Redis has let us in

    def selected(self) -> JobRecord | None:
        """The job to work for, as it is now; None where there is none yet."""
        with self._lock:
            return self._jobs.get(self._job)

    def still(self, job: JobRecord) -> JobSpec | None:
        """A job that was selected, as it is now; None where this worker is to leave it."""
        record = self.selected()
        return record.spec if record is not None and record.is_same_job(job) else None

    def pinned_by(self, pinned: Callable[[], bool] | None) -> None:
        """Whom to ask whether this worker must stay where it is; None: nobody."""
        self._pinned = pinned or _free

    def failed(self, job: str, error: BaseException) -> float:
        """What ended this worker's part in a job, whoever's fault it is: it leaves it for a while.

        Each kind of failure is told once, with its traceback.

        Returns:
            For how many seconds it does.
        """
        unavailable = passes(error)
        self._metrics.job_faults.labels(job, "unavailable" if unavailable else "fault").inc()
        with self._lock:
            now = self._clock()
            failing = self._failing.setdefault(job, _Failing(0, now))
            if self._job == job and now - self._since >= PATIENCE.healthy_s:
                failing.failures = 0
                self._reported = {kind for kind in self._reported if kind[0] != job}
            failing.failures += not unavailable
            pause_s = UNAVAILABLE_S if unavailable else PATIENCE.pause_s(failing.failures)
            failing.until = now + pause_s
            if self._job == job:
                self._job = ""
        kind = (job, *kind_of(error))
        if kind in self._reported:
            return pause_s
        self._reported.add(kind)
        reason = reason_of(error)
        if unavailable:
            self._log.warning("job_waits", job=job, reason=reason, again_in_s=pause_s)
        else:
            self._log.error(
                "job_failed", job=job, reason=reason, again_in_s=pause_s, exc_info=error
            )
        return pause_s

    def turn(self) -> None:
        """Wait a moment for news of jobs, look at the others when it is time.

        Raises:
            OutsideError: If Kafka or Redis did not let us in from the first.
        """
        try:
            self._read_jobs()
            self._kafka_outage.quiet()
        except UnavailableError as error:
            self._kafka_outage.met(error)
        now = self._clock()
        if not self._has_read or (now < self._look_at and self._job):
            return
        self._look_at = now + LOOK_S * (1 + JITTER * (2 * self._random() - 1))
        try:
            self._look(now)
            self._roster_outage.over()
            self._spoke = True
        except OutsideError as error:
            if not self._spoke and not error.retriable:
                raise
            self._roster_outage.met(error)
            self._follow(PlacementView(), now)

    def close(self) -> None:
        """Say that this worker leaves, and let go of all connections."""
        try:
            self._roster.remove(workers=[self._me.name])
        except OutsideError as error:  # then the record runs out
            self._roster_outage.met(error)
        self._job_store.close()

    # --- jobs --------------------------------------------------------------------------------

    def _read_jobs(self) -> None:
        jobs = self._job_store.refresh(JOBS_S) if self._has_read else self._job_store.read()
        self._has_read = True
        known = {name: record for name, record in jobs.items() if record.wanted != "stopped"}
        with self._lock:
            before, after = self._jobs.get(self._job), known.get(self._job)
            if after is None or (before is not None and not before.is_same_job(after)):
                self._job = ""  # stopped, deleted, or another of its name
            self._jobs = known
        for name, record in known.items():
            task = record.spec.task_name
            if task not in self._me.tasks and name not in self._left:
                self._left.add(name)
                reason = f"its task {task} is not in DOLL_TASKS here"
                self._log.warning("job_left_to_others", job=name, reason=reason)

    def _known(self) -> dict[str, JobDemand]:
        return {
            name: JobDemand(
                name,
                weight=record.spec.weight,
                runs=record.wanted == "running",
                most_workers=len(record.first),
                task=record.spec.task_name,
            )
            for name, record in self._jobs.items()
        }

    # --- the others --------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        self._roster.put([self._placement(now)])  # first: who looks in this moment sees it
        seen = self._sightings.see(self._roster.read(), now)
        if self._follow(seen, now):
            self._roster.put([self._placement(now)])
        jobs, workers = self._sightings.forget(now)
        self._roster.remove(jobs, workers)

    def _follow(self, seen: PlacementView, now: float) -> bool:
        """Do what the plan says; returns whether that is news for others."""
        if self._me.only:
            return self._return_to(self._me.only, now)
        me = self._placement(now)
        workers = (*(it for it in seen.workers if it.worker != self._me.name), me)
        view = with_jobs(PlacementView(seen.jobs, workers, seen.stale), self._known())
        step = next_step(view, self._me.name)
        if step.goes != self._goes:
            self._log.debug("worker_goes", to=step.goes, reason=step.reason)
        news = step.now or step.goes != self._goes
        self._goes = "" if step.now else step.goes
        if step.now:
            self._select(step.goes, now, step.reason)
        return news

    def _return_to(self, only: str, now: float) -> bool:
        """It is for one job alone: it waits for it, and tries it again when it has failed."""
        job = job_name(only)
        record = self._jobs.get(job)
        if self._job or record is None or job in self._avoided(now):
            return False
        if only not in (job, record.id):  # a machine of one that was purged
            return False
        self._select(job, now, "it is for this job alone")
        return True

    def _select(self, job: str, now: float, reason: str) -> None:
        with self._lock:
            if job not in self._jobs:
                return
            self._log.info("job_selected", job=job, before=self._job, reason=reason)
            self._job, self._since = job, now

    def _avoided(self, now: float) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(job for job, it in self._failing.items() if now < it.until))

    def _placement(self, now: float) -> WorkerPlacement:
        self._number += 1
        avoided, pinned = self._avoided(now), self._pinned()
        with self._lock:
            record = self._jobs.get(self._job)
            # Where partitions wait for their worker's return it must not go elsewhere.
            holds = record is not None and record.spec.on_preemption == "hold"
            # Nor may what it alone holds of a job that runs: that would be learned again.
            holds |= pinned and record is not None and record.wanted == "running"
            return WorkerPlacement(
                self._me.name,
                self._number,
                job_name(self._me.only) or self._job,
                now - self._since if self._job else 0.0,
                pinned=bool(self._me.only) or holds,
                tasks=self._me.tasks,
                avoided=avoided,
                goes=self._goes,
            )


def _free() -> bool:
    return False
