"""Followers of all jobs that run or were requested recently, in one thread.

A follower starts with the first request or as soon as its job runs. It ends some minutes after the
last request if the job does not run, and when the job is deleted. Records of a job that nobody
watches are folded when the job is polled, every two seconds together with all other jobs.

For a job that does not run, only the newest records are read, and only once: when a list shows the
job, or in any case if it is paused. All these jobs are polled once a minute, because retention may
delete records that a paused job has not trained.

The thread calls a follower when there is something to fold, so a follower never waits. Kafka and
Redis may be unavailable, the plans topic may appear late or never, and the job may be deleted.
Requests read under a lock, which is held while records are folded.
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
from common.core.liveness import WORKER, OutageNotice
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
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.telemetry.logging import event_logger
from common.telemetry.outages import Outage, ongoing
from services.admin.live.answers import plan_event, verdict_event
from services.admin.live.feed import Feed
from services.admin.live.listing import Listing, LiveSummary

if TYPE_CHECKING:
    from common.core.liveness import Device
    from common.jobs.progress import JobObservation, State
    from common.jobs.store import JobRecord
    from common.jobs.watching import ReadLiveStatuses
    from common.kafka.port import Log, Tail
    from common.redis.port import Board
    from common.spot.theory.billing import Billing

# Number of records folded under the lock at a time, which takes about a millisecond.
FOLDED = 50
# Seconds before a retry after a server did not answer.
AGAIN_S = 0.5
# Seconds between checks for topics that were deleted.
LOST_S = 2.0
# Seconds between events of updates; people cannot see more than 20 per second.
UPDATES_S = 0.05
# Time after the last request or event stream during which a job counts as watched. A broken stream
# reconnects within seconds and continues where it was.
WATCHED_S = 15.0
# Time after the last request until the follower of a job that does not run ends.
IDLE_S = 300.0
# Time that a request waits until a history is read.
READY_S = 3.0
# Seconds between searches for jobs to start or stop following.
SWEEP_S = 0.25
# Time that a list waits until histories are read.
LIST_S = 1.0
# Seconds after a fault until another follower is started.
FAILED_S = 10.0
# Time limit for the thread to end.
END_S = 5.0
# Seconds between checks for plans topics that do not exist yet.
PLANS_S = 2.0
# Seconds between polls of jobs that nobody watches; lists and scrapes need no newer numbers.
UNWATCHED_S = 2.0
# Seconds between polls of jobs that do not run. Unreadable ones are retried at the same time.
RESTING_S = 60.0
# Number of records read for all jobs that do not run together, and minimum number for each; takes
# about half a second.
BRIEF_RECORDS, LEAST_RECORDS = 20_000, 200
# Number of unrequested paused jobs read together after the start, and seconds between such reads.
FILL, FILL_S = 20, 5.0

# Names of events.
_NAMES = {kind: name for name, kind in EVENT_DATA.items()}
_log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Functions that followers read with, callable from any thread."""

    log: Callable[[], Log]
    # Opens the board of a job.
    open_board: Callable[[str], Board]
    # Reads the live statuses of several boards.
    live_statuses: ReadLiveStatuses
    # Returns the jobs as last read.
    jobs: Callable[[], Mapping[str, JobRecord]]
    # Returns seconds since 1970.
    clock: Callable[[], float]
    # Returns the billing of machines by pool.
    billing: Callable[[], Mapping[str, Billing]] = dict


class View(NamedTuple):
    """A job and its machines, as known so far."""

    job: JobProgress
    # The job's machines.
    ledger: FleetLedger


class JobFollower:
    """Follows one job until `stop`, or until the job is deleted.

    Attributes:
        briefly: True if the job does not run and only its newest records are read, once.
        feed: Events since the history was read. Nothing is published while nobody watches.
        ready: True once the history from before the start is read.
        ended_s: Time on the clock `monotonic` when it ended, or None.
        asked_s: Time on the clock `monotonic` of the last request about the job.
        summary: Summary as of the last poll, the same object until it changes, or None before the
            first poll.
        is_stale: True after a request about an unwatched job until its new records are folded.
        due_s: Time on the clock `monotonic` of the next turn even without new records.
        looked_at: The job and its board, for polls.
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
        # Replaces `_view` once it has caught up.
        self._filling = self._view
        # Time of the last summary on the clock of `sources`, or NaN if records were folded since.
        self._summarized_s = nan
        # Reason why reading is interrupted.
        self._away = ""
        self._history: HistoryReader | None = None
        # True if the topics were deleted and only the job's record is known.
        self._lost = False
        self._plans: Tail | None = None
        # End of the plans topic when it was opened; earlier records are history.
        self._plans_until = 0
        # Time of the last event of an update.
        self._published_at = 0.0
        # Number of updates since that event.
        self._untold = 0
        # Workers that say why they cannot work for the job, each with the reason.
        self._failed = dict[str, str]()

    @property
    def job(self) -> str:
        """Name of its job."""
        return self.looked_at.record.spec.name

    @property
    def looked(self) -> bool:
        """True once the board and the streams were polled."""
        return self._filling.job.seen.at_s > 0.0

    @property
    def failed(self) -> bool:
        """True if it can't read its topics."""
        return self._lost or self.ended_s is not None

    @property
    def watched(self) -> bool:
        """True if an event stream is open or a request came within the last seconds."""
        return self.feed.listeners > 0 or monotonic() < self.asked_s + WATCHED_S

    def follows(self, record: JobRecord) -> bool:
        """Return True if this is its job and not a later one of the same name."""
        return self.looked_at.record.is_same_job(record)

    @contextmanager
    def view(self) -> Iterator[View]:
        """Yield the current view. Nothing is folded meanwhile, so be quick."""
        with self._lock:
            yield self._view

    def check(self) -> None:
        """Raise an error if the job is not completely known.

        Raises:
            UnavailableError: If the history is still being read, or cannot be read.
        """
        if not self.ready or self.ended_s is not None:
            why = self._away or "its history is still being read"
            raise UnavailableError(f'not all of the job "{self.job}" is known: {why}')

    def job_json(self, record: JobRecord | None = None) -> bytes:
        """Return the job's current state, a `JobAnswer` as JSON.

        Args:
            record: Optional. The job's record, if it may be newer than the last one read. If unset,
                the last one read.
        """
        now = self._sources.clock()
        with self.view() as view:
            record = view.job.record if record is None else record
            state = resting(record) or self._state_at_work(view.job, now)
            progress = progress_answer(view.job, now)
        return job_answer(record, state, progress).model_dump_json().encode()

    def state_at_work(self) -> State:
        """Return the state of a job that should run, including outages noticed by now.

        A poll may take long, and the job's record may be an old one.
        """
        with self.view() as view:
            return self._state_at_work(view.job, self._sources.clock())

    def _state_at_work(self, job: JobProgress, now: float) -> State:
        job.seen = job.seen._replace(outages=ongoing())
        return job.state_at_work(now)

    # --- for the loop ----------------------------------------------------------------------------

    def stop(self, why: str = "") -> None:
        """End this follower and all its event streams."""
        if self.ended_s is None:
            self._away = why
            self.ended_s = monotonic()
            self.feed.close()
            self.close_tails()
            self.looked_at.board.close()

    def guarded(self, step: Callable[[], object]) -> None:
        """Run a step. An error is logged and reported to requests."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 -- reported to requests; another follower tries
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Handle the error of a step."""
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
        """True if its topics should be opened now."""
        return self._history is None and self.ended_s is None and monotonic() >= self.due_s

    def topics(self) -> set[Partition]:
        """Return the partitions to look up before `open`."""
        return {*topics_of(self.looked_at.record.id), self._plans_place}

    def open(self, own: OwnTopics, most: int | None = None) -> None:
        """Start reading its topics from their beginning.

        Args:
            own: Ids and bounds of the topics.
            most: Optional. See `HistoryReader`.

        Raises:
            UnknownTopicError: If the job's topics were deleted.
            UnavailableError: If Kafka does not return their bounds.
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
        """Start reading the plans topic if it exists."""
        # No provisioner has created the topic yet.
        with suppress(UnknownTopicError):
            bounds = own.bounds(self._plans_place)
            position = own.identified(self._plans_place, bounds.start)
            self._plans = self._sources.log().tail(self._plans_place, position, self._on_change)
            self._plans_until = bounds.end

    def turn(self) -> None:
        """Read and publish new records; request another turn if there may be more.

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
        """Apply a change of the job's record."""
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
                # A new leader took updates back, so everything changes.
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
        """Fold new records of the plans topic; return True if there were any."""
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
        """Apply a poll of the board and the streams, and publish what changed."""
        with self._lock:
            before = self._view.job.seen.statuses
            is_new = self._filling.job.look(look)
            if self._view is not self._filling:
                is_new = self._view.job.look(look)
        known = self._failed
        if look.statuses is not None:
            self._failed = _failed(look)
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
        for worker, reason in sorted(self._failed.items() - known.items()):
            failed = MemberEvent(worker=worker, status="failed", reason=reason, at_s=look.at_s)
            self._publish(failed)

    def _stands(self) -> bool:
        """Return True if time alone does not change the summary: no cost grows, no rate falls."""
        if self.summary is None or self.summary.numbers is None:
            return False
        numbers, spent_usd = self.summary.numbers, self.summary.spent_usd
        is_quiet = self._summarized_s >= (numbers.last_update_s or -inf) + QUIET_S
        return spent_usd is None and not numbers.updates_per_s and is_quiet

    def _summarize(self) -> None:
        # This is not the time of the poll, because a poll during an outage may take ten seconds.
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
        """Return True if new records are news, not history."""
        return self.ready and self._filling is self._view

    def catch_up(self) -> bool:
        """Mark the history as read once it is; return True if the follower became ready."""
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
        """Stop reading."""
        for reader in (self._history, self._plans):
            if reader is not None:
                reader.close()
        self._history = self._plans = None
        self._plans_until = 0


def _failed(look: JobObservation) -> dict[str, str]:
    """Return the workers that say why they cannot work for the job, each with the reason."""
    unable = look.unable.items()
    return {who.removeprefix(WORKER): why for who, why in unable if who.startswith(WORKER)}


class Followers:
    """Followers of one process. Thread-safe.

    The constructor opens and starts nothing.

    Attributes:
        fault: Error that ended the thread, or None.
        listing: All jobs as a list shows them.
        outage: Outage of Kafka as the followers see it.

    Args:
        ending: Set when the process should end; all event streams end at once.
    """

    def __init__(self, sources: Sources, ending: threading.Event) -> None:
        self.fault: Exception | None = None
        self.listing = Listing(sources.jobs, self.summary)
        self.sources = sources
        self.outage = Outage(_log, "kafka")
        self._ending = ending
        # The condition guards the following fields. No server is called and no tail closed under
        # it, because the log calls `receive`.
        self._changed = threading.Condition()
        # Followers by job: those that are reading, and finished ones of jobs that do not run.
        self._followers = dict[str, JobFollower]()
        self._resting = dict[str, JobFollower]()
        # Replaced followers that are not stopped yet.
        self._left = list[JobFollower]()
        self._woken = set[JobFollower]()
        # True if one of the woken followers is watched or not ready.
        self._urgent = False
        self._thread: threading.Thread | None = None
        # Wakes requests when a follower is ready or has ended.
        self._settled = Feed("settled", 1)
        # The thread alone uses the following fields.
        self._looker = Looker(sources.log, sources.live_statuses, _log)
        # Due times of periodic work on the clock `monotonic`.
        self._due = dict.fromkeys(("sweep", "fill", "plans", "watched", "all", "resting"), 0.0)
        # Jobs as of the last full sweep.
        self._swept: Mapping[str, JobRecord] | None = None

    def start(self) -> None:
        """Start following the jobs that run, unless already started."""
        with self._changed:
            self._keep()

    def of(self, job: str) -> JobFollower:
        """Return the follower of a job, started if necessary; it may not know the history yet.

        Raises:
            NotFoundError: If the job does not exist.
            UnavailableError: If this process is shutting down.
        """
        with self._changed:
            self._keep()
            follower = self._begun(job)
            if not follower.watched:
                # Its records were folded up to two seconds ago.
                follower.is_stale = self._urgent = True
                self._woken.add(follower)
                self._changed.notify()
            follower.asked_s = monotonic()
            return follower

    async def ready(self, job: str) -> JobFollower:
        """Return the follower of a job once it knows everything from before this call.

        Raises:
            NotFoundError: If the job does not exist.
            UnavailableError: If the history is long or a server is unavailable; ask again.
        """
        follower = self.of(job)
        await self._settle(
            lambda: follower.ended_s is not None or (follower.ready and not follower.is_stale),
            READY_S,
        )
        follower.check()
        return follower

    async def known(self, jobs: Collection[JobRecord]) -> None:
        """Wait up to `LIST_S` until `summary` knows the numbers of these jobs.

        Reads the newest records of jobs that do not run, unless already read.
        """
        with self._changed:
            self._keep()
            self._read_briefly(jobs)
        await self._settle(lambda: self._ending.is_set() or all(map(self._knows, jobs)), LIST_S)

    def summary(self, record: JobRecord) -> LiveSummary:
        """Return a job's state and progress as of the last poll."""
        name, state = record.spec.name, resting(record)
        brief = None if state is None else self._resting.get(name)
        for follower in (self._followers.get(name), brief):
            if follower is None or not follower.ready or not follower.follows(record):
                continue
            if (summary := follower.summary) is None:
                continue
            # Since the last poll a server may have failed or recovered, or the job may have been
            # resumed.
            is_old = follower.looked_at.record is not record
            if is_old or ongoing() or summary.state.word == "waiting for a server":
                state = state or follower.state_at_work()
            return summary._replace(state=state or summary.state)
        return LiveSummary(state or UNREAD)

    def shown(self) -> Iterator[tuple[str, LiveSummary]]:
        """Yield `summary` of all jobs that are neither stopped nor still being read."""
        for name, record in self.sources.jobs().items():
            summary = self.summary(record)
            if record.wanted == "running" and summary.state is UNREAD:
                continue
            if record.wanted == "paused" and not (summary.numbers and summary.numbers.whole):
                # Counts of a part of the history would appear to rise once the job is resumed.
                yield name, LiveSummary(summary.state)
            elif record.wanted != "stopped":
                yield name, summary

    def outages(self) -> dict[str, OutageNotice]:
        """Return the longest outage that other processes report for each server."""
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

    def smallest_gpu(self) -> Device | None:
        """Return the GPU with the least memory of all workers that are at a job now, or None."""
        found: list[Device] = []
        for follower in list(self._followers.values()):
            if follower.ended_s is None:
                with follower.view() as view:
                    found += view.job.seen.devices.values()
        gpus = [each for each in found if each.kind == "cuda" and each.memory_bytes]
        return min(gpus, key=lambda each: each.memory_bytes, default=None)

    def receive(self, follower: JobFollower) -> None:
        """Note that a job may have new records. Called by the log's threads, too."""
        with self._changed:
            self._woken.add(follower)
            if not self._urgent and (not follower.ready or follower.watched):
                self._urgent = True
                self._changed.notify()

    def close(self) -> None:
        """End all event streams and the thread."""
        self._ending.set()
        with self._changed:
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(END_S)

    # --- for requests ----------------------------------------------------------------------------

    async def _settle(self, settled: Callable[[], bool], patience_s: float) -> None:
        """Wait until a condition is true, for a limited time."""
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
        """Return True if a job's numbers are known or its follower has ended."""
        name = record.spec.name
        follower, brief = self._followers.get(name), self._resting.get(name)
        if resting(record) and brief is not None and brief.looked_at.record is record:
            return True
        if follower is None or not follower.follows(record):
            return False
        return follower.ready or follower.ended_s is not None

    def _read_briefly(self, records: Iterable[JobRecord]) -> None:
        """Start reading jobs that do not run and are unknown. The caller holds the lock."""
        for record in records:
            if resting(record) and not self._knows(record):
                # The job may be deleted at this moment.
                with suppress(NotFoundError, UnavailableError):
                    self._begun(record.spec.name, briefly=True)

    def _keep(self) -> None:
        """Start the thread if necessary. The caller holds the lock."""
        if self._thread is None and not self._ending.is_set():
            self._thread = threading.Thread(target=self._run, name="followers", daemon=True)
            self._thread.start()

    def _begun(self, job: str, *, briefly: bool = False) -> JobFollower:
        """Return the follower of a job, started if necessary. The caller holds the lock."""
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
        """Return True if periodic work is due, and set its next time."""
        if (clock := monotonic()) < self._due[what]:
            return False
        self._due[what] = clock + every_s
        return True

    def _await_news(self) -> None:
        """Wait for new records of a watched job, or until something is due."""
        with self._changed:
            living = (each for each in self._followers.values() if each.ended_s is None)
            due_s = min((each.due_s for each in living), default=inf)
            until_s = min(due_s, self._due["sweep"]) - monotonic()
            self._changed.wait_for(lambda: self._urgent or self._ending.is_set(), until_s)
            self._urgent = False

    def _sweep(self) -> None:
        """Start followers of jobs that run, apply changes of jobs, and drop unneeded followers."""
        with self._changed:
            jobs = self.sources.jobs()
            is_full, self._swept = jobs is not self._swept, jobs
            # Followers of running jobs stay as long as no job changes.
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
                    # The job may be deleted at this moment.
                    with suppress(NotFoundError, UnavailableError):
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
        """Drop followers of changed jobs and read paused jobs. The caller holds the lock."""
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
        """Read new records and run the polls that are due."""
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
        """Stop reading jobs that do not run once their newest records are known."""
        for follower in followers:
            follower.close_tails()
            with self._changed:
                if self._followers.get(follower.job) is not follower:
                    # Another follower has replaced this one.
                    continue
                del self._followers[follower.job]
                if (before := self._resting.get(follower.job)) is not None:
                    self._left.append(before)
                self._resting[follower.job] = follower

    def _open(
        self,
        followers: Sequence[JobFollower],
        begin: Callable[[JobFollower, OwnTopics], None],
    ) -> None:
        """Look up the topics of several jobs at once, and start reading them."""
        if not followers:
            return
        try:
            log = self.sources.log()
            own = OwnTopics(log, {place for each in followers for place in each.topics()})
        except OutsideError as error:
            if len(followers) == 1 or isinstance(error, UnavailableError):
                for follower in followers:
                    follower.fail(error)
            else:
                # Kafka refuses the topics of one of the jobs: the others are opened one by one.
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
        """Poll jobs that do not run, and forget those that could not be read."""
        with self._changed:
            for job in [job for job, each in self._resting.items() if each.failed]:
                self._left.append(self._resting.pop(job))
            followers = list(self._resting.values())
        self._look(followers, clock)
