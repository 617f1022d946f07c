"""What one process knows of one job: folded from its topics, its board and its streams.

The loop of `Followers` calls a follower when there is something to fold, so a follower has no
thread and never waits. Kafka and Redis may be unavailable, the plans topic may come later or never,
the job may be deleted. Requests read under a lock, which is held to fold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

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
from common.jobs.progress import QUIET_S, UNREAD, JobProgress, Numbers, State, Word, resting
from common.jobs.watching import (
    READ_RECORDS,
    Audited,
    HistoryReader,
    LookedAt,
    OwnTopics,
    decoded,
    topics_of,
)
from common.kafka import names as topics
from common.spot.plans import decode_plan
from common.telemetry.logging import event_logger
from common.telemetry.outages import ongoing
from services.admin.live.answers import plan_event, verdict_event
from services.admin.live.feed import Feed
from services.admin.live.view import JobView

if TYPE_CHECKING:
    from common.jobs.progress import Look
    from common.jobs.store import JobRecord
    from common.jobs.watching import Glances
    from common.ports.servers import Board, Log, Tail
    from common.spot.theory.billing import Billing
    from common.telemetry.outages import Outage

FOLDED = 50  # of them at once: about a millisecond under the lock
AGAIN_S = 0.5  # after a server did not answer
LOST_S = 2.0  # between looks for topics that were deleted
UPDATES_S = 0.05  # between events of updates: 20 a second are as many as anybody can see
# Time after the last question or stream of events during which a job counts as watched. A stream
# that breaks comes back within seconds and continues where it was.
WATCHED_S = 15.0

_NAMES = {kind: name for name, kind in EVENT_DATA.items()}  # of events
_log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where followers read; each may be called from any thread."""

    log: Callable[[], Log]
    open_board: Callable[[str], Board]  # by job
    glances: Glances  # at several boards
    jobs: Callable[[], Mapping[str, JobRecord]]  # as last read
    clock: Callable[[], float]  # seconds since 1970
    billing: Callable[[], Mapping[str, Billing]] = dict  # by pool


class Summary(NamedTuple):
    """How a job is and how far, as a list shows it."""

    state: State
    # None if they are not known.
    numbers: Numbers | None = None
    # Cost of its machines; None if it has none.
    spent_usd: float | None = None
    open_transactions_s: Mapping[str, float] = {}  # see `JobProgress.open_transactions_s`


class JobFollower:
    """Follows one job until `stop`, or until the job is deleted.

    Attributes:
        job: Its name.
        feed: What happens, once all that had happened before is known. Nothing is published while
            nobody watches.
        ready: True once all is known that had happened before it began.
        ended_s: When it ended, on the clock `monotonic`; None: it has not.
        asked_s: When a request last asked about the job, on the clock `monotonic`.
        summary: As of the last look, the same object until it changes; None: there was none yet.
        listed: The summary that the list of jobs shows.
        looked: True once there was a look.
        is_stale: True from a question about a job that nobody watched until what is new is folded.
        due_s: When it has something to do even without news, on the clock `monotonic`.
        looked_at: Its board, for looks.

    Args:
        on_news: Called by threads of the log's when there may be records to read.
        outage: Of Kafka; that of all followers of a process.
    """

    def __init__(
        self,
        record: JobRecord,
        sources: Sources,
        on_news: Callable[[JobFollower], None],
        outage: Outage,
    ) -> None:
        self.job = record.spec.name
        self.feed = Feed(token_hex(8))
        self.ready = False
        self.ended_s: float | None = None
        self.asked_s = -inf
        self.summary: Summary | None = None
        self.listed: Summary | None = None
        self.due_s = 0.0
        self.looked_at = LookedAt(record, sources.open_board(record.id))
        self._sources = sources
        self._on_news = partial(on_news, self)
        self._record = record
        self._lock = threading.Lock()
        self._view = JobView(record)
        self._filling = self._view  # becomes the view when it has caught up
        self.looked = self.is_stale = False
        # True if something was folded since the last summary.
        self._has_news = True
        self._summarized_s = 0.0
        self._away = ""  # why reading does not go on
        self._history: HistoryReader | None = None
        self._lost = False  # its topics were deleted: its record is all that is known
        self._plans: Tail | None = None
        self._plans_until = 0  # end of their topic when it was opened: what had happened before
        self._word: Word | None = None  # of the job's state, as it was told last
        self._told_at = 0.0  # when the last event of an update was made
        self._untold = 0  # updates since
        self._head: tuple[JobRecord, bytes] | None = None
        self._outage = outage

    @property
    def watched(self) -> bool:
        """True if a stream of events is open, or somebody asked within the last seconds."""
        return self.feed.listeners > 0 or monotonic() < self.asked_s + WATCHED_S

    def follows(self, record: JobRecord) -> bool:
        """Whether this is its job, not another one of its name."""
        return self._record.is_same_job(record)

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
            view.job.seen = view.job.seen._replace(outages=ongoing())
            state, progress = resting(record) or view.job.state_at_work(now), view.progress(now)
        return b'%b"state":%b,"why":%b,"progress":%b}' % (
            self._head_of(record),
            *map(msgspec.json.encode, state),
            progress.model_dump_json().encode(),
        )

    def state_at_work(self) -> State:
        """Return the state of a job that is to run, by what this process has met until now.

        A look may take long, and the record of the job may be an old one.
        """
        with self.view() as view:
            view.job.seen = view.job.seen._replace(outages=ongoing())
            return view.job.state_at_work(self._sources.clock())

    def _head_of(self, record: JobRecord) -> bytes:
        """The answer up to what is not of the record, made once for each: many requests ask."""
        if self._head is None or self._head[0] is not record:
            answer = job_answer(record, UNREAD, progress_answer(JobProgress(record), 0.0))
            head = answer.model_dump_json(exclude={"state", "why", "progress"})
            self._head = record, head.encode()[:-1] + b","
        return self._head[1]

    # --- for the loop ----------------------------------------------------------------------------

    def stop(self, why: str = "") -> None:
        """End, and all streams of events with it."""
        if self.ended_s is None:
            self._away = why
            self.ended_s = monotonic()
            self.feed.close()
            self._close_tails()
            self.looked_at.board.close()

    def guarded(self, step: Callable[[], object]) -> None:
        """Take a step; what goes wrong is logged, and told to whoever asks."""
        try:
            step()
        except UnavailableError as error:
            self._away = str(error)
            self._outage.met(error)
            self.due_s = monotonic() + AGAIN_S
        except UnknownTopicError as error:
            if not self._lost:
                _log.warning("topics_lost", job=self.job, reason=str(error))
            self._away, self._lost = str(error), True
            self._close_tails()
            self.due_s = monotonic() + LOST_S
        except (ExpiredError, TruncatedError) as error:
            _log.warning("followed_anew", job=self.job, reason=str(error))
            self._close_tails()
            self.due_s = 0.0
        except Exception as fault:  # noqa: BLE001 -- told to whoever asks; another follower tries
            _log.exception("follower_failed", job=self.job)
            self.stop(str(fault))

    @property
    def unopened(self) -> bool:
        """True if its topics are to be opened now."""
        return self._history is None and self.ended_s is None and monotonic() >= self.due_s

    def topics(self) -> set[Partition]:
        """Partitions to be asked about before `open`."""
        return {*topics_of(self._record.id), self._plans_place}

    def open(self, own: OwnTopics) -> None:
        """Begin to read from the start of its topics.

        Raises:
            UnknownTopicError: If the job's topics were deleted.
            UnavailableError: If Kafka does not say what they hold.
        """
        log = self._sources.log()
        self._history = history = HistoryReader(self._record.id, log, None, own, self._on_news)
        self._lost = False
        starts = history.updates_start, history.control_start
        self._filling = JobView(self._record, *starts, self._sources.billing())
        self.due_s = 0.0
        self.open_plans(own)

    @property
    def awaits_plans(self) -> bool:
        """True if a provisioner may still create its plans topic."""
        provisioned = self._record.spec.provisioning is not None
        return provisioned and self._plans is None and self._history is not None

    def open_plans(self, own: OwnTopics) -> None:
        """Read its plans topic, if there is one."""
        with suppress(UnknownTopicError):  # nobody provisions it, or not yet
            bounds = own.bounds(self._plans_place)
            position = own.identified(self._plans_place, bounds.start)
            self._plans = self._sources.log().tail(self._plans_place, position, self._on_news)
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
                    self._filling.job.feed_claim(offset, claim)
        records = self._history.updates(0.0)
        if records or claims:
            self._away = ""
            self._take_updates(records)
        if self._untold and (not self.watched or monotonic() >= self._told_at + UPDATES_S):
            self._tell_update()
        if self._untold:
            self.due_s = self._told_at + UPDATES_S
        plans = self._take_plans()
        if records or claims or plans:
            self._has_news = True
            self._on_news()

    def take_record(self, record: JobRecord) -> None:
        """Take over a change of the job."""
        if record is not self._record:
            changed, self._record = record != self._record, record
            self.looked_at.record = record
            now = self._sources.clock()
            with self._lock:
                self._view.job.record = self._filling.job.record = record
                # The event below tells of the state, too.
                if self._word is not None:
                    self._word = self._view.job.state(now).word
            if changed and self.ready:
                self._summarize(now)
                self._publish_job()

    @property
    def _plans_place(self) -> Partition:
        return Partition(topics.plans_topic(self._record.id), 0)

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
                self._publish_job()

    def _tell_update(self) -> None:
        count, self._untold, self._told_at = self._untold, 0, monotonic()
        with self._lock:
            row = self._view.job.newest()
        if row is not None:
            self._publish(UpdateEvent(**row._asdict(), count=count))

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

    def look(self, look: Look) -> None:
        """Take over a look at its board and streams, and tell of what changed."""
        self.looked = True
        with self._lock:
            before = self._view.job.seen.statuses
            is_new = self._filling.look(look)
            if self._view is not self._filling:
                is_new = self._view.look(look)
        if is_new or not self._stands():
            # A look during an outage may take ten seconds.
            self._summarize(self._sources.clock())
        self._tell_state()
        if before is None or look.statuses is None or not self._live():
            return
        for worker in sorted({*before, *look.statuses}):
            status = look.statuses.get(worker, "gone")
            if status != before.get(worker, "gone"):
                fields = {"worker": worker, "status": status, "at_s": look.at_s}
                self._publish(MemberEvent.model_validate(fields))

    def _stands(self) -> bool:
        """True if time alone does not change the summary: no rate, cost or wait goes on."""
        if self._has_news or self.summary is None or self.summary.numbers is None:
            return False
        numbers, spent_usd = self.summary.numbers, self.summary.spent_usd
        is_quiet = self._summarized_s >= (numbers.last_update_s or -inf) + QUIET_S
        return spent_usd is None and not numbers.updates_per_s and is_quiet

    def _tell_state(self) -> None:
        """Tell of the job where its state is called otherwise than before."""
        if not self._live() or self.summary is None:
            return
        word = self.summary.state.word
        before, self._word = self._word, word
        if before not in (None, word):
            self._publish_job()

    def _summarize(self, now: float) -> None:
        self._has_news, self._summarized_s = False, now
        with self._lock:
            view = self._view
            spent_usd = view.ledger.spent_usd(now) if view.ledger.launches else None
            summary = Summary(
                view.job.state(now),
                view.job.numbers(now),
                spent_usd,
                view.job.open_transactions_s(now),
            )
        if summary != self.summary:
            self.summary = summary

    def _publish(self, event: Answer) -> None:
        if self.watched:
            self.feed.publish(_NAMES[type(event)], event.model_dump_json().encode())
        else:
            self.feed.skip()

    def _publish_job(self) -> None:
        if self.watched:
            self.feed.publish("job", self.told())
        else:
            self.feed.skip()

    def _live(self) -> bool:
        """Whether what comes now is news."""
        return self.ready and self._filling is self._view

    def catch_up(self) -> bool:
        """Note that all is known, once what had happened before is; True if that is news."""
        if self._lost and self.looked:
            self.ready, before = True, self.ready
            return not before
        if self._live() or self._history is None or not self.looked:
            return False
        plans = 0 if self._plans is None else self._plans.position()
        if not self._history.caught_up or plans < self._plans_until:
            return False
        with self._lock:
            anew, self._view = self._view is not self._filling, self._filling
        self._summarize(self._sources.clock())
        before, self.ready = self.ready, True
        if before and anew:
            self._publish_job()
        return not before

    def _close_tails(self) -> None:
        for reader in (self._history, self._plans):
            if reader is not None:
                reader.close()
        self._history = self._plans = None
        self._plans_until = 0
