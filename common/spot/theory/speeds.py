"""How fast machines of each pool compute, from updates that machines of several have made together.

An update tells the mean time of its gradients, and which machine has made each. With n_p of them
from pool p, and g_p the time that one takes there,

    n gradient_s  =  sum over p of n_p g_p

which is linear in g: least squares over the updates of late, with what was said beforehand as some
gradients more. Where all updates have the same mix, that says how pools compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

PRIOR_GRADIENTS = 4.0  # that count for what was said: noise moves speeds by a quarter of its size
LIKELY = 1e-3  # of a mean time; a gradient takes no less


class SpeedTally:
    """Speeds of pools, against the first one where that was seen, else as they were said to be.

    Args:
        said: (P,) speeds, as they were said to be.
        half_life_s: After which an update counts half.
    """

    def __init__(self, said: Sequence[float], half_life_s: float) -> None:
        self._said, self._half_life_s = np.array(said, np.float64), half_life_s
        self._squares = np.zeros((len(said), len(said)))
        self._products = np.zeros(len(said))
        self._gradients = np.zeros(len(said))
        self._at_s = float("-inf")

    def add(self, now_s: float, made: Sequence[int], gradient_s: float) -> None:
        """Take in an update.

        Args:
            now_s: Seconds; earlier ones count as if they were now.
            made: (P,) gradients of each pool.
            gradient_s: Mean time of all of them.
        """
        many = np.array(made, np.float64)
        if not many.any():
            return
        if now_s > self._at_s:
            kept = 0.5 ** ((now_s - self._at_s) / self._half_life_s)
            self._squares *= kept
            self._products *= kept
            self._gradients *= kept
            self._at_s = now_s
        # An update of n gradients tells their mean n times as surely as one of a single gradient.
        total = float(many.sum())
        self._squares += np.outer(many, many) / total
        self._products += many * gradient_s
        self._gradients += many

    @property
    def speeds(self) -> Array:
        """(P,) of each pool; those of which nothing was seen are as said."""
        seen = self._gradients > 0
        if not seen.any():
            return self._said.copy()
        weights = self._gradients[seen]
        said = 1 / self._said[seen]
        # The one time that explains most, were pools to each other as they are said to be.
        squares = self._squares[np.ix_(seen, seen)]
        unit_s = float(said @ self._products[seen]) / float(said @ squares @ said)
        prior = PRIOR_GRADIENTS * np.minimum(weights / weights.max(), 1.0) + LIKELY
        found_s = np.linalg.solve(
            squares + np.diag(prior), self._products[seen] + prior * unit_s * said
        )
        found_s = np.maximum(found_s, LIKELY * unit_s)
        base_s = found_s[0] * self._said[0] if seen[0] else unit_s
        speeds = self._said.copy()
        speeds[seen] = base_s / found_s
        return speeds
