"""The `Log` port in memory: what tests and the counting model run on instead of Kafka.

Besides the port it has what a test does to a log from outside: `expire` (retention), `punch`
(compaction), `cut` (loss), `delete_topic`, `recreate` and `configure` (somebody's hand), `go_away`
and `come_back` (the broker), `rebalance` and `lose` (the group).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakSet

from common.core.spans import LogPosition, Partition
from common.errors import DeliveryError, RecordTooLargeError, UnavailableError, UnknownTopicError
from common.ports import MESSAGE_BYTES, WRITER_BYTES, Bounds, FoundTopic, NewTopic, Truncated
from common.testing.log_group import Group, MemoryStreamReader
from common.testing.log_readers import MemorySpanReader, MemoryTail, MemoryWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from common.core.messages import Positions
    from common.ports import NewTopic

_DEFAULTS = {  # Kafka's, of a topic of which nobody said anything
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "max.message.bytes": str(MESSAGE_BYTES),
}


@dataclass(slots=True)
class Stored:
    """One record as the log keeps it."""

    offset: int
    key: bytes | None
    value: bytes | None
    arrival_s: float
    epoch: int


@dataclass(slots=True)
class PartitionLog:
    """Records of one partition in offset order, with holes where some were punched out."""

    records: list[Stored] = field(default_factory=list)
    start: int = 0
    end: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # with first offsets

    def read(self, position: int, max_records: int) -> list[Stored]:
        """Up to so many records from the first one at or after a position on."""
        first = bisect_left(self.records, position, key=lambda record: record.offset)
        return self.records[first : first + max_records]

    def cut(self, end: int) -> None:
        """Lose the records from an offset on; the log goes on under the next leader epoch."""
        self.records = [each for each in self.records if each.offset < end]
        self.end = end
        later = self.epochs[-1][0] + 1
        self.epochs = [*(each for each in self.epochs if each[1] < end), (later, end)]

    def divergent_offset(self, offset: int, epoch: int) -> int | None:
        """Where this is not the log any more of which a position knows; None where it is."""
        reached = self.end
        if epoch > self.epochs[-1][0]:
            reached = 0
        elif epoch >= 0:
            reached = next((first for later, first in self.epochs if later > epoch), self.end)
            reached = max(reached, self.start)
        return reached if reached < offset else None


class MemoryLog:
    """The `Log` port; all its objects share one lock, so they may live in different threads.

    Args:
        clock: The time that becomes each record's timestamp, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # its lock guards everything here
        self._topics: dict[str, list[PartitionLog]] = {}
        self._ids = dict[str, str]()  # of topics
        self._numbers = count()
        self._groups: dict[str, Group] = {}
        self._keyless = 0  # records appended without key and partition
        self._tails = set[MemoryTail]()
        self._writers = WeakSet[MemoryWriter]()
        self._settings = dict[str, dict[str, str]]()  # by topic
        self._away = False
        self.tells_no_offsets = False  # in delivery reports, as of records that were sent twice

    # --- the port --------------------------------------------------------------------------------

    def create_topics(self, wanted: Sequence[NewTopic]) -> None:
        """See the port; all is kept, until a test expires it or punches holes."""
        with self.here():
            for topic in wanted:
                if topic.name not in self._topics:
                    self._make(topic.name, topic.partitions)
                    self._settings[topic.name] = _DEFAULTS | topic.settings
            self.changed()

    def settings(self, topics: Collection[str]) -> dict[str, dict[str, str]]:
        """See the port."""
        with self.here():
            return {topic: dict(self._settings[topic]) for topic in topics if topic in self._topics}

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """See the port.

        Raises:
            UnknownTopicError: If there is no such topic.
        """
        with self.here():
            return self.partitions_of(topic)

    def bounds(self, partition: Partition) -> Bounds:
        """See the port.

        Raises:
            UnknownTopicError: If there is no such partition.
        """
        with self.here():
            stored = self.stored(partition)
            return Bounds(stored.start, stored.end)

    def ends(self, partitions: Collection[Partition]) -> Positions:
        """See the port."""
        return {place: bounds.end for place, bounds in self._bounds_of(partitions).items()}

    def end_positions(
        self, partitions: Collection[Partition], topics: Mapping[str, FoundTopic] | None = None
    ) -> dict[Partition, LogPosition]:
        """See the port."""
        del topics  # known at once
        with self.here():
            return {
                place: LogPosition(
                    bounds.end, self._ids[place.topic], self.stored(place).epochs[-1][0]
                )
                for place, bounds in self._bounds_of(partitions).items()
            }

    def starts(self, partitions: Collection[Partition]) -> Positions:
        """See the port."""
        return {place: bounds.start for place, bounds in self._bounds_of(partitions).items()}

    def _bounds_of(self, partitions: Collection[Partition]) -> dict[Partition, Bounds]:
        with self.here():
            return {
                place: self.bounds(place)
                for place in partitions
                if place.index < len(self._topics.get(place.topic, ()))
            }

    def describe(self, topics: Collection[str]) -> dict[str, FoundTopic]:
        """See the port."""
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
        """See the port.

        Raises:
            UnknownTopicError: If there is no such partition.
        """
        del ends  # known at once
        with self.here():
            found = {place: self.loss(place, known) for place, known in positions.items()}
        return {place: loss.divergent_offset for place, loss in found.items() if loss is not None}

    def position_at(self, partition: Partition, timestamp_s: float) -> int:
        """See the port.

        Raises:
            UnknownTopicError: If there is no such partition.
        """
        with self.here():
            stored = self.stored(partition)
            young = (each.offset for each in stored.records if each.arrival_s >= timestamp_s)
            return next(young, stored.end)

    def stream(
        self, group: str, topics: Sequence[str], member: str, *, hold: bool = False
    ) -> MemoryStreamReader:
        """See the port."""
        with self._changed:
            joined = self._groups.setdefault(group, Group())
            self.changed()
            return MemoryStreamReader(self, joined, tuple(topics), member, hold=hold)

    def spans(self) -> MemorySpanReader:
        """See the port."""
        return MemorySpanReader(self)

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
    ) -> MemoryTail:
        """See the port."""
        tail = MemoryTail(self, partition, LogPosition.of(position), on_ready)
        with self._changed:
            self._tails.add(tail)
            tail.tell_if_ready(away=self._away)
        return tail

    def writer(
        self,
        *,
        waits: bool = True,
        max_bytes: int = WRITER_BYTES,
        on_ready: Callable[[], None] | None = None,
    ) -> MemoryWriter:
        """See the port."""
        writer = MemoryWriter(self, waits=waits, max_bytes=max_bytes, on_ready=on_ready)
        self._writers.add(writer)
        return writer

    def close(self) -> None:
        """See the port; other parts of a test go on with it, as other processes do with Kafka."""

    # --- what a test does to it ------------------------------------------------------------------

    def break_writers(self) -> None:
        """No writer that there is now can go on: the broker has lost its place."""
        for writer in list(self._writers):
            writer.lose_place()

    def expire(self, partition: Partition, below: int) -> None:
        """Do what retention does: the log starts at `below` from now on."""
        with self._changed:
            stored = self.stored(partition)
            stored.start = max(stored.start, min(below, stored.end))
            stored.records = stored.read(stored.start, len(stored.records))
            self.changed()

    def punch(self, partition: Partition, offset: int) -> None:
        """Do what compaction does: this offset holds no record any more."""
        with self._changed:
            stored = self.stored(partition)
            stored.records = [each for each in stored.records if each.offset != offset]

    def cut(self, partition: Partition, end: int) -> None:
        """Lose acknowledged records: the log ends at `end` from now on."""
        with self._changed:
            self.stored(partition).cut(end)
            self.changed()

    def add_partitions(self, topic: str, total: int) -> None:
        """Give a topic as many partitions as `total`; members of groups get their share."""
        with self._changed:
            have = self._topics[topic]
            have += [PartitionLog() for _ in range(total - len(have))]
            self.changed()

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with all that it holds."""
        with self._changed:
            del self._topics[topic], self._settings[topic]
            self.changed()

    def recreate(self, topic: str) -> None:
        """Delete a topic with all that it holds, and create it anew with as many partitions."""
        with self._changed:
            self._make(topic, len(self._topics[topic]))
            self.changed()

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change settings of a topic; `cleanup.policy` and `max.message.bytes` refuse records."""
        with self._changed:
            self._settings[topic] |= settings

    def go_away(self) -> None:
        """Be a broker that does not answer, until `come_back`."""
        with self._changed:
            self._away = True
            self.changed()

    def come_back(self) -> None:
        """Answer again; nothing was lost."""
        with self._changed:
            self._away = False
            self.changed()

    def rebalance(self, group: str) -> None:
        """Hand every partition of a group to the next member."""
        with self._changed:
            self._groups[group].rotate()
            self.changed()

    def lose(self, group: str, member: str) -> None:
        """Treat a member as dead: others own its partitions before it hears of it."""
        with self._changed:
            self._groups[group].lose(member)
            self.changed()

    def committed(self, group: str) -> dict[Partition, int]:
        """What the members of a group have told lag tools."""
        with self._changed:
            return dict(self._groups[group].committed)

    # --- for its own readers and writers ---------------------------------------------------------

    @contextmanager
    def here(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            UnavailableError: If the broker is away.
        """
        with self._changed:
            if self._away:
                raise UnavailableError("the log in memory plays a broker that is away")
            yield

    @contextmanager
    def anyway(self) -> Iterator[None]:
        """Hold the lock, whether the broker is away or not; wakes everybody who waits."""
        with self._changed:
            yield
            self.changed()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait for something to be so, or for the broker to go away; the lock must be held."""
        self._changed.wait_for(lambda: self._away or ready(), timeout_s)

    def await_here(self, timeout_s: float) -> None:
        """Wait until the broker is not away."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away, timeout_s)

    def changed(self) -> None:
        """Wake everybody who waits, and tell tails that are ready; the lock must be held."""
        self._changed.notify_all()
        for tail in tuple(self._tails):
            tail.tell_if_ready(away=self._away)

    def forget(self, tail: MemoryTail) -> None:
        """Tell this tail nothing any more."""
        with self._changed:
            self._tails.discard(tail)

    def stored(self, partition: Partition) -> PartitionLog:
        """The records of a partition; the lock must be held.

        Raises:
            UnknownTopicError: If there is no such partition.
        """
        stored = self._topics.get(partition.topic, [])
        if not 0 <= partition.index < len(stored):
            raise UnknownTopicError(f"there is no {partition}")
        return stored[partition.index]

    def loss(self, partition: Partition, known: LogPosition) -> Truncated | None:
        """What a partition's log lost of what a position knows; the lock must be held.

        Raises:
            UnknownTopicError: If there is no such partition.
        """
        stored = self.stored(partition)
        if known.topic_id and known.topic_id != self._ids[partition.topic]:
            return Truncated(partition, 0, recreated=True)
        at = stored.divergent_offset(known.offset, known.epoch)
        return None if at is None else Truncated(partition, at, recreated=False)

    def partitions_of(self, topic: str) -> tuple[Partition, ...]:
        """All partitions of a topic; the lock must be held.

        Raises:
            UnknownTopicError: If there is no such topic.
        """
        if topic not in self._topics:
            raise UnknownTopicError(f"there is no topic {topic}")
        return tuple(Partition(topic, index) for index in range(len(self._topics[topic])))

    def append(
        self, topic: str, partition: int | None, key: bytes | None, value: bytes | None
    ) -> int:
        """Append a record and give its offset; the lock must be held.

        Raises:
            UnknownTopicError: If there is no such partition.
            RecordTooLargeError: If its topic does not take it.
            DeliveryError: If its topic is compacted, and it has no key.
        """
        if partition is None:
            count = len(self.partitions_of(topic))
            self._keyless += key is None
            partition = (self._keyless if key is None else sum(key)) % count
        stored = self.stored(Partition(topic, partition))
        settings = self._settings[topic]
        limit = int(settings["max.message.bytes"])
        if value is not None and len(value) > limit:
            raise RecordTooLargeError(f"{topic} takes records of {limit} bytes, not {len(value)}")
        if key is None and "compact" in settings["cleanup.policy"]:
            raise DeliveryError(f"{topic} is compacted and takes no record without a key")
        offset, stored.end = stored.end, stored.end + 1
        epoch = stored.epochs[-1][0]
        stored.records.append(Stored(offset, key, value, self._clock(), epoch))
        self.changed()
        return offset

    def _make(self, topic: str, partitions: int) -> None:
        self._topics[topic] = [PartitionLog() for _ in range(partitions)]
        self._ids[topic] = f"{topic}#{next(self._numbers)}"
