"""Running tallies for estimates, such as gradient times.

Contributions lose half of their weight after each half-life, so that a tally follows drifts. A
tally keeps sums and no history. Contributions may come late and in any order, and each has the
weight of its own time. The estimate's distribution uses the weights as counts. Without drift, this
overestimates the error by a factor of up to sqrt(2), because faded contributions would still be
valid.
"""

from __future__ import annotations

import math

from common.spot.theory.errors import ParameterError
from common.spot.theory.estimates import Estimate

# Number of updates after which a contribution counts half, as after a change of compression.
TRANSFER_HALF_LIFE = 100.0
# Share of the messages below which degrees of freedom are a rounding error and count as none.
ROUNDING = 1e-9


class Sums:
    """Sums over time with decay.

    Args:
        terms: Number of sums.
        half_life_s: Time after which a contribution counts half; infinite for no decay.
    """

    def __init__(self, terms: int, half_life_s: float = math.inf) -> None:
        self._decay_per_s = math.log(2) / half_life_s
        self._totals: list[float] = [0.0] * terms
        self._as_of_s = -math.inf

    def add(self, since_s: float, until_s: float, *terms: float) -> None:
        """Add terms that came evenly between two times, which may be equal."""
        decay = self._decay_per_s
        if not decay:
            self._totals = [total + term for total, term in zip(self._totals, terms, strict=True)]
            return
        if until_s > self._as_of_s:
            fade = math.exp(decay * (self._as_of_s - until_s))
            self._totals = [total * fade for total in self._totals]
            self._as_of_s = until_s
        # The mean weight over the time, so that the result does not depend on how the time is
        # split.
        length = decay * (until_s - since_s)
        weight = -math.expm1(-length) / length if length else 1.0
        weight *= math.exp(decay * (until_s - self._as_of_s))
        self._totals = [t + weight * term for t, term in zip(self._totals, terms, strict=True)]

    def at(self, now_s: float) -> list[float]:
        """Return the sums after decay until `now_s`. Later contributions count in full."""
        fade = 1.0
        if self._decay_per_s:
            fade = math.exp(self._decay_per_s * min(self._as_of_s - now_s, 0.0))
        return [total * fade for total in self._totals]


class GradientTally:
    """Mean time of one batch's gradient: mu_C, with its uncertainty.

    A message has m batches and one time, the sum of theirs. The time of one batch, this sum over m,
    has the weight m and the variance sigma_C^2 / m if batches are independent. Moments about the
    first message's time are as exact as Welford's recurrence, and as sums they allow late
    contributions.

    Args:
        half_life_s: Time after which a message counts half; infinite for no decay.
    """

    def __init__(self, half_life_s: float = math.inf) -> None:
        # Sums of 1, m, m d and m d^2 over messages; d is the deviation from `_about_s`.
        self._sums = Sums(4, half_life_s)
        # Sum of m with squared weights, which fade twice as fast.
        self._squares = Sums(1, half_life_s / 2)
        self._about_s: float | None = None

    def add(self, at_s: float, seconds: float, batches: float = 1.0) -> None:
        """Add the compute time of a message with some batches."""
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
            raise ParameterError("seconds", "no gradient was computed yet; wait for one")
        shift_s = first / m
        std, freedom = math.inf, messages - self._squares.at(now_s)[0] / m
        if freedom > ROUNDING * messages:
            std = math.sqrt(max(second - m * shift_s**2, 0.0) / freedom / m)
        return Estimate(self._about_s + shift_s, std)


class TransferTally:
    """Mean megabytes that a machine moves for an update, from audit records.

    It decays by updates, not by time, so that every reader of the same records has the same result.
    """

    def __init__(self) -> None:
        self._means = GradientTally(TRANSFER_HALF_LIFE)
        self._newest: float | None = None

    def add(self, update: float, moved: int, share: float) -> None:
        """Add a measurement.

        Args:
            update: Progress of the job with this update, in updates of the job's own group size.
            moved: Bytes that a machine sent and received for this update.
            share: Group size of this update over the job's own.
        """
        self._means.add(update, moved / share / 1e6)
        self._newest = update

    def mean(self) -> Estimate | None:
        """Estimate the mean in MB; None if nothing was measured yet.

        After a single measurement, the standard deviation equals its value.
        """
        if self._newest is None:
            return None
        mean = self._means.mean(self._newest)
        std = float(mean.std)
        return Estimate(mean.value, std if math.isfinite(std) else float(mean.value))
