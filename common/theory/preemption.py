"""How many updates workers make that come and go, and how long a number of updates takes then.

Section III-B4. A preempted worker's stream pauses meanwhile (`on_preemption: hold`): what counts is
how long workers run, added up over all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from common.theory.errors import ParameterError, not_negative, positive, share

if TYPE_CHECKING:
    from common.theory.work import Pool

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A quantity over time that keeps its value from each time to the next: N(t) or lambda(t).

    Raises:
        ParameterError: If times do not begin at 0, do not rise or miss, or a value is below 0.
    """

    times_s: Array  # (S + 1,) where the steps begin, and where the last one ends
    values: Array  # (S,)

    def __post_init__(self) -> None:
        times, values = self.times_s, self.values
        if times.ndim != 1 or values.ndim != 1 or len(times) != len(values) + 1 or len(values) < 1:
            problem = f"must be one more than the values, the last the end: got {times.shape} times"
            raise ParameterError("times_s", f"{problem} for {values.shape} values")
        if not np.isfinite(times).all() or times[0] != 0:
            raise ParameterError("times_s", "must begin at 0 and leave no gap")
        if not (steps := np.diff(times) > 0).all():
            later = int(np.flatnonzero(~steps)[0]) + 1
            problem = f"must rise: number {later} ({times[later]:g} s) is not after the one before"
            raise ParameterError("times_s", problem)
        if not (valid := np.isfinite(values) & (values >= 0)).all():
            step = int(np.flatnonzero(~valid)[0])
            problem = f"step {step} has {values[step]:g}; it must be a number of at least 0"
            raise ParameterError("values", problem)

    @property
    def end_s(self) -> float:
        """Where the last step ends: t."""
        return float(self.times_s[-1])

    @property
    def integral(self) -> float:
        """The area below, from 0 to the end."""
        return float(np.diff(self.times_s) @ self.values)

    def at(self, times_s: Array) -> Array:
        """Give the values at times (T,) before the end."""
        return self.values[np.searchsorted(self.times_s, times_s, side="right") - 1]


def update_rate_of_running_per_s(
    running: float, rate_per_s: float, group_size: int, batch_size: int
) -> float:
    """Give lambda_U(t) = N(t) lambda_A / (K b): 0 while nobody runs (equation 4, first line).

    Raises:
        ParameterError: If a number is out of range.
    """
    not_negative("running", running)
    not_negative("rate_per_s", rate_per_s)
    positive("group_size", group_size)
    positive("batch_size", batch_size)
    return running * rate_per_s / (group_size * batch_size)


def updates_on_path(running: Steps, rate_per_s: float, group_size: int, batch_size: int) -> float:
    """Give E[J_t] = lambda_A / (K b) times the integral of N (equation 4).

    It holds where preemptions are rare against updates. Where rates differ, let `running` be the
    sum of the rates of those that run and the rate 1.

    Raises:
        ParameterError: If a number is out of range.
    """
    mean = running.integral / running.end_s
    return running.end_s * update_rate_of_running_per_s(mean, rate_per_s, group_size, batch_size)


def _check_same_end(running: Steps, rates_per_s: Steps) -> None:
    if running.end_s != rates_per_s.end_s:
        problem = f"end at {rates_per_s.end_s:g} s, workers at {running.end_s:g} s; cut the longer"
        raise ParameterError("rates_per_s", problem)


def updates_on_paths_by_means(
    running: Steps, rates_per_s: Steps, group_size: int, batch_size: int
) -> float:
    """Give E[J_t] as printed below equation 4: the product of both integrals over K b t.

    It is right only where N(t) and lambda_A(t) do not move together. Otherwise it is wrong by their
    covariance over time: see `updates_on_paths`.

    Raises:
        ParameterError: If the two end at different times or a number is out of range.
    """
    _check_same_end(running, rates_per_s)
    mean_rate_per_s = rates_per_s.integral / rates_per_s.end_s
    return updates_on_path(running, mean_rate_per_s, group_size, batch_size)


def updates_on_paths(running: Steps, rates_per_s: Steps, group_size: int, batch_size: int) -> float:
    """Give E[J_t] for N(t) and lambda_A(t) as the integral of their product over K b.

    Raises:
        ParameterError: If the two end at different times or a number is out of range.
    """
    _check_same_end(running, rates_per_s)
    times_s = np.union1d(running.times_s, rates_per_s.times_s)
    arriving = Steps(times_s, running.at(times_s[:-1]) * rates_per_s.at(times_s[:-1]))
    return updates_on_path(arriving, 1.0, group_size, batch_size)


@dataclass(frozen=True, slots=True)
class SpotChain:
    """The two-state chain of one preemptible machine: on for exponential times, off likewise.

    Raises:
        ParameterError: If a number is out of range.
    """

    availability: float  # alpha; 0: never on, 1: never preempted
    cycle_s: float  # mean time from one preemption to the next

    def __post_init__(self) -> None:
        share("availability", self.availability)
        positive("cycle_s", self.cycle_s)

    @property
    def mean_on_s(self) -> float:
        """Mean time between return and preemption, which comes at the rate 1 over it."""
        return self.availability * self.cycle_s

    @property
    def mean_off_s(self) -> float:
        """Mean time between preemption and return, which comes at the rate 1 over it."""
        return (1 - self.availability) * self.cycle_s

    @property
    def relaxation_s(self) -> float:
        """tau: after it, what was known of the state counts 1/e.

        1 / tau is the sum of both rates, 1 / (alpha cycle) + 1 / ((1 - alpha) cycle), hence
        tau = alpha (1 - alpha) cycle.
        """
        return self.availability * self.mean_off_s


def expected_running(workers: int, availability: float) -> float:
    """Give E[N] = alpha N_tot, with machines independent of each other.

    Raises:
        ParameterError: If a number is out of range.
    """
    not_negative("workers", workers)
    share("availability", availability)
    return workers * availability


def distribution_of_running(workers: int, availability: float) -> Array:
    """Give the stationary distribution of N, binomial B(N_tot, alpha): (N_tot + 1,) from 0 on.

    Raises:
        ParameterError: If a number is out of range.
    """
    from scipy.special import gammaln, xlog1py, xlogy  # noqa: PLC0415 -- slow to load, seldom asked

    not_negative("workers", workers)
    share("availability", availability)
    running = np.arange(workers + 1)
    ways = gammaln(workers + 1) - gammaln(running + 1) - gammaln(workers - running + 1)
    log = ways + xlogy(running, availability) + xlog1py(workers - running, -availability)
    return np.asarray(np.exp(log), np.float64)


def variance_of_uptime_s2(t_s: float, availability: float, cycle_s: float) -> float:
    """Give the variance of the time that one machine is on in [0, t], from a stationary start.

    The state's covariance alpha (1 - alpha) exp(-gap / tau), integrated twice:
    2 alpha (1 - alpha) tau (t - tau (1 - exp(-t / tau))). For n independent machines it is n times
    this. It is 0 where alpha is 0 or 1.

    Raises:
        ParameterError: If a number is out of range.
    """
    not_negative("t_s", t_s)
    tau_s = SpotChain(availability, cycle_s).relaxation_s
    if not tau_s:
        return 0.0
    gap = t_s / tau_s
    state_variance = availability * (1 - availability)
    if gap < 1e-4:  # the two terms cancel: their series, right to gap^2 / 12 of itself
        return state_variance * t_s**2 * (1 - gap / 3)
    return 2 * state_variance * tau_s * (t_s + tau_s * math.expm1(-gap))


def runtime_per_update_s(
    expected_workers: float, rate_per_s: float, group_size: int, batch_size: int
) -> float:
    """Give the limit of E[Theta_J] / J for large J (Proposition 2, equation 5).

    It is K b / (lambda_A E[N]), and needs outages that are short against the whole runtime: only
    then does a path spend its shares of time in each state. Where no worker ever runs (E[N] = 0)
    it is infinite.

    Raises:
        ParameterError: If a number is out of range.
    """
    positive("rate_per_s", rate_per_s)
    rate = update_rate_of_running_per_s(expected_workers, rate_per_s, group_size, batch_size)
    return 1 / rate if rate else math.inf


def effective_runtime_s(
    updates: float, expected_workers: float, rate_per_s: float, group_size: int, batch_size: int
) -> float:
    """Give the effective mean runtime of J updates, J K b / (lambda_A E[N]) (equation 6).

    `expected_workers` is alpha N_s of preemptible ones and all on-demand ones (section IV-B).

    Raises:
        ParameterError: If a number is out of range.
    """
    not_negative("updates", updates)
    if not updates:
        return 0.0
    return updates * runtime_per_update_s(expected_workers, rate_per_s, group_size, batch_size)


def effective_availability(spot: Pool) -> float:
    """Give the share of the time that a spot machine delivers: alpha exp(-S / (alpha cycle)).

    Of an exponential time U of mean u = alpha cycle for which a machine can be had, S goes to its
    start-up: what is left, E[max(0, U - S)], is u exp(-S / u).
    """
    mean_up_s = spot.availability * spot.cycle_s
    if spot.availability == 1 or not mean_up_s:
        return spot.availability  # never preempted, it starts once
    return spot.availability * math.exp(-spot.start_up_s / mean_up_s)
