"""All jobs that one process follows, in one thread: those that run, and those asked about of late.

Following begins at the first question, or as soon as a job runs. It ends some minutes after the
last question about a job that does not run, and when a job is deleted. A job that nobody watches is
folded when it is looked at, every other second together with all others.

A job that does not run is read once, its newest records only: when a list shows it, and if it is
paused in any case. Once a minute all of these are looked at together, because retention may delete
records that a paused job has not trained.

The thread calls a follower when there is something to fold, so a follower never waits. Kafka and
Redis may be unavailable, the plans topic may come later or never, the job may be deleted. Requests
read under a lock, which is held to fold.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf, nan
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from common.api.answers import EVENT_DATA, Answer, MemberEvent, UpdateEvent
from common.api.jobs import job_answer, progress_answer
from common.core.liveness import OutageNotice
from common.core.messages import Drifted, Evaluated, UpdateApplied
from common.core.spans import Partition
from common.errors import (
    ExpiredError,
    NotFoundError,
    OutsideError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.jobs.progress import QUIET_S, UNREAD, JobProgress, resting
from common.jobs.watching import (
    READ_RECORDS,
    Audited,
    HistoryReader,
    Looker,
    ObservedJob,
    OwnTopics,
    decoded,
    pause_s,
    topics_of,
)
from common.kafka import names as topics
from common.spot.plans import decode_plan
from common.spot.provisioning.ledger import FleetLedger
from common.telemetry.logging import event_logger
from common.telemetry.outages import Outage, ongoing
from services.admin.live.answers import plan_event, verdict_event
from services.admin.live.feed import Feed
from services.admin.live.listing import Listing, LiveSummary

if TYPE_CHECKING:
    from common.jobs.progress import JobObservation, State
    from common.jobs.store import JobRecord
    from common.jobs.watching import ReadLiveStatuses
    from common.kafka.port import Log, Tail
    from common.redis.port import Board
    from common.spot.theory.billing import Billing

FOLDED = 50  # of them at once: about a millisecond under the lock
AGAIN_S = 0.5  # after a server did not answer
LOST_S = 2.0  # between looks for topics that were deleted
UPDATES_S = 0.05  # between events of updates: 20 a second are as many as anybody can see
# Time after the last question or stream of events during which a job counts as watched. A stream
# that breaks comes back within seconds and continues where it was.
WATCHED_S = 15.0
IDLE_S = 300.0  # nobody asked about a job that does not run
READY_S = 3.0  # that a request waits for a history to be read
SWEEP_S = 0.25  # between looks for jobs that are not followed, or need not be any more
LIST_S = 1.0  # that a list waits for histories to be read
FAILED_S = 10.0  # after a fault, until another follower tries
END_S = 5.0  # for the thread to end
PLANS_S = 2.0  # between looks for plans topics that are not there
# Time between looks at jobs that nobody watches: a list and a scrape need no newer numbers.
UNWATCHED_S = 2.0
# Time between looks at jobs that do not run. Those that could not be read are tried again then.
RESTING_S = 60.0
# Records that are read of jobs that do not run, of all that are read together and of each at least:
# about half a second.
BRIEF_RECORDS, LEAST_RECORDS = 20_000, 200
# Paused jobs of which nobody asked, read together so often after the start.
FILL, FILL_S = 20, 5.0

_NAMES = {kind: name for name, kind in EVENT_DATA.items()}  # of events
_log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where followers read; each may be called from any thread."""

    log: Callable[[], Log]
    open_board: Callable[[str], Board]  # by job
    live_statuses: ReadLiveStatuses  # at several boards
    jobs: Callable[[], Mapping[str, JobRecord]]  # as last read
    clock: Callable[[], float]  # seconds since 1970
    billing: Callable[[], Mapping[str, Billing]] = dict  # by pool


class View(NamedTuple):
    """What is known of a job."""

    job: JobProgress
    ledger: FleetLedger  # its machines


class JobFollower:
    """Follows one job until `stop`, or until the job is deleted.

    Attributes:
        briefly: True if it is of a job that does not run, whose newest records it reads once.
        feed: What happens, once all that had happened before is known. Nothing is published while
            nobody watches.
        ready: True once all is known that had happened before it began.
        ended_s: When it ended, on the clock `monotonic`; None: it has not.
        asked_s: When a request last asked about the job, on the clock `monotonic`.
        summary: As of the last look, the same object until it changes; None: there was none yet.
        is_stale: True from a question about a job that nobody watched until what is new is folded.
        due_s: When it has something to do even without news, on the clock `monotonic`.
        looked_at: The job and its board, for looks.
    """

    def __init__(self, record: JobRecord, owner: Followers, *, briefly: bool = False) -> None:
        self.briefly = briefly
        self.feed = Feed(token_hex(8))
        self.ready = self.is_stale = False
        self.ended_s: float | None = None
        self.asked_s = -inf
        self.summary: LiveSummary | None = None
        self.due_s = 0.0
        self.looked_at = ObservedJob(record, owner.sources.open_board(record.id))
        self._owner = owner
        self._sources = owner.sources
        self._lock = threading.Lock()
        self._view = View(JobProgress(record), FleetLedger())
        self._filling = self._view  # becomes the view when it has caught up
        # On the clock of sources; not a number if something was folded since the last summary.
        self._summarized_s = nan
        self._away = ""  # why reading does not go on
        self._history: HistoryReader | None = None
        self._lost = False  # its topics were deleted: its record is all that is known
        self._plans: Tail | None = None
        self._plans_until = 0  # end of their topic when it was opened: what had happened before
        self._published_at = 0.0  # when the last event of an update was made
        self._untold = 0  # updates since

    @property
    def job(self) -> str:
        """Name of its job."""
        return self.looked_at.record.spec.name

    @property
    def looked(self) -> bool:
        """True once its board and streams were looked at."""
        return self._filling.job.seen.at_s > 0.0

    @property
    def failed(self) -> bool:
        """True if it can't read its topics."""
        return self._lost or self.ended_s is not None

    @property
    def watched(self) -> bool:
        """True if a stream of events is open, or somebody asked within the last seconds."""
        return self.feed.listeners > 0 or monotonic() < self.asked_s + WATCHED_S

    def follows(self, record: JobRecord) -> bool:
        """Whether this is its job, not another one of its name."""
        return self.looked_at.record.is_same_job(record)

    @contextmanager
    def view(self) -> Iterator[View]:
        """What is known; nothing is added meanwhile, so be quick."""
        with self._lock:
            yield self._view

    def check(self) -> None:
        """Say why not all is known.

        Raises:
            UnavailableError: It will be later, or when somebody has seen to it.
        """
        if not self.ready or self.ended_s is not None:
            why = self._away or "its history is still being read"
            raise UnavailableError(f'not all of the job "{self.job}" is known: {why}')

    def job_json(self, record: JobRecord | None = None) -> bytes:
        """The job as it is now, a `JobAnswer` as JSON.

        Args:
            record: A change of it that may not have been heard of yet; None: as it was heard.
        """
        now = self._sources.clock()
        with self.view() as view:
            record = view.job.record if record is None else record
            state = resting(record) or self._state_at_work(view.job, now)
            progress = progress_answer(view.job, now)
        return job_answer(record, state, progress).model_dump_json().encode()

    def state_at_work(self) -> State:
        """Return the state of a job that is to run, by what this process has met until now.

        A look may take long, and the record of the job may be an old one.
        """
        with self.view() as view:
            return self._state_at_work(view.job, self._sources.clock())

    def _state_at_work(self, job: JobProgress, now: float) -> State:
        job.seen = job.seen._replace(outages=ongoing())
        return job.state_at_work(now)

    # --- for the loop ----------------------------------------------------------------------------

    def stop(self, why: str = "") -> None:
        """End, and all streams of events with it."""
        if self.ended_s is None:
            self._away = why
            self.ended_s = monotonic()
            self.feed.close()
            self.close_tails()
            self.looked_at.board.close()

    def guarded(self, step: Callable[[], object]) -> None:
        """Take a step; what goes wrong is logged, and told to whoever asks."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 -- told to whoever asks; another follower tries
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note that a step went wrong."""
        match error:
            case UnavailableError():
                self._away = str(error)
                self._owner.outage.met(error)
                self.due_s = monotonic() + AGAIN_S
            case UnknownTopicError():
                if not self._lost:
                    _log.warning("topics_lost", job=self.job, reason=str(error))
                self._away, self._lost = str(error), True
                self.close_tails()
                self.due_s = monotonic() + LOST_S
            case ExpiredError() | TruncatedError():
                _log.warning("followed_anew", job=self.job, reason=str(error))
                self.close_tails()
                self.due_s = 0.0
            case _:
                _log.error("follower_failed", job=self.job, exc_info=error)
                self.stop(str(error))

    @property
    def unopened(self) -> bool:
        """True if its topics are to be opened now."""
        return self._history is None and self.ended_s is None and monotonic() >= self.due_s

    def topics(self) -> set[Partition]:
        """Partitions to be asked about before `open`."""
        return {*topics_of(self.looked_at.record.id), self._plans_place}

    def open(self, own: OwnTopics, most: int | None = None) -> None:
        """Begin to read from the start of its topics.

        Args:
            own: What is known of them.
            most: Optional. See `HistoryReader`.

        Raises:
            UnknownTopicError: If the job's topics were deleted.
            UnavailableError: If Kafka does not say what they hold.
        """
        log, record = self._sources.log(), self.looked_at.record
        self._history = history = HistoryReader(record.id, log, most, own, self._on_change)
        self._lost = False
        progress = JobProgress(record, history.updates_start, history.control_start)
        self._filling = View(progress, FleetLedger(self._sources.billing()))
        self.due_s = 0.0
        if not self.briefly:
            self.open_plans(own)

    @property
    def awaits_plans(self) -> bool:
        """True if a provisioner may still create its plans topic."""
        provisioned = self.looked_at.record.spec.provisioning is not None
        return provisioned and self._plans is None and self._history is not None

    def open_plans(self, own: OwnTopics) -> None:
        """Read its plans topic, if there is one."""
        with suppress(UnknownTopicError):  # nobody provisions it, or not yet
            bounds = own.bounds(self._plans_place)
            position = own.identified(self._plans_place, bounds.start)
            self._plans = self._sources.log().tail(self._plans_place, position, self._on_change)
            self._plans_until = bounds.end

    def turn(self) -> None:
        """Read what is new and tell of it; calls for another turn if there may be more.

        Raises:
            OutsideError: If Kafka does not do what it should.
        """
        if self._history is None or self.ended_s is not None:
            return
        self.due_s = inf
        claims = self._history.claims()
        for first in range(0, len(claims), FOLDED):
            with self._lock:
                for offset, claim in claims[first : first + FOLDED]:
                    self._filling.job.claims.feed(offset, claim)
        records = self._history.updates(0.0)
        if records or claims:
            self._away = ""
            self._take_updates(records)
        if self._untold and (not self.watched or monotonic() >= self._published_at + UPDATES_S):
            self._publish_update()
        if self._untold:
            self.due_s = self._published_at + UPDATES_S
        plans = self._take_plans()
        if records or claims or plans:
            self._summarized_s = nan
            self._on_change()

    def take_record(self, record: JobRecord) -> None:
        """Take over a change of the job."""
        if record is not self.looked_at.record:
            changed, self.looked_at.record = record != self.looked_at.record, record
            with self._lock:
                self._view.job.record = self._filling.job.record = record
            if changed and self.ready:
                self._summarize()
                self._publish_job()

    def _on_change(self) -> None:
        self._owner.receive(self)

    @property
    def _plans_place(self) -> Partition:
        return Partition(topics.plans_topic(self.looked_at.record.id), 0)

    def _take_updates(self, records: Sequence[Audited]) -> None:
        now, live = self._sources.clock(), self._live()
        counted, before = 0, self._filling.job.version
        for first in range(0, len(records), FOLDED):
            with self._lock:
                for offset, record, written_s in records[first : first + FOLDED]:
                    seen_s = now if live or written_s is None else min(written_s, now)
                    counts = self._filling.job.feed_update(offset, record, written_s, seen_s)
                    counted += counts and isinstance(record, UpdateApplied)
                    if live and counts and isinstance(record, Evaluated | Drifted):
                        self._publish(verdict_event(record))
        if live:
            self._untold += counted
            if self._filling.job.version != before + counted:
                # A new leader took some back: everything looks different.
                self._publish_job()

    def _publish_update(self) -> None:
        count, self._untold, self._published_at = self._untold, 0, monotonic()
        with self._lock:
            row = self._view.job.updates.newest
        if row is not None:
            self._publish(
                UpdateEvent.model_validate(msgspec.structs.asdict(row) | {"count": count})
            )

    def _take_plans(self) -> bool:
        """Fold new records of the plans topic; True if there were some."""
        if self._plans is None:
            return False
        live = self._live()
        records = self._plans.read(READ_RECORDS, 0.0)
        decisions = [(each.offset, decoded(decode_plan, each)) for each in records]
        with self._lock:
            ledger = self._filling.ledger
            for offset, record in decisions:
                if ledger.feed(offset, record) and record is not None and live:
                    event = plan_event(ledger, record)
                    if event is not None:
                        self._publish(event)
        return bool(records)

    def look(self, look: JobObservation) -> None:
        """Take over a look at its board and streams, and tell of what changed."""
        with self._lock:
            before = self._view.job.seen.statuses
            is_new = self._filling.job.look(look)
            if self._view is not self._filling:
                is_new = self._view.job.look(look)
        shown = self.summary
        if is_new or not self._stands():
            self._summarize()
        if not self._live():
            return
        if shown and self.summary and shown.state.word != self.summary.state.word:
            self._publish_job()
        if before is None or look.statuses is None:
            return
        for worker in sorted({*before, *look.statuses}):
            status = look.statuses.get(worker, "gone")
            if status != before.get(worker, "gone"):
                fields = {"worker": worker, "status": status, "at_s": look.at_s}
                self._publish(MemberEvent.model_validate(fields))

    def _stands(self) -> bool:
        """True if time alone does not change the summary: no rate, cost or wait goes on."""
        if self.summary is None or self.summary.numbers is None:
            return False
        numbers, spent_usd = self.summary.numbers, self.summary.spent_usd
        is_quiet = self._summarized_s >= (numbers.last_update_s or -inf) + QUIET_S
        return spent_usd is None and not numbers.updates_per_s and is_quiet

    def _summarize(self) -> None:
        # A look during an outage may take ten seconds.
        self._summarized_s = now = self._sources.clock()
        with self._lock:
            job, ledger = self._view
            summary = LiveSummary(
                job.state(now),
                job.numbers(now),
                ledger.spent_usd(now) if ledger.launches else None,
                job.open_transactions_s(now),
            )
        if summary != self.summary:
            self.summary = summary
            self._owner.listing.change(self.job)

    def _publish(self, event: Answer) -> None:
        if self.watched:
            self.feed.publish(_NAMES[type(event)], event.model_dump_json().encode())
        else:
            self.feed.skip()

    def _publish_job(self) -> None:
        if self.watched:
            self.feed.publish("job", self.job_json())
        else:
            self.feed.skip()

    def _live(self) -> bool:
        """Whether what comes now is news."""
        return self.ready and self._filling is self._view

    def catch_up(self) -> bool:
        """Note that all is known, once what had happened before is; True if that is news."""
        is_lost = self._lost and not self.briefly
        if self._live() or not self.looked or (self._history is None and not is_lost):
            return False
        if self._history is not None:
            plans = 0 if self._plans is None else self._plans.position()
            if not self._history.caught_up or plans < self._plans_until:
                return False
            with self._lock:
                anew, self._view = self._view is not self._filling, self._filling
            self._summarize()
            if self.ready and anew:
                self._publish_job()
        if self.ready:
            return False
        self.ready = True
        self._owner.listing.change(self.job)
        return True

    def close_tails(self) -> None:
        """Read no more."""
        for reader in (self._history, self._plans):
            if reader is not None:
                reader.close()
        self._history = self._plans = None
        self._plans_until = 0


class Followers:
    """The followers of one process. May be shared between threads.

    Making it opens nothing and starts nothing.

    Attributes:
        fault: Why its thread cannot go on; None: it can.
        listing: All jobs as a list shows them.
        outage: Of Kafka, for its followers.

    Args:
        ending: Set when the process is to end: all streams of events end at once then.
    """

    def __init__(self, sources: Sources, ending: threading.Event) -> None:
        self.fault: Exception | None = None
        self.listing = Listing(sources.jobs, self.summary)
        self.sources = sources
        self.outage = Outage(_log, "kafka")
        self._ending = ending
        # The condition guards all that follows. No server is asked and no tail closed under it,
        # since the log calls `receive`.
        self._changed = threading.Condition()
        # Followers by job: those that read, and those that have read a job that does not run.
        self._followers = dict[str, JobFollower]()
        self._resting = dict[str, JobFollower]()
        # Followers that others have replaced, until they are stopped.
        self._left = list[JobFollower]()
        self._woken = set[JobFollower]()
        # True if one of the woken followers is watched, or not ready.
        self._urgent = False
        self._thread: threading.Thread | None = None
        # Wakes requests when a follower is ready or has ended.
        self._settled = Feed("settled", 1)
        # From here on all is the thread's.
        self._looker = Looker(sources.log, sources.live_statuses, _log)
        # When to do what is done at intervals, on the clock `monotonic`.
        self._due = dict.fromkeys(("sweep", "fill", "plans", "watched", "all", "resting"), 0.0)
        # Jobs as of the last full sweep.
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
            READY_S,
        )
        follower.check()
        return follower

    async def known(self, jobs: Collection[JobRecord]) -> None:
        """Wait a moment until `summary` knows the numbers of these jobs.

        Of those that do not run the newest records are read, if that was not done before.
        """
        with self._changed:
            self._keep()
            self._read_briefly(jobs)
        await self._settle(lambda: self._ending.is_set() or all(map(self._knows, jobs)), LIST_S)

    def summary(self, record: JobRecord) -> LiveSummary:
        """How a job is and how far, as of the last look."""
        name, state = record.spec.name, resting(record)
        brief = None if state is None else self._resting.get(name)
        for follower in (self._followers.get(name), brief):
            if follower is None or not follower.ready or not follower.follows(record):
                continue
            if (summary := follower.summary) is None:
                continue
            # Since the last look a server may be lost or back, or the job may be resumed.
            is_old = follower.looked_at.record is not record
            if is_old or ongoing() or summary.state.word == "waiting for a server":
                state = state or follower.state_at_work()
            return summary._replace(state=state or summary.state)
        return LiveSummary(state or UNREAD)

    def shown(self) -> Iterator[tuple[str, LiveSummary]]:
        """`summary` of all jobs that are not stopped, without those that are still being read."""
        for name, record in self.sources.jobs().items():
            summary = self.summary(record)
            if record.wanted == "running" and summary.state is UNREAD:
                continue
            if record.wanted == "paused" and not (summary.numbers and summary.numbers.whole):
                # Counts of a part of the history would seem to rise once the job is resumed.
                yield name, LiveSummary(summary.state)
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

    def receive(self, follower: JobFollower) -> None:
        """Note that there may be news of a job. Threads of the log's call this, too."""
        with self._changed:
            self._woken.add(follower)
            if not self._urgent and (not follower.ready or follower.watched):
                self._urgent = True
                self._changed.notify()

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
            self._settled.unlisten(news)

    def _knows(self, record: JobRecord) -> bool:
        """True if the numbers of a job are known, or nobody reads them."""
        name = record.spec.name
        follower, brief = self._followers.get(name), self._resting.get(name)
        if resting(record) and brief is not None and brief.looked_at.record is record:
            return True
        if follower is None or not follower.follows(record):
            return False
        return follower.ready or follower.ended_s is not None

    def _read_briefly(self, records: Iterable[JobRecord]) -> None:
        """Have jobs read that do not run, unless they are known; the lock is held."""
        for record in records:
            if resting(record) and not self._knows(record):
                with suppress(NotFoundError, UnavailableError):  # deleted in this moment
                    self._begun(record.spec.name, briefly=True)

    def _keep(self) -> None:
        """Have the thread run; the lock is held."""
        if self._thread is None and not self._ending.is_set():
            self._thread = threading.Thread(target=self._run, name="followers", daemon=True)
            self._thread.start()

    def _begun(self, job: str, *, briefly: bool = False) -> JobFollower:
        """Whoever follows a job, from now on if nobody did; the lock is held."""
        if self._ending.is_set():
            raise UnavailableError("this service is shutting down")
        record = self.sources.jobs().get(job)
        if record is None:
            raise NotFoundError(f'there is no job "{job}"')
        follower = self._followers.get(job)
        ended_s = None if follower is None else follower.ended_s
        is_less = follower is not None and follower.briefly and not briefly
        if follower is not None and (is_less or not follower.follows(record)):
            self._left.append(follower)
            follower = None
        if follower is None or (ended_s is not None and monotonic() - ended_s > FAILED_S):
            follower = JobFollower(record, self, briefly=briefly)
            self._followers[job] = follower
            self.listing.change(job)
            self._urgent = True
            self._changed.notify()
        return follower

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._await_news()
                if self._is_due("sweep", SWEEP_S):
                    self._sweep()
                self._follow(list(self._followers.values()))
        except Exception as fault:  # noqa: BLE001 -- raised again in the main thread
            self.fault = fault
        finally:
            self._ending.set()
            with self._changed:
                followers = [*self._followers.values(), *self._resting.values(), *self._left]
            for follower in followers:
                follower.stop("this service is shutting down")
            self._settled.close()

    def _is_due(self, what: str, every_s: float) -> bool:
        """True if it is time to do something that is done at intervals."""
        if (clock := monotonic()) < self._due[what]:
            return False
        self._due[what] = clock + every_s
        return True

    def _await_news(self) -> None:
        """Wait for news of a job that somebody watches, or until something is due."""
        with self._changed:
            living = (each for each in self._followers.values() if each.ended_s is None)
            due_s = min((each.due_s for each in living), default=inf)
            until_s = min(due_s, self._due["sweep"]) - monotonic()
            self._changed.wait_for(lambda: self._urgent or self._ending.is_set(), until_s)
            self._urgent = False

    def _sweep(self) -> None:
        """Begin with jobs that run, take over changes, and leave jobs that nobody needs."""
        with self._changed:
            jobs = self.sources.jobs()
            is_full, self._swept = jobs is not self._swept, jobs
            # As long as no job changes, those that run and are followed stay so.
            doubtful = [
                job
                for job, each in self._followers.items()
                if is_full or each.ended_s is not None or each.looked_at.record.wanted != "running"
            ]
            for job in doubtful:
                if not self._needs(jobs.get(job), self._followers[job]):
                    self._left.append(self._followers.pop(job))
            self._sweep_resting(jobs, is_full=is_full)
            for job in jobs if is_full else doubtful:
                if job in jobs and jobs[job].wanted == "running":
                    with suppress(NotFoundError, UnavailableError):  # deleted in this moment
                        self._begun(job)
            self._woken.intersection_update(self._followers.values())
            followers = list(self._followers.values()) if is_full else []
            left, self._left = self._left, []
        for follower in left:
            follower.stop("it was deleted")
            self.listing.change(follower.job)
        for follower in followers:
            if follower.job in jobs:
                follower.take_record(jobs[follower.job])

    def _sweep_resting(self, jobs: Mapping[str, JobRecord], *, is_full: bool) -> None:
        """Leave jobs that have changed, and have paused ones read; the lock is held."""
        briefs = self._resting.items() if is_full else ()
        for job in [job for job, it in briefs if jobs.get(job) is not it.looked_at.record]:
            self._left.append(self._resting.pop(job))
        if self._is_due("fill", FILL_S):
            paused = (each for each in jobs.values() if each.wanted == "paused")
            unread = (each for each in paused if not self._knows(each))
            self._read_briefly([*islice(unread, FILL)])

    def _needs(self, record: JobRecord | None, follower: JobFollower) -> bool:
        if record is None or not follower.follows(record):
            return False
        is_asked = follower.feed.listeners > 0 or monotonic() - follower.asked_s < IDLE_S
        return record.wanted == "running" or follower.briefly or is_asked

    def _follow(self, followers: Sequence[JobFollower]) -> None:
        """Read what is to be read, and look at what it is time to look at."""
        clock = monotonic()
        self.outage.quiet()
        unopened = [each for each in followers if each.unopened]
        most = max(LEAST_RECORDS, BRIEF_RECORDS // max(1, sum(each.briefly for each in unopened)))
        self._open(unopened, lambda each, own: each.open(own, most if each.briefly else None))
        if self._is_due("plans", PLANS_S):
            self._open([each for each in followers if each.awaits_plans], JobFollower.open_plans)
        all_due, watched_due = clock >= self._due["all"], clock >= self._due["watched"]
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
            self._due["watched"] = clock + pause_s(took_s)
            if all_due:
                self._due["all"] = clock + pause_s(took_s, UNWATCHED_S)
        if self._is_due("resting", RESTING_S):
            self._look_at_resting(clock)
        for follower in stale:
            follower.is_stale = follower in self._woken
        news = [each for each in active if each.catch_up() or each.ended_s is not None] or stale
        briefs = [each for each in active if each.briefly and (each.ready or each.failed)]
        self._rest(briefs)
        if news or briefs:
            self._settled.wake()

    def _rest(self, followers: Sequence[JobFollower]) -> None:
        """Read no more of jobs that do not run and whose newest records are known."""
        for follower in followers:
            follower.close_tails()
            with self._changed:
                if self._followers.get(follower.job) is not follower:
                    continue  # another one has replaced it
                del self._followers[follower.job]
                if (before := self._resting.get(follower.job)) is not None:
                    self._left.append(before)
                self._resting[follower.job] = follower

    def _open(
        self,
        followers: Sequence[JobFollower],
        begin: Callable[[JobFollower, OwnTopics], None],
    ) -> None:
        """Ask Kafka about the topics of several jobs at once, and begin to read them."""
        if not followers:
            return
        try:
            log = self.sources.log()
            own = OwnTopics(log, {place for each in followers for place in each.topics()})
        except OutsideError as error:
            if len(followers) == 1 or isinstance(error, UnavailableError):
                for follower in followers:
                    follower.fail(error)
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
            looks = self._looker.look(looked_at, self.sources.clock(), clock)
            for follower, look in zip(living, looks, strict=True):
                follower.guarded(partial(follower.look, look))

    def _look_at_resting(self, clock: float) -> None:
        """Look at jobs that do not run, and forget those that could not be read."""
        with self._changed:
            for job in [job for job, each in self._resting.items() if each.failed]:
                self._left.append(self._resting.pop(job))
            followers = list(self._resting.values())
        self._look(followers, clock)
