"""Input of `common.jobs.progress`: reads a job's topics, its board, and the ends of its streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from common.core.liveness import ALIVE, MISSING_SCHEMA, PROBE, TOO_FEW
from common.core.snapshot_search import AWAITED
from common.core.spans import LogPosition, Partition
from common.errors import (
    FutureFormatError,
    OutsideError,
    UnavailableError,
    UnknownTopicError,
)
from common.jobs.progress import JobObservation, JobProgress, partitions_of
from common.kafka import names as topics
from common.kafka import read
from common.kafka.port import Bounds
from common.redis.port import LiveStatus, live_status
from common.telemetry.outages import Outage, ongoing
from common.wire.messages import decode_audit, decode_claim

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, ControlRecord
    from common.jobs.store import JobRecord
    from common.kafka.port import Log, LogRecord
    from common.redis.port import Board
    from common.telemetry.logging import EventLogger

T = TypeVar("T")
ReadLiveStatuses: TypeAlias = "Callable[[Sequence[Board]], Sequence[LiveStatus | Exception]]"

# Maximum number of records per read of a topic.
READ_RECORDS = 500

# --- the job's own topics -------------------------------------------------------------------------


def topics_of(job: str) -> tuple[Partition, Partition]:
    """Return the control and the updates topic of a job; each has one partition."""
    return Partition(topics.control_topic(job), 0), Partition(topics.updates_topic(job), 0)


class Audited(NamedTuple):
    """A record of the updates topic."""

    offset: int
    # None if the record does not parse.
    record: AuditRecord | None
    # Seconds since 1970; None if not known.
    written_s: float | None


class OwnTopics:
    """Bounds and ids of several jobs' own topics, from three requests to Kafka in total.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(self, log: Log, places: Collection[Partition]) -> None:
        self._topics = log.describe({place.topic for place in places})
        there = {place for place in places if place.topic in self._topics}
        starts, ends = log.starts(there), log.ends(there)
        self._bounds = {
            place: Bounds(starts[place], ends[place])
            for place in there
            if place in starts and place in ends
        }

    def bounds(self, place: Partition) -> Bounds:
        """Return the bounds of a partition.

        Raises:
            UnknownTopicError: If there is no such topic.
            UnavailableError: If Kafka does not report them now.
        """
        if place.topic not in self._topics:
            raise UnknownTopicError(f"there is no partition {place}")
        if place not in self._bounds:
            raise UnavailableError(f"Kafka did not return the first and last offset of {place}")
        return self._bounds[place]

    def identified(self, place: Partition, offset: int) -> LogPosition:
        """Return a position with its topic's id: see `common.kafka.read.identified`."""
        return LogPosition(offset, self._topics[place.topic].topic_id)


class HistoryReader:
    """Reads a job's control and updates topics as they grow. For one thread.

    Attributes:
        updates_start: Offset of the first record of the updates topic that it reads.
        control_start: Offset of the first record of the control topic that it reads.

    Args:
        job: Id of the job.
        most: Optional. If either topic has more records than this, only the newest are read. If
            unset, all are read.
        own: Optional. Known bounds and ids of both topics. If unset, the reader asks Kafka.
        on_ready: Optional. See `Log.tail`.

    Raises:
        UnknownTopicError: If the job has no such topics, or no longer.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(
        self,
        job: str,
        log: Log,
        most: int | None = None,
        own: OwnTopics | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        control, updates = topics_of(job)
        own = OwnTopics(log, (control, updates)) if own is None else own
        control_bounds, updates_bounds = own.bounds(control), own.bounds(updates)
        self._ends = control_bounds.end, updates_bounds.end
        sizes = [bounds.end - bounds.start for bounds in (control_bounds, updates_bounds)]
        if most is None or max(sizes) <= most:
            self.control_start, self.updates_start = control_bounds.start, updates_bounds.start
        else:
            # Claims cannot be decided from the middle of the topic, so none is read.
            self.control_start = control_bounds.end
            self.updates_start = max(updates_bounds.start, updates_bounds.end - most)
        self._control = log.tail(control, own.identified(control, self.control_start), on_ready)
        self._updates = log.tail(updates, own.identified(updates, self.updates_start), on_ready)

    @property
    def caught_up(self) -> bool:
        """True if everything was read that existed when the reader was created."""
        control, updates = self._ends
        return self._control.position() >= control and self._updates.position() >= updates

    def claims(self) -> list[tuple[int, ControlRecord | None]]:
        """Return new records of the control topic, without waiting.

        Raises:
            OutsideError: If Kafka is unavailable, the topic was cut, or a newer program wrote to
                it.
        """
        records = self._control.read(READ_RECORDS, 0.0)
        return [(each.offset, decoded(decode_claim, each)) for each in records]

    def updates(self, timeout_s: float) -> list[Audited]:
        """Return new records of the updates topic; wait for them up to `timeout_s`.

        Raises:
            OutsideError: If Kafka is unavailable, the topic was cut, or a newer program wrote to
                it.
        """
        return [
            Audited(each.offset, decoded(decode_audit, each), each.timestamp_s or None)
            for each in self._updates.read(READ_RECORDS, timeout_s)
        ]

    def close(self) -> None:
        """Close the connections."""
        self._control.close()
        self._updates.close()


def decoded(decode: Callable[[bytes], T], record: LogRecord) -> T | None:
    """Decode a record; return None if it does not parse.

    Raises:
        OutsideError: If a newer program wrote it. That is no fault of this observer.
    """
    try:
        return read.decoded(decode, record)
    except FutureFormatError as error:
        raise OutsideError(str(error)) from error


def read_history(
    reader: HistoryReader, progress: JobProgress, now: float, timeout_s: float
) -> None:
    """Feed new records of both topics to the progress of a job.

    Args:
        reader: Reader of the topics.
        progress: Progress to feed.
        now: Seconds since 1970.
        timeout_s: Maximum time to wait for an update.

    Raises:
        OutsideError: If Kafka is unavailable, a topic was cut, or a newer program wrote to it.
    """
    old = not reader.caught_up
    for offset, claim in reader.claims():
        progress.claims.feed(offset, claim)
    for offset, record, written_s in reader.updates(timeout_s):
        seen_s = min(written_s, now) if old and written_s is not None else now
        progress.feed_update(offset, record, written_s, seen_s)


# --- the board, and the streams -------------------------------------------------------------------

# Minimum time between the starts of two polls.
LOOK_S = 0.5
# A thread spends at most a tenth of its time on polls.
_SHARE = 10
# Maximum time between the starts of two polls, even if servers are slow.
_LONGEST_S = 10.0
_PROBE_S = 1.0
# Time between polls of the streams' starts. Retention itself runs only once in minutes.
_STARTS_S = 5.0


@dataclass(slots=True)
class ObservedJob:
    """A job whose board and streams are polled."""

    record: JobRecord
    board: Board
    # Time of the next poll of its streams' starts, on a monotonic clock.
    starts_due: float = 0.0


class Looker:
    """Polls the boards and the streams of many jobs with a few requests for all of them.

    It never fails: values that it cannot get are reported as unknown. For one thread.

    Args:
        log: Opens Kafka.
        live_statuses: Polls several boards.
        logger: Logs outages.
    """

    def __init__(
        self, log: Callable[[], Log], live_statuses: ReadLiveStatuses, logger: EventLogger
    ) -> None:
        self._log = log
        self._live_statuses = live_statuses
        self._redis, self._kafka = Outage(logger, "redis"), Outage(logger, "kafka")

    def look(self, jobs: Sequence[ObservedJob], now: float, clock: float) -> list[JobObservation]:
        """Poll jobs; return an observation of each.

        Args:
            jobs: Jobs to poll.
            now: Seconds since 1970.
            clock: Time on a monotonic clock, in seconds.
        """
        looks = self._look_at_boards(jobs, now)
        places = [
            partitions_of(
                job.record, {} if look.leader_status is None else look.leader_status.claimed
            )
            for job, look in zip(jobs, looks, strict=True)
        ]
        due = [clock >= job.starts_due for job in jobs]
        asked = {at for of, is_due in zip(places, due, strict=True) if is_due for at in of}
        try:
            # High watermarks are read last, so that none is below the last stable offset.
            stable = self._log().ends(set[Partition]().union(*places))
            ends = self._log().high_watermarks(stable)
            starts = self._log().starts(asked) if asked else {}
        except OutsideError as error:
            self._kafka.met(error)
            return self._with_outages(looks)
        self._kafka.over()
        for number, (job, of) in enumerate(zip(jobs, places, strict=True)):
            if ends.keys() >= of:
                looks[number] = looks[number]._replace(
                    ends={at: ends[at] for at in of}, stable={at: stable[at] for at in of}
                )
            if due[number]:
                known = {at: starts[at] for at in of if at in starts}
                looks[number] = looks[number]._replace(starts=known)
                job.starts_due = clock + _STARTS_S
        return self._with_outages(looks)

    def _look_at_boards(self, jobs: Sequence[ObservedJob], now: float) -> list[JobObservation]:
        looks = [
            _seen(JobObservation(now), each)
            for each in self._live_statuses([job.board for job in jobs])
        ]
        away = [look.board_away for look in looks if look.board_away]
        if away:
            self._redis.met(OutsideError(away[0]))
            return looks
        try:
            for job, look in zip(jobs, looks, strict=True):
                if job.record.wanted == "running" and not look.led:
                    # If Redis is full or has become a replica, it answers reads but refuses writes.
                    job.board.put_unable(PROBE, "", _PROBE_S)
                    break
            self._redis.over()
        except OutsideError as error:
            self._redis.met(error)
        return looks

    def _with_outages(self, looks: list[JobObservation]) -> list[JobObservation]:
        """Add the outages of this process, including those that its other parts have met."""
        outages = ongoing()
        return [look._replace(outages=outages) for look in looks] if outages else looks


class Poller:
    """Polls one job when it is due. For one thread."""

    def __init__(
        self,
        record: JobRecord,
        log: Callable[[], Log],
        open_board: Callable[[str], Board],
        logger: EventLogger,
    ) -> None:
        self._looker = Looker(log, one_by_one, logger.bind(job=record.spec.name))
        self._job = ObservedJob(record, open_board(record.id))
        self._due = 0.0

    def look(self, now: float, clock: float) -> JobObservation | None:
        """Poll the job if it is due; otherwise return None.

        Args:
            now: Seconds since 1970.
            clock: Time on a monotonic clock, in seconds.
        """
        if clock < self._due:
            return None
        (seen,) = self._looker.look([self._job], now, clock)
        self._due = clock + pause_s(monotonic() - clock)
        return seen

    def close(self) -> None:
        """Close the connection."""
        self._job.board.close()


def pause_s(took_s: float, least_s: float = LOOK_S) -> float:
    """Return the time between the starts of two polls, if a poll took `took_s`."""
    return min(_LONGEST_S, max(least_s, _SHARE * took_s))


def one_by_one(boards: Sequence[Board]) -> list[LiveStatus | Exception]:
    """Poll boards that share no connection."""
    return list(map(live_status, boards))


def _seen(look: JobObservation, found: LiveStatus | Exception) -> JobObservation:
    """Add the status on a board to an observation."""
    if isinstance(found, Exception):
        return look._replace(board_away=str(found))
    statuses = found.statuses
    waiting = {str(w): status for w, status in statuses.items() if status in MISSING_SCHEMA}
    too_few = {worker for worker, status in statuses.items() if status == TOO_FEW}
    alive = waiting.keys() | too_few
    return look._replace(
        statuses={str(w): ALIVE if w in alive else status for w, status in statuses.items()},
        waiting=waiting,
        too_few=tuple(sorted(too_few)),
        leader_status=found.leader_status,
        led=found.led,
        unable={who: why for who, why in found.unable.items() if who != PROBE},
        devices={str(worker): device for worker, device in found.devices.items()},
    )


def waits_for_checkpoint(record: JobRecord, open_board: Callable[[str], Board]) -> bool:
    """Return True if a coordinator has recently reported that the job waits for a checkpoint.

    Raises:
        UnavailableError: If Redis is unavailable and the job runs, so that this is not known.
    """
    if record.wanted != "running":
        return False
    with closing(open_board(record.id)) as board:
        return any(why.startswith(AWAITED) for why in board.unable().values())
