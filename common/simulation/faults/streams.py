"""The job's streams in virtual time: partitions that grow, lose records, or are recreated."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from common.core.losses import Divergence
from common.core.spans import LogPosition, Partition

if TYPE_CHECKING:
    from common.simulation.faults.scenario import Scenario

# Topics of the partitions, in turn.
TOPICS = ("s", "t")

Content: TypeAlias = tuple[Partition, int, int, str]  # offset, leader epoch, topic id
_offset, _arrival = itemgetter(0), itemgetter(1)  # parts of a record


class Streams:
    """Logs of all partitions.

    Args:
        scenario: The world.
        now: Returns the virtual time.
        say: Adds a line to the narration.
        serial: Numbers that never repeat.
    """

    def __init__(
        self,
        scenario: Scenario,
        now: Callable[[], float],
        say: Callable[[str], None],
        serial: Iterator[int],
    ) -> None:
        self._scenario = scenario
        self._now = now
        self._say = say
        self._serial = serial
        self.partitions = [
            Partition(TOPICS[i % len(TOPICS)], i) for i in range(len(scenario.arrivals))
        ]
        # Positions where the job begins.
        self.first = dict.fromkeys(self.partitions, 0)
        self.records = dict(zip(self.partitions, scenario.arrivals, strict=True))
        self.log_start = dict.fromkeys(self.partitions, 0)
        # Leader epochs of each log, with their first offsets.
        self.epochs: dict[Partition, tuple[tuple[int, int], ...]]
        self.epochs = dict.fromkeys(self.partitions, ((0, 0),))
        self.topic_ids = {topic: f"{topic}#0" for topic in TOPICS}
        self.known = {p: LogPosition(0, self.topic_ids[p.topic]) for p in self.partitions}
        # Number of times that a stream lost records.
        self.losses = 0

    def add_partition(self) -> None:
        """Add a partition to a stream."""
        index = len(self.partitions)
        partition = Partition(TOPICS[index % len(self._scenario.arrivals) % len(TOPICS)], index)
        self.partitions.append(partition)
        self.records[partition] = self._scenario.added[index - len(self.first)]
        self.log_start[partition] = 0
        self.epochs[partition] = ((0, 0),)

    def cut_stream(self, partition: Partition, lost: int, new: int) -> None:
        """Let a stream lose its last records, and write new ones at their offsets."""
        there = [each for each in self.records[partition] if each[1] <= self._now()]
        if not there:
            return
        end = there[-min(lost, len(there))][0]
        self._rewrite(partition, end, [each for each in there if each[0] < end], new)
        later = self.epochs[partition][-1][0] + 1
        kept = [each for each in self.epochs[partition] if each[1] < end]
        self.epochs[partition] = (*kept, (later, end))
        self.log_start[partition] = min(self.log_start[partition], end)
        self.losses += 1
        self._say(f"{partition} is cut at {end}, and gets {new} new records")

    def recreate_stream(self, topic: str, new: int) -> None:
        """Delete and recreate a stream's topic, with some records in it."""
        self.topic_ids[topic] = f"{topic}#{next(self._serial)}"
        for partition in [each for each in self.partitions if each.topic == topic]:
            self._rewrite(partition, 0, [], new)
            self.epochs[partition] = ((0, 0),)
            self.log_start[partition] = 0
        self.losses += 1
        self._say(f"{topic} is created anew, with {new} records each")

    def _rewrite(
        self, partition: Partition, end: int, kept: list[tuple[int, float]], new: int
    ) -> None:
        """Replace the records from `end` on: first new ones, then those that have not arrived."""
        coming = [each for each in self.records[partition] if each[1] > self._now()]
        fresh = [(end + at, self._now()) for at in range(new)]
        shift = end + new - coming[0][0] if coming else 0
        moved = [(offset + shift, arrival) for offset, arrival in coming]
        self.records[partition] = (*kept, *fresh, *moved)

    def stream_end(self, partition: Partition) -> int:
        """Return the end of a stream's log."""
        records = self.records[partition]
        there = bisect_right(records, self._now(), key=_arrival)
        end = records[there - 1][0] + 1 if there else 0
        return max(self.epochs[partition][-1][1], end)

    def epoch_at(self, partition: Partition, offset: int) -> int:
        """Return the leader epoch of a stream's record."""
        return max(epoch for epoch, first in self.epochs[partition] if first <= offset)

    def content(self, partition: Partition, offset: int) -> Content:
        """Return a record's unique identity."""
        topic_id = self.topic_ids[partition.topic]
        return partition, offset, self.epoch_at(partition, offset), topic_id

    def divergence(self, partition: Partition, known: LogPosition) -> Divergence | None:
        """Return how a stream's log differs from what a reader knew of it; None if it does not."""
        topic_id, end = self.topic_ids[partition.topic], self.stream_end(partition)
        if known.topic_id not in {"", topic_id}:
            return Divergence(0, LogPosition(0, topic_id), end, recreated=True)
        later = [first for epoch, first in self.epochs[partition] if epoch > known.epoch >= 0]
        reached = min([end, *later])
        if reached >= known.offset:
            return None
        return Divergence(0, known._replace(offset=reached), end, recreated=False)

    def fetch(self, partition: Partition, position: int, limit: int) -> list[int]:
        """Return offsets of existing records from a position on."""
        records, first = self.records[partition], max(position, self.log_start[partition])
        end = bisect_right(records, self._now(), key=_arrival)
        begin = bisect_left(records, first, 0, end, key=_offset)
        return [offset for offset, _ in records[begin : min(begin + limit, end)]]
