"""Speeds of machines of each pool, from updates that several pools have made together.

An update reports the mean time of its n gradients, and the number n_p that machines of pool p
computed. With the time g_p of a gradient on pool p,

    n gradient_s  =  sum over p of n_p g_p

is linear in g. Least squares over recent updates solve it, with the stated speeds as a few more
gradients. If all updates have the same mix, the stated speeds give the ratios of pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

# Number of gradients as which the stated speeds count. Noise of the measured times changes speeds
# by a quarter of its own size.
PRIOR_GRADIENTS = 4.0
# Lower bound of a gradient's time, as a share of the mean.
LIKELY = 1e-3


class SpeedTally:
    """Speeds of pools, relative to the first pool, or to the stated speeds if it was not observed.

    Args:
        said: (P,) stated speeds.
        half_life_s: Time after which an update counts half.
    """

    def __init__(self, said: Sequence[float], half_life_s: float) -> None:
        self._said, self._half_life_s = np.array(said, np.float64), half_life_s
        self._squares = np.zeros((len(said), len(said)))
        self._products = np.zeros(len(said))
        self._gradients = np.zeros(len(said))
        self._at_s = float("-inf")

    def add(self, now_s: float, made: Sequence[int], gradient_s: float) -> None:
        """Add an update.

        Args:
            now_s: Time of the update. If it is before that of an earlier call, it counts as that.
            made: (P,) gradients of each pool.
            gradient_s: Mean time of all these gradients.
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
        # The mean of n gradients is n times as certain as a single gradient.
        total = float(many.sum())
        self._squares += np.outer(many, many) / total
        self._products += many * gradient_s
        self._gradients += many

    @property
    def speeds(self) -> Array:
        """(P,) speeds of the pools; stated ones if not observed."""
        seen = self._gradients > 0
        if not seen.any():
            return self._said.copy()
        weights = self._gradients[seen]
        said = 1 / self._said[seen]
        # Time of a gradient at speed 1, by least squares, if the stated ratios of pools were right.
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
