"""Reads what `common.jobs.progress` folds: a job's topics, its board, the ends of its streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.core.liveness import ALIVE, MISSING_SCHEMA, TOO_FEW
from common.core.snapshot_search import AWAITED
from common.core.spans import Partition
from common.errors import (
    ExpiredError,
    FutureFormatError,
    OutsideError,
    TruncatedError,
    UnknownTopicError,
)
from common.jobs.progress import JobProgress, Look, partitions_of
from common.telemetry.logging import EventLogger, Outage
from common.topics import names as topics
from common.topics import read
from common.wire.messages import decode_audit, decode_claim

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, ControlRecord
    from common.jobs.store import JobRecord
    from common.ports.servers import Board, Log, LogRecord

T = TypeVar("T")

READ_RECORDS = 500  # at once, of each topic

# --- the job's own topics -------------------------------------------------------------------------


def topics_of(job: str) -> tuple[Partition, Partition]:
    """The control and the updates topic of a job: each has one partition."""
    return Partition(topics.control_topic(job), 0), Partition(topics.updates_topic(job), 0)


class Audited(NamedTuple):
    """A record of the updates topic."""

    offset: int
    record: AuditRecord | None  # None: it does not parse
    written_s: float | None  # since 1970; None: not known


class HistoryReader:
    """Reads a job's control and updates topics as they grow. For one thread.

    Attributes:
        updates_start: Offset of the first record of the updates topic that it reads.
        control_start: Likewise of the control topic.

    Args:
        job: Its id.
        most: Where either topic has more records, only the newest are read; None: all, always.

    Raises:
        UnknownTopicError: If the job has no such topics, or no more.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(self, job: str, log: Log, most: int | None = None) -> None:
        control, updates = topics_of(job)
        # Claims first: whatever an update is made of by then has been claimed before.
        control_bounds, updates_bounds = log.bounds(control), log.bounds(updates)
        self._ends = control_bounds.end, updates_bounds.end
        sizes = [bounds.end - bounds.start for bounds in (control_bounds, updates_bounds)]
        if most is None or max(sizes) <= most:
            self.control_start, self.updates_start = control_bounds.start, updates_bounds.start
        else:  # claims cannot be decided from the middle on: none of them is read
            self.control_start = control_bounds.end
            self.updates_start = max(updates_bounds.start, updates_bounds.end - most)
        self._control = log.tail(control, read.identified(log, control, self.control_start))
        self._updates = log.tail(updates, read.identified(log, updates, self.updates_start))

    @property
    def caught_up(self) -> bool:
        """Whether everything was read that was there when it began."""
        control, updates = self._ends
        return self._control.position() >= control and self._updates.position() >= updates

    def claims(self) -> list[tuple[int, ControlRecord | None]]:
        """What is new in the control topic; without waiting.

        Raises:
            OutsideError: If Kafka is unavailable, the topic was cut, or a newer program wrote it.
        """
        records = self._control.read(READ_RECORDS, 0.0)
        return [(each.offset, decoded(decode_claim, each)) for each in records]

    def updates(self, timeout_s: float) -> list[Audited]:
        """What is new in the updates topic; waits for it up to `timeout_s`.

        Raises:
            OutsideError: If Kafka is unavailable, the topic was cut, or a newer program wrote it.
        """
        return [
            Audited(each.offset, decoded(decode_audit, each), each.timestamp_s or None)
            for each in self._updates.read(READ_RECORDS, timeout_s)
        ]

    def close(self) -> None:
        """Read no more."""
        self._control.close()
        self._updates.close()


def decoded(decode: Callable[[bytes], T], record: LogRecord) -> T | None:
    """What a record says; None: it does not parse.

    Raises:
        OutsideError: If a newer program wrote it: no fault of what looks at the job.
    """
    try:
        return read.decoded(decode, record)
    except FutureFormatError as error:
        raise OutsideError(str(error)) from error


def read_history(
    reader: HistoryReader, progress: JobProgress, now: float, timeout_s: float
) -> None:
    """Feed what is new.

    Args:
        reader: Where from.
        progress: What for.
        now: Seconds since 1970.
        timeout_s: How long to wait for an update.

    Raises:
        OutsideError: If Kafka is unavailable, a topic was cut, or a newer program wrote to it.
    """
    old = not reader.caught_up
    for offset, claim in reader.claims():
        progress.feed_claim(offset, claim)
    for offset, record, written_s in reader.updates(timeout_s):
        seen_s = min(written_s, now) if old and written_s is not None else now
        progress.feed_update(offset, record, written_s, seen_s)


# --- the board, and the streams -------------------------------------------------------------------

LOOK_S = 0.5
_SHARE = 10  # of its time that a thread spends looking, at most a tenth
_LONGEST_S = 10.0  # even where servers are slow
_STARTS_S = 5.0  # between looks at where streams begin: retention looks once in minutes itself


class Poller:
    """Looks when it is time to, and never fails: what cannot be seen is told as unknown.

    For one thread.

    Attributes:
        looked: Whether there was a look, whatever it saw.
    """

    def __init__(
        self,
        record: JobRecord,
        log: Callable[[], Log],
        open_board: Callable[[str], Board],
        logger: EventLogger,
    ) -> None:
        self.looked = False
        self._record = record
        self._log = log
        self._open_board = open_board
        self._board: Board | None = None
        self._due = self._starts_due = 0.0
        bound = logger.bind(job=record.spec.name)
        self._redis, self._streams = Outage(bound, "redis"), Outage(bound, "streams")

    def look(self, now: float, clock: float) -> Look | None:
        """Look, if it is time to.

        Args:
            now: Seconds since 1970.
            clock: Seconds that never go back.
        """
        if clock < self._due:
            return None
        seen = self._look_at_streams(self._look_at_board(Look(now)), clock)
        took_s = monotonic() - clock
        self._due = clock + min(_LONGEST_S, max(LOOK_S, _SHARE * took_s))
        self.looked = True
        return seen

    def close(self) -> None:
        """Let go of the connection."""
        if self._board is not None:
            self._board.close()

    def _look_at_board(self, look: Look) -> Look:
        try:
            if self._board is None:
                self._board = self._open_board(self._record.id)
            seen = look_at(self._board, look)
        except OutsideError as error:
            self._redis.met(error)
            return look._replace(board_away=str(error))
        self._redis.over()
        return seen

    def _look_at_streams(self, look: Look, clock: float) -> Look:
        places = partitions_of(
            self._record, {} if look.leader_status is None else look.leader_status.claimed
        )
        try:
            ends = self._log().ends(places)
            starts = self._log().starts(places) if clock >= self._starts_due else None
        except OutsideError as error:
            self._streams.met(error)
            return look
        self._streams.over()
        if starts is not None:
            self._starts_due = clock + _STARTS_S
        return look._replace(ends=ends if len(ends) == len(places) else None, starts=starts)


def look_at(board: Board, look: Look) -> Look:
    """What a job's board says, beside what a look saw already.

    Raises:
        OutsideError: If Redis is unavailable.
    """
    led, statuses = board.is_leased(), board.alive()
    waiting = {str(w): status for w, status in statuses.items() if status in MISSING_SCHEMA}
    too_few = {worker for worker, status in statuses.items() if status == TOO_FEW}
    alive = waiting.keys() | too_few
    return look._replace(
        statuses={str(w): ALIVE if w in alive else status for w, status in statuses.items()},
        waiting=waiting,
        too_few=tuple(sorted(too_few)),
        leader_status=board.get_leader_status(),
        led=led,
        unable=board.unable(),
    )


def waits_for_checkpoint(record: JobRecord, open_board: Callable[[str], Board]) -> bool:
    """Return True if a coordinator said lately that the job waits for a checkpoint.

    Raises:
        UnavailableError: If Redis is unavailable and the job runs, so that nobody knows.
    """
    if record.wanted != "running":
        return False
    with closing(open_board(record.id)) as board:
        return any(why.startswith(AWAITED) for why in board.unable().values())


# --- many jobs at once ----------------------------------------------------------------------------

LIST_S = 3.0  # that histories are read for a list: what is not known by then is told so
LIST_RECORDS = 20_000  # of all histories together: about half a second
_LEAST_RECORDS = 200  # of each
_WAIT_S = 0.01


def look_at_jobs(
    records: Mapping[str, JobRecord],
    log: Log,
    open_board: Callable[[str], Board],
    now: float,
) -> dict[str, JobProgress]:
    """Look once at jobs that are not stopped: how each is and how far, by name.

    Of a long history only the newest part is read. A job whose topics are gone, or cannot be read
    in time, is missing.

    Args:
        records: The jobs.
        log: Kafka.
        open_board: Of a job.
        now: Seconds since 1970.

    Raises:
        OutsideError: If Kafka is unavailable.
    """
    looked_at = {name: record for name, record in records.items() if record.wanted != "stopped"}
    own = {name: topics_of(record.id) for name, record in looked_at.items()}
    streams = [place for record in looked_at.values() for place in record.first]
    ends = log.ends({*streams, *(place for places in own.values() for place in places)})
    starts = log.starts(set(streams))
    most = max(_LEAST_RECORDS, LIST_RECORDS // max(1, len(looked_at)))
    found = dict[str, JobProgress]()
    readers = dict[str, HistoryReader]()
    try:
        for name, record in looked_at.items():
            sizes = [ends.get(place) for place in own[name]]
            if not any(sizes):  # nobody has led it yet; or its topics are gone
                if None not in sizes:
                    found[name] = JobProgress(record)
                continue
            with suppress(UnknownTopicError):  # deleted in this moment
                readers[name] = reader = HistoryReader(record.id, log, most)
                found[name] = JobProgress(record, reader.updates_start, reader.control_start)
        unread = _read_all(readers, found, now)
    finally:
        for reader in readers.values():
            reader.close()
    for name in unread:
        del found[name]
    places = {name: partitions_of(each.record, each.claimed) for name, each in found.items()}
    if added := set[Partition]().union(*places.values()) - ends.keys():
        ends |= log.ends(added)
        starts |= log.starts(added)
    for name, progress in found.items():
        known = {place: ends[place] for place in places[name] if place in ends}
        look = Look(now, starts={place: starts[place] for place in places[name] if place in starts})
        if len(known) == len(places[name]):
            look = look._replace(ends=known)
        progress.look(_seen(open_board, progress.record.id, look))
    return found


def _read_all(
    readers: Mapping[str, HistoryReader], found: Mapping[str, JobProgress], now: float
) -> set[str]:
    """Read histories side by side; returns those that could not be read to their ends."""
    unread, until = set(readers), monotonic() + LIST_S
    while unread and monotonic() < until:
        for number, name in enumerate(sorted(unread)):
            try:
                read_history(readers[name], found[name], now, 0.0 if number else _WAIT_S)
            except (ExpiredError, TruncatedError, UnknownTopicError):
                return unread  # somebody cuts topics just now
            if readers[name].caught_up:
                unread.remove(name)
    return unread


def _seen(open_board: Callable[[str], Board], job: str, look: Look) -> Look:
    board = open_board(job)
    try:
        return look_at(board, look)
    except OutsideError as error:
        return look._replace(board_away=str(error))
    finally:
        board.close()
