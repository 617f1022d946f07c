"""Records of one partition that were fetched and are not given out yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.kafka.client import Record

# What a record takes besides its value: the client's message, its offset, a place in the queue.
# Without it a queue of 8-byte records would hold thirty times the memory that it is allowed.
_OVERHEAD_BYTES = 250


class RecordQueue:
    """Keeps records as they were fetched, in chunks: to cut one is cheaper than to queue each."""

    def __init__(self) -> None:
        self._chunks: deque[list[Record]] = deque()
        self._taken = 0  # of the first chunk
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        """How many records it holds."""
        return self._count

    def put(self, records: list[Record]) -> None:
        """Add records, which continue those that are there; at least one."""
        self._chunks.append(records)
        self._count += len(records)
        self.size_bytes += _size_of(records)

    def first_offset(self) -> int | None:
        """Offset of the oldest record; None where there is none."""
        return self._chunks[0][self._taken].offset() if self._chunks else None

    def take(self, count: int) -> list[Record]:
        """Take the oldest records out; no more than there are."""
        taken: list[Record] = []
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


def _size_of(records: list[Record]) -> int:
    return sum(map(len, records)) + _OVERHEAD_BYTES * len(records)
