"""Selects the job that this worker works for; `common.core.job_placement` decides.

One thread follows the jobs topic, and other processes' published demands and placements. It runs
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
from common.runtime.faults import Patience
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.jobs.store import JobRecord, JobStore
    from common.redis.port import Roster
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics
    from services.worker.channel import Failure

# Interval of reads of the jobs topic.
JOBS_S = 0.5
# Interval of reads of demands and placements. In a simulation with two seconds instead, 100 small
# jobs take 215 s on four workers, compared with 190 s. With 64 workers and 200 jobs, one read a
# second is 1.7 MB/s through Redis.
LOOK_S = 1.0
# Random share of the interval, in both directions, that spreads workers which were started
# together.
JITTER = 0.25
# Pause after an outage, which ends soon. Other failures have longer pauses.
UNAVAILABLE_S = 1.0
PATIENCE = Patience(first_s=5.0, longest_s=300.0, healthy_s=60.0)
# The same for a process that died. A batch that kills processes is soon sent alone, and then
# quarantined, so the pauses are shorter.
DEATHS = Patience(first_s=1.0, longest_s=60.0, healthy_s=60.0)


@dataclass(frozen=True, slots=True)
class SelectingWorker:
    """The worker that jobs are selected for."""

    name: str
    # Name or id of the only job that the worker may take. Empty if it may take any.
    only: str = ""
    # Tasks that the worker has: built-in ones and those in its DOLL_TASKS.
    tasks: tuple[str, ...] = ()


@dataclass(slots=True)
class _Failing:
    """A job that failed at this worker."""

    # Number of consecutive failures.
    failures: int
    # Earliest time of the next attempt.
    until: float


class JobSelector:
    """Selects jobs. One thread calls `turn`; everything else is safe to call from any thread.

    Args:
        roster: Published demands and placements.
        random: Random numbers from 0 to 1.
        clock: Monotonic time in seconds.
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
        # Guards `_job`, `_since`, `_jobs` and `_failing`.
        self._lock = threading.Lock()
        self._pinned: Callable[[], bool] = _free
        # The job that this worker works for or is to join.
        self._job = ""
        self._since = 0.0
        # All jobs that are not stopped.
        self._jobs: dict[str, JobRecord] = {}
        self._failing = dict[str, _Failing]()
        # Reported kinds of failures, each with its job.
        self._reported = set[tuple[str, ...]]()
        # Jobs that were reported as left to other workers.
        self._left = set[str]()
        self._goes = ""
        self._number = 0
        self._look_at = 0.0
        # True once all jobs were read. After the first records alone, a stopped job may seem to
        # run.
        self._has_read = False
        self._sightings = Sightings()
        self._kafka_outage = Outage(logger, "kafka")
        self._roster_outage = Outage(logger, "redis")
        # True once Redis has accepted this worker.
        self._spoke = False

    def selected(self) -> JobRecord | None:
        """Return the newest record of the selected job; None if no job is selected."""
        with self._lock:
            return self._jobs.get(self._job)

    def still(self, job: JobRecord) -> JobRecord | None:
        """Return the newest record of a selected job; None if this worker must leave it."""
        record = self.selected()
        return record if record is not None and record.is_same_job(job) else None

    def pinned_by(self, pinned: Callable[[], bool] | None) -> None:
        """Set the function that says if this worker must stay at its job. None means no."""
        self._pinned = pinned or _free

    def failed(self, job: str, failure: Failure) -> float:
        """Leave a job for a while after a failure of any kind.

        Each kind of failure is logged once, with its traceback.

        Returns:
            The pause in seconds.
        """
        unavailable = failure.passes
        patience = DEATHS if failure.died else PATIENCE
        self._metrics.job_faults.labels(job, "unavailable" if unavailable else "fault").inc()
        with self._lock:
            now = self._clock()
            failing = self._failing.setdefault(job, _Failing(0, now))
            if self._job == job and now - self._since >= patience.healthy_s:
                failing.failures = 0
                self._reported = {kind for kind in self._reported if kind[0] != job}
            failing.failures += not unavailable
            pause_s = UNAVAILABLE_S if unavailable else patience.pause_s(failing.failures)
            failing.until = now + pause_s
            if self._job == job:
                self._job = ""
        kind = (job, *failure.kind)
        if kind in self._reported:
            return pause_s
        self._reported.add(kind)
        reason = failure.reason
        if unavailable:
            self._log.warning("job_waits", job=job, reason=reason, again_in_s=pause_s)
        else:
            more = {"traceback": failure.traceback} if failure.traceback else {}
            self._log.error("job_failed", job=job, reason=reason, again_in_s=pause_s, **more)
        return pause_s

    def turn(self, *, waits: bool = True) -> None:
        """Read job records, and demands and placements when due.

        Args:
            waits: True to wait a moment for job records.

        Raises:
            OutsideError: If Kafka or Redis has refused this worker from the start.
        """
        try:
            self._read_jobs(JOBS_S if waits else 0.0)
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
        """Report that this worker leaves."""
        try:
            self._roster.remove(workers=[self._me.name])
        # The published record then expires.
        except OutsideError as error:
            self._roster_outage.met(error)

    # --- jobs -------------------------------------------------------------------------------------

    def _read_jobs(self, wait_s: float) -> None:
        jobs = self._job_store.refresh(wait_s) if self._has_read else self._job_store.read()
        self._has_read = True
        known = {name: record for name, record in jobs.items() if record.wanted != "stopped"}
        with self._lock:
            before, after = self._jobs.get(self._job), known.get(self._job)
            if after is None or (before is not None and not before.is_same_job(after)):
                # The job was stopped or deleted, or is another job of the same name.
                self._job = ""
            self._jobs = known
        for name, record in known.items():
            task = record.spec.task_name
            if task not in self._me.tasks and name not in self._left:
                self._left.add(name)
                reason = f"its task {task} is not in this worker's DOLL_TASKS"
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

    # --- demands and placements -------------------------------------------------------------------

    def _look(self, now: float) -> None:
        # The placement is published first, so that workers that read now see it.
        self._roster.put([self._placement(now)])
        seen = self._sightings.see(self._roster.read(), now)
        if self._follow(seen, now):
            self._roster.put([self._placement(now)])
        jobs, workers = self._sightings.forget(now)
        self._roster.remove(jobs, workers)

    def _follow(self, seen: PlacementView, now: float) -> bool:
        """Take the next step that `job_placement` decides.

        Returns:
            True if other workers should know of the step at once.
        """
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
        """Select the only job of this worker, again after failures; return True if selected."""
        job = job_name(only)
        record = self._jobs.get(job)
        if self._job or record is None or job in self._avoided(now):
            return False
        # The worker is a machine of a purged job.
        if only not in (job, record.id):
            return False
        self._select(job, now, "the worker is reserved for this job")
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
            # If partitions wait for their worker to return, it must stay at its job.
            holds = record is not None and record.spec.on_preemption == "hold"
            # A member that alone holds the state of a running job must stay, too, or updates are
            # lost.
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
