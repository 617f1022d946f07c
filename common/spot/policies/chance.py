"""Meet the deadline with a given probability, while Theorem 4 only meets it on average.

This goes beyond the paper. The number of records until theta varies for three reasons: spot
machines come and go (by far the most), records arrive at random, and some are in batches that are
not full yet. Their means, variances and the third moment of the first are known in closed form; the
sum gets the gamma distribution (Pearson's type III) with these moments. If alpha is above one half,
few long outages weigh more than many short gains, and the sum is skewed to the left: for the
paper's job with 26 spot workers, a normal distribution would promise 96.1 %, while 95.7 % are in
time.

Assumptions: two-state chains, stationary from the start and independent of each other (a pool that
loses many machines at once varies more); start-up times and gradient times are small against theta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.policies.fixed import FIRST_SPOT, decision, market_of
from common.spot.policies.policy import Policy
from common.spot.theory.preemption import relaxation_s, variance_of_uptime_s2
from common.spot.theory.provisioning import Order, Plan, as_plan, choose, cost_curve
from common.spot.theory.work import partial_batches_s

if TYPE_CHECKING:
    from common.spot.policies.policy import Decision, Situation
    from common.spot.theory.work import PaperMarket, Pool, Work

Values: TypeAlias = npt.NDArray[np.float64]

# Below this skewness, the gamma distribution differs from the normal one by less than 1e-5
# everywhere.
STRAIGHT = 1e-4
# Number of relaxation times after which exp(-gap) is practically 0 and gap^2 may overflow.
FAR = 700.0


def third_moment_of_uptime_s3(t_s: float, availability: float, cycle_s: float) -> float:
    """Return the third central moment of the time that one machine is on in [0, t].

    Y is the state, 1 or 0, minus alpha. For times t1 < t2 < t3 of a stationary two-state chain,
    E[Y1 Y2 Y3] = alpha (1 - alpha) (1 - 2 alpha) exp(-(t3 - t1) / tau), whatever t2 is. Integrated
    over all three times, this is 6 alpha (1 - alpha) (1 - 2 alpha) times the integral of (t - u) u
    exp(-u / tau). It is negative if alpha is above one half.
    """
    tau_s = relaxation_s(availability, cycle_s)
    if not tau_s:
        return 0.0
    gap = t_s / tau_s
    lean = 6 * availability * (1 - availability) * (1 - 2 * availability)
    # If the gap is small, the terms of the formula below cancel numerically. The series used
    # instead has a relative error of about gap^3 / 30.
    if gap < 1e-2:
        return lean * t_s**3 * (1 / 6 - gap / 12 + gap**2 / 40)
    once = twice = 1.0
    if gap < FAR:
        rest = math.exp(-gap)
        once -= rest * (1 + gap)
        twice -= rest * (1 + gap + gap**2 / 2)
    return lean * tau_s**2 * (t_s * once - 2 * tau_s * twice)


def deadline_probability(work: Work, pool: Pool, order: Order) -> Values:
    """Return (N_tot + 1,) probabilities of J updates by theta with 0 to N_tot spot workers.

    J updates take J K b records in full batches. At the end of an update, N_tot - 1 workers have an
    incomplete batch, each of 0 to b - 1 records. `order` sorts the workers, the first to become
    spot first.
    """
    if work.updates == 0:
        return np.ones(work.workers + 1)
    alpha, theta = pool.availability, work.deadline_s
    rates = work.rates_per_s[order]
    first, squares, cubes = (np.append(0.0, np.cumsum(rates**power)) for power in (1, 2, 3))
    rate = alpha * first + (first[-1] - first)
    partial = partial_batches_s(rates, work.batch_size) * first[-1]
    spare = rate * theta - partial - work.records
    partial_variance = np.count_nonzero(rates) * (work.batch_size**2 - 1) / 12
    variance = squares * variance_of_uptime_s2(theta, alpha, pool.cycle_s)
    variance += rate * theta + partial_variance
    third = cubes * third_moment_of_uptime_s3(theta, alpha, pool.cycle_s)
    return _at_least_zero(spare, variance, third)


def plan_with_probability(work: Work, market: PaperMarket, probability: float) -> Plan:
    """Return the plan with the cheapest N_s that meets the deadline with at least a probability.

    It is infeasible if on-demand machines alone do not. The limit cases are those of
    `common.spot.theory.provisioning.plan`.
    """
    curve = cost_curve(work, market)
    on_average, _ = choose(curve, market)
    chances = deadline_probability(work, market.spot, curve.order)
    there = np.arange(work.workers + 1) <= market.spot.at_most(work.workers)
    sure = there & (chances >= probability)
    spot, binding = choose(replace(curve, feasible=sure), market)
    asked = f"{100 * probability:g} % are required"
    if binding == "infeasible":
        chance = f"{100 * chances[0]:.2f} %"
        reason = f"even on-demand machines alone meet the deadline with only {chance}; {asked}"
    else:
        reason = (
            f"{spot} of {work.workers} workers on spot meet the deadline with"
            f" {100 * chances[spot]:.2f} % probability, {asked}; {on_average}, which are in time on"
            f" average, would meet it with {100 * chances[on_average]:.2f} %"
        )
    return as_plan(replace(curve, feasible=sure), spot, binding, reason)


@dataclass(frozen=True, slots=True)
class Chance(Policy):
    """Decides once, as the static policy does, with a probability of meeting the deadline."""

    name: ClassVar[str] = "chance"
    probability: float = 0.95

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Plan once.

        Raises:
            ParameterError: If there is no spot pool.
        """
        if last is not None:
            return last
        market = market_of(situation.pools)
        best = plan_with_probability(situation.work, market, self.probability)
        return decision(situation, best, FIRST_SPOT, f"planned once: {best.reason}")


def _at_least_zero(mean: Values, variance: Values, third: Values) -> Values:
    """Return P(X >= 0) by the gamma distribution with this mean and these central moments."""
    from scipy.special import gammainc, gammaincc, ndtr  # noqa: PLC0415 -- slow to load

    std = np.sqrt(variance)
    # Distance of 0 below the mean, in standard deviations.
    distance = np.full(len(mean), np.inf)
    np.divide(mean, std, out=distance, where=std > 0)
    distance = np.where(std > 0, distance, np.where(mean >= 0, np.inf, -np.inf))
    skewness = np.zeros(len(mean))
    np.divide(third, std**3, out=skewness, where=std > 0)
    probability = np.asarray(ndtr(distance), np.float64)
    # Skewed to the left, then to the right.
    for law, sign in ((gammainc, -1.0), (gammaincc, 1.0)):
        some = (sign * skewness > STRAIGHT) & np.isfinite(distance)
        shape = 4 / skewness[some] ** 2
        bound = shape - sign * distance[some] * np.sqrt(shape)
        probability[some] = law(shape, np.maximum(bound, 0.0))
    return probability
