"""All jobs that one process follows: those that may run, and those that were asked about of late.

Following begins at the first question, or as soon as a job is there that is not stopped; it ends
some minutes after the last question about a job that is, and when a job is deleted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from common.errors import NotFoundError, UnavailableError
from services.admin.live.follower import JobFollower, Sources

if TYPE_CHECKING:
    from common.jobs.store import JobRecord

IDLE_S = 300.0  # nobody asked about a job that is stopped
READY_S = 3.0  # that a request waits for a history to be read
SWEEP_S = 0.25  # between looks for jobs that are not
LIST_S = 1.0  # that a list waits for histories to be read
LOOK_S = 0.01  # between looks whether it is
FAILED_S = 10.0  # after a fault, until another follower tries
END_S = 5.0  # for all threads to end


class Followers:
    """The followers of one process. May be shared between threads.

    Making it opens nothing and starts nothing.

    Args:
        ending: Set when the process is to end: all streams of events end at once then.
        idle_s: After so long without a question a job that is stopped is left.
        ready_s: How long `ready` waits.
    """

    def __init__(
        self,
        sources: Sources,
        ending: threading.Event,
        idle_s: float = IDLE_S,
        ready_s: float = READY_S,
    ) -> None:
        self._sources = sources
        self._ending = ending
        self._idle_s = idle_s
        self._ready_s = ready_s
        self._lock = threading.Lock()
        self._followers = dict[str, JobFollower]()
        self._asked_at = dict[str, float]()
        self._left = list[JobFollower]()  # told to stop, perhaps not gone yet
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        """Begin to follow the jobs that are not stopped, unless that has begun."""
        with self._lock:
            self._keep()

    def of(self, job: str) -> JobFollower:
        """Whoever follows a job, from now on if nobody did; it may not know all yet.

        Raises:
            NotFoundError: If there is no such job.
            UnavailableError: If this process is about to end.
        """
        with self._lock:
            self._keep()
            self._asked_at[job] = monotonic()
            return self._begun(job)

    async def ready(self, job: str) -> JobFollower:
        """Whoever follows a job and knows all that had happened before it was asked.

        Raises:
            NotFoundError: If there is no such job.
            UnavailableError: If its history is long, or a server unavailable: ask again.
        """
        follower = self.of(job)
        until = monotonic() + self._ready_s
        while not follower.ready and follower.ended_s is None and monotonic() < until:  # noqa: ASYNC110 -- a thread says so, which knows of no loop
            await asyncio.sleep(LOOK_S)
        follower.check()
        return follower

    def following(self) -> dict[str, JobFollower]:
        """Those who follow a job that is not stopped, and know all that had happened before."""
        with self._lock:
            jobs = self._sources.jobs()
            return {
                job: each
                for job, each in self._followers.items()
                if each.ready and job in jobs and followed(jobs[job])
            }

    async def known(self, jobs: Collection[str]) -> dict[str, JobFollower]:
        """Those who follow these jobs and know all that had happened before.

        Waits a moment for those who have just begun, and begins with none: what rests is not
        followed because somebody looks at a list.
        """
        until = monotonic() + LIST_S
        while True:
            with self._lock:
                self._keep()
                found = {job: self._followers[job] for job in jobs if job in self._followers}
                running = self._sources.jobs()
            done = {job for job, each in found.items() if each.ready or each.ended_s is not None}
            missing = [job for job in set(jobs) - done if job in running and followed(running[job])]
            if not missing or monotonic() > until or self._ending.is_set():
                return {job: each for job, each in found.items() if each.ready}
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """End all streams and threads."""
        self._ending.set()
        with self._lock:
            keeper, followers = self._keeper, [*self._left, *self._followers.values()]
            self._followers.clear()
        for follower in followers:
            follower.stop()
        until = monotonic() + END_S
        for follower in followers:
            follower.join(max(0.0, until - monotonic()))
        if keeper is not None:
            keeper.join(max(0.0, until - monotonic()))

    def _keep(self) -> None:
        """Have the keeper run; the lock is held."""
        if self._keeper is None and not self._ending.is_set():
            self._keeper = threading.Thread(target=self._sweep, name="followers", daemon=True)
            self._keeper.start()

    def _begun(self, job: str) -> JobFollower:
        """Whoever follows a job, from now on if nobody did; the lock is held."""
        if self._ending.is_set():
            raise UnavailableError("this service is shutting down")
        record = self._sources.jobs().get(job)
        if record is None:
            raise NotFoundError(f'there is no job "{job}"')
        follower = self._followers.get(job)
        ended_s = None if follower is None else follower.ended_s
        if follower is not None and not follower.follows(record):  # it ends by itself
            self._left.append(follower)
            follower = None
        if follower is None or (ended_s is not None and monotonic() - ended_s > FAILED_S):
            follower = self._followers[job] = JobFollower(record, self._sources)
            follower.start()
        return follower

    def _sweep(self) -> None:
        while not self._ending.wait(SWEEP_S):
            with self._lock:
                for job, record in list(self._sources.jobs().items()):
                    if followed(record) and not self._ending.is_set():
                        with suppress(NotFoundError):  # deleted in this moment
                            self._begun(job)
                for job in list(self._followers):
                    self._leave(job)
        with self._lock:
            for follower in self._followers.values():
                follower.stop()

    def _leave(self, job: str) -> None:
        """Stop following what nobody needs; the lock is held."""
        record, follower = self._sources.jobs().get(job), self._followers[job]
        idle_s = monotonic() - self._asked_at.setdefault(job, monotonic())
        wanted = record is not None and (
            followed(record) or follower.feed.listeners > 0 or idle_s < self._idle_s
        )
        if not wanted:
            follower.stop()
            del self._followers[job], self._asked_at[job]
            self._left = [*(each for each in self._left if each.ended_s is None), follower]


def followed(record: JobRecord) -> bool:
    """Whether a job is followed although nobody asks: what is stopped does not change any more."""
    return record.wanted != "stopped"
