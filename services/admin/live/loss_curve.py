"""Curves in bounded memory, however long a job runs: as many points as a page is wide.

`LossCurve` has loss and metrics over all updates. Each of its blocks holds the means of a run of
versions; runs have the same length and begin at its multiples, so that two neighbours become one
when there are too many:

    versions   1-2  3-4  5-6  7-8  9        one more than fit
               1-4       5-8       9        each run twice as long
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.jobs.progress import Row

POINTS = 2000  # as wide as a page: more could not be told apart
_RATE_S = 10.0  # of updates per second, as in progress


class Points(NamedTuple):
    """One curve each, all of one length; a point stands where its block ends."""

    update_at_s: tuple[float, ...]
    version: tuple[int, ...]
    loss: tuple[float, ...]
    metrics: dict[str, tuple[float | None, ...]]
    updates_per_s: tuple[float, ...]


@dataclass(slots=True)
class _Block:
    run: int
    version: int  # the last
    at_s: float  # when that was made
    samples: int
    loss: float  # summed over the samples
    metrics: dict[str, tuple[float, int]]  # likewise; the samples

    def swallow(self, later: _Block) -> None:
        self.version, self.at_s = later.version, later.at_s
        self.samples += later.samples
        self.loss += later.loss
        for name, (total, weight) in later.metrics.items():
            before, among = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = before + total, among + weight

    def mean(self, name: str) -> float | None:
        total, weight = self.metrics.get(name, (0.0, 0))
        return total / weight if weight else None


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
        run, weight = (row.version - 1) // self.length, max(row.samples, 1)
        at_s = row.at_s or (self._blocks[-1].at_s if self._blocks else 0.0)
        metrics = {
            name: (value * (count := max(row.measured[name], 1)), count)
            for name, value in row.metrics.items()
        }
        self._add(_Block(run, row.version, at_s, weight, row.loss * weight, metrics))
        if len(self._blocks) > self._capacity:
            self.length *= 2
            blocks, self._blocks = self._blocks, []
            for block in blocks:
                block.run //= 2
                self._add(block)

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
            tuple(block.at_s for block in blocks),
            tuple(block.version for block in blocks),
            tuple(block.loss / block.samples for block in blocks),
            {name: tuple(block.mean(name) for block in blocks) for name in names},
            tuple(self._rates()),
        )

    def _add(self, block: _Block) -> None:
        if self._blocks and self._blocks[-1].run == block.run:
            self._blocks[-1].swallow(block)
        else:
            self._blocks.append(block)

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
