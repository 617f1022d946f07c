"""The `Log` port in memory, for tests and the counting model.

It fakes the happy path. A broker's losses, compaction and elections are tested on brokers. Besides
the port, it has methods for tests: `expire` (retention), `punch` (offsets without a record),
`add_partitions`, `recreate` and `configure` (an operator), `go_away` and `come_back`.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from common.core.spans import Assigned, LogPosition, Partition, Revoked, Span
from common.core.weighted_turns import RunsInTurn
from common.errors import (
    DeliveryError,
    ExpiredError,
    OutsideError,
    RecordTooLargeError,
    RecreatedError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.kafka.port import (
    MESSAGE_BYTES,
    WRITER_BYTES,
    Bounds,
    Fetched,
    FoundTopic,
    LogEndReached,
    LogRecord,
    LogTruncated,
    NewRecord,
    NewTopic,
    OutOfRange,
    StreamEvent,
)

if TYPE_CHECKING:
    from common.core.messages import Positions


class MemoryConsumerGroup:
    """Members of a consumer group. The log's lock guards it."""

    def __init__(self) -> None:
        self.members: list[MemoryStreamReader] = []
        self.owner: dict[Partition, MemoryStreamReader] = {}

    def share(
        self, reader: MemoryStreamReader, partitions: Sequence[Partition]
    ) -> Sequence[Partition]:
        """Return the partitions that a member should own."""
        if reader not in self.members:
            return ()
        return partitions[self.members.index(reader) :: len(self.members)]

    def leave(self, reader: MemoryStreamReader) -> None:
        """Remove a member."""
        if reader in self.members:
            self.members.remove(reader)
        self.owner = {each: owner for each, owner in self.owner.items() if owner is not reader}


class MemoryStreamReader:
    """The `StreamReader` port."""

    def __init__(self, log: MemoryLog, group: MemoryConsumerGroup, topics: tuple[str, ...]) -> None:
        self._log = log
        self._group = group
        self._topics = topics
        self._owned: set[Partition] = set()
        # Positions of placed partitions.
        self._positions: dict[Partition, LogPosition] = {}
        self._in_turn = RunsInTurn()
        self._paused = False
        group.members.append(self)

    def poll(
        self, max_records: int, timeout_s: float, run: int | None = None
    ) -> tuple[StreamEvent, ...]:
        with self._log.here():
            wanted = 0 if self._paused else max_records
            self._log.wait_until(lambda: self._has_news(wanted), timeout_s)
            return (*self._rebalanced(), *self._read(wanted, run or max(wanted, 1)))

    def place(self, positions: Mapping[Partition, int | LogPosition]) -> None:
        """See the port. Partitions that this member does not own are left out."""
        for partition in self._owned & positions.keys():
            self._positions[partition] = LogPosition.of(positions[partition])

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """See the port. The offsets are dropped, because nobody reads them here."""

    def lag(self) -> dict[Partition, int]:
        with self._log.here():
            return {
                partition: max(0, self._log.stored(partition).end - position.offset)
                for partition, position in self._positions.items()
            }

    def close(self) -> None:
        with self._log.anyway():
            self._group.leave(self)

    def _has_news(self, wanted: int) -> bool:
        return bool(self._losing() or self._gaining() or (wanted > 0 and self._readable()))

    def _partitions(self) -> tuple[Partition, ...]:
        found: list[Partition] = []
        for topic in self._topics:
            try:
                found += self._log.partitions_of(topic)
            except UnknownTopicError:
                # The topic may be created later.
                continue
        return tuple(found)

    def _losing(self) -> list[Partition]:
        owner, share = self._group.owner, self._group.share(self, self._partitions())
        return [each for each in self._owned if owner.get(each) is not self or each not in share]

    def _gaining(self) -> list[Partition]:
        share = self._group.share(self, self._partitions())
        return [each for each in share if each not in self._group.owner]

    def _readable(self) -> list[Partition]:
        """Return placed partitions that are not at their end, or whose log has lost records."""
        return [
            partition
            for partition, position in self._positions.items()
            if partition in self._owned
            and (
                position.offset != self._log.stored(partition).end
                or self._log.loss(partition, position)
            )
        ]

    def _rebalanced(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if losing := self._losing():
            for partition in losing:
                self._owned.discard(partition)
                self._positions.pop(partition, None)
                if self._group.owner.get(partition) is self:
                    del self._group.owner[partition]
            events.append(Revoked(tuple(losing)))
        if gaining := self._gaining():
            self._owned.update(gaining)
            self._group.owner.update(dict.fromkeys(gaining, self))
            events.append(Assigned(tuple(gaining)))
        if events:
            self._log.changed()
        return events

    def _read(self, wanted: int, run: int) -> list[StreamEvent]:
        if wanted < 1:
            return []
        events = list[StreamEvent]()
        here, lags = dict[Partition, int](), dict[Partition, int]()
        for partition in self._readable():
            stored, position = self._log.stored(partition), self._positions[partition]
            if loss := self._log.loss(partition, position):
                del self._positions[partition]
                events.append(loss)
            elif position.offset < stored.start:
                del self._positions[partition]
                events.append(OutOfRange(partition, Bounds(stored.start, stored.end)))
            elif length := len(stored.read(position.offset, wanted)):
                here[partition] = length
                lags[partition] = stored.end - position.offset
            else:
                self._positions[partition] = position._replace(offset=stored.end)
                events.append(LogEndReached(partition, stored.end))
        for partition, length in self._in_turn.plan(here, lags, wanted, run):
            position = self._positions[partition]
            records = self._log.stored(partition).read(position.offset, length)
            self._positions[partition] = position._replace(offset=records[-1].offset + 1)
            events.append(fetched(partition, records))
        return events


# The client library's default.
MAX_RECORD_BYTES = 1_000_000
# Epoch of the only leader of a log in memory.
EPOCH = 0
# Kafka's defaults for a topic without settings.
_DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "max.message.bytes": str(MESSAGE_BYTES),
    "min.compaction.lag.ms": "0",
}


@dataclass(slots=True)
class PartitionLog:
    """Records of one partition in offset order, with holes where records were punched out."""

    records: list[LogRecord] = field(default_factory=list)
    start: int = 0
    end: int = 0

    def read(self, position: int, max_records: int) -> list[LogRecord]:
        """Return at most `max_records` records from the first one at or after a position."""
        first = bisect_left(self.records, position, key=lambda record: record.offset)
        return self.records[first : first + max_records]


class MemoryLog:
    """The `Log` port. All its objects share one lock, so they may be used in different threads.

    Args:
        clock: Time of each record's timestamp, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # Its lock guards all fields.
        self._changed = threading.Condition()
        self._topics: dict[str, list[PartitionLog]] = {}
        # Ids of topics.
        self._ids = dict[str, str]()
        self._numbers = count()
        self._groups: dict[str, MemoryConsumerGroup] = {}
        # Number of records appended without key and partition.
        self._keyless = 0
        self._tails = set[MemoryTail]()
        self._names = dict[str, MemoryTransactions]()
        # Settings by topic.
        self._settings = dict[str, dict[str, str]]()
        self._away = False
        # True to leave offsets out of delivery reports, as for records that were sent twice.
        self.reports_no_offsets = False

    # --- the port ---------------------------------------------------------------------------------

    def create_topics(self, wanted: Sequence[NewTopic]) -> None:
        """See the port. All records are kept until a test expires or punches them."""
        with self.here():
            for topic in wanted:
                if topic.name not in self._topics:
                    self._make(topic.name, topic.partitions)
                    self._settings[topic.name] = _DEFAULTS | topic.settings
            self.changed()

    def delete_topics(self, topics: Collection[str]) -> None:
        with self.here():
            for topic in self._topics.keys() & topics:
                del self._topics[topic], self._settings[topic]
            self.changed()

    def delete_groups(self, groups: Collection[str]) -> None:
        with self.here():
            for name in self._groups.keys() & groups:
                if self._groups[name].members:
                    raise OutsideError(f"deleting consumer group {name}: it has members")
                del self._groups[name]

    def topics(self) -> list[str]:
        with self.here():
            return sorted(self._topics)

    def settings(
        self, topics: Collection[str], refused: list[str] | None = None
    ) -> dict[str, dict[str, str]]:
        del refused
        with self.here():
            return {topic: dict(self._settings[topic]) for topic in topics if topic in self._topics}

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        with self.here():
            return self.partitions_of(topic)

    def bounds(self, partition: Partition) -> Bounds:
        with self.here():
            stored = self.stored(partition)
            return Bounds(stored.start, stored.end)

    def ends(self, partitions: Collection[Partition]) -> Positions:
        return {place: bounds.end for place, bounds in self._bounds_of(partitions).items()}

    def high_watermarks(self, partitions: Collection[Partition]) -> Positions:
        return self.ends(partitions)

    def end_positions(
        self, partitions: Collection[Partition], topics: Mapping[str, FoundTopic] | None = None
    ) -> dict[Partition, LogPosition]:
        del topics  # known at once
        with self.here():
            return {
                place: LogPosition(bounds.end, self._ids[place.topic], EPOCH)
                for place, bounds in self._bounds_of(partitions).items()
            }

    def starts(self, partitions: Collection[Partition]) -> Positions:
        return {place: bounds.start for place, bounds in self._bounds_of(partitions).items()}

    def _bounds_of(self, partitions: Collection[Partition]) -> dict[Partition, Bounds]:
        with self.here():
            return {
                place: self.bounds(place)
                for place in partitions
                if place.index < len(self._topics.get(place.topic, ()))
            }

    def describe(self, topics: Collection[str]) -> dict[str, FoundTopic]:
        with self.here():
            return {
                topic: FoundTopic(self._ids[topic], len(self._topics[topic]))
                for topic in topics
                if topic in self._topics
            }

    def agrees(
        self,
        positions: Mapping[Partition, LogPosition],
        ends: Mapping[Partition, LogPosition] | None = None,
    ) -> dict[Partition, int]:
        del ends  # known at once
        with self.here():
            found = {place: self.loss(place, known) for place, known in positions.items()}
        return {place: loss.divergent_offset for place, loss in found.items() if loss is not None}

    def position_at(self, partition: Partition, timestamp_s: float) -> int:
        with self.here():
            stored = self.stored(partition)
            young = (each.offset for each in stored.records if each.timestamp_s >= timestamp_s)
            return next(young, stored.end)

    def stream(
        self,
        group: str,
        topics: Sequence[str],
        member: str,
        *,
        hold: bool = False,
    ) -> MemoryStreamReader:
        # Partitions do not wait for a static member to return.
        del member, hold
        with self._changed:
            joined = self._groups.setdefault(group, MemoryConsumerGroup())
            self.changed()
            return MemoryStreamReader(self, joined, tuple(topics))

    def spans(self) -> MemorySpanReader:
        return MemorySpanReader(self)

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
        *,
        prompt: bool = False,  # noqa: ARG002 -- every tail is here
    ) -> MemoryTail:
        tail = MemoryTail(self, partition, LogPosition.of(position), on_ready)
        with self._changed:
            self._tails.add(tail)
            tail.notify_if_ready(away=self._away)
        return tail

    def writer(
        self,
        *,
        waits: bool = True,
        max_bytes: int = WRITER_BYTES,
        on_ready: Callable[[], None] | None = None,
    ) -> MemoryWriter:
        del waits, max_bytes  # it is never full
        return MemoryWriter(self, on_ready)

    def transactions(self, name: str) -> MemoryTransactions:
        with self.here():
            self._names[name] = MemoryTransactions(self, name)
            return self._names[name]

    def close(self) -> None:
        """See the port. Other parts of a test still use it, as other processes use Kafka."""

    # --- for tests --------------------------------------------------------------------------------

    def expire(self, partition: Partition, below: int) -> None:
        """Expire records as retention does: the log starts at `below` from now on."""
        with self._changed:
            stored = self.stored(partition)
            stored.start = max(stored.start, min(below, stored.end))
            stored.records = stored.read(stored.start, len(stored.records))
            self.changed()

    def punch(self, partition: Partition, offset: int) -> None:
        """Remove the record at this offset, like a transaction's marker."""
        with self._changed:
            stored = self.stored(partition)
            stored.records = [each for each in stored.records if each.offset != offset]

    def add_partitions(self, topic: str, total: int) -> None:
        """Increase a topic's partitions to `total`. Group members get their share."""
        with self._changed:
            have = self._topics[topic]
            have += [PartitionLog() for _ in range(total - len(have))]
            self.changed()

    def recreate(self, topic: str) -> None:
        """Delete a topic and its records, and create it again with as many partitions."""
        with self._changed:
            self._make(topic, len(self._topics[topic]))
            self.changed()

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change a topic's settings. Only `max.message.bytes` has an effect: it refuses records."""
        with self._changed:
            self._settings[topic] |= settings

    def go_away(self) -> None:
        """Stop answering, like an unavailable broker, until `come_back`."""
        with self._changed:
            self._away = True
            self.changed()

    def come_back(self) -> None:
        """Answer again. Nothing was lost."""
        with self._changed:
            self._away = False
            self.changed()

    # --- for its own readers and writers ----------------------------------------------------------

    @contextmanager
    def here(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            UnavailableError: If the broker is unavailable.
        """
        with self._changed:
            if self._away:
                raise UnavailableError("the in-memory log simulates an unavailable broker")
            yield

    @contextmanager
    def anyway(self) -> Iterator[None]:
        """Hold the lock even if the broker is unavailable, then wake all waiting threads."""
        with self._changed:
            yield
            self.changed()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `ready` or until the broker is unavailable. The lock must be held."""
        self._changed.wait_for(lambda: self._away or ready(), timeout_s)

    def await_here(self, timeout_s: float) -> None:
        """Wait until the broker is available."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away, timeout_s)

    def changed(self) -> None:
        """Wake waiting threads, and notify tails that are ready. The lock must be held."""
        self._changed.notify_all()
        for tail in tuple(self._tails):
            tail.notify_if_ready(away=self._away)

    def forget(self, tail: MemoryTail) -> None:
        """Stop notifying this tail."""
        with self._changed:
            self._tails.discard(tail)

    def stored(self, partition: Partition) -> PartitionLog:
        """Return the records of a partition. The lock must be held.

        Raises:
            UnknownTopicError: If the partition does not exist.
        """
        stored = self._topics.get(partition.topic, [])
        if not 0 <= partition.index < len(stored):
            raise UnknownTopicError(f"there is no {partition}")
        return stored[partition.index]

    def loss(self, partition: Partition, known: LogPosition) -> LogTruncated | None:
        """Return how the log below a position was lost; None if it was not. The lock must be held.

        Raises:
            UnknownTopicError: If the partition does not exist.
        """
        stored = self.stored(partition)
        if known.topic_id and known.topic_id != self._ids[partition.topic]:
            return LogTruncated(partition, 0, recreated=True)
        if stored.end < known.offset:
            return LogTruncated(partition, stored.end, recreated=False)
        return None

    def partitions_of(self, topic: str) -> tuple[Partition, ...]:
        """Return all partitions of a topic. The lock must be held.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """
        if topic not in self._topics:
            raise UnknownTopicError(f"there is no topic {topic}")
        return tuple(Partition(topic, index) for index in range(len(self._topics[topic])))

    def has_name(self, name: str, transactions: MemoryTransactions) -> bool:
        """Return True if these transactions still own a name."""
        return self._names[name] is transactions

    def append(self, record: NewRecord) -> int:
        """Append a record and return its offset. The lock must be held.

        Raises:
            UnknownTopicError: If the partition does not exist.
            RecordTooLargeError: If its topic refuses the record's size.
        """
        topic, value, key, headers, partition = record
        if partition is None:
            count = len(self.partitions_of(topic))
            self._keyless += key is None
            partition = (self._keyless if key is None else sum(key)) % count
        stored = self.stored(Partition(topic, partition))
        self.check_size(record)
        offset, stored.end = stored.end, stored.end + 1
        stored.records.append(LogRecord(offset, key, value, self._clock(), EPOCH, headers))
        self.changed()
        return offset

    def check_size(self, record: NewRecord) -> None:
        """Check that a topic accepts a record. The lock must be held.

        Raises:
            RecordTooLargeError: If the topic refuses the record's size.
        """
        limit = int(self._settings[record.topic]["max.message.bytes"])
        limit, size = min(limit, MAX_RECORD_BYTES), len(record.value or b"")
        if size > limit:
            raise RecordTooLargeError(
                f"{record.topic} accepts records of at most {limit} bytes, got {size}"
            )

    def _make(self, topic: str, partitions: int) -> None:
        self._topics[topic] = [PartitionLog() for _ in range(partitions)]
        self._ids[topic] = f"{topic}#{next(self._numbers)}"


class MemoryTransactions:
    """The `Transactions` port."""

    def __init__(self, log: MemoryLog, name: str) -> None:
        self._log = log
        self._name = name

    def write(self, records: Sequence[NewRecord]) -> None:
        with self._log.here():
            for record in records:
                self._log.partitions_of(record.topic)
                self._log.check_size(record)
            if not self._log.has_name(self._name, self):
                raise DeliveryError(f"another process writes as {self._name} now")
            for record in records:
                self._log.append(record)

    def close(self) -> None:
        """See the port."""


def fetched(partition: Partition, run: Sequence[LogRecord]) -> Fetched:
    """Return a run of stored records as a `Fetched`."""
    return Fetched(
        partition,
        [each.offset for each in run],
        [each.value for each in run],
        run[0].timestamp_s if run else 0.0,
        run[-1].timestamp_s if run else 0.0,
        [EPOCH] * len(run),
    )


class MemorySpanReader:
    """The `SpanReader` port."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def read(self, span: Span, timeout_s: float) -> Fetched:
        with self._log.here():
            stored = self._log.stored(span.place)
            self._log.wait_until(lambda: stored.end >= span.end, timeout_s)
            if stored.start > span.start:
                raise ExpiredError(f"{span} has expired: its partition starts at {stored.start}")
            if stored.end < span.end:
                raise UnavailableError(
                    f"{span} does not exist yet: its partition ends at {stored.end}"
                )
            run = stored.read(span.start, span.end - span.start)
            return fetched(span.place, [each for each in run if each.offset < span.end])

    def close(self) -> None:
        """See the port."""


class MemoryTail:
    """The `Tail` port."""

    def __init__(
        self,
        log: MemoryLog,
        partition: Partition,
        position: LogPosition,
        on_ready: Callable[[], None] | None,
    ) -> None:
        self._log = log
        self._partition = partition
        self._position = position
        self._on_ready = on_ready

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        with self._log.here():
            self._log.wait_until(self._is_ready, timeout_s)
            at, stored = self._position, self._log.stored(self._partition)
            if loss := self._log.loss(self._partition, at):
                if loss.recreated:
                    raise RecreatedError(f"{self._partition} belongs to a recreated topic")
                raise TruncatedError(f"{self._partition} was cut", loss.divergent_offset)
            if at.offset < stored.start:
                raise ExpiredError(f"{self._partition} starts at {stored.start}")
            run = stored.read(at.offset, max_records)
            # True if the log is read to its end: after these records, there are only holes.
            whole = len(run) < max_records
            self._position = at._replace(offset=stored.end if whole else run[-1].offset + 1)
            return run

    def position(self) -> int:
        return self._position.offset

    def close(self) -> None:
        self._log.forget(self)

    def notify_if_ready(self, *, away: bool) -> None:
        """Call `on_ready` if there is an event. The log's lock must be held."""
        if self._on_ready is not None and (away or self._is_ready()):
            self._on_ready()

    def _is_ready(self) -> bool:
        at = self._position
        try:
            end = self._log.stored(self._partition).end
            return at.offset != end or self._log.loss(self._partition, at) is not None
        except UnknownTopicError:
            return True


class _Queued(NamedTuple):
    record: NewRecord
    on_delivered: Callable[[int | None], None] | None
    on_failed: Callable[[DeliveryError], None] | None


class MemoryWriter:
    """The `Writer` port: records stay in its queue while the broker is unavailable."""

    def __init__(self, log: MemoryLog, on_ready: Callable[[], None] | None = None) -> None:
        self._log = log
        self._on_ready = on_ready
        self._queue: deque[_Queued] = deque()
        # Delivery callbacks.
        self._due: deque[Callable[[], None]] = deque()
        self._failure: DeliveryError | None = None
        # Topics that were checked.
        self._checked = set[str]()

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        partition: int | None = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivered: Callable[[int | None], None] | None = None,
        on_failed: Callable[[DeliveryError], None] | None = None,
    ) -> None:
        self._raise_failure()
        if value is not None and len(value) > MAX_RECORD_BYTES:
            raise RecordTooLargeError(f"{topic} refuses a record of {len(value)} bytes")
        if topic not in self._checked:
            # Without a broker, the record waits in the queue.
            with suppress(UnavailableError):
                self._log.partitions(topic)
                self._checked.add(topic)
        record = NewRecord(topic, value, key, tuple(headers), partition)
        self._queue.append(_Queued(record, on_delivered, on_failed))
        self._send()

    @property
    def waiting_s(self) -> float:
        return 0.0

    def poll(self) -> None:
        self._send()
        while self._due:
            self._due.popleft()()
        self._raise_failure()

    def flush(self, timeout_s: float) -> bool:
        self._log.await_here(timeout_s)
        self.poll()
        return not self._queue

    def close(self) -> None:
        with suppress(DeliveryError):
            self.flush(0.0)

    def _send(self) -> None:
        while self._queue:
            queued = self._queue[0]
            try:
                with self._log.here():
                    offset = self._log.append(queued.record)
            except UnavailableError:
                return
            except DeliveryError as error:
                self._refuse(queued, error)
            except UnknownTopicError as error:
                self._checked.discard(queued.record.topic)
                self._refuse(queued, DeliveryError(str(error)))
            else:
                if queued.on_delivered is not None:
                    known = None if self._log.reports_no_offsets else offset
                    self._due.append(partial(queued.on_delivered, known))
            self._queue.popleft()
            self._notify()

    def _refuse(self, queued: _Queued, error: DeliveryError) -> None:
        if queued.on_failed is None:
            self._failure = self._failure or error
        else:
            self._due.append(partial(queued.on_failed, error))

    def _notify(self) -> None:
        if self._on_ready is not None and (self._due or self._failure):
            self._on_ready()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
