"""Select significant changes of weights. Workers compute at a view, without the other changes.

The weights themselves have every gradient; only the point at which the next gradients are computed
is inexact. The view takes over a weight if it differs by more than a share of the weight. This
share shrinks with the square root of the number of updates (MLLess, section 3.1; there, each worker
filters its own sum, and what it holds back is lost with the worker). With a share alone, all
changes of weights near 0 would be significant. So each weight counts at least as the root mean
square of all nonzero weights.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.core.vectors import SparseVector

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector

# Share of changed parameters above which the whole view is sent.
WHOLE_FROM = 0.4
# Number of weights that are compared at once: a megabyte stays in the cache.
_CHUNK = 1 << 18


class Compression(NamedTuple):
    """Rule for the changes to send: significant ones, or the largest. Exactly one field is set."""

    # v > 0: differences above v / sqrt(J) of a weight are sent.
    significance: float | None = None
    # 0..1: maximum share of the parameters per version.
    changes: float | None = None


class KnownWeights:
    """The weights as known to every worker that has received each version.

    Args:
        weights: (P + B,) float32, copied. All workers know these.
        parameter_count: P. Buffers are always sent.
        compression: Rule for the changes to send. It may be replaced later.
    """

    def __init__(self, weights: Vector, parameter_count: int, compression: Compression) -> None:
        self.weights = weights.copy()
        self._split = parameter_count
        self.compression = compression
        self._scratch = np.empty(min(_CHUNK, len(weights)), np.float32)

    def follow(self, weights: Vector, version: int) -> SparseVector | None:
        """Take over the selected changes.

        Args:
            weights: (P + B,) float32, the new version.
            version: J

        Returns:
            Indexes and new values of the changed weights. None if there are too many; then the view
                equals the weights, and all are sent.
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
        # The comparison makes this 4 times faster than counting on the numbers themselves.
        nonzero = max(np.count_nonzero(parameters != 0), 1)
        floor = sqrt(np.dot(parameters, parameters) / nonzero)
        # Few weights exceed the floor's bound. Only these are compared with their own bound.
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
        """Return the distance of the view from these weights. The next call overwrites it."""
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
