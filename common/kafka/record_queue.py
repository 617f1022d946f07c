"""Records that were fetched and are not given out yet."""

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

# How long records wait for those of a partition that has some, but none here, to take their turn.
_PATIENCE_S = 0.25

# What a record takes besides its value: the client's message, its offset, a place in the queue.
# Without it a queue of 8-byte records would hold thirty times the memory that it is allowed.
_OVERHEAD_BYTES = 250


class RecordQueue:
    """Keeps records of one partition as they were fetched, in chunks.

    To cut a chunk is cheaper than to queue each record.
    """

    def __init__(self) -> None:
        self._chunks: deque[list[ClientMessage]] = deque()
        self._taken = 0  # of the first chunk
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        """How many records it holds."""
        return self._count

    def put(self, records: list[ClientMessage]) -> None:
        """Add records, which continue those that are there; at least one."""
        self._chunks.append(records)
        self._count += len(records)
        self.size_bytes += _size_of(records)

    def first_offset(self) -> int | None:
        """Offset of the oldest record; None where there is none."""
        return self._chunks[0][self._taken].offset() if self._chunks else None

    def take(self, count: int) -> list[ClientMessage]:
        """Take the oldest records out; no more than there are."""
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
    """Records of all partitions that are read: a queue each, given out in turn.

    What it keeps beside the queues is there so that a poll costs what came, however many partitions
    there are.
    """

    def __init__(self) -> None:
        self._queues = dict[Partition, RecordQueue]()
        self._reported = dict[Partition, int]()  # up to where each was given out
        self.filled = set[Partition]()  # those that hold records
        self._full = set[Partition]()  # paused at the client
        self._at_end = set[Partition]()  # all there is to read was fetched
        self._ended = set[Partition]()  # of those, whose end may lie above the last record
        self._lacking_since = dict[Partition, float]()  # not at its end, and nothing is here
        self._in_turn = RunsInTurn()

    def place(self, partition: Partition, position: int) -> None:
        """Begin a partition at a position."""
        self._queues[partition] = RecordQueue()
        self._reported[partition] = position

    def drop(self, partition: Partition) -> None:
        """Forget a partition."""
        for table in (self._queues, self._reported, self._lacking_since):
            table.pop(partition, None)
        for group in (self.filled, self._full, self._at_end, self._ended):
            group.discard(partition)

    def put(self, partition: Partition, records: list[ClientMessage]) -> None:
        """Add records, at least one, which continue those that are there."""
        self._queues[partition].put(records)
        self.filled.add(partition)

    def end(self, partition: Partition, *, reached: bool) -> None:
        """Note whether what came last reached the end of a partition."""
        if reached:
            self._at_end.add(partition)
            self._ended.add(partition)
        else:
            self._at_end.discard(partition)

    def is_at_end(self, partition: Partition) -> bool:
        """Return True if all there is to read of a partition was fetched."""
        return partition in self._at_end

    def first_offset(self, partition: Partition) -> int | None:
        """Offset of a partition's oldest record; None where there is none."""
        return self._queues[partition].first_offset()

    def emptied(self, full_bytes: int) -> set[Partition]:
        """Partitions that were overfull and are half empty now."""
        emptied = {p for p in self._full if self._queues[p].size_bytes <= full_bytes // 2}
        self._full -= emptied
        return emptied

    def overfull(self, full_bytes: int, besides: Collection[Partition]) -> set[Partition]:
        """Partitions that have come to hold so many bytes, but for some."""
        overfull = {
            each
            for each in self.filled - self._full
            if self._queues[each].size_bytes >= full_bytes and each not in besides
        }
        self._full |= overfull
        return overfull

    def lacks(self, halted: set[Partition]) -> bool:
        """Whether to wait for a partition that has more to read, and of which nothing is here."""
        now, since = time.monotonic(), self._lacking_since
        # What waits for a look at its topic is here: of a thousand that trickle some always do.
        lacking = self._queues.keys() - self.filled - self._at_end - halted
        self._lacking_since = {partition: since.get(partition, now) for partition in lacking}
        return any(now < since_s + _PATIENCE_S for since_s in self._lacking_since.values())

    def give_out(
        self, here: Collection[Partition], lags: Mapping[Partition, int], wanted: int, run: int
    ) -> list[Fetched]:
        """Take records of these partitions out, in turn."""
        counts = {partition: len(self._queues[partition]) for partition in here}
        given = [
            fetched(partition, self._queues[partition].take(count))
            for partition, count in self._in_turn.plan(counts, lags, wanted, run)
        ]
        self.filled = {partition for partition in self.filled if self._queues[partition]}
        self._reported.update((each.partition, each.offsets[-1] + 1) for each in given)
        return given

    def reached(self, cursors: Mapping[Partition, Cursor]) -> list[LogEndReached]:
        """Ends that lie above the last record, of partitions all of which was given out."""
        ends, self._ended = self._ended - self.filled, self._ended & self.filled
        reached = list[LogEndReached]()
        for partition in ends & self._at_end:
            position = cursors[partition].position
            if position > self._reported[partition]:
                self._reported[partition] = position
                reached.append(LogEndReached(partition, position))
        return reached
