"""Running tallies, of gradients among others, from which estimates are made.

What is old counts less: half as much after each half-life, so that a tally follows what drifts. A
tally keeps sums and no history; contributions may come late and in any order, and each weighs what
its own time says. The law that an estimate then has takes the weights for counts. If nothing
drifts, that is too careful by a factor of up to sqrt(2): what has faded would still be true.
"""

from __future__ import annotations

import math

from common.spot.theory.errors import ParameterError
from common.spot.theory.estimates import Estimate

TRANSFER_HALF_LIFE = 100.0  # updates: a change of compression shows within some
ROUNDING = 1e-9  # less freedom than this share of the messages is none


class Sums:
    """Sums over time that forget.

    Args:
        terms: How many sums.
        half_life_s: After which a contribution counts half; infinite to forget nothing.
    """

    def __init__(self, terms: int, half_life_s: float = math.inf) -> None:
        self._decay_per_s = math.log(2) / half_life_s
        self._totals: list[float] = [0.0] * terms
        self._as_of_s = -math.inf

    def add(self, since_s: float, until_s: float, *terms: float) -> None:
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

    def at(self, now_s: float) -> list[float]:
        """The sums as they count now; what came after now counts in full."""
        fade = 1.0
        if self._decay_per_s:
            fade = math.exp(self._decay_per_s * min(self._as_of_s - now_s, 0.0))
        return [total * fade for total in self._totals]


class GradientTally:
    """Mean time that the gradient of one batch takes: mu_C, with what its scatter leaves unsure.

    A message is over m batches and gives one time, their sum. Divided by m it weighs m and scatters
    by sigma_C^2 / m, if the batches are independent. The moments are about the first time, which
    keeps them as exact as Welford's recurrence does, and as sums they take in what comes late.

    Args:
        half_life_s: After which a message counts half; infinite to forget nothing.
    """

    def __init__(self, half_life_s: float = math.inf) -> None:
        self._sums = Sums(4, half_life_s)  # messages, batches m, and m d, m d^2 of deviations d
        self._squares = Sums(1, half_life_s / 2)  # of weights: they fade twice as fast
        self._about_s: float | None = None

    def add(self, at_s: float, seconds: float, batches: float = 1.0) -> None:
        """Take in the compute time of a message over so many batches."""
        if self._about_s is None:
            self._about_s = seconds / batches
        deviation = seconds / batches - self._about_s
        self._sums.add(at_s, at_s, 1.0, batches, batches * deviation, batches * deviation**2)
        self._squares.add(at_s, at_s, batches)

    def mean(self, now_s: float) -> Estimate:
        """Estimate mu_C; the standard deviation is infinite after a single message.

        Raises:
            ParameterError: If there was no time yet.
        """
        messages, m, first, second = self._sums.at(now_s)
        if self._about_s is None or not m > 0:
            raise ParameterError("seconds", "no gradient was computed yet: wait for one")
        shift_s = first / m
        std, freedom = math.inf, messages - self._squares.at(now_s)[0] / m
        if freedom > ROUNDING * messages:
            std = math.sqrt(max(second - m * shift_s**2, 0.0) / freedom / m)
        return Estimate(self._about_s + shift_s, std)


class TransferTally:
    """Mean megabytes that a machine moves for an update, by what audit records say.

    It forgets by updates and not by time: whoever reads the same records knows the same.
    """

    def __init__(self) -> None:
        self._means = GradientTally(TRANSFER_HALF_LIFE)
        self._newest: float | None = None

    def add(self, update: float, moved: int, share: float) -> None:
        """Take in what was measured.

        Args:
            update: As how many of the job's own the updates count, up to this one.
            moved: Bytes for this one.
            share: As how many it counts itself.
        """
        self._means.add(update, moved / share / 1e6)
        self._newest = update

    def mean(self) -> Estimate | None:
        """Estimate it, in MB; None: nothing was measured yet.

        After a single measurement the standard deviation is of its size.
        """
        if self._newest is None:
            return None
        mean = self._means.mean(self._newest)
        std = float(mean.std)
        return Estimate(mean.value, std if math.isfinite(std) else float(mean.value))
