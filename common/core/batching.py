"""Cut a worker's records into batches of b (Algorithm 1), by offsets alone.

Rule 1: a batch's content is its address, so this module never sees a record. Rule 2: what is cut
depends on the records and their order, never on how polls happened to chunk them. Rule 3: each span
of a partition starts where the previous one ended, whatever offsets are missing in between.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from common.core.spans import Partition, Span, address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.messages import Skipped
    from common.core.spans import Address

MAX_SKIPPED = 1000  # a batch closes at this many bad records: an indicator stays under about 100 kB


class Run(msgspec.Struct, frozen=True):
    """Consecutive records of one partition, as decoded: which offsets are good, which are not."""

    partition: Partition
    offsets: Sequence[int]  # of the records that decoded, increasing
    skipped: tuple[Skipped, ...]  # of those that did not, increasing offsets
    first_arrival_s: float
    last_arrival_s: float


class Cut(msgspec.Struct, frozen=True):
    """A closed batch: its address, and how many samples each of its spans holds."""

    address: Address
    counts: tuple[int, ...]  # samples per span, in the order of the address
    skipped: tuple[Skipped, ...]
    first_arrival_s: float
    last_arrival_s: float

    @property
    def samples(self) -> int:
        """Records that decoded."""
        return sum(self.counts)


@dataclass(slots=True)
class _Open:
    """The part of the open batch that lies in one partition."""

    start: int
    end: int
    samples: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    first_arrival_s: float = 0.0
    last_arrival_s: float = 0.0


class Batcher:
    """The batch that a worker is filling, over all partitions that it reads.

    Args:
        batch_size: b >= 1, samples in a batch.
        linger_s: Close a partial batch this long after its first record; None for never.

    Raises:
        ValueError: If `batch_size` is less than 1.
    """

    def __init__(self, batch_size: int, linger_s: float | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._batch_size = batch_size
        self._linger_s = linger_s
        self._positions = dict[Partition, int]()
        self._open = dict[Partition, _Open]()
        self._samples = 0
        self._skipped = 0
        self._opened_at = 0.0

    @property
    def samples(self) -> int:
        """Samples in the open batch."""
        return self._samples

    def position(self, partition: Partition) -> int | None:
        """Where the next record of a partition is expected, None while it is not read."""
        return self._positions.get(partition)

    def has_open(self, partition: Partition) -> bool:
        """Whether the open batch holds records of this partition."""
        return partition in self._open

    def place(self, partition: Partition, position: int) -> None:
        """Begin a partition's next span at `position`, forgetting what was open of it."""
        self.drop(partition)
        self._positions[partition] = position

    def drop(self, partition: Partition) -> None:
        """Forget a partition: its position, and its part of the open batch."""
        self._positions.pop(partition, None)
        part = self._open.pop(partition, None)
        if part is not None:
            self._samples -= part.samples
            self._skipped -= len(part.skipped)

    def add(self, run: Run, now: float) -> tuple[Cut, ...]:
        """Take in a run; returns the batches that it completes, oldest first.

        Raises:
            ValueError: If the partition has no position, or the run begins below it: some reader
                would then mistake records that it never got for a hole in the log.
        """
        position = self._positions.get(run.partition)
        if position is None:
            raise ValueError(f"{run.partition} was read before it was placed")
        offsets, skipped = run.offsets, run.skipped
        begin = offsets[0] if offsets else position
        if skipped:
            begin = min(begin, skipped[0].offset) if offsets else skipped[0].offset
        if begin < position:
            raise ValueError(f"{run.partition} gave offset {begin} below its position {position}")
        cuts = list[Cut]()
        i = j = 0  # samples and skipped records of the run taken in so far
        while i < len(offsets) or j < len(skipped):
            end, i_next, j_next = self._next_end(run, i, j)
            self._extend(run, (i, i_next), (j, j_next), end, now)
            i, j = i_next, j_next
            if self._samples >= self._batch_size or self._skipped >= MAX_SKIPPED:
                cuts.append(self._close())
        return tuple(cuts)

    def resize(self, batch_size: int) -> Cut | None:
        """Make batches of this size from now on.

        Returns:
            The open batch, closed as it is, where it holds as many samples already.

        Raises:
            ValueError: If `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._batch_size = batch_size
        return self._close() if self._samples >= batch_size else None

    def due(self) -> float | None:
        """When a partial batch has to go, or None."""
        if self._linger_s is None or not self._open:
            return None
        return self._opened_at + self._linger_s

    def close(self) -> Cut | None:
        """Close the open batch as it is; None where it is empty."""
        return self._close() if self._open else None

    def _next_end(self, run: Run, i: int, j: int) -> tuple[int, int, int]:
        """Position up to which the run fits into the open batch, as (position, i, j)."""
        offsets, skipped = run.offsets, run.skipped
        last_good = i + self._batch_size - self._samples - 1  # the sample that would fill the batch
        last_bad = j + MAX_SKIPPED - self._skipped - 1
        full_at = offsets[last_good] if last_good < len(offsets) else None
        if not skipped:  # the common road
            end = offsets[-1] + 1 if full_at is None else full_at + 1
            return end, min(last_good + 1, len(offsets)), 0
        bad_at = skipped[last_bad].offset if last_bad < len(skipped) else None
        ends = [x for x in (full_at, bad_at) if x is not None]
        end = min(ends) + 1 if ends else max([*offsets[-1:], skipped[-1].offset]) + 1
        return end, bisect_left(offsets, end), bisect_left(skipped, end, key=lambda s: s.offset)

    def _extend(
        self, run: Run, good: tuple[int, int], bad: tuple[int, int], end: int, now: float
    ) -> None:
        if not self._open:
            self._opened_at = now
        part = self._open.get(run.partition)
        # Arrival times inside a run are interpolated: only its ends are known.
        n = max(len(run.offsets) - 1, 1)
        slope_s = (run.last_arrival_s - run.first_arrival_s) / n
        if part is None:
            start = self._positions[run.partition]
            first_s = run.first_arrival_s + slope_s * good[0]
            part = self._open[run.partition] = _Open(start, end, first_arrival_s=first_s)
        part.end = self._positions[run.partition] = end
        part.samples += good[1] - good[0]
        part.skipped += run.skipped[bad[0] : bad[1]]
        part.last_arrival_s = run.first_arrival_s + slope_s * max(good[1] - 1, 0)
        self._samples += good[1] - good[0]
        self._skipped += bad[1] - bad[0]

    def _close(self) -> Cut:
        if len(self._open) == 1:  # the common road
            ((place, part),) = self._open.items()
            self._open = {}
            self._samples = self._skipped = 0
            address = (Span(*place, part.start, part.end),)
            counts, skipped = (part.samples,), tuple(part.skipped)
            return Cut(address, counts, skipped, part.first_arrival_s, part.last_arrival_s)
        parts = sorted(self._open.items())
        self._open = {}
        self._samples = self._skipped = 0
        return Cut(
            address=address_of(Span(*p, part.start, part.end) for p, part in parts),
            counts=tuple(part.samples for _, part in parts),
            skipped=tuple(s for _, part in parts for s in part.skipped),
            first_arrival_s=min(part.first_arrival_s for _, part in parts),
            last_arrival_s=max(part.last_arrival_s for _, part in parts),
        )
