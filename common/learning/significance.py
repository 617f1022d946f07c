"""Which changes of the weights are significant: workers compute at a view that leaves out the rest.

The weights themselves have every gradient; what is inexact is only where the next ones are taken.
The view follows a weight once it is off by more than a share of the weight, and that share shrinks
with the root of the updates (MLLess, section 3.1; its filter acts on each worker's own sum, and
what that holds back dies with the worker). A share alone finds every weight near 0 significant, so
the root mean square of all weights that are not 0 is its floor.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.core.vectors import SparseVector

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector

WHOLE_FROM = 0.4  # of the parameters: where so many changed the whole view is sent
_CHUNK = 1 << 18  # weights that are looked at together: a megabyte stays in the cache


class Compression(NamedTuple):
    """Which changes are sent: those that are significant, or the largest; one of both is given."""

    significance: float | None = None  # v > 0: off by more than v / sqrt(J) of a weight
    changes: float | None = None  # 0..1: so much of the parameters per version, at most


class KnownWeights:
    """The weights as every worker knows them that has heard of each version.

    Args:
        weights: (P + B,) float32, copied: what all know.
        parameter_count: P; buffers are always sent.
        compression: Which changes are; may be set to another.
    """

    def __init__(self, weights: Vector, parameter_count: int, compression: Compression) -> None:
        self.weights = weights.copy()
        self._split = parameter_count
        self.compression = compression
        self._scratch = np.empty(min(_CHUNK, len(weights)), np.float32)

    def follow(self, weights: Vector, version: int) -> SparseVector | None:
        """Take over what has changed significantly.

        Args:
            weights: (P + B,) float32: the new version.
            version: J.

        Returns:
            Numbers of weights and what they are now; None where that are so many that all are told:
            then the view is the weights.
        """
        split = self._split
        if self.compression.changes is not None:
            indices = self._largest(weights[:split], self.compression.changes)
        else:
            share = (self.compression.significance or 0.0) / sqrt(max(version, 1))
            indices = self._significant(weights[:split], share)
        if len(indices) > WHOLE_FROM * split:
            self.weights[:] = weights
            return None
        selected = np.concatenate((indices, np.arange(split, len(weights))))
        values = weights[selected]
        self.weights[selected] = values
        return SparseVector(len(weights), selected, values[:, None])

    def _significant(self, parameters: Vector, share: float) -> npt.NDArray[np.intp]:
        nonzero = max(np.count_nonzero(parameters != 0), 1)  # 4 times faster than of the numbers
        floor = sqrt(np.dot(parameters, parameters) / nonzero)
        # Few are off by as much as the floor asks; only at those is their own share looked at.
        bound = np.float32(floor) * np.float32(share)
        indices = np.concatenate(
            [
                start + np.flatnonzero(self._off(parameters[start : start + _CHUNK], start) > bound)
                for start in range(0, max(len(parameters), 1), _CHUNK)
            ]
        )
        now = parameters[indices]
        off = np.abs(now - self.weights[indices])
        significant: npt.NDArray[np.bool_] = off > np.maximum(np.abs(now), floor) * share
        return indices[significant]

    def _off(self, now: Vector, start: int) -> Vector:
        """How far from these weights the view is; the next call overwrites it."""
        off = self._scratch[: len(now)]
        np.subtract(now, self.weights[start : start + len(now)], out=off)
        return np.abs(off, out=off)

    def _largest(self, parameters: Vector, share: float) -> npt.NDArray[np.intp]:
        off = np.abs(parameters - self.weights[: len(parameters)])
        changed = np.flatnonzero(off)
        most = ceil(share * len(parameters))
        if len(changed) > most:
            changed = np.sort(changed[np.argpartition(off[changed], -most)[-most:]])
        return changed
