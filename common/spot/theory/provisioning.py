"""The number of workers on spot machines, and the choice of these workers: section IV-B.

Assumptions: a spot machine runs for a share alpha of the time and is paid for only then; while it
is gone, its stream waits (`on_preemption: hold`); arrivals, not gradients, limit the updates
(Proposition 1). All results are means: a job that ends at its deadline on average misses it about
half of the time (`common.spot.policies.chance` plans for a given probability).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.theory.errors import ParameterError

if TYPE_CHECKING:
    from common.spot.theory.work import PaperMarket, Work


Binding: TypeAlias = Literal[
    # One more spot worker would miss the deadline (equation 23).
    "deadline",
    # Every worker is on spot already.
    "workers",
    # One more spot worker extends the runtime by more than it saves (Theorem 5).
    "cost",
    # Spot costs as much as on-demand, or more.
    "price",
    # Spot is never available.
    "availability",
    # No number of machines keeps up with the arrivals (Proposition 1).
    "stability",
    # A pool has no more machines.
    "capacity",
    # Not even on-demand machines alone meet the deadline.
    "infeasible",
]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Machines to rent, and their expected cost and runtime."""

    # True if these machines are expected to meet the deadline, and the pools have them.
    feasible: bool
    # N_s, over all pools that may be preempted.
    spot: int
    on_demand: int  # N_o
    # (N_s,) indexes into the rates; empty if workers have no fixed machines.
    spot_workers: npt.NDArray[np.int64]
    expected_cost_usd: float
    expected_runtime_s: float
    # Expected cost over that of all workers on demand, which take theta_0.
    cost_ratio_to_on_demand: float
    binding: Binding
    reason: str  # a sentence for a person


# Rounding error of a number that is an integer on paper. Sums of 10,000 rates are off by at most
# 1e-13 of their value, and 1e-12 of a deadline is negligible.
TOLERANCE = 1e-12

# (N_tot,) indexes of the workers, the first to become spot first.
Order: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CostCurve:
    """Costs and runtimes at every N_s from 0 to N_tot: equations 21 to 23.

    With equal rates, they are equations 15 and 16.
    """

    # (N_tot + 1,) infinite if nothing ever runs.
    costs_usd: npt.NDArray[np.float64]
    runtimes_s: npt.NDArray[np.float64]  # (N_tot + 1,)
    # (N_tot + 1,) True if N_s meets the deadline on average, and the pool has as many machines.
    feasible: npt.NDArray[np.bool_]
    order: Order  # (N_tot,)


def cost_curve(work: Work, market: PaperMarket, order: Order | None = None) -> CostCurve:
    """Evaluate all N_s at once, by prefix sums of the rates.

    For each N_s, the workers with the lowest rates are the best choice: the cost per second is the
    same for any N_s workers, and the loss of these delays the fewest records. Without an `order`,
    equal rates are ordered by number. A cost is the product of two means, which is exact if cost
    per second and runtime vary independently.
    """
    alpha, count = market.spot.availability, work.workers
    if order is None:
        order = np.argsort(work.rates_per_s, kind="stable")
    first = np.concatenate(([0.0], np.cumsum(work.rates_per_s[order])))
    rate = alpha * first + (first[-1] - first)  # records per second
    spot = np.arange(count + 1)
    usd_per_s = (count - spot) * market.on_demand.wanted_usd_per_s
    usd_per_s += spot * market.spot.wanted_usd_per_s
    runs = rate > 0
    runtimes = np.full(count + 1, np.inf)
    np.divide(work.records, rate, out=runtimes, where=runs)
    costs = np.full(count + 1, np.inf)
    np.multiply(runtimes, usd_per_s, out=costs, where=runs)
    feasible = runs & (work.records <= rate * work.deadline_s * (1 + TOLERANCE))
    feasible &= spot <= market.spot.at_most(count)
    return CostCurve(costs, runtimes, feasible, order)


def choose(curve: CostCurve, market: PaperMarket) -> tuple[int, Binding]:
    """Return the cheapest feasible N_s (the lowest, if several cost the same) and its limit."""
    if not curve.feasible[0]:
        return 0, "infeasible"
    if market.spot.availability == 0:
        return 0, "availability"
    if market.spot.wanted_usd_per_s >= market.spot.availability * market.on_demand.wanted_usd_per_s:
        return 0, "price"
    best = int(np.argmin(np.where(curve.feasible, curve.costs_usd, np.inf)))
    binding: Binding = "deadline"
    if best == len(curve.order):
        binding = "workers"
    elif curve.costs_usd[best + 1] >= curve.costs_usd[best]:
        binding = "cost"
    elif best >= market.spot.at_most(len(curve.order)):
        binding = "capacity"
    return best, binding


def as_plan(curve: CostCurve, spot: int, binding: Binding, reason: str) -> Plan:
    """Make a plan from one point of the curve."""
    alone = float(curve.costs_usd[0])
    return Plan(
        feasible=bool(curve.feasible[spot]),
        spot=spot,
        on_demand=len(curve.order) - spot,
        spot_workers=curve.order[:spot],
        expected_cost_usd=float(curve.costs_usd[spot]),
        expected_runtime_s=float(curve.runtimes_s[spot]),
        cost_ratio_to_on_demand=float(curve.costs_usd[spot]) / alone if alone else 1.0,
        binding=binding,
        reason=reason,
    )


def plan(work: Work, market: PaperMarket) -> Plan:
    """Apply Theorem 5: the cheapest N_s of all that meet the deadline on average.

    With equal rates, it is Theorem 4's. The limit cases:

    - alpha = 1: all workers are on spot.
    - alpha = 0 or pi_s >= pi_o: none are. The paper excludes this case. Equation 22 would save
      money by letting slow streams stand still, which is no use of spot machines.
    - theta < theta_0: infeasible, with cost and runtime of on-demand machines alone.
    - No updates are left: no workers are on spot, and the cost is 0.
    """
    curve = cost_curve(work, market)
    spot, binding = choose(curve, market)
    return as_plan(curve, spot, binding, _reason(work, market, curve, spot, binding))


def plan_of(work: Work, market: PaperMarket, spot: int) -> Plan:
    """Return the plan of a given N_s.

    If this N_s meets the deadline, `binding` is the limit of the cheapest N_s.

    Raises:
        ParameterError: If N_s is below 0 or above the number of workers.
    """
    curve = cost_curve(work, market)
    if not 0 <= spot <= work.workers:
        raise ParameterError("spot", f"must be 0 to {work.workers} workers, got {spot}")
    _, binding = choose(curve, market)
    takes, left = f"{curve.runtimes_s[spot]:,.6g} s", f"{work.deadline_s:,.6g} s"
    reason = f"{_some(spot, work)}, as requested, take {takes} on average, and {left} are left"
    if curve.feasible[0] and not curve.feasible[spot]:
        binding = "capacity" if spot > market.spot.at_most(work.workers) else "deadline"
    return as_plan(curve, spot, binding, reason)


def _reason(work: Work, market: PaperMarket, curve: CostCurve, spot: int, binding: Binding) -> str:
    if work.updates == 0:
        return "no updates are left, so no machines are needed"
    takes, left = f"{curve.runtimes_s[spot]:,.6g} s", f"{work.deadline_s:,.6g} s"
    some = f"{_some(spot, work)} take {takes} of {left} on average"
    spot_price, price = market.spot.usd_per_hour, market.on_demand.usd_per_hour
    after = min(spot + 1, work.workers)
    costs = f"${curve.costs_usd[spot]:,.6g} and one more ${curve.costs_usd[after]:,.6g}"
    reasons = {
        "infeasible": f"even on-demand machines alone take theta_0 = {takes}, and {left} are left",
        "availability": "no spot machines: their availability is 0",
        "price": f"no spot machines: ${spot_price:g} an hour is not below ${price:g} on demand",
        "workers": f"{some}: all workers are on spot",
        "cost": f"{some}: they cost {costs}, because the runtime grows",
        "capacity": f"{some}: the pool has no more machines",
        "deadline": f"{some}: one more would make it {curve.runtimes_s[after]:,.6g} s",
    }
    return reasons[binding]


def _some(spot: int, work: Work) -> str:
    return f"{spot} of {work.workers} workers on spot"
