"""All jobs that one process follows, in one thread: those that run, and those asked about of late.

Following begins at the first question, or as soon as a job runs. It ends some minutes after the
last question about a job that does not run, and when a job is deleted. A job that nobody watches is
folded when it is looked at, every other second together with all others.

A job that does not run is read once, its newest records only: when a list shows it, and if it is
paused in any case. Once a minute all of these are looked at together, because retention may delete
records that a paused job has not trained.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import inf
from time import monotonic
from typing import NamedTuple

from common.core.liveness import OutageNotice
from common.errors import NotFoundError, OutsideError, UnavailableError
from common.jobs.progress import UNREAD, JobProgress, Look, resting
from common.jobs.store import JobRecord
from common.jobs.watching import LookedAt, Looker, OwnTopics, look_at_jobs, pause_s
from common.telemetry.logging import event_logger
from common.telemetry.outages import Outage, ongoing
from services.admin.live.feed import Feed
from services.admin.live.follower import JobFollower, Sources, Summary
from services.admin.live.listing import Listing

IDLE_S = 300.0  # nobody asked about a job that does not run
READY_S = 3.0  # that a request waits for a history to be read
SWEEP_S = 0.25  # between looks for jobs that are not followed, or need not be any more
LIST_S = 1.0  # that a list waits for histories to be read
FAILED_S = 10.0  # after a fault, until another follower tries
END_S = 5.0  # for the threads to end
PLANS_S = 2.0  # between looks for plans topics that are not there
# Time between looks at jobs that nobody watches: a list and a scrape need no newer numbers.
UNWATCHED_S = 2.0
RESTING_S = 60.0  # between looks at jobs that do not run
# Time until a job that could not be read is tried again: because its topics are gone, say, or
# because Kafka was unavailable.
FAILED_BRIEF_S, AWAY_BRIEF_S = 300.0, 5.0
# Jobs whose newest records are read together: a page of a list.
BRIEFS = 100
# Paused jobs of which nobody asked, read together so often after the start.
FILL, FILL_S = 20, 5.0

_log = event_logger(__name__)


class _Brief(NamedTuple):
    """A job that does not run, read from its newest records."""

    looked_at: LookedAt
    again_s: float  # when to read it again if that failed, on the clock `monotonic`
    # None if its topics are gone, or could not be read.
    job: JobProgress | None
    summary: Summary

    def is_of(self, record: JobRecord) -> bool:
        """True if it need not be read again for this record."""
        done = self.job is not None or monotonic() < self.again_s
        return self.looked_at.record is record and done

    def looked(self, look: Look) -> _Brief:
        """Return it as of another look."""
        if self.job is None:
            return self
        self.job.look(look)
        return self._replace(summary=_summary_of(self.job, look.at_s))


class Followers:
    """The followers of one process. May be shared between threads.

    Making it opens nothing and starts nothing.

    Attributes:
        fault: Why one of its threads cannot go on; None: all can.
        listing: All jobs as a list shows them.

    Args:
        ending: Set when the process is to end: all streams of events end at once then.
        idle_s: After so long without a question a job that does not run is left.
        ready_s: How long `ready` waits.
    """

    def __init__(
        self,
        sources: Sources,
        ending: threading.Event,
        idle_s: float = IDLE_S,
        ready_s: float = READY_S,
    ) -> None:
        self.fault: Exception | None = None
        self.listing = Listing(sources.jobs, self.summary)
        self._sources = sources
        self._ending = ending
        self._idle_s = idle_s
        self._ready_s = ready_s
        # The condition guards all that follows. No server is asked and no tail closed under it,
        # since the log calls `_hear`.
        self._changed = threading.Condition()
        self._followers = dict[str, JobFollower]()
        # Followers of jobs whose names other jobs have now, until they are stopped.
        self._left = list[JobFollower]()
        self._woken = set[JobFollower]()
        # True if one of the woken followers is watched, or not ready.
        self._urgent = False
        self._thread: threading.Thread | None = None
        self._briefs = dict[str, _Brief]()
        self._unread = dict[str, JobRecord]()
        self._reads_briefs = False
        # Wakes requests when a follower is ready or has ended, and when briefs were read.
        self._settled = Feed("settled", 1)
        # From here on all is the thread's.
        self._looker = Looker(sources.log, sources.glances, _log)
        self._outage = Outage(_log, "kafka")
        self._sweep_due = self._watched_due = self._all_due = self._plans_due = 0.0
        self._resting_due = self._fill_due = 0.0
        # Jobs as of the last full sweep; None if the next one is to be full.
        self._swept: Mapping[str, JobRecord] | None = None

    def start(self) -> None:
        """Begin to follow the jobs that run, unless that has begun."""
        with self._changed:
            self._keep()

    def of(self, job: str) -> JobFollower:
        """Whoever follows a job, from now on if nobody did; it may not know all yet.

        Raises:
            NotFoundError: If there is no such job.
            UnavailableError: If this process is about to end.
        """
        with self._changed:
            self._keep()
            follower = self._begun(job)
            if not follower.watched:
                # It was folded up to two seconds ago.
                follower.is_stale = self._urgent = True
                self._woken.add(follower)
                self._changed.notify()
            follower.asked_s = monotonic()
            return follower

    async def ready(self, job: str) -> JobFollower:
        """Whoever follows a job and knows all that had happened before it was asked.

        Raises:
            NotFoundError: If there is no such job.
            UnavailableError: If its history is long, or a server unavailable: ask again.
        """
        follower = self.of(job)
        await self._settle(
            lambda: follower.ended_s is not None or (follower.ready and not follower.is_stale),
            self._ready_s,
        )
        follower.check()
        return follower

    async def known(self, jobs: Collection[JobRecord]) -> None:
        """Wait a moment until `summary` knows the numbers of these jobs.

        Of those that do not run the newest records are read, if that was not done before.
        """
        with self._changed:
            self._keep()
            self._want_briefs([each for each in jobs if resting(each) and not self._is_read(each)])
        await self._settle(lambda: self._ending.is_set() or all(map(self._knows, jobs)), LIST_S)

    def summary(self, record: JobRecord) -> Summary:
        """How a job is and how far, as of the last look."""
        name, state = record.spec.name, resting(record)
        follower, brief = self._followers.get(name), self._briefs.get(name)
        if follower is not None and follower.follows(record) and follower.ready:
            summary = follower.summary
            if summary is not None:
                # Since the last look a server may be lost or back, or the job may be resumed.
                is_old = follower.looked_at.record is not record
                if is_old or ongoing() or summary.state.word == "waiting for a server":
                    state = state or follower.state_at_work()
                return summary._replace(state=state or summary.state)
        if state is None or brief is None or brief.looked_at.record is not record:
            return Summary(state or UNREAD)
        return brief.summary

    def shown(self) -> Iterator[tuple[str, Summary]]:
        """`summary` of all jobs that are not stopped, without those that are still being read."""
        for name, record in self._sources.jobs().items():
            summary = self.summary(record)
            if record.wanted == "running" and summary.state is UNREAD:
                continue
            if record.wanted == "paused" and not (summary.numbers and summary.numbers.whole):
                # Counts of a part of the history would seem to rise once the job is resumed.
                yield name, Summary(summary.state)
            elif record.wanted != "stopped":
                yield name, summary

    def outages(self) -> dict[str, OutageNotice]:
        """What other processes say that they cannot use, by server; the longest outage of each."""
        found = dict[str, OutageNotice]()
        for follower in list(self._followers.values()):
            if follower.ended_s is not None:
                continue
            with follower.view() as view:
                met = view.job.outages()
            for server, by in met.items():
                for process, (since_s, reason) in by:
                    if process and (server not in found or since_s < found[server].since_s):
                        found[server] = OutageNotice(since_s, f"{process}: {reason}")
        return found

    def close(self) -> None:
        """End all streams and the thread."""
        self._ending.set()
        with self._changed:
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(END_S)

    # --- for requests ----------------------------------------------------------------------------

    async def _settle(self, settled: Callable[[], bool], patience_s: float) -> None:
        """Wait until something is so, for a limited time."""
        news, loop = asyncio.Event(), asyncio.get_running_loop()
        self._settled.listen(loop, news)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while not settled():
                        news.clear()
                        await news.wait()
        finally:
            self._settled.unlisten(loop, news)

    def _knows(self, record: JobRecord) -> bool:
        """True if the numbers of a job are known, or nobody reads them."""
        name = record.spec.name
        if resting(record):
            return name not in self._unread
        follower = self._followers.get(name)
        return follower is not None and (follower.ready or follower.ended_s is not None)

    def _is_read(self, record: JobRecord) -> bool:
        """True if a job that does not run was read; the lock is held."""
        follower, brief = self._followers.get(record.spec.name), self._briefs.get(record.spec.name)
        is_followed = follower is not None and follower.ready and follower.follows(record)
        return is_followed or (brief is not None and brief.is_of(record))

    def _want_briefs(self, records: Sequence[JobRecord]) -> None:
        """Have jobs read that do not run; the lock is held."""
        self._unread.update((record.spec.name, record) for record in records)
        if self._unread and not self._reads_briefs and not self._ending.is_set():
            self._reads_briefs = True
            self._started(self._read_briefs, "briefs")

    def _read_briefs(self) -> None:
        """Read the newest records of jobs that do not run, until nobody wants more."""
        while True:
            with self._changed:
                unread = dict([*self._unread.items()][:BRIEFS])
                if not unread:
                    self._reads_briefs = False
                    return
            sources, now, found = self._sources, self._sources.clock(), {}
            again_s = FAILED_BRIEF_S
            try:
                log = sources.log()
                found = look_at_jobs(unread, log, sources.open_board, now, sources.glances)
            except OutsideError as error:
                _log.warning("list_not_read", reason=str(error))
                again_s = AWAY_BRIEF_S
            with self._changed:
                for name, record in unread.items():
                    del self._unread[name]
                    looked_at, job = LookedAt(record, sources.open_board(record.id)), None
                    summary = Summary(resting(record) or UNREAD)
                    if name in found:
                        job, summary = found[name], _summary_of(found[name], now)
                    self._briefs[name] = _Brief(looked_at, monotonic() + again_s, job, summary)
                    self.listing.change(name)
                self._swept = None  # one of these jobs may be another one by now
            self._settled.wake()

    def _keep(self) -> None:
        """Have the thread run; the lock is held."""
        if self._thread is None and not self._ending.is_set():
            self._thread = self._started(self._run, "followers")

    def _begun(self, job: str) -> JobFollower:
        """Whoever follows a job, from now on if nobody did; the lock is held."""
        if self._ending.is_set():
            raise UnavailableError("this service is shutting down")
        record = self._sources.jobs().get(job)
        if record is None:
            raise NotFoundError(f'there is no job "{job}"')
        follower = self._followers.get(job)
        ended_s = None if follower is None else follower.ended_s
        if follower is not None and not follower.follows(record):
            self._left.append(follower)
            follower = None
        if follower is None or (ended_s is not None and monotonic() - ended_s > FAILED_S):
            follower = JobFollower(record, self._sources, self._hear, self._outage)
            self._followers[job] = follower
            self.listing.change(job)
            self._urgent = True
            self._changed.notify()
        return follower

    # --- the thread ------------------------------------------------------------------------------

    def _hear(self, follower: JobFollower) -> None:
        """Note that there may be news of a job."""
        with self._changed:
            self._woken.add(follower)
            if not self._urgent and (not follower.ready or follower.watched):
                self._urgent = True
                self._changed.notify()

    def _started(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread; a fault of it ends the process."""

        def guarded() -> None:
            try:
                run()
            except Exception as fault:  # noqa: BLE001 -- raised again in the main thread
                self.fault = fault
                self._ending.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._await_news()
                if monotonic() >= self._sweep_due:
                    self._sweep()
                    self._sweep_due = monotonic() + SWEEP_S
                self._follow(list(self._followers.values()))
        finally:
            self._ending.set()
            with self._changed:
                followers = list(self._followers.values())
            for follower in followers:
                follower.stop("this service is shutting down")
            self._settled.close()

    def _await_news(self) -> None:
        """Wait for news of a job that somebody watches, or until something is due."""
        with self._changed:
            living = (each for each in self._followers.values() if each.ended_s is None)
            due_s = min((each.due_s for each in living), default=inf)
            until_s = min(due_s, self._sweep_due) - monotonic()
            self._changed.wait_for(lambda: self._urgent or self._ending.is_set(), until_s)
            self._urgent = False

    def _sweep(self) -> None:
        """Begin with jobs that run, take over changes, and leave jobs that nobody needs."""
        with self._changed:
            left = [(each, "it was deleted") for each in self._left]
            self._left.clear()
            jobs = self._sources.jobs()
            is_full, self._swept = jobs is not self._swept, jobs
            # As long as no job changes, those that run and are followed stay so.
            doubtful = [
                job
                for job, each in self._followers.items()
                if is_full or each.ended_s is not None or each.looked_at.record.wanted != "running"
            ]
            for job in doubtful:
                follower, record = self._followers[job], jobs.get(job)
                if record is None or not follower.follows(record):
                    left.append((self._followers.pop(job), "it was deleted"))
                elif not self._needs(record, follower):
                    left.append((self._followers.pop(job), "nobody asked about it"))
            self._sweep_briefs(jobs, is_full=is_full)
            for job in jobs if is_full else doubtful:
                if job in jobs and jobs[job].wanted == "running":
                    with suppress(NotFoundError, UnavailableError):  # deleted in this moment
                        self._begun(job)
            self._woken.intersection_update(self._followers.values())
            followers = list(self._followers.values()) if is_full else []
        for follower, why in left:
            follower.stop(why)
            self.listing.change(follower.job)
        for follower in followers:
            if follower.job in jobs:
                follower.take_record(jobs[follower.job])
        self._list(followers)

    def _list(self, followers: Iterable[JobFollower]) -> None:
        """Have the list show followers whose summaries have changed."""
        for follower in followers:
            if follower.ready and follower.listed is not follower.summary:
                follower.listed = follower.summary
                self.listing.change(follower.job)

    def _sweep_briefs(self, jobs: Mapping[str, JobRecord], *, is_full: bool) -> None:
        """Forget jobs that run or are others by now, and have paused ones read; with the lock."""
        briefs = self._briefs.items() if is_full else ()
        for job in [job for job, it in briefs if not _rests(jobs.get(job), it)]:
            self._briefs.pop(job).looked_at.board.close()
        if monotonic() >= self._fill_due:
            self._fill_due = monotonic() + FILL_S
            paused = (each for each in jobs.values() if each.wanted == "paused")
            unread = (each for each in paused if not self._is_read(each))
            self._want_briefs([*islice(unread, FILL)])

    def _needs(self, record: JobRecord, follower: JobFollower) -> bool:
        idle_s = monotonic() - follower.asked_s
        is_asked = follower.feed.listeners > 0 or idle_s < self._idle_s
        return record.wanted == "running" or is_asked

    def _follow(self, followers: Sequence[JobFollower]) -> None:
        """Read what is to be read, and look at what it is time to look at."""
        clock = monotonic()
        self._outage.quiet()
        self._open([each for each in followers if each.unopened], JobFollower.open)
        if clock >= self._plans_due:
            self._plans_due = clock + PLANS_S
            self._open([each for each in followers if each.awaits_plans], JobFollower.open_plans)
        all_due, watched_due = clock >= self._all_due, clock >= self._watched_due
        active = [
            each
            for each in followers
            if all_due or not each.ready or clock >= each.due_s or each.watched
        ]
        for follower in active:
            with self._changed:
                is_woken = follower in self._woken
                self._woken.discard(follower)
            if is_woken or clock >= follower.due_s:
                follower.guarded(follower.turn)
        stale = [each for each in active if each.is_stale]
        is_due = all_due or watched_due
        self._look([e for e in active if is_due or not e.looked or e.is_stale], clock)
        if is_due:
            took_s = monotonic() - clock
            self._watched_due = clock + pause_s(took_s)
            if all_due:
                self._all_due = clock + pause_s(took_s, UNWATCHED_S)
        if clock >= self._resting_due:
            self._resting_due = clock + RESTING_S
            self._look_at_briefs(clock)
        for follower in stale:
            follower.is_stale = follower in self._woken
        news = [each for each in active if each.catch_up() or each.ended_s is not None] or stale
        self._list(active)
        if news:
            self._settled.wake()

    def _open(
        self,
        followers: Sequence[JobFollower],
        begin: Callable[[JobFollower, OwnTopics], None],
    ) -> None:
        """Ask Kafka about the topics of several jobs at once, and begin to read them."""
        if not followers:
            return
        try:
            log = self._sources.log()
            own = OwnTopics(log, {place for each in followers for place in each.topics()})
        except OutsideError as error:
            if len(followers) == 1 or isinstance(error, UnavailableError):
                for follower in followers:
                    follower.guarded(partial(_refuse, error))
            else:  # Kafka refuses the topics of one of them: others are opened
                for follower in followers:
                    self._open([follower], begin)
            return
        for follower in followers:
            follower.guarded(partial(begin, follower, own))
            follower.guarded(follower.turn)

    def _look(self, followers: Sequence[JobFollower], clock: float) -> None:
        living = [each for each in followers if each.ended_s is None]
        looked_at = [each.looked_at for each in living]
        if looked_at:
            looks = self._looker.look(looked_at, self._sources.clock(), clock)
            for follower, look in zip(living, looks, strict=True):
                follower.guarded(partial(follower.look, look))

    def _look_at_briefs(self, clock: float) -> None:
        with self._changed:
            briefs = dict(self._briefs)
        if briefs:
            jobs = [brief.looked_at for brief in briefs.values()]
            looks = self._looker.look(jobs, self._sources.clock(), clock)
            found = {
                name: brief.looked(look)
                for (name, brief), look in zip(briefs.items(), looks, strict=True)
            }
            with self._changed:
                for name, brief in found.items():
                    if self._briefs.get(name) is briefs[name]:
                        self._briefs[name] = brief
                        self.listing.change(name)


def _rests(record: JobRecord | None, brief: _Brief) -> bool:
    """True if a brief is of this job, and the job does not run."""
    return record is not None and record is brief.looked_at.record and record.wanted != "running"


def _summary_of(job: JobProgress, now: float) -> Summary:
    transactions_s = job.open_transactions_s(now)
    return Summary(job.state(now), job.numbers(now), open_transactions_s=transactions_s)


def _refuse(error: OutsideError) -> None:
    raise error
