"""Grouping rule: any K waiting batches make one model update.

The bulk queue of the paper (section III-B.2; Algorithm 3, and Algorithm 4 lines 3-5). Everything
that decides *which* batches form an update lives here; *when* the next group is taken is the
coordinator's gate, never the arrival of a K-th batch.
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
    """A batch that waits, and how many offsets of each stream it takes up."""

    batch: Batch
    records: dict[str, int]
    stream: str  # that most of it is of; of equals the first by name


class Grouper:
    """Accepted batches that wait for an update.

    The oldest batch of all begins each group: none starves. Then workers take turns, so that a busy
    one is rarely asked twice in a group: a worker's next batch ranks behind the first of all that
    have fewer in it. Within a rank streams take turns by what waits of each, so that a group does
    not learn from one stream because another's batches came later; within a stream the oldest
    leads.

    Measured on NSL-KDD as one stream of normal and one of hostile connections, read in runs of
    4,000 records, 400 batches waiting: held-out accuracy 0.944; by age alone 0.762.
    """

    def __init__(self, batches: Iterable[Batch] = ()) -> None:
        self._waiting = dict[int, _Waiting]()
        # Control offsets, oldest first, by the stream that most of a batch is of.
        self._queues = dict[WorkerId, dict[str, list[int]]]()
        self._backlog = dict[str, int]()  # records that wait, by stream
        self._turns = Turns()
        # The oldest batch, and the version since which it is the oldest.
        self._oldest_since: tuple[int | None, int] = (None, 0)
        for batch in batches:
            self.add(batch)

    def __len__(self) -> int:
        """Count the batches waiting."""
        return len(self._waiting)

    @property
    def oldest(self) -> int | None:
        """Control offset of the batch that has waited longest."""
        return min(self._waiting, default=None)

    def see_oldest(self, version: int) -> tuple[int | None, int]:
        """Return the oldest batch, and the version since which it is seen to be the oldest.

        Args:
            version: The newest version.
        """
        oldest = self.oldest
        if self._oldest_since[0] != oldest:
            self._oldest_since = oldest, version
        return self._oldest_since

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All that wait, oldest first."""
        return tuple(self._waiting[offset].batch for offset in sorted(self._waiting))

    def add(self, batch: Batch) -> None:
        """Queue a batch at its age: a new one last, one put back where it was."""
        if batch.offset in self._waiting:
            raise ValueError(f"batch {batch.offset} waits already")
        waiting = self._waiting[batch.offset] = _weighed(batch)
        backlog = self._backlog
        for stream, count in waiting.records.items():
            backlog[stream] = backlog.get(stream, 0) + count
        streams = self._queues.setdefault(batch.worker, {})
        insort(streams.setdefault(waiting.stream, []), batch.offset)

    def remove(self, offset: int) -> Batch | None:
        """Take one batch out of the queue; None where it does not wait."""
        return self._remove(offset) if offset in self._waiting else None

    def take(
        self, count: int, having: Iterable[Batch] = (), loads: Mapping[WorkerId, int] = NOBODY
    ) -> tuple[Batch, ...]:
        """Take up to `count` batches, fairest first.

        Args:
            count: How many the group lacks.
            having: Those that it has already, which a refill must not undo the mix of.
            loads: Batches that workers have in hand: who has none has the first turn.
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
                # Of a single stream nobody takes turns with it.
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
        """Take up to `count` batches for one worker; streams take turns.

        Args:
            worker: Who is asked for all of them: for its own, and for the oldest of others.
            live: Who can compute its own; before all others go the batches of those who cannot.
            count: How many.
            first: A batch that must wait no longer.
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
        """How many batches of a worker wait."""
        return sum(map(len, self._queues.get(worker, {}).values()))

    def is_for(self, idle: Collection[WorkerId], live: Collection[WorkerId]) -> bool:
        """Whether something waits that one of the idle workers would be asked for first."""
        return bool(idle) and any(each in idle or each not in live for each in self._queues)

    def _oldest(self, workers: Iterable[WorkerId]) -> dict[str, int]:
        """The oldest batch of each stream, of these workers."""
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
        """Let the streams of a batch pay for it, of several that take turns."""
        records = self._waiting[offset].records
        total = sum(records.values())
        self._turns.pay({each: n / total for each, n in records.items()}, weights)


class _Heads:
    """The oldest batch of each worker and stream, and whose turn it is.

    Args:
        queues: What waits; whoever takes a batch from there says so by `taken`.
        ranks: Batches of each worker in the group.
    """

    def __init__(
        self, queues: Mapping[WorkerId, Mapping[str, list[int]]], ranks: dict[WorkerId, int]
    ) -> None:
        self._queues = queues
        self._ranks = ranks
        # By stream, as (rank, offset, worker); what a worker had at an earlier rank is void.
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
        """By stream the oldest batch of workers of the lowest rank; others have none of theirs."""
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
        """A batch of this worker is in the group now: it has its next turn a rank later."""
        rank = self._ranks[worker] = self._ranks.get(worker, 0) + 1
        for stream, offsets in self._queues.get(worker, NOTHING).items():
            heap = self._heaps[stream]
            if heap and heap[0][2] == worker:  # mostly the one that was taken
                heapreplace(heap, (rank, offsets[0], worker))
            else:
                heappush(heap, (rank, offsets[0], worker))


def _weighed(batch: Batch) -> _Waiting:
    if len(batch.address) == 1:  # the common road
        (span,) = batch.address
        return _Waiting(batch, {span.topic: span.end - span.start}, span.topic)
    records = dict[str, int]()
    for span in batch.address:
        records[span.topic] = records.get(span.topic, 0) + span.end - span.start
    stream = min(records, key=lambda each: (-records[each], each)) if len(records) > 1 else ""
    return _Waiting(batch, records, stream or next(iter(records)))
