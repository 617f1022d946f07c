"""What error is left after a number of updates or a time, and how many updates a target takes.

Section IV-A. The learning rate here is that of the *mean* gradient over the K b records of an
update. The paper sums them: its step size is this one over K b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.special import erfcx

from common.theory.errors import ParameterError, not_negative, positive

if TYPE_CHECKING:
    from common.theory.updates import Normal


@dataclass(frozen=True, slots=True)
class Convex:
    """The constants of equation 10: a loss that is L-smooth and c-strongly convex.

    The descent lemma gives the equation for learning rates of at most 1 / L, where the gradient is
    unbiased and a mean over independent records, and B bounds the variance of one record's.

    Raises:
        ParameterError: If a number is out of range, c is above L, or the learning rate above 1 / L.
    """

    learning_rate: float  # eta, of the mean gradient
    smoothness: float  # L
    convexity: float  # c
    gradient_bound: float  # B, on the mean square of one record's gradient, or its variance
    group_size: int  # K
    batch_size: int  # b
    initial_error: float  # E[G(w_0)] - G*

    def __post_init__(self) -> None:
        for name in ("learning_rate", "smoothness", "convexity", "group_size", "batch_size"):
            positive(name, getattr(self, name))
        not_negative("gradient_bound", self.gradient_bound)
        not_negative("initial_error", self.initial_error)
        if self.convexity > self.smoothness:
            problem = f"no loss is more convex than it is smooth ({self.smoothness:g})"
            raise ParameterError("convexity", problem)
        if self.learning_rate * self.smoothness > 1 or self.learning_rate * self.convexity >= 1:
            problem = f"must be at most 1 / smoothness ({1 / self.smoothness:g}), and below"
            raise ParameterError("learning_rate", f"{problem} 1 / convexity, or nothing is bounded")

    @property
    def contraction(self) -> float:
        """Give rho = 1 - eta c, what an update leaves of the error above the floor."""
        return 1 - self.learning_rate * self.convexity

    @property
    def log_contraction(self) -> float:
        """Give the logarithm of rho, below 0; right also where eta c is lost beside 1."""
        return math.log1p(-self.learning_rate * self.convexity)

    @property
    def floor(self) -> float:
        """Give gamma = eta L B / (2 K b c), which the noise of the gradients keeps up."""
        noise = self.gradient_bound / (self.group_size * self.batch_size)
        return self.learning_rate * self.smoothness * noise / (2 * self.convexity)

    @property
    def excess(self) -> float:
        """Give beta, how far above the floor it begins; negative where it begins below."""
        return self.initial_error - self.floor


def error_after(problem: Convex, updates: float) -> float:
    """Bound E[G(w_J)] - G* by phi(J) = beta rho^J + gamma (equation 10).

    From a start below the floor (beta < 0) the bound rises to the floor: noise may carry the error
    up again.

    Raises:
        ParameterError: If the number of updates is negative.
    """
    not_negative("updates", updates)
    return problem.excess * math.exp(updates * problem.log_contraction) + problem.floor


def error_at(problem: Convex, updates: Normal) -> float:
    """Integrate phi(j) over the normal law of J_t from 0 on, in closed form (equation 11).

    beta exp(mu ln rho + sigma^2 ln(rho)^2 / 2) Phi((mu + sigma^2 ln rho) / sigma)
    + gamma Phi(mu / sigma), by the normal's moment generating function cut off at 0.

    As in the paper, what the law puts below 0 is left out: Phi(-mu / sigma), which is nothing
    for the large t that Theorem 1 asks for. Where it is something, the integral bounds no error.
    From a start below the floor (beta < 0) the value lies between the start and the floor.

    Raises:
        ParameterError: If the mean is negative.
    """
    not_negative("updates.mean", updates.mean)
    mean, std = updates.mean, updates.std
    if not std:
        return error_after(problem, mean)
    slope = problem.log_contraction
    tilted = mean / std + std * slope  # (mu + sigma^2 ln rho) / sigma
    if tilted > 0:  # then mu ln rho + sigma^2 ln(rho)^2 / 2 is below mu ln(rho) / 2: no overflow
        share = math.exp(slope * (mean + std**2 * slope / 2)) * _below(tilted)
    else:  # its square cancels that exponent up to -mu^2 / (2 sigma^2): again no overflow
        share = math.exp(-((mean / std) ** 2) / 2) * float(erfcx(-tilted / math.sqrt(2))) / 2
    return problem.excess * share + problem.floor * _below(mean / std)


def _below(deviations: float) -> float:
    return math.erfc(-deviations / math.sqrt(2)) / 2


def decay_rate_per_s(
    problem: Convex, update_rate_per_s: float, interval_variance_s2: float
) -> float:
    """Give the rate of equation 9, as the moment generating function of Theorem 1's law gives it.

    E[rho^J_t] = exp(-rate t) with rate = -(lambda_U ln rho + sigma_U^2 lambda_U^3 ln(rho)^2 / 2).
    It is above 0 only while sigma_U^2 lambda_U^2 |ln rho| < 2: further out, the normal law's left
    tail, which the number of updates does not have, outweighs everything.

    Args:
        problem: The constants.
        update_rate_per_s: lambda_U.
        interval_variance_s2: sigma_U^2, of the time between updates.

    Raises:
        ParameterError: If a number is out of range.
    """
    positive("update_rate_per_s", update_rate_per_s)
    not_negative("interval_variance_s2", interval_variance_s2)
    slope = problem.log_contraction
    squared_variation = interval_variance_s2 * update_rate_per_s**2
    return -update_rate_per_s * slope * (1 + squared_variation * slope / 2)


def error_in_time(
    problem: Convex, t_s: float, update_rate_per_s: float, interval_variance_s2: float
) -> float:
    """Bound equation 11 by beta exp(-rate t) + gamma (Theorem 2, equation 9).

    It is a bound for every t, as both Phi of equation 11 are at most 1. From a start below the
    floor (beta < 0) that argument turns round, and the bound is the floor.

    Raises:
        ParameterError: If a number is out of range, or the variance so large that the rate is not
            above 0 (see `decay_rate_per_s`).
    """
    not_negative("t_s", t_s)
    rate = decay_rate_per_s(problem, update_rate_per_s, interval_variance_s2)
    if rate <= 0:
        limit_s2 = -2 / (problem.log_contraction * update_rate_per_s**2)
        problem_text = f"must be below {limit_s2:g}, or equation 9 bounds nothing; lower eta"
        raise ParameterError("interval_variance_s2", problem_text)
    return max(problem.excess, 0.0) * math.exp(-rate * t_s) + problem.floor


def error_under_preemption(problem: Convex, t_s: float, update_rate_per_s: float) -> float:
    """Give phi(E[J_t]), preemption as the paper brings it in: by Proposition 2's mean for J_t.

    phi is convex where beta > 0, so this lies below the mean error bound E[phi(J_t)] (Jensen),
    the more the longer the outages. Where that counts, give `error_at` a variance that
    has the one of the uptime in it.

    Args:
        problem: The constants.
        t_s: t.
        update_rate_per_s: Of the workers that run on average, lambda_A E[N] / (K b).

    Raises:
        ParameterError: If a number is out of range.
    """
    not_negative("t_s", t_s)
    not_negative("update_rate_per_s", update_rate_per_s)
    return error_after(problem, t_s * update_rate_per_s)


def updates_for(problem: Convex, error: float) -> int:
    """Give J(epsilon), the least number of updates after which equation 10 stays at most epsilon.

    It is 0 where the start is as good already, also from below the floor (beta < 0).

    Raises:
        ParameterError: If the error is not above the floor: no number of updates is enough.
    """
    positive("error", error)
    if error <= problem.floor:
        records = problem.group_size * problem.batch_size
        by = problem.floor / error  # the floor goes with eta / (K b)
        raise ParameterError(
            "error",
            f"{error:g} is not above the floor {problem.floor:g}, which no number of updates "
            "passes; ask for more, or lower the learning rate below "
            f"{problem.learning_rate / by:g}, or raise group_size (K) times batch_size (b) above "
            f"{records * by:g}",
        )
    if error >= problem.initial_error:
        return 0
    left = math.log((error - problem.floor) / problem.excess)
    updates = max(1, math.ceil(left / problem.log_contraction))
    if error_after(problem, updates - 1) <= error:  # the division was rounded up past an integer
        return updates - 1
    return updates if error_after(problem, updates) <= error else updates + 1


@dataclass(frozen=True, slots=True)
class NonConvex:
    """The constants of Proposition 3: a loss that is L-smooth, with learning rate c / sqrt(J).

    Raises:
        ParameterError: If a number is out of range.
    """

    smoothness: float  # L
    gradient_bound: float  # B, on the mean square of the mean gradient of an update
    initial_error: float  # E[G(w_0)] - G*
    step_scale: (
        float  # c; J must be known before the first update, the learning rate stays the same
    )

    def __post_init__(self) -> None:
        positive("smoothness", self.smoothness)
        positive("step_scale", self.step_scale)
        not_negative("gradient_bound", self.gradient_bound)
        not_negative("initial_error", self.initial_error)

    @property
    def scale(self) -> float:
        """(G_0 - G*) / c + L c B / 2, what the bound has over sqrt(J).

        The descent lemma, E[G_j+1] <= E[G_j] - eta E|grad G_j|^2 + L eta^2 B / 2, summed over J
        updates and divided by eta J; the least of J is at most their mean.
        """
        noise = self.smoothness * self.step_scale * self.gradient_bound / 2
        return self.initial_error / self.step_scale + noise


def squared_gradient_after(problem: NonConvex, updates: float) -> float:
    """Bound the least mean square of the gradient over J updates: scale / sqrt(J) (Proposition 3).

    Raises:
        ParameterError: If there is no update.
    """
    positive("updates", updates)
    return problem.scale / math.sqrt(updates)


def updates_for_squared_gradient(problem: NonConvex, squared_gradient: float) -> int:
    """Give J(epsilon) for the least mean square of the gradient: (scale / epsilon)^2.

    Raises:
        ParameterError: If the target is not above 0.
    """
    positive("squared_gradient", squared_gradient)
    return max(1, math.ceil((problem.scale / squared_gradient) ** 2))


def squared_gradient_in_time(problem: NonConvex, t_s: float, update_rate_per_s: float) -> float:
    """Bound the least mean square of the gradient within a time (Theorem 3).

    It is scale / sqrt(t lambda_U): J_t is replaced by t lambda_U, its limit in ratio for large t
    (elementary renewal theorem). With preemption, lambda_U is that of E[N] workers (Proposition 2).

    Raises:
        ParameterError: If a number is out of range.
    """
    positive("t_s", t_s)
    positive("update_rate_per_s", update_rate_per_s)
    return squared_gradient_after(problem, t_s * update_rate_per_s)
