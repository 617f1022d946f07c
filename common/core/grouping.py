"""Grouping rule: any K waiting batches make one model update.

The bulk queue of the paper (section III-B.2; Algorithm 3, and Algorithm 4 lines 3-5). This module
decides which batches form an update. The leader decides when the next group is taken; the arrival
of a K-th batch does not.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from types import MappingProxyType

import msgspec

from common.core.messages import Batch, WorkerId
from common.core.weighted_turns import Turns, level

NOBODY: Mapping[WorkerId, int] = MappingProxyType({})
NOTHING: Mapping[str, list[int]] = MappingProxyType({})


class _Waiting(msgspec.Struct, frozen=True, gc=False):
    """A waiting batch, with the number of offsets that it has of each stream."""

    batch: Batch
    records: dict[str, int]
    # The stream with most of the offsets. If several have as many, the first by name.
    stream: str


class Grouper:
    """Accepted batches that wait for an update.

    The oldest batch begins each group, so that none starves. Then workers take turns, so that a
    busy worker rarely gets two batches of a group: a worker's next batch ranks behind the batches
    of all workers that have fewer in the group. Within a rank, streams take turns in proportion to
    their waiting records, so that a group is not dominated by the stream whose batches came first.
    Within a stream the oldest batch comes first.

    Measured on NSL-KDD as one stream of normal and one of hostile connections, read in runs of
    4,000 records, 400 batches waiting: held-out accuracy 0.944; by age alone 0.762.
    """

    def __init__(self, batches: Iterable[Batch] = ()) -> None:
        self._waiting = dict[int, _Waiting]()
        # Control offsets by worker and by main stream of the batch, oldest first.
        self._queues = dict[WorkerId, dict[str, list[int]]]()
        # Number of waiting records by stream.
        self._backlog = dict[str, int]()
        self._turns = Turns()
        # The oldest batch, and the version at which it became the oldest.
        self._oldest_since: tuple[int | None, int] = (None, 0)
        for batch in batches:
            self.add(batch)

    def __len__(self) -> int:
        """Return the number of waiting batches."""
        return len(self._waiting)

    @property
    def oldest(self) -> int | None:
        """Control offset of the oldest batch."""
        return min(self._waiting, default=None)

    def see_oldest(self, version: int) -> tuple[int | None, int]:
        """Return the oldest batch, and the version at which it was first seen as the oldest.

        Args:
            version: The newest version.
        """
        oldest = self.oldest
        if self._oldest_since[0] != oldest:
            self._oldest_since = oldest, version
        return self._oldest_since

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Waiting batches, oldest first."""
        return tuple(self._waiting[offset].batch for offset in sorted(self._waiting))

    def add(self, batch: Batch) -> None:
        """Queue a batch by its age. A batch that is put back gets its old place."""
        if batch.offset in self._waiting:
            raise ValueError(f"batch {batch.offset} waits already")
        waiting = self._waiting[batch.offset] = _weighed(batch)
        backlog = self._backlog
        for stream, count in waiting.records.items():
            backlog[stream] = backlog.get(stream, 0) + count
        streams = self._queues.setdefault(batch.worker, {})
        insort(streams.setdefault(waiting.stream, []), batch.offset)

    def remove(self, offset: int) -> Batch | None:
        """Remove a batch from the queue and return it, or None if it does not wait."""
        return self._remove(offset) if offset in self._waiting else None

    def take(
        self, count: int, having: Iterable[Batch] = (), loads: Mapping[WorkerId, int] = NOBODY
    ) -> tuple[Batch, ...]:
        """Take up to `count` batches, fairest first.

        Args:
            count: Number of batches that the group lacks.
            having: Batches that the group already has. A refill must not undo their mix.
            loads: Number of batches assigned to each worker. Workers without any come first.
        """
        ranks = Counter(batch.worker for batch in having)
        begun = bool(ranks)
        ranks.update(loads)
        heads = _Heads(self._queues, ranks)
        taken = list[Batch]()
        while self._waiting and len(taken) < count:
            weights = level(self._backlog) if len(self._backlog) > 1 else {}
            if begun:
                here = heads.first()
                # Streams take turns only if several wait.
                stream = self._turns.choose(weights, here) if weights else None
                offset = here[stream or next(iter(here))]
            else:
                offset, begun = min(self._waiting), True
            if weights:
                self._pay(offset, weights)
            batch = self._remove(offset)
            heads.taken(batch.worker)
            taken.append(batch)
        return tuple(taken)

    def take_for(
        self, worker: WorkerId, live: Collection[WorkerId], count: int, first: int | None = None
    ) -> tuple[Batch, ...]:
        """Take up to `count` batches for one worker. Streams take turns.

        Args:
            worker: The worker that gets all of them: its own batches first, then the oldest of
                others.
            live: Living workers. Batches of all other workers come before everything else.
            count: Number of batches.
            first: A batch that must not wait any longer.
        """
        taken = list[Batch]()
        while self._waiting and len(taken) < count:
            weights = level(self._backlog) if len(self._backlog) > 1 else {}
            if first is not None and not taken:
                offset = first
            else:
                orphans = [each for each in self._queues if each not in live]
                heads = (
                    self._oldest(orphans) or self._oldest([worker]) or self._oldest(self._queues)
                )
                offset = heads[self._turns.choose(weights, heads) or next(iter(heads))]
            if weights:
                self._pay(offset, weights)
            taken.append(self._remove(offset))
        return tuple(taken)

    def waiting_of(self, worker: WorkerId) -> int:
        """Return the number of waiting batches of a worker."""
        return sum(map(len, self._queues.get(worker, {}).values()))

    def is_for(self, idle: Collection[WorkerId], live: Collection[WorkerId]) -> bool:
        """True if a waiting batch belongs to an idle worker, or to a worker that is not alive."""
        return bool(idle) and any(each in idle or each not in live for each in self._queues)

    def _oldest(self, workers: Iterable[WorkerId]) -> dict[str, int]:
        """Return the oldest batch of each stream, of these workers."""
        oldest = dict[str, int]()
        for worker in workers:
            for stream, offsets in self._queues.get(worker, {}).items():
                oldest[stream] = min(oldest.get(stream, offsets[0]), offsets[0])
        return oldest

    def _remove(self, offset: int) -> Batch:
        waiting = self._waiting.pop(offset)
        batch, stream = waiting.batch, waiting.stream
        for each, count in waiting.records.items():
            left = self._backlog[each] - count
            if left:
                self._backlog[each] = left
            else:
                del self._backlog[each]
        streams = self._queues[batch.worker]
        queue = streams[stream]
        queue.remove(offset)
        if not queue:
            del streams[stream]
            if not streams:
                del self._queues[batch.worker]
        return batch

    def _pay(self, offset: int, weights: Mapping[str, float]) -> None:
        """Charge each stream of a batch for its share of the turn."""
        records = self._waiting[offset].records
        total = sum(records.values())
        self._turns.pay({each: n / total for each, n in records.items()}, weights)


class _Heads:
    """The oldest batch of each worker and stream, in order of their turns.

    Args:
        queues: Waiting batches. The caller reports each removal by `taken`.
        ranks: Number of batches of each worker in the group.
    """

    def __init__(
        self, queues: Mapping[WorkerId, Mapping[str, list[int]]], ranks: dict[WorkerId, int]
    ) -> None:
        self._queues = queues
        self._ranks = ranks
        # Entries (rank, offset, worker) by stream. An entry with an outdated rank is void.
        self._heaps = dict[str, list[tuple[int, int, WorkerId]]]()
        for worker, streams in queues.items():
            rank = ranks.get(worker, 0)
            for stream, offsets in streams.items():
                if stream in self._heaps:
                    self._heaps[stream].append((rank, offsets[0], worker))
                else:
                    self._heaps[stream] = [(rank, offsets[0], worker)]
        for heap in self._heaps.values():
            heapify(heap)

    def first(self) -> dict[str, int]:
        """Return the oldest batch of each stream, only of workers of the lowest rank."""
        ranks, lowest, found = self._ranks, inf, dict[str, int]()
        for stream, heap in self._heaps.items():
            while heap and ranks.get(heap[0][2], 0) != heap[0][0]:
                heappop(heap)
            if heap and heap[0][0] <= lowest:
                if heap[0][0] < lowest:
                    lowest, found = heap[0][0], {}
                found[stream] = heap[0][1]
        return found

    def taken(self, worker: WorkerId) -> None:
        """Record that a batch of this worker was taken, so that its next one ranks lower."""
        rank = self._ranks[worker] = self._ranks.get(worker, 0) + 1
        for stream, offsets in self._queues.get(worker, NOTHING).items():
            heap = self._heaps[stream]
            # Usually the entry of the batch that was taken.
            if heap and heap[0][2] == worker:
                heapreplace(heap, (rank, offsets[0], worker))
            else:
                heappush(heap, (rank, offsets[0], worker))


def _weighed(batch: Batch) -> _Waiting:
    # The usual case.
    if len(batch.address) == 1:
        (span,) = batch.address
        return _Waiting(batch, {span.topic: span.end - span.start}, span.topic)
    records = dict[str, int]()
    for span in batch.address:
        records[span.topic] = records.get(span.topic, 0) + span.end - span.start
    stream = min(records, key=lambda each: (-records[each], each)) if len(records) > 1 else ""
    return _Waiting(batch, records, stream or next(iter(records)))
