"""The thread that follows one job: its topics as they grow, its board and streams twice a second.

Kafka and Redis may be unavailable, the plans topic may come later or never, the job may be deleted.
Readers ask under a lock, which is held to fold, never while something is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from common.api.answers import EVENT_DATA, Answer, MemberEvent, UpdateEvent
from common.api.jobs import job_answer, progress_answer
from common.core.messages import Drifted, Evaluated, UpdateApplied
from common.core.spans import Partition
from common.errors import (
    ExpiredError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.jobs.progress import UNREAD, JobProgress, Word, resting
from common.jobs.watching import READ_RECORDS, Audited, HistoryReader, Poller, decoded
from common.telemetry.logging import Outage, event_logger
from common.topics import names as topics
from common.topics.read import identified
from common.wire.plans import decode_plan
from services.admin.live.answers import plan_event, verdict_event
from services.admin.live.feed import Feed
from services.admin.live.view import JobView

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.ports.servers import Board, Log, Tail
    from common.theory.billing import Billing

FOLDED = 50  # of them at once: about a millisecond under the lock
WAIT_S = 0.1  # for news: so soon a thread notices that it is to end
AGAIN_S = 0.5  # after a server did not answer
PLANS_S = 2.0  # between looks for a plans topic that is not there
UPDATES_S = 0.05  # between events of updates: 20 a second are as many as anybody can see

_NAMES = {kind: name for name, kind in EVENT_DATA.items()}  # of events
_log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where followers read; each may be called from any thread."""

    log: Callable[[], Log]
    open_board: Callable[[str], Board]  # by job
    jobs: Callable[[], Mapping[str, JobRecord]]  # as last read
    clock: Callable[[], float]  # seconds since 1970
    billing: Callable[[], Mapping[str, Billing]] = dict  # by pool


class _DeletedError(Exception):
    """There is no such job any more."""


class JobFollower:
    """Follows one job from `start` until `stop`, or until the job is deleted.

    Attributes:
        job: Its name.
        feed: What happens, once all that had happened before is known.
        ended_s: When it ended, on the clock `monotonic`; None: it has not.
    """

    def __init__(self, record: JobRecord, sources: Sources) -> None:
        self.job = record.spec.name
        self.feed = Feed(token_hex(8))
        self.ended_s: float | None = None
        self._sources = sources
        self._record = record
        self._lock = threading.Lock()
        self._view = JobView(record)
        self._filling = self._view  # becomes the view when it has caught up
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._away = ""  # why reading does not go on
        self._history: HistoryReader | None = None
        self._lost = False  # its topics were deleted: its record is all that is known
        self._plans: Tail | None = None
        self._plans_until = 0  # end of their topic when it was opened: what had happened before
        self._word: Word | None = None  # of the job's state, as it was told last
        self._plans_at = 0.0  # when to look for the topic again; 0: nobody looked yet
        self._told_at = 0.0  # when the last event of an update was made
        self._untold = 0  # updates since
        self._head: tuple[JobRecord, bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"follow {self.job}", daemon=True)
        self._poller = Poller(record, sources.log, sources.open_board, _log)
        self._outage = Outage(_log.bind(job=self.job), "kafka")

    @property
    def ready(self) -> bool:
        """Whether all is known that had happened before it began."""
        return self._ready.is_set()

    def follows(self, record: JobRecord) -> bool:
        """Whether this is its job, not another one of its name."""
        return self._record.is_same_job(record)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, and all streams of events at once."""
        self._stopping.set()
        self.feed.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    @contextmanager
    def view(self) -> Iterator[JobView]:
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

    def told(self, record: JobRecord | None = None) -> bytes:
        """The job as it is now, a `JobAnswer` as JSON.

        Args:
            record: A change of it that may not have been heard of yet; None: as it was heard.
        """
        now = self._sources.clock()
        with self.view() as view:
            record = view.job.record if record is None else record
            state, progress = resting(record) or view.job.state_at_work(now), view.progress(now)
        return b'%b"state":%b,"why":%b,"progress":%b}' % (
            self._head_of(record),
            *map(msgspec.json.encode, state),
            progress.model_dump_json().encode(),
        )

    def _head_of(self, record: JobRecord) -> bytes:
        """The answer up to what is not of the record, made once for each: many requests ask."""
        if self._head is None or self._head[0] is not record:
            answer = job_answer(record, UNREAD, progress_answer(JobProgress(record), 0.0))
            head = answer.model_dump_json(exclude={"state", "why", "progress"})
            self._head = record, head.encode()[:-1] + b","
        return self._head[1]

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._follow_record()
                try:
                    self._turn()
                except (UnavailableError, UnknownTopicError) as error:
                    self._away = str(error)
                    self._outage.met(error)
                    self._lost = isinstance(error, UnknownTopicError)
                    self._stopping.wait(AGAIN_S)
                except (ExpiredError, TruncatedError) as error:
                    _log.warning("followed_anew", job=self.job, reason=str(error))
                    self._close_tails()
                self._look()
                self._catch_up()
        except _DeletedError:
            self._away = "it was deleted"
        except Exception as fault:  # noqa: BLE001 -- told to whoever asks; another follower tries
            self._away = str(fault)
            _log.exception("follower_failed", job=self.job)
        finally:
            self.ended_s = monotonic()
            self.feed.close()
            self._close_tails()
            self._poller.close()

    def _turn(self) -> None:
        """Read on, and tell of it.

        Raises:
            OutsideError: If Kafka does not do what it should.
        """
        history = self._open_history()
        wait_s = self._told_at + UPDATES_S - monotonic() if self._untold else WAIT_S
        claims = history.claims()
        for first in range(0, len(claims), FOLDED):
            with self._lock:
                for offset, claim in claims[first : first + FOLDED]:
                    self._filling.job.feed_claim(offset, claim)
        records = history.updates(0.0 if claims else min(max(wait_s, 0.0), WAIT_S))
        if records or claims:
            self._outage.over()
            self._away = ""
            self._take_updates(records)
        else:
            self._outage.quiet()
        if self._untold and monotonic() >= self._told_at + UPDATES_S:
            self._tell_update()
        plans = self._open_plans()
        if plans is not None:
            self._take_plans(plans)

    def _follow_record(self) -> None:
        record = self._sources.jobs().get(self.job)
        if record is None or not self.follows(record):
            raise _DeletedError
        if record is not self._record:
            changed, self._record = record != self._record, record
            with self._lock:
                self._view.job.record = self._filling.job.record = record
            if changed and self.ready:
                self.feed.publish("job", self.told())

    def _open_history(self) -> HistoryReader:
        if self._history is None:
            self._history = history = HistoryReader(self._record.id, self._sources.log())
            billing = self._sources.billing()
            self._filling = JobView(
                self._record, history.updates_start, history.control_start, billing
            )
            self._plans_at = 0.0
        return self._history

    def _open_plans(self) -> Tail | None:
        if self._plans is None and monotonic() >= self._plans_at:
            place = Partition(topics.plans_topic(self._record.id), 0)
            log = self._sources.log()
            try:
                bounds = log.bounds(place)
            except UnknownTopicError:
                self._plans_at = monotonic() + PLANS_S
                return None  # nobody provisions it, or not yet
            self._plans_at = monotonic()
            self._plans = log.tail(place, identified(log, place, bounds.start))
            self._plans_until = bounds.end
        return self._plans

    def _take_updates(self, records: Sequence[Audited]) -> None:
        now, live = self._sources.clock(), self._live()
        counted, before = 0, self._filling.job.version
        for first in range(0, len(records), FOLDED):
            with self._lock:
                for offset, record, written_s in records[first : first + FOLDED]:
                    seen_s = now if live or written_s is None else min(written_s, now)
                    counts = self._filling.feed_update(offset, record, written_s, seen_s)
                    counted += counts and isinstance(record, UpdateApplied)
                    if live and counts and isinstance(record, Evaluated | Drifted):
                        self._publish(verdict_event(record))
        if live:
            self._untold += counted
            if self._filling.job.version != before + counted:
                # A new leader took some back: everything looks different.
                self.feed.publish("job", self.told())

    def _tell_update(self) -> None:
        count, self._untold, self._told_at = self._untold, 0, monotonic()
        with self._lock:
            row = self._view.job.newest()
        if row is not None:
            self._publish(UpdateEvent(**row._asdict(), count=count))

    def _take_plans(self, plans: Tail) -> None:
        live = self._live()
        records = plans.read(READ_RECORDS, 0.0)
        decisions = [(each.offset, decoded(decode_plan, each)) for each in records]
        with self._lock:
            ledger = self._filling.ledger
            for offset, record in decisions:
                if ledger.feed(offset, record) and record is not None and live:
                    event = plan_event(ledger, record)
                    if event is not None:
                        self._publish(event)

    def _look(self) -> None:
        look = self._poller.look(self._sources.clock(), monotonic())
        if look is None:
            return
        with self._lock:
            before = self._view.job.seen.statuses
            self._filling.look(look)
            if self._view is not self._filling:
                self._view.look(look)
        self._tell_state(look.at_s)
        if before is None or look.statuses is None or not self._live():
            return
        for worker in sorted({*before, *look.statuses}):
            status = look.statuses.get(worker, "gone")
            if status != before.get(worker, "gone"):
                fields = {"worker": worker, "status": status, "at_s": look.at_s}
                self._publish(MemberEvent.model_validate(fields))

    def _tell_state(self, now: float) -> None:
        """Tell of the job where its state is called otherwise than before."""
        if not self._live():
            return
        with self._lock:
            word = self._view.job.state(now).word
        before, self._word = self._word, word
        if before not in (None, word):
            self.feed.publish("job", self.told())

    def _publish(self, event: Answer) -> None:
        self.feed.publish(_NAMES[type(event)], event.model_dump_json().encode())

    def _live(self) -> bool:
        """Whether what comes now is news."""
        return self.ready and self._filling is self._view

    def _catch_up(self) -> None:
        """Say that all is known, once what had happened before is."""
        if self._lost and self._poller.looked:
            self._ready.set()
        if self._live() or self._history is None or not (self._plans_at and self._poller.looked):
            return
        plans = 0 if self._plans is None else self._plans.position()
        if self._history.caught_up and plans >= self._plans_until:
            with self._lock:
                anew, self._view = self._view is not self._filling, self._filling
            if self.ready and anew:
                self.feed.publish("job", self.told())
            self._ready.set()

    def _close_tails(self) -> None:
        for reader in (self._history, self._plans):
            if reader is not None:
                reader.close()
        self._history = self._plans = None
        self._plans_until = 0
