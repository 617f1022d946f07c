"""Uptimes of machines that come and go, each by a two-state chain (section III-B4).

A machine is on for exponential times with the mean alpha * cycle, and off for exponential times
with the mean (1 - alpha) * cycle. Machines are independent. A cycle is the mean time from one
preemption of a machine to its next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.spot.theory.work import Pool

Array: TypeAlias = npt.NDArray[np.float64]


def relaxation_s(availability: float, cycle_s: float) -> float:
    """Return tau of the chain, after which the correlation with the earlier state is 1/e.

    1 / tau is the sum of both rates, 1 / (alpha cycle) + 1 / ((1 - alpha) cycle), hence tau = alpha
    (1 - alpha) cycle.
    """
    return availability * (1 - availability) * cycle_s


def distribution_of_running(workers: int, availability: float) -> Array:
    """Return (N_tot + 1,) stationary probabilities of 0 to N_tot running machines (binomial)."""
    from scipy.special import gammaln, xlog1py, xlogy  # noqa: PLC0415 -- slow to load, seldom asked

    running = np.arange(workers + 1)
    ways = gammaln(workers + 1) - gammaln(running + 1) - gammaln(workers - running + 1)
    log = ways + xlogy(running, availability) + xlog1py(workers - running, -availability)
    return np.asarray(np.exp(log), np.float64)


def variance_of_uptime_s2(t_s: float, availability: float, cycle_s: float) -> float:
    """Return the variance of the time that one machine is on in [0, t], from a stationary start.

    It is the covariance of the state at two times, alpha (1 - alpha) exp(-gap / tau), integrated
    over both: 2 alpha (1 - alpha) tau (t - tau (1 - exp(-t / tau))). For n independent machines, it
    is n times this. It is 0 if alpha is 0 or 1.
    """
    tau_s = relaxation_s(availability, cycle_s)
    if not tau_s:
        return 0.0
    gap = t_s / tau_s
    state_variance = availability * (1 - availability)
    # If the gap is small, the two terms of the formula below cancel numerically. The series used
    # instead has a relative error of about gap^2 / 12.
    if gap < 1e-4:
        return state_variance * t_s**2 * (1 - gap / 3)
    return 2 * state_variance * tau_s * (t_s + tau_s * math.expm1(-gap))


def effective_availability(spot: Pool) -> float:
    """Return the share of the time that a spot machine works: alpha exp(-S / (alpha cycle)).

    A machine is available for an exponential time U of mean u = alpha cycle, and S of it is its
    start-up: the rest, E[max(0, U - S)], is u exp(-S / u).
    """
    mean_up_s = spot.availability * spot.cycle_s
    if spot.availability == 1 or not mean_up_s:
        # A machine that is never preempted starts once.
        return spot.availability
    return spot.availability * math.exp(-spot.start_up_s / mean_up_s)
