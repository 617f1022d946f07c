"""How loss and metrics went, over all updates of a job, in at most some 2,000 blocks.

A block holds the means of a run of versions; runs have the same length and begin at its multiples,
so that two neighbours become one when there are too many:

    versions   1-2  3-4  5-6  7-8  9        one more than fit
               1-4       5-8       9        each run twice as long
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from services.admin.live.thinned import POINTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.jobs.progress import Row

_RATE_S = 10.0  # of updates per second, as in progress


class Points(NamedTuple):
    """One curve each, all of one length; a point stands where its block ends."""

    at_s: list[float]
    version: list[int]
    loss: list[float]
    metrics: dict[str, list[float | None]]
    updates_per_s: list[float]


class _Block:
    __slots__ = ("at_s", "loss", "metrics", "run", "samples", "version")

    def __init__(self, run: int) -> None:
        self.run = run
        self.version = 0
        self.at_s = 0.0
        self.samples = 0
        self.loss = 0.0  # summed over the samples
        self.metrics = defaultdict[str, list[float]](lambda: [0.0, 0.0])  # likewise; the samples

    def take(self, row: Row, at_s: float) -> None:
        weight = max(row.samples, 1)
        self.version, self.at_s = row.version, at_s
        self.samples += weight
        self.loss += row.loss * weight
        for name, value in row.metrics.items():
            sums = self.metrics[name]
            sums[0] += value * weight
            sums[1] += weight

    def swallow(self, later: _Block) -> None:
        self.version, self.at_s = later.version, later.at_s
        self.samples += later.samples
        self.loss += later.loss
        for name, (total, weight) in later.metrics.items():
            sums = self.metrics[name]
            sums[0] += total
            sums[1] += weight


class LossCurve:
    """The blocks so far.

    Args:
        capacity: Blocks at most.
    """

    def __init__(self, capacity: int = POINTS) -> None:
        self._capacity = capacity
        self._blocks = list[_Block]()
        self.length = 1  # versions of a block

    def append(self, row: Row) -> None:
        """Take in the next version; one without a time gets that of the one before."""
        run = (row.version - 1) // self.length
        if not self._blocks or self._blocks[-1].run != run:
            self._blocks.append(_Block(run))
        before_s = self._blocks[-2].at_s if len(self._blocks) > 1 else 0.0
        self._blocks[-1].take(row, row.at_s or self._blocks[-1].at_s or before_s)
        if len(self._blocks) > self._capacity:
            self._merge()

    def first_of(self, version: int) -> int:
        """The first version of the block that holds a version."""
        return (version - 1) // self.length * self.length + 1

    def take_back(self, version: int, left: Iterable[Row]) -> None:
        """Forget all updates above a version.

        Args:
            version: The last that stays.
            left: Updates from `first_of(version)` to it, as far as they are known.
        """
        taken = False
        while self._blocks and self._blocks[-1].version > version:
            self._blocks.pop()
            taken = True
        if taken:
            for row in left:
                if not self._blocks or row.version > self._blocks[-1].version:
                    self.append(row)

    def points(self) -> Points:
        """One point for each block."""
        blocks = self._blocks
        names = sorted({name for block in blocks for name in block.metrics})
        return Points(
            [block.at_s for block in blocks],
            [block.version for block in blocks],
            [block.loss / block.samples for block in blocks],
            {name: [_mean(block, name) for block in blocks] for name in names},
            self._rates(),
        )

    def _merge(self) -> None:
        self.length *= 2
        merged = list[_Block]()
        for block in self._blocks:
            block.run //= 2
            if merged and merged[-1].run == block.run:
                merged[-1].swallow(block)
            else:
                merged.append(block)
        self._blocks = merged

    def _rates(self) -> list[float]:
        """Updates per second of the last 10 s before each point, or since the point before it."""
        rates, first = list[float](), 0
        for index, block in enumerate(self._blocks):
            while first < index - 1 and self._blocks[first].at_s < block.at_s - _RATE_S:
                first += 1
            since = self._blocks[first]
            span_s = block.at_s - since.at_s
            rates.append((block.version - since.version) / span_s if span_s > 0 else 0.0)
        if len(rates) > 1:
            rates[0] = rates[1]  # nobody knows since when the first one was under way
        return rates


def _mean(block: _Block, name: str) -> float | None:
    total, weight = block.metrics.get(name, (0.0, 0.0))
    return total / weight if weight else None
