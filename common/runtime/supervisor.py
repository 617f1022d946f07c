"""Runs the jobs of a process on a few threads and isolates the faults of each job.

A job is an actor. Its `turn` handles what has happened, does what is due, and returns the time of
the next call. An actor never runs in two threads at once, so it needs no locks. Other threads put
messages where the actor looks for them, and wake it. A turn may block; other jobs continue in the
other threads.

An exception closes the actor of that job alone. The supervisor makes a new actor after a pause.
The pause doubles after each fault, but stays the same while a server is unavailable. The function
that makes the actor gets the previous fault, and may return another kind of actor, such as one that
records that the job is held.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from common.runtime.faults import Patience, kind_of, passes, reason_of
from common.runtime.schedule import TurnSchedule
from common.telemetry.metrics.serving import Watchdog, Watchdogs
from common.telemetry.outages import SETTLED_S

if TYPE_CHECKING:
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics

THREADS = 8
# A turn of this length is counted as slow: rounds of other jobs take a few milliseconds.
SLOW_S = 0.05
# A turn of this length makes the process unhealthy.
HANGS_S = 300.0
# A turn of this length occupies its thread. The log says if only one thread is left for all others.
LONG_S = 1.0
PATIENCE = Patience()
# A second thread wakes this much after the first one, in case the first one is in a turn by then.
DEPUTY_S = 0.05


class Actor(Protocol):
    """A job's part in this process."""

    def turn(self) -> float | None:
        """Handle what has happened and do what is due.

        Returns:
            Time of the next turn on the supervisor's clock, unless the job is woken before;
            infinite to wait for a wake-up. None if the job has ended here; it is then closed.
        """

    def close(self) -> None:
        """Release all resources. Called once after the last turn, even if that turn raised."""


class PreviousFault(NamedTuple):
    """The fault that ended the previous actor.

    Attributes:
        error: The exception.
        detail: Its traceback.
        in_a_row: Number of consecutive actors that ended in a fault before they were healthy.
        alike: Number of actors, up to and including the last one, that ended one after another in
            an exception of its class.
    """

    error: BaseException
    detail: str
    in_a_row: int
    alike: int


Make: TypeAlias = "Callable[[Callable[[], None], PreviousFault | None], Actor | None]"


class Supervised:
    """A job that a supervisor runs. `Supervisor.begin` makes it; threads may share it."""

    def __init__(self, name: str, make: Make, supervisor: Supervisor, watchdog: Watchdog) -> None:
        self.name = name
        self.watchdog = watchdog
        # Set once the actor is closed and no other will be made.
        self.ended = threading.Event()
        self.ending = False
        # Time at which the actor was made; infinite without an actor.
        self.began_at = inf
        # Time at which the turn in progress began.
        self.turn_at = 0.0
        self.actor: Actor | None = None
        self._make = make
        self._supervisor = supervisor
        self._again_at = -inf
        self._fault: PreviousFault | None = None
        self._reported = set[tuple[str, ...]]()

    def wake(self) -> None:
        """Schedule a turn as soon as possible."""
        self._supervisor.wake(self)

    def end(self) -> None:
        """Close the actor after the turn in progress and make no other. `ended` is set then."""
        self.ending = True
        self.wake()

    # --- for the thread that runs the turn ---------------------------------------------------

    def run(self, now: float) -> float | None:
        """Run one turn; see `Actor.turn` for the result."""
        if self.ending:
            return None
        if self.actor is None:
            if now < self._again_at:
                return self._again_at
            self.actor = self._make(self.wake, self._fault)
            self.began_at = now
        return None if self.actor is None else self.actor.turn()

    def failed(self, error: BaseException, now: float, patience: Patience) -> tuple[float, bool]:
        """Record the error of a turn. Return the pause, and True if the error is new."""
        if now - self.began_at >= patience.healthy_s:
            self._fault = None
            self._reported.clear()
        self.began_at = inf
        pause_s = patience.first_s
        if not passes(error):
            before = self._fault or PreviousFault(error, "", 0, 0)
            alike = before.alike + 1 if type(before.error) is type(error) else 1
            detail = "".join(traceback.format_exception(error)).rstrip()
            self._fault = PreviousFault(error, detail, before.in_a_row + 1, alike)
            pause_s = patience.pause_s(self._fault.in_a_row)
        self._again_at = now + pause_s
        kind = kind_of(error)
        news = kind not in self._reported
        self._reported.add(kind)
        return pause_s, news


class Supervisor:
    """Runs the jobs of one process. May be shared between threads.

    Args:
        metrics: Metrics that count faults and slow turns, or None.
        watchdogs: Watchdogs of the process, which report a turn that hangs.
        logger: Log for faults and waiting jobs.
        threads: Number of turns that can run at the same time.
        slow_s: Minimum length of a turn that is counted as slow.
        hangs_s: Minimum length of a turn that makes the process unhealthy.
        patience: Pauses after faults.
        clock: Monotonic clock, in seconds.
    """

    def __init__(  # noqa: PLR0913 -- parts of a process, and independent figures
        self,
        metrics: ProcessMetrics | None,
        watchdogs: Watchdogs,
        logger: EventLogger,
        *,
        threads: int = THREADS,
        slow_s: float = SLOW_S,
        hangs_s: float = HANGS_S,
        patience: Patience = PATIENCE,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._metrics = metrics
        self._watchdogs = watchdogs
        self._log = logger
        self._slow_s = slow_s
        self._hangs_s = hangs_s
        self._patience = patience
        self._clock = clock
        self._schedule = TurnSchedule[Supervised]()
        self._running = set[Supervised]()
        # Time at which a job last waited, by the reason. One log line is enough for all jobs.
        self._waited_at = dict[str, float]()
        self._crowded = False
        # Time at which long turns last took all threads but one.
        self._crowded_at = 0.0
        self._closed = False
        # Guards the attributes above and below.
        self._changed = threading.Condition(threading.Lock())
        # Ends of the waits of those threads that wait with a time limit.
        self._timed = list[float]()
        self._threads = [
            threading.Thread(target=self._work, name=f"turns-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, name: str, make: Make) -> Supervised:
        """Run a job from now on.

        Args:
            name: Name of the job in logs and metrics.
            make: Makes the actor within a turn, and another one after each fault. Its arguments are
                a function that wakes the actor from any thread, and the previous fault or None. It
                returns None if the job has ended.
        """
        watchdog = Watchdog(self._clock, f"a turn of job {name}", self._hangs_s)
        job = Supervised(name, make, self, watchdog)
        with self._changed:
            if self._closed:
                job.ended.set()
            else:
                if self._metrics is not None:
                    self._metrics.supervise(name)
                self._schedule.add(job)
                self._changed.notify()
        return job

    def wake(self, job: Supervised) -> None:
        """Schedule a turn of a job as soon as possible; do nothing if the job has ended."""
        with self._changed:
            if self._schedule.wake(job):
                self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Close all jobs after their turns and end the threads; False if the timeout passed."""
        until = monotonic() + timeout_s
        with self._changed:
            for job in self._schedule:
                job.ending = True
                self._schedule.wake(job)
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(until - monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads -------------------------------------------------------------------------

    def _work(self) -> None:
        job: Supervised | None = None
        due: float | None = None
        while True:
            with self._changed:
                if job is not None:
                    self._take_back(job, due)
                job = self._next()
            if job is None:
                return
            due = self._run(job)

    def _take_back(self, job: Supervised, due: float | None) -> None:
        self._running.remove(job)
        if due is None:
            self._schedule.forget(job)
            job.ended.set()
            if self._closed and not self._schedule:
                # Nothing is left to run: all threads can end.
                self._changed.notify_all()
        else:
            self._schedule.done(job, due)

    def _next(self) -> Supervised | None:
        """Wait for the next job that is ready; None if the supervisor is closed."""
        while True:
            now = self._clock()
            job = self._schedule.next(now)
            if job is not None:
                job.turn_at = now
                self._running.add(job)
                self._notice_crowd(now)
                self._leave_a_watch(now)
                return job
            if self._closed and not self._schedule:
                return None
            self._wait(self._schedule.due(), now)

    def _leave_a_watch(self, now: float) -> None:
        """Wake another thread unless one already wakes in time for the next ready or due job."""
        by = DEPUTY_S + (now if self._schedule.ready else self._schedule.due())
        if by < inf and not any(until <= by for until in self._timed):
            self._changed.notify()

    def _wait(self, due: float, now: float) -> None:
        """Wait for a wake-up. One thread also wakes at the next due time, and one shortly after."""
        until = due
        if any(other <= due for other in self._timed):
            until = due + DEPUTY_S
        if until == inf or sum(other <= until for other in self._timed) > 1:
            self._changed.wait()
            return
        self._timed.append(until)
        self._changed.wait(max(until - now, 0.0))
        self._timed.remove(until)

    def _run(self, job: Supervised) -> float | None:
        self._watchdogs.watch(job.watchdog)
        began_at = self._clock()
        try:
            due = job.run(began_at)
            if due is None:
                self._close_actor(job)
        except BaseException as error:  # noqa: BLE001 -- any fault ends this job's actor alone
            self._close_actor(job)
            due = self._after(job, error)
        finally:
            self._watchdogs.end(job.watchdog)
        took_s = self._clock() - began_at
        if self._metrics is not None and took_s >= self._slow_s:
            self._metrics.slow_turns.labels(job.name).inc()
        if self._metrics is not None and due is None:
            self._metrics.unsupervise(job.name)
        return due

    def _after(self, job: Supervised, error: BaseException) -> float:
        """Count and log the error that ended an actor; return when the next one is made."""
        now = self._clock()
        pause_s, news = job.failed(error, now, self._patience)
        reason = reason_of(error)
        if self._metrics is not None:
            kind = "unavailable" if passes(error) else "fault"
            self._metrics.job_faults.labels(job.name, kind).inc()
        if passes(error):
            news = self._is_new(reason.replace(f"doll.{job.name}.", "doll."), now) and news
        if news:
            fields = {"job": job.name, "reason": reason, "again_in_s": pause_s}
            if passes(error):
                self._log.warning("job_waits", **fields)
            else:
                self._log.error("job_failed", **fields, exc_info=error)
        return now + pause_s

    def _is_new(self, outage: str, now: float) -> bool:
        """True if no job has waited for the same reason within `SETTLED_S`."""
        with self._changed:
            lately = {each: at for each, at in self._waited_at.items() if now - at < SETTLED_S}
            self._waited_at = {**lately, outage: now}
        return outage not in lately

    def _close_actor(self, job: Supervised) -> None:
        actor, job.actor = job.actor, None
        if actor is None:
            return
        try:
            actor.close()
        except BaseException as error:  # noqa: BLE001 -- any fault ends this job's actor alone
            # The failed turn or the next actor reports the outage.
            if passes(error):
                self._log.debug("job_not_closed", job=job.name, reason=reason_of(error))
                return
            if self._metrics is not None:
                self._metrics.job_faults.labels(job.name, "fault").inc()
            self._log.error("job_not_closed", job=job.name, reason=reason_of(error), exc_info=error)

    def _notice_crowd(self, now: float) -> None:
        """Log if long turns occupy all threads but one, and when that has been over for a while.

        The second line comes once threads have been free for `SETTLED_S`.
        """
        long = [job for job in self._running if now - job.turn_at >= LONG_S]
        crowded, before = len(long) >= len(self._threads) - 1 > 0, self._crowded
        if crowded:
            self._crowded_at = now
        self._crowded = crowded or (before and now - self._crowded_at < SETTLED_S)
        if self._crowded == before:
            return
        if crowded:
            jobs = ", ".join(sorted(job.name for job in long))
            self._log.warning("turns_crowded", threads=len(self._threads), long_turns_of=jobs)
        else:
            self._log.info("turns_free")
