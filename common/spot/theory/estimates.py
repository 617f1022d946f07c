"""What was counted and timed, as estimates that say how sure they are.

Everything takes floats or arrays alike: one number, a number per worker, or one per simulated run.
`common.spot.theory.tallies` gathers the counts as they come in and forgets old ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from common.spot.theory.errors import ParameterError

Numbers: TypeAlias = float | npt.NDArray[np.float64]  # one, or one per worker or simulated run

Law: TypeAlias = Literal[
    "normal",  # means of many
    "gamma",  # rates and variances: above 0
    "beta",  # shares: between 0 and 1
    "log",  # times and ratios: normal on the log scale, long towards large values
]

NARROW = 1e-6  # of a relative standard deviation: below, every law is normal to six digits


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A value and its standard deviation, and the law that has these two moments."""

    value: Numbers
    std: Numbers  # of what we know about the quantity, not of single observations
    law: Law = "normal"

    @property
    def relative_std(self) -> Numbers:
        """The standard deviation as a share of the value; infinite where the value is 0."""
        value, std = np.abs(np.asarray(self.value, np.float64)), np.asarray(self.std, np.float64)
        known = (value > 0) & np.isfinite(value)
        share = np.divide(std, value, out=np.full(value.shape, np.inf), where=known)
        return plain(np.where(std == 0, 0.0, share))

    def interval(self, probability: float) -> tuple[Numbers, Numbers]:
        """Where the quantity lies with this probability, as much below as above.

        A quantity that is infinite, or known exactly, has an interval of one point.
        """
        return self.quantile((1 - probability) / 2), self.quantile((1 + probability) / 2)

    def quantile(self, probability: float) -> Numbers:
        """What the quantity stays below with this probability."""
        value, std = np.asarray(self.value, np.float64), np.asarray(self.std, np.float64)
        z = float(special.ndtri(probability))
        normal = value + (z * std if z else 0)  # 0 times infinity is not a number
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
    """What is believed of a rate beforehand: as if so many records had come in so many seconds."""

    records: Numbers = 0.5  # Jeffreys' prior of a Poisson rate: half a record, in no time
    seconds: Numbers = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CyclePrior:
    """What is believed of a machine beforehand: as if so many cycles had been watched.

    One cycle outweighs nothing, and keeps a machine that was never lost from looking eternal. AWS
    posts interruptions below 20 % for most types; cycles of 1,000 s are the paper's (section V).
    """

    availability: float = 0.9  # alpha
    cycle_s: float = 1000.0  # from one preemption to the next
    cycles: float = 1.0


JEFFREYS = RatePrior()
ONE_CYCLE = CyclePrior()


def rate_from_counts(records: Numbers, seconds: Numbers, prior: RatePrior = JEFFREYS) -> Estimate:
    """Estimate lambda_A, n: the rate of a Poisson stream that gave so many records in such a time.

    The Gamma law is conjugate: its shape grows by the records, its time by the seconds. It does not
    matter whether the counting stopped after a time or after a record (a full batch): the
    likelihood is the same.

    Args:
        records: Without the one that began the time, where it began with a record.
        seconds: During which the stream was watched, none of it paused.
        prior: See `pooled_prior` for workers that share a job.

    Raises:
        ParameterError: If no time has passed and the prior has none.
    """
    shape, time_s = prior.records + records, prior.seconds + seconds
    if not (time_s > 0 if isinstance(time_s, float) else (time_s > 0).all()):
        problem = "no time has passed, so nothing is known of the rate: wait, or give a prior"
        raise ParameterError("seconds", problem)
    return Estimate(plain(shape / time_s), plain(np.sqrt(shape) / time_s), "gamma")


def pooled_prior(records: Numbers, seconds: Numbers) -> RatePrior:
    """Believe of a worker that has said little yet what all workers together say, as one record.

    Args:
        records: Of each worker.
        seconds: Of each worker.

    Raises:
        ParameterError: If all workers together saw no record.
    """
    count, time_s = float(np.sum(records)), float(np.sum(seconds))
    if not (count > 0 and time_s > 0):
        raise ParameterError("records", "no worker has seen any: there is nothing to pool yet")
    return RatePrior(1.0, time_s / count)


def availability_from_times(
    up_s: Numbers, down_s: Numbers, outages: Numbers, prior: CyclePrior = ONE_CYCLE
) -> Estimate:
    """Estimate alpha, the share of the time that a machine can be had.

    Seconds are no observations: a machine that is up now is almost surely up a second later. What
    is independent are sojourns. With exponential ones (the two-state chain) of m cycles, the mean
    lengths u up and d down are each known to 1/sqrt(m), relatively, and so is their ratio; hence,
    by the delta method, alpha = u / (u + d) has the variance

        alpha^2 (1 - alpha)^2 (1/m + 1/m)  =  alpha (1 - alpha) / n,  n = m / (2 alpha (1 - alpha)),

    that of n independent looks. As the chain forgets with tau = alpha (1 - alpha) (u + d), n is the
    time over 2 tau. A Beta law of weight n is exact for u = d. The prior counts as further cycles.
    With no time at all the prior alone speaks.

    Args:
        up_s: In which a machine was there; several machines' times add up.
        down_s: In which it was wanted and not to be had.
        outages: How often one went.
        prior: What is believed beforehand.
    """
    up, down, cycles = _with_prior(up_s, down_s, outages, prior)
    alpha = up / (up + down)
    looks = cycles / (2 * alpha * (1 - alpha))
    return Estimate(plain(alpha), plain(np.sqrt(alpha * (1 - alpha) / (looks + 1))), "beta")


def cycle_from_times(
    up_s: Numbers, down_s: Numbers, outages: Numbers, prior: CyclePrior = ONE_CYCLE
) -> Estimate:
    """Estimate the mean time from one preemption to the next, u + d, from the same times.

    For exponential sojourns the mean is the time over the number of ends: the last sojourn, which
    has not ended, adds its time and no end. Each mean is known to 1/sqrt(m), relatively. A machine
    that is down now counts as one end of being down too many; the prior is of the same size.
    """
    up, down, cycles = _with_prior(up_s, down_s, outages, prior)
    std = np.hypot(up, down) / cycles**1.5
    return Estimate(plain((up + down) / cycles), plain(std), "log")


def plain(numbers: npt.ArrayLike) -> Numbers:
    """Give a single number as a float, so that it prints and compares as one."""
    if isinstance(numbers, float):
        return float(numbers)  # soon: so are most
    array = np.asarray(numbers, np.float64)
    return array if array.ndim else float(array)


def _with_prior(
    up_s: Numbers, down_s: Numbers, outages: Numbers, prior: CyclePrior
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    prior_s = prior.cycles * prior.cycle_s
    up = np.asarray(up_s + prior_s * prior.availability)
    down = np.asarray(down_s + prior_s * (1 - prior.availability))
    return up, down, np.asarray(outages + prior.cycles)
