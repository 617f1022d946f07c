"""Records that were fetched and not returned yet."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.core.weighted_turns import RunsInTurn
from common.kafka.client import fetched
from common.kafka.port import Fetched, LogEndReached

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from common.kafka.client import ClientMessage
    from common.kafka.cursor import Cursor

# Longest time that records wait for a partition that has more to read but no record here, so that
# it can take its turn.
_PATIENCE_S = 0.25

# Memory of a record besides its value: the client's message, its offset, and a place in the queue.
# Without this, a queue of 8-byte records would take thirty times its limit.
_OVERHEAD_BYTES = 250


class RecordQueue:
    """Records of one partition, in chunks as they were fetched.

    Cutting a chunk is cheaper than queueing each record.
    """

    def __init__(self) -> None:
        self._chunks: deque[list[ClientMessage]] = deque()
        # Records taken from the first chunk.
        self._taken = 0
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        """Number of records."""
        return self._count

    def put(self, records: list[ClientMessage]) -> None:
        """Add at least one record; the records continue the queue."""
        self._chunks.append(records)
        self._count += len(records)
        self.size_bytes += _size_of(records)

    def first_offset(self) -> int | None:
        """Return the offset of the oldest record; None if the queue is empty."""
        return self._chunks[0][self._taken].offset() if self._chunks else None

    def take(self, count: int) -> list[ClientMessage]:
        """Remove and return the oldest records, at most `count`."""
        taken: list[ClientMessage] = []
        while count > len(taken) and self._chunks:
            chunk = self._chunks[0]
            end = self._taken + count - len(taken)
            taken += chunk[self._taken : end]
            if end < len(chunk):
                self._taken = end
            else:
                self._chunks.popleft()
                self._taken = 0
        self._count -= len(taken)
        self.size_bytes -= _size_of(taken)
        return taken


def _size_of(records: list[ClientMessage]) -> int:
    return sum(map(len, records)) + _OVERHEAD_BYTES * len(records)


class WaitingRecords:
    """Waiting records of all partitions, in a queue for each, returned in turn.

    The other fields make the cost of a poll depend on arrived records, not on the number of
    partitions.
    """

    def __init__(self) -> None:
        self._queues = dict[Partition, RecordQueue]()
        # Next offset to return for each partition.
        self._reported = dict[Partition, int]()
        # Partitions with records.
        self.filled = set[Partition]()
        # Partitions that are paused at the client.
        self._full = set[Partition]()
        # Partitions that were fetched to their end.
        self._at_end = set[Partition]()
        # Partitions whose end may be above the last record.
        self._ended = set[Partition]()
        # Partitions that are not at their end and have no record here, with the time since when.
        self._lacking_since = dict[Partition, float]()
        self._in_turn = RunsInTurn()

    def place(self, partition: Partition, position: int) -> None:
        """Start a partition at a position."""
        self._queues[partition] = RecordQueue()
        self._reported[partition] = position

    def drop(self, partition: Partition) -> None:
        """Drop a partition."""
        for table in (self._queues, self._reported, self._lacking_since):
            table.pop(partition, None)
        for group in (self.filled, self._full, self._at_end, self._ended):
            group.discard(partition)

    def put(self, partition: Partition, records: list[ClientMessage]) -> None:
        """Add at least one record; the records continue the partition."""
        self._queues[partition].put(records)
        self.filled.add(partition)

    def end(self, partition: Partition, *, reached: bool) -> None:
        """Note if the last fetch has reached a partition's end."""
        if reached:
            self._at_end.add(partition)
            self._ended.add(partition)
        else:
            self._at_end.discard(partition)

    def is_at_end(self, partition: Partition) -> bool:
        """Return True if a partition was fetched to its end."""
        return partition in self._at_end

    def first_offset(self, partition: Partition) -> int | None:
        """Return the offset of a partition's oldest record; None if it has no record."""
        return self._queues[partition].first_offset()

    def emptied(self, full_bytes: int) -> set[Partition]:
        """Return the partitions that were overfull and are half empty now."""
        emptied = {p for p in self._full if self._queues[p].size_bytes <= full_bytes // 2}
        self._full -= emptied
        return emptied

    def overfull(self, full_bytes: int, besides: Collection[Partition]) -> set[Partition]:
        """Return partitions that have become full, except those in `besides`."""
        overfull = {
            each
            for each in self.filled - self._full
            if self._queues[each].size_bytes >= full_bytes and each not in besides
        }
        self._full |= overfull
        return overfull

    def lacks(self, halted: set[Partition]) -> bool:
        """Return True if a partition with more to read but no record here is worth a wait."""
        now, since = time.monotonic(), self._lacking_since
        # A partition that waits for a check of its topic has records here, so nobody waits for it.
        # Otherwise, of a thousand partitions with few records, some would always cause a wait.
        lacking = self._queues.keys() - self.filled - self._at_end - halted
        self._lacking_since = {partition: since.get(partition, now) for partition in lacking}
        return any(now < since_s + _PATIENCE_S for since_s in self._lacking_since.values())

    def give_out(
        self, here: Collection[Partition], lags: Mapping[Partition, int], wanted: int, run: int
    ) -> list[Fetched]:
        """Remove and return up to `wanted` records of these partitions, in turns of up to `run`."""
        counts = {partition: len(self._queues[partition]) for partition in here}
        given = [
            fetched(partition, self._queues[partition].take(count))
            for partition, count in self._in_turn.plan(counts, lags, wanted, run)
        ]
        self.filled = {partition for partition in self.filled if self._queues[partition]}
        self._reported.update((each.partition, each.offsets[-1] + 1) for each in given)
        return given

    def reached(self, cursors: Mapping[Partition, Cursor]) -> list[LogEndReached]:
        """Return each end above a partition's last record, once all its records were returned."""
        ends, self._ended = self._ended - self.filled, self._ended & self.filled
        reached = list[LogEndReached]()
        for partition in ends & self._at_end:
            position = cursors[partition].position
            if position > self._reported[partition]:
                self._reported[partition] = position
                reached.append(LogEndReached(partition, position))
        return reached
