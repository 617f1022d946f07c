"""Running tallies, of gradients among others, from which estimates are made.

What is old counts less: half as much after each half-life, so that a tally follows what drifts. A
tally keeps sums and no history; contributions may come late and in any order, and each weighs what
its own time says. The law that an estimate then has takes the weights for counts. If nothing
drifts, that is too careful by a factor of up to sqrt(2): what has faded would still be true.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from common.theory.errors import ParameterError
from common.theory.estimates import Estimate, check, plain

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.theory.estimates import Numbers

    _Array: TypeAlias = npt.NDArray[np.float64]

ROUNDING = 1e-9  # less freedom than this share of the messages is none


class Sums:
    """Sums over time that forget; floats or arrays alike.

    Args:
        terms: How many sums.
        half_life_s: After which a contribution counts half; infinite to forget nothing.

    Raises:
        ParameterError: If the half-life is not above 0.
    """

    def __init__(self, terms: int, half_life_s: float = math.inf) -> None:
        if not half_life_s > 0:
            raise ParameterError("half_life_s", f"must be above 0, got {half_life_s:g}")
        self._decay_per_s = math.log(2) / half_life_s
        self._totals: list[Numbers] = [0.0] * terms
        self._as_of_s = -math.inf

    def add(self, since_s: float, until_s: float, *terms: Numbers) -> None:
        """Add what came evenly between two times; an instant may be given as both."""
        decay = self._decay_per_s
        if not decay:
            self._totals = [total + term for total, term in zip(self._totals, terms, strict=True)]
            return
        if until_s > self._as_of_s:
            fade = math.exp(decay * (self._as_of_s - until_s))
            self._totals = [total * fade for total in self._totals]
            self._as_of_s = until_s
        # The mean of the weight over the time, so that it is the same however the time is cut.
        length = decay * (until_s - since_s)
        weight = -math.expm1(-length) / length if length else 1.0
        weight *= math.exp(decay * (until_s - self._as_of_s))
        self._totals = [t + weight * term for t, term in zip(self._totals, terms, strict=True)]

    def at(self, now_s: float) -> list[Numbers]:
        """The sums as they count now; what came after now counts in full."""
        fade = 1.0
        if self._decay_per_s:
            fade = math.exp(self._decay_per_s * min(self._as_of_s - now_s, 0.0))
        return [total * fade for total in self._totals]


class GradientTally:
    """Mean and variance of the time that the gradient of one batch takes: mu_C and sigma_C^2.

    A message is over m batches and gives one time, their sum. Divided by m it weighs m and scatters
    by sigma_C^2 / m, if the batches are independent. The moments are about each worker's first
    time, which keeps them as exact as Welford's recurrence does, and as sums they take in what
    comes late. Floats for one worker or a pool, arrays for many.

    Args:
        half_life_s: After which a message counts half; infinite to forget nothing.

    Raises:
        ParameterError: If the half-life is not above 0.
    """

    def __init__(self, half_life_s: float = math.inf) -> None:
        self._sums = Sums(4, half_life_s)  # messages, batches m, and m d, m d^2 of deviations d
        self._squares = Sums(1, half_life_s / 2)  # of weights: they fade twice as fast
        self._about_s: npt.NDArray[np.float64] = np.asarray(math.nan)

    def add(self, at_s: float, seconds: Numbers, batches: Numbers = 1.0) -> None:
        """Take in the compute time of a message over so many batches; over none, it says nothing.

        Raises:
            ParameterError: If a number is out of range.
        """
        check("seconds", seconds)
        check("batches", batches)
        m = np.asarray(batches, np.float64)
        each_s = np.asarray(seconds) / np.where(m > 0, m, 1.0)
        unseen = np.isnan(self._about_s) & (m > 0)
        self._about_s = np.where(unseen, each_s, self._about_s)
        deviation = np.where(m > 0, each_s - self._about_s, 0.0)
        moments = (plain(m > 0), plain(m), plain(m * deviation), plain(m * deviation**2))
        self._sums.add(at_s, at_s, *moments)
        self._squares.add(at_s, at_s, plain(m))

    def mean(self, now_s: float) -> Estimate:
        """Estimate mu_C; the standard deviation is infinite after a single message.

        Raises:
            ParameterError: If a worker has given no time yet.
        """
        batches, shift_s, variance, freedom = self._moments(now_s)
        known = freedom > 0
        std = np.where(known, np.sqrt(variance / batches), np.inf)
        return Estimate(plain(self._about_s + shift_s), plain(std))

    def variance(self, now_s: float) -> Estimate:
        """Estimate sigma_C^2; its own uncertainty is that of a normal law's variance.

        Raises:
            ParameterError: If a worker has not given two times yet.
        """
        _, _, variance, freedom = self._moments(now_s)
        if not (freedom > 0).all():
            raise ParameterError("seconds", "a variance takes two messages of every worker: wait")
        return Estimate(plain(variance), plain(variance * np.sqrt(2 / freedom)), "gamma")

    def _moments(self, now_s: float) -> tuple[_Array, _Array, _Array, _Array]:
        """Weight in batches, mean and variance about the first time, degrees of freedom."""
        messages, m, first, second = (np.asarray(total) for total in self._sums.at(now_s))
        if not (m > 0).all():
            raise ParameterError("seconds", "a worker has computed no gradient yet: wait for one")
        shift_s = first / m
        freedom = messages - np.asarray(self._squares.at(now_s)[0]) / m
        freedom = np.where(freedom > ROUNDING * messages, freedom, 0.0)
        squared = np.maximum(second - m * shift_s**2, 0.0)
        return m, shift_s, squared / np.where(freedom > 0, freedom, 1.0), freedom
