"""Grouping rule: any K waiting batches make one model update.

The bulk queue of the paper (section III-B.2; Algorithm 3, and Algorithm 4 lines 3-5). Everything
that decides *which* batches form an update lives here; *when* the next group is taken is the
coordinator's gate, never the arrival of a K-th batch.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from common.core.messages import Batch, WorkerId

if TYPE_CHECKING:
    from collections.abc import Iterable


class Grouper:
    """Accepted batches that wait for an update.

    A worker's second waiting batch ranks behind every other worker's first, so that one busy worker
    is rarely asked twice in a group; within a rank the oldest leads. The oldest batch of all is the
    first of its worker, so it is always in the next group: none starves.
    """

    def __init__(self, batches: Iterable[Batch] = ()) -> None:
        self._batches = dict[int, Batch]()
        self._queues = dict[WorkerId, list[int]]()  # control offsets, oldest first
        for batch in batches:
            self.add(batch)

    def __len__(self) -> int:
        """Count the batches waiting."""
        return len(self._batches)

    @property
    def oldest(self) -> int | None:
        """Control offset of the batch that has waited longest."""
        return min(self._batches, default=None)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All that wait, oldest first."""
        return tuple(self._batches[offset] for offset in sorted(self._batches))

    def add(self, batch: Batch) -> None:
        """Queue a batch at its age: a new one last, one put back where it was."""
        if batch.offset in self._batches:
            raise ValueError(f"batch {batch.offset} waits already")
        self._batches[batch.offset] = batch
        insort(self._queues.setdefault(batch.worker, []), batch.offset)

    def remove(self, offset: int) -> Batch | None:
        """Take one batch out of the queue; None where it does not wait."""
        batch = self._batches.pop(offset, None)
        if batch is not None:
            queue = self._queues[batch.worker]
            queue.remove(offset)
            if not queue:
                del self._queues[batch.worker]
        return batch

    def take(self, count: int) -> tuple[Batch, ...]:
        """Take up to `count` batches, fairest first."""
        heads = [(0, queue[0], worker) for worker, queue in self._queues.items()]
        heapify(heads)  # (rank within its worker, control offset, worker)
        taken = list[Batch]()
        while heads and len(taken) < count:
            rank, offset, worker = heappop(heads)
            taken.append(self._batches[offset])
            queue = self._queues[worker]
            if rank + 1 < len(queue):
                heappush(heads, (rank + 1, queue[rank + 1], worker))
        for batch in taken:
            self.remove(batch.offset)
        return tuple(taken)
