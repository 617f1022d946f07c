"""How many updates a job makes in a given time, and how long a number of updates takes.

Section III-B. Two laws of the number of updates stand beside each other. Theorem 1 takes the
batches of all workers for a Poisson process. That is good for the gaps inside a group, but over a
long time a batch is *exactly* b records, and only the records are random: the variance of the
number of updates is then 1/b of what the Poisson batches give. `..._renewal` is that law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.theory.errors import ParameterError, not_negative, positive

if TYPE_CHECKING:
    from common.spot.theory.work import Rates

Array: TypeAlias = npt.NDArray[np.float64]


def _total_rate_per_s(rates_per_s: Rates) -> float:
    valid = rates_per_s.ndim == 1 and rates_per_s.size and rates_per_s.min() >= 0
    total_per_s = float(rates_per_s.sum()) if valid else 0.0
    if not 0 < total_per_s < np.inf:
        problem = "must be one number of at least 0 per running worker, not all of them 0"
        raise ParameterError("rates_per_s", problem)
    return total_per_s


def batch_rate_per_s(rates_per_s: Rates, batch_size: int) -> float:
    """Give the rate at which batches are full: lambda_B = N lambda_A / b.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    positive("batch_size", batch_size)
    return _total_rate_per_s(rates_per_s) / batch_size


def update_rate_per_s(rates_per_s: Rates, group_size: int, batch_size: int) -> float:
    """Give lambda_U = N lambda_A / (K b) (equation 1), right while the process is stable.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    positive("group_size", group_size)
    return batch_rate_per_s(rates_per_s, batch_size) / group_size


def update_interval_variance_s2(
    rates_per_s: Rates, group_size: int, batch_size: int, gradient_variance_s2: float = 0.0
) -> float:
    """Bound the variance of the time between updates: sigma_U^2 of equation 1.

    K b^2 / (N lambda_A)^2 is the Erlang law of K Poisson batches. K^2 sigma_C^2 is the worst case:
    one worker computes the whole group and its gradient times move together. Independent ones
    add at most 2 K sigma_C^2 (a round's length enters twice, at its end and at its beginning), so
    that the bound needs K of at least 2 then.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    positive("group_size", group_size)
    not_negative("gradient_variance_s2", gradient_variance_s2)
    batch_s = 1.0 / batch_rate_per_s(rates_per_s, batch_size)
    return group_size * batch_s**2 + group_size**2 * gradient_variance_s2


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal law; with variance 0 the number itself."""

    mean: float
    variance: float

    @property
    def std(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)


def updates_after(
    t_s: float,
    rates_per_s: Rates,
    group_size: int,
    batch_size: int,
    gradient_variance_s2: float = 0.0,
) -> Normal:
    """Give the law of J_t, N(t lambda_U, t sigma_U^2 lambda_U^3) (Theorem 1, equation 2).

    It holds for large t and Poisson batches. With batches of b records from few streams it is
    far too wide: see `updates_after_renewal`.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    not_negative("t_s", t_s)
    rate = update_rate_per_s(rates_per_s, group_size, batch_size)
    variance = update_interval_variance_s2(
        rates_per_s, group_size, batch_size, gradient_variance_s2
    )
    return Normal(t_s * rate, t_s * variance * rate**3)


def _record_variance_per_s(rates_per_s: Rates, squared_variation: float | Array) -> float:
    if not (np.isfinite(squared_variation).all() and (np.asarray(squared_variation) >= 0).all()):
        problem = "must be at least 0, the variance of the gaps over their squared mean"
        raise ParameterError("squared_variation", problem)
    return float((rates_per_s * squared_variation).sum())


def updates_after_renewal(
    t_s: float,
    rates_per_s: Rates,
    group_size: int,
    batch_size: int,
    squared_variation: float | Array = 1.0,
) -> Normal:
    """Give the law of J_t for superposed renewal streams, exact to first order in a long time t.

    A renewal stream has t lambda c_A^2 as its variance of records, streams are independent, and
    K b records make an update: t c_A^2 sum(lambda_A) / (K b)^2. Gradient times do not enter: where
    updates are stable they only delay the last one. Left out is what does not grow with t: records
    in incomplete batches (`partial_batches_s`), whose variance is about N (b^2 - 1) / 12 records^2.

    Args:
        t_s: Long against b mu_A, the time in which one worker fills a batch.
        rates_per_s: (N,) those of the workers that run.
        group_size: K.
        batch_size: b.
        squared_variation: c_A^2 of the gaps between records, for all streams or (N,) for each: 1
            for Poisson arrivals, 0 for a steady beat.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    not_negative("t_s", t_s)
    rate = update_rate_per_s(rates_per_s, group_size, batch_size)
    record_variance = t_s * _record_variance_per_s(rates_per_s, squared_variation)
    return Normal(t_s * rate, record_variance / (group_size * batch_size) ** 2)


def expected_runtime_s(
    updates: float, rates_per_s: Rates, group_size: int, batch_size: int
) -> float:
    """Give E[runtime(J)] = J / lambda_U for large J without preemption (Corollary 1, equation 3).

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    not_negative("updates", updates)
    return updates / update_rate_per_s(rates_per_s, group_size, batch_size)


def partial_batches_s(rates_per_s: Rates, batch_size: int) -> float:
    """Give the time that records in incomplete batches took, when an update has just begun.

    Workers hold 0 to b - 1 of them, each number as likely, once the streams have drifted apart by
    about half a batch (lambda_A t c_A^2 > (b/2)^2); the one that completed the group holds none:
    (N - 1)(b - 1) / 2 records. Add it to a runtime where all workers begin with empty batches. A
    job that is under way begins with as many as it ends with, so nothing is to be added.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    positive("batch_size", batch_size)
    total = _total_rate_per_s(rates_per_s)
    return (int(np.count_nonzero(rates_per_s)) - 1) * (batch_size - 1) / 2 / total


def runtime_of_renewal(
    updates: float,
    rates_per_s: Rates,
    group_size: int,
    batch_size: int,
    squared_variation: float | Array = 1.0,
) -> Normal:
    """Give the law of the time of J updates that belongs to `updates_after_renewal`.

    With equal c_A^2 its variance is J K b c_A^2 / sum(lambda_A)^2. `partial_batches_s` and the time
    of the last gradients are not in it.

    Raises:
        ParameterError: If nothing arrives or a number is out of range.
    """
    mean = expected_runtime_s(updates, rates_per_s, group_size, batch_size)
    law = updates_after_renewal(mean, rates_per_s, group_size, batch_size, squared_variation)
    return Normal(mean, law.variance / update_rate_per_s(rates_per_s, group_size, batch_size) ** 2)
