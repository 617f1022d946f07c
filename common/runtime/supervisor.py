"""Runs the jobs of a process on a few threads, and keeps what goes wrong with one from the others.

A job is an actor: `turn` takes in what has happened, does what is due and says when it wants to be
called again. It is never in two threads at once, so it needs no locks; what other threads tell it,
they put where it looks, and wake it. A turn may block: others go on in the other threads.

An exception ends that job's actor alone. It is closed, and made anew after a pause: one that
doubles, but where a server is away, which is asked again and again at the same pace. Whoever makes
it is told what ended the one before, and may make another kind of actor then, one that writes down
that the job is held, say.
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
SLOW_S = 0.05  # of a turn; above it is counted: rounds of other jobs take a few milliseconds
HANGS_S = 300.0  # of a turn; above it the process is unhealthy
# A thread in so long a turn counts as taken. One is left for all other jobs where all but one are.
LONG_S = 1.0
PATIENCE = Patience()
# While one thread waits for the next time and then works, another is there so much later.
DEPUTY_S = 0.05


class Actor(Protocol):
    """A job's part in this process."""

    def turn(self) -> float | None:
        """Take in what has happened, do what is due.

        Returns:
            When to be called next unless woken, on the supervisor's clock; infinite: only when
            woken. None: the job is over here, and is closed.
        """

    def close(self) -> None:
        """Let go of everything; called once, after the last turn, also after one that raised."""


class PreviousFault(NamedTuple):
    """What ended the actor before this one."""

    error: BaseException
    detail: str  # its traceback
    in_a_row: int  # actors that ended so, one after the other, none of them healthy for a while
    alike: int  # the last of these that ended by an exception of this very class


Make: TypeAlias = "Callable[[Callable[[], None], PreviousFault | None], Actor | None]"


class Supervised:
    """One job in the hands of a supervisor; may be shared between threads.

    Made by `Supervisor.begin`.
    """

    def __init__(self, name: str, make: Make, supervisor: Supervisor, watchdog: Watchdog) -> None:
        self.name = name
        self.watchdog = watchdog
        self.ended = threading.Event()  # its actor is closed, and none will be made
        self.ending = False
        self.began_at = inf  # its actor; infinite as long as there is none
        self.turn_at = 0.0  # when the turn in progress began
        self.actor: Actor | None = None
        self._make = make
        self._supervisor = supervisor
        self._again_at = -inf
        self._fault: PreviousFault | None = None
        self._reported = set[tuple[str, ...]]()

    def wake(self) -> None:
        """Let it have a turn soon."""
        self._supervisor.wake(self)

    def end(self) -> None:
        """Close it once its turn in progress is over, and make none anew; `ended` says when."""
        self.ending = True
        self.wake()

    # --- for the thread that has its turn ----------------------------------------------------

    def run(self, now: float) -> float | None:
        """One turn; returns as the actor's does."""
        if self.ending:
            return None
        if self.actor is None:
            if now < self._again_at:
                return self._again_at
            self.actor = self._make(self.wake, self._fault)
            self.began_at = now
        return None if self.actor is None else self.actor.turn()

    def failed(self, error: BaseException, now: float, patience: Patience) -> tuple[float, bool]:
        """Take in what ended a turn; returns the pause, and whether that is news."""
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
    """The jobs of one process; may be shared between threads.

    Args:
        metrics: Where failures and slow turns are counted; None: nowhere.
        pulses: Of the process: they complain of a turn that hangs.
        threads: How many turns there are at once.
        slow_s: A turn of so long is counted.
        hangs_s: Within a turn of so long the process is unhealthy.
        patience: With jobs that fail.
        clock: Seconds that never go back, as `time.monotonic` counts them.
    """

    def __init__(  # noqa: PLR0913 -- the parts of a process, and figures that each differ
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
        # Time at which a job last waited for something, by what it is: all jobs share an outage.
        self._waited_at = dict[str, float]()
        self._crowded = False
        # Time at which long turns last took all threads but one.
        self._crowded_at = 0.0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())  # guards what is above and below
        self._timed = list[float]()  # until when threads wait that do not wait for a wake-up alone
        self._threads = [
            threading.Thread(target=self._work, name=f"turns-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, name: str, make: Make) -> Supervised:
        """Take a job in hand.

        Args:
            name: The job's, for logs and metrics.
            make: Makes its actor, in a turn, and anew after a fault; None: the job is over. It gets
                what wakes the actor, from any thread, and what ended the one before.
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
        """Let a job have a turn soon; nothing happens to one that has ended."""
        with self._changed:
            if self._schedule.wake(job):
                self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """End all jobs in order, and the threads; False if some took longer."""
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
                self._changed.notify_all()  # there is nothing left to wait for
        else:
            self._schedule.done(job, due)

    def _next(self) -> Supervised | None:
        """Wait for a job whose turn it is; None at the end."""
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
        """See that somebody comes soon for what is ready or due, while this thread works."""
        by = DEPUTY_S + (now if self._schedule.ready else self._schedule.due())
        if by < inf and not any(until <= by for until in self._timed):
            self._changed.notify()

    def _wait(self, due: float, now: float) -> None:
        """Wait for a wake-up; one thread also for the next time, and one for a little later."""
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
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it ends this job's actor alone
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
        """Tell what ended an actor; returns when there will be another."""
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
        """True if no job has waited for this lately; another job may say the same of its topics."""
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
        except BaseException as error:  # noqa: BLE001 -- likewise
            if passes(error):  # the turn that it ended, or the next actor, has told it
                self._log.debug("job_not_closed", job=job.name, reason=reason_of(error))
                return
            if self._metrics is not None:
                self._metrics.job_faults.labels(job.name, "fault").inc()
            self._log.error("job_not_closed", job=job.name, reason=reason_of(error), exc_info=error)

    def _notice_crowd(self, now: float) -> None:
        """Log when long turns take all threads but one, and when they have not for `SETTLED_S`."""
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
