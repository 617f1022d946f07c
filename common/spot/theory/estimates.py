"""Estimates from counts and times, with their uncertainty.

All functions accept floats and arrays: one number, one per worker, or one per simulated run.
`common.spot.theory.tallies` collects the counts over time and forgets old ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from common.spot.theory.errors import ParameterError

# One number, or one per worker or simulated run.
Numbers: TypeAlias = float | npt.NDArray[np.float64]

Law: TypeAlias = Literal[
    # Means of many values have this distribution.
    "normal",
    # Rates and variances are above 0.
    "gamma",
    # Shares lie between 0 and 1.
    "beta",
    # Times and ratios are normal on the log scale, with a long upper tail.
    "log",
]

# Relative standard deviation below which every distribution is normal to six digits.
NARROW = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A value and its standard deviation, and the distribution with these two moments."""

    value: Numbers
    # Standard error of the value, not the spread of single observations.
    std: Numbers
    law: Law = "normal"

    @property
    def relative_std(self) -> Numbers:
        """Standard deviation over the value; infinite if the value is 0."""
        value, std = np.abs(np.asarray(self.value, np.float64)), np.asarray(self.std, np.float64)
        known = (value > 0) & np.isfinite(value)
        share = np.divide(std, value, out=np.full(value.shape, np.inf), where=known)
        return plain(np.where(std == 0, 0.0, share))

    def interval(self, probability: float) -> tuple[Numbers, Numbers]:
        """Return the interval with this probability; the quantity is as often below as above it.

        An infinite or exact quantity has an interval of one point.
        """
        return self.quantile((1 - probability) / 2), self.quantile((1 + probability) / 2)

    def quantile(self, probability: float) -> Numbers:
        """Return the value below which the quantity is with this probability."""
        value, std = np.asarray(self.value, np.float64), np.asarray(self.std, np.float64)
        z = float(special.ndtri(probability))
        # Avoid 0 times infinity, which is NaN.
        normal = value + (z * std if z else 0)
        room = value * (1 - value) if self.law == "beta" else value
        if self.law == "normal":
            return plain(normal)
        shaped = np.isfinite(value) & (std > NARROW * room) & (room > 0)
        v, s = np.where(shaped, value, 0.5), np.where(shaped, std, 0.1)
        match self.law:
            case "gamma":
                found = special.gammaincinv((v / s) ** 2, probability) * s**2 / v
            case "beta":
                looks = v * (1 - v) / s**2 - 1
                found = special.betaincinv(v * looks, (1 - v) * looks, probability)
            case "log":
                found = v * (np.exp(z * np.sqrt(np.log1p((s / v) ** 2))) if z else 1)
        return plain(np.where(shaped, found, normal))


@dataclass(frozen=True, slots=True, eq=False)
class RatePrior:
    """Prior of a rate: as if this number of records had come in this time."""

    # Jeffreys' prior of a Poisson rate: half a record, in no time.
    records: Numbers = 0.5
    seconds: Numbers = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CyclePrior:
    """Prior of a machine: as if this number of cycles had been observed.

    A single cycle changes an estimate from many real ones little. It keeps a machine that was never
    lost from looking as if it never could be. AWS publishes interruptions below 20 % for most
    types; cycles of 1,000 s are the paper's (section V).
    """

    availability: float = 0.9  # alpha
    # Time from one preemption to the next.
    cycle_s: float = 1000.0
    cycles: float = 1.0


JEFFREYS = RatePrior()
ONE_CYCLE = CyclePrior()


def rate_from_counts(records: Numbers, seconds: Numbers, prior: RatePrior = JEFFREYS) -> Estimate:
    """Estimate lambda_A,n: the rate of a Poisson stream from its records and the time.

    The Gamma distribution is conjugate: its shape grows by the records, its time by the seconds. It
    does not matter if the counting stopped after a time or after a record (a full batch), because
    the likelihood is the same.

    Args:
        records: Number of records, without the first one if the time began with it.
        seconds: Observed time of the stream, without pauses.
        prior: See `pooled_prior` for workers that share a job.

    Raises:
        ParameterError: If neither the data nor the prior has any time.
    """
    shape, time_s = prior.records + records, prior.seconds + seconds
    if not (time_s > 0 if isinstance(time_s, float) else (time_s > 0).all()):
        problem = "must be above 0, got 0; wait, or give a prior"
        raise ParameterError("seconds", problem)
    return Estimate(plain(shape / time_s), plain(np.sqrt(shape) / time_s), "gamma")


def pooled_prior(records: Numbers, seconds: Numbers) -> RatePrior:
    """Return a prior for workers with few records: the rate of all, with the weight of one record.

    Args:
        records: Records of each worker.
        seconds: Seconds of each worker.

    Raises:
        ParameterError: If all workers together have no record.
    """
    count, time_s = float(np.sum(records)), float(np.sum(seconds))
    if not (count > 0 and time_s > 0):
        raise ParameterError("records", "no worker has any yet; wait")
    return RatePrior(1.0, time_s / count)


def availability_from_times(
    up_s: Numbers, down_s: Numbers, outages: Numbers, prior: CyclePrior = ONE_CYCLE
) -> Estimate:
    """Estimate alpha, the share of the time that a machine is available.

    Seconds are no independent observations: a machine that is up now is almost surely up a second
    later. Times from one change of state to the next are independent. If they are exponential (the
    two-state chain), then after m cycles the mean times u up and d down have relative errors of
    1/sqrt(m) each. Hence, by the delta method, alpha = u / (u + d) has the variance

        alpha^2 (1 - alpha)^2 (1/m + 1/m)  =  alpha (1 - alpha) / n,  n = m / (2 alpha (1 - alpha)),

    that of n independent observations. The chain forgets its state with the time constant tau =
    alpha (1 - alpha) (u + d), so n is the observed time over 2 tau. A Beta distribution of weight n
    is exact for u = d. The cycles of the prior are added to the observed ones. Without any time,
    the estimate is the prior.

    Args:
        up_s: Time that machines ran, summed over machines.
        down_s: Time that machines were wanted and not available, summed over machines.
        outages: Number of machines lost.
        prior: Prior of the machine.
    """
    up, down, cycles = _with_prior(up_s, down_s, outages, prior)
    alpha = up / (up + down)
    looks = cycles / (2 * alpha * (1 - alpha))
    return Estimate(plain(alpha), plain(np.sqrt(alpha * (1 - alpha) / (looks + 1))), "beta")


def cycle_from_times(
    up_s: Numbers, down_s: Numbers, outages: Numbers, prior: CyclePrior = ONE_CYCLE
) -> Estimate:
    """Estimate the mean time from one preemption to the next, u + d.

    The arguments are those of `availability_from_times`. For exponential times up and down, each
    mean is the total time over the number of its ends, with a relative error of 1/sqrt(m). Both
    numbers of ends are taken as `outages`. A machine that is down now has not ended its time down,
    which is one end too many; this error is no larger than the weight of the prior.
    """
    up, down, cycles = _with_prior(up_s, down_s, outages, prior)
    std = np.hypot(up, down) / cycles**1.5
    return Estimate(plain((up + down) / cycles), plain(std), "log")


def plain(numbers: npt.ArrayLike) -> Numbers:
    """Return a single number as a float, and others as an array."""
    if isinstance(numbers, float):
        # The fast path for most calls.
        return float(numbers)
    array = np.asarray(numbers, np.float64)
    return array if array.ndim else float(array)


def _with_prior(
    up_s: Numbers, down_s: Numbers, outages: Numbers, prior: CyclePrior
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    prior_s = prior.cycles * prior.cycle_s
    up = np.asarray(up_s + prior_s * prior.availability)
    down = np.asarray(down_s + prior_s * (1 - prior.availability))
    return up, down, np.asarray(outages + prior.cycles)
