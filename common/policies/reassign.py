"""Reassign: streams of a preempted worker move to the others, so machines are bought for gradients.

Kafka keeps what arrives, whoever runs. What a preemption takes is compute capacity, and as long as
there is enough of it (Proposition 1) the runtime is theta_0. How many machines there are at all
becomes a choice, and it may be far below one per stream.

    arrivals, sum(lambda) / (K b) ──▶ backlog ──▶ updates, capacity(N_o + machines on spot that run)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from common.policies.fixed import FIRST_SPOT, market_of
from common.policies.policy import NOWHERE, ON_DEMAND, by_slot
from common.theory.errors import ParameterError, positive
from common.theory.preemption import (
    distribution_of_running,
    effective_availability,
    variance_of_uptime_s2,
)
from common.theory.provisioning import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.policies.policy import Decision, Situation
    from common.theory.provisioning import Binding
    from common.theory.work import Market, Work


Array: TypeAlias = npt.NDArray[np.float64]

WINDOWS = 32  # of each plan; twice as many change no plan that was tried
ROUNDING = 1e-9  # 20 / (20 / 3) is 3 rounds, not 4


@dataclass(frozen=True, slots=True)
class Computing:
    """What gradients take, and how sure the plan shall be.

    Raises:
        ParameterError: If a number is out of range.
    """

    gradient_s: float  # mu_C, of one batch on the first pool
    probability: float = 0.95  # of the deadline
    # Capacity over arrivals. At a load of 1 / 1.25 = 0.8 an update waits for about two others
    # (M/D/1: load / (2 (1 - load))), and a gradient time underestimated by a fifth is no harm.
    headroom: float = 1.25

    def __post_init__(self) -> None:
        positive("gradient_s", self.gradient_s)
        if not 0 < self.probability < 1:
            raise ParameterError("probability", f"must lie in (0, 1), got {self.probability:g}")
        if not self.headroom >= 1:
            raise ParameterError("headroom", f"must be at least 1, got {self.headroom:g}")


def update_capacity_per_s(
    machines: Array, group_size: int, gradient_s: float, round_overhead_s: float = 0.0
) -> Array:
    """Give how many updates a second machines can make: 1 / (ceil(K / m) mu_C + overhead).

    The K gradients of an update are spread evenly; a machine computes its share one after the
    other, and the update waits for the last. No machine makes no update. Theirs are mean times: the
    slowest of K random ones takes longer, which is for the headroom.

    Args:
        machines: Any shape; not necessarily integers, but sums of speeds.
        group_size: K.
        gradient_s: mu_C.
        round_overhead_s: Of each update.
    """
    busy = machines > 0
    rounds = np.ceil(
        np.divide(group_size, machines, out=np.ones(machines.shape), where=busy) - ROUNDING
    )
    return np.where(busy, 1 / (rounds * gradient_s + round_overhead_s), 0.0)


def waiting_told(
    work: Work, waiting: float, gradient_s: float, *, backlog: bool
) -> tuple[Work, float | None]:
    """Say to a policy what waits: some plan with it, the others for what is to arrive yet.

    What waits need not arrive any more; but its gradients take their time all the same. So the work
    of the others is as many updates as would take as long to arrive as what is left takes at least.

    Args:
        work: What is left, with what waits.
        waiting: Updates whose records have arrived.
        gradient_s: mu_C.
        backlog: Whether it plans with it, see `Policy`.
    """
    waiting = min(max(waiting, 0.0), work.updates)
    if backlog:
        return work, waiting
    machines = np.array([float(work.workers)])
    capacity_per_s = float(update_capacity_per_s(machines, work.group_size, gradient_s).item())
    computed = work.updates * min(work.updates_per_s / capacity_per_s, 1.0)
    return replace(work, updates=max(work.updates - waiting, computed)), None


def machines_for_stability(work: Work, computing: Computing) -> int | None:
    """Give the machines of speed 1 with which updates keep up with arrivals (Proposition 1).

    K b / sum(lambda), the time from one group to the next, must be at least `headroom` times
    ceil(K / m) mu_C. None: not even a machine for each of the K gradients does.
    """
    rate_per_s = work.updates_per_s * computing.headroom
    return machines_for_rate(rate_per_s, work.group_size, computing.gradient_s)


def machines_for_rate(updates_per_s: float, group_size: int, gradient_s: float) -> int | None:
    """Give the fewest machines of speed 1 that make so many updates; None: none do."""
    rounds = math.floor(1 / (updates_per_s * gradient_s) + ROUNDING)
    return math.ceil(group_size / rounds) if rounds >= 1 else None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a number of machines comes to."""

    capacity_per_s: float  # mean, of updates
    stable: bool  # capacity above arrivals with the headroom
    probability: float  # that the updates are made by theta


class Prospect:
    """Says of any numbers of machines how likely they meet the deadline, and which are cheapest.

    With arrivals A and capacity C the updates made by theta are the least, over s, of A(s) +
    C(s, theta): the backlog was empty last at s. They reach J if for every window u = theta - s
    before the deadline C(theta - u, theta) >= J - A(theta - u). Three approximations:

    - the least probable of the windows stands for all of them (its *dominant time scale*);
    - C over a window is normal, with the mean and variance that the stationary binomial law of the
      running machines gives, and covariance falling as exp(-t / tau), tau = alpha (1 - alpha)
      cycle. For a linear capacity that is exact, the bends of any other one forget faster;
    - with no on-demand machine at all, stretches without any machine that outlast the slack are
      added on top: the normal law does not know them.

    Attributes:
        most_spot: Spot machines that are of use, so many that K of them run almost always.

    Args:
        work: What is left.
        market: Of both kinds; a capacity is respected.
        computing: What gradients take.
        backlog: Updates whose records wait already.
    """

    def __init__(
        self, work: Work, market: Market, computing: Computing, backlog: float = 0.0
    ) -> None:
        self._work, self._computing = work, computing
        self._on_demand, self._spot = market.on_demand, market.spot
        self._availability = effective_availability(market.spot)
        self._arrived_s = max((work.updates - backlog) / work.updates_per_s, 0.0)
        self._slack_s = work.deadline_s - self._arrived_s
        shortest = max(min(self._slack_s, work.deadline_s), 1e-3)
        self._windows_s = np.geomspace(shortest, max(work.deadline_s, shortest), WINDOWS)
        before_s = work.deadline_s - self._windows_s
        self._missing = work.updates - backlog - work.updates_per_s * before_s
        self._missing[-1] = work.updates
        per_update = work.group_size * work.batch_size
        self._arrival_variance = work.records_per_s * np.maximum(before_s, 0.0) / per_update**2
        scatter = self._availability * (1 - self._availability)
        self._correlated_s2 = np.zeros(WINDOWS)  # 2 tau (u - tau (1 - exp(-u / tau)))
        if scatter:
            self._correlated_s2[:] = [
                variance_of_uptime_s2(window, self._availability, self._spot.cycle_s) / scatter
                for window in self._windows_s.tolist()
            ]
        # One machine on demand for each of the K gradients and each slot.
        useful = min(work.workers, math.ceil(work.group_size / self._on_demand.speed))
        self._most_on_demand = self._on_demand.at_most(useful)
        self.most_spot = self._spot.at_most(self._useful_spot())

    def _useful_spot(self) -> int:
        spot, alpha = self._spot, self._availability
        most_usd_per_s = spot.availability * spot.speed * self._on_demand.wanted_usd_per_s
        if not alpha or spot.wanted_usd_per_s >= most_usd_per_s:
            return 0
        needed = self._work.group_size / spot.speed / alpha
        most = math.ceil(needed + 10 * math.sqrt(needed * (1 - alpha) / alpha)) + 10
        return min(self._work.workers, most)

    def of(self, on_demand: int, spot: int) -> Outlook:
        """Look at so many machines of each kind."""
        running = distribution_of_running(spot, self._availability)
        machines = on_demand + self._spot.speed * np.arange(spot + 1.0)
        made, work = self._computing, self._work
        capacity = update_capacity_per_s(machines, work.group_size, made.gradient_s)
        mean = float(running @ capacity)
        variance = max(float(running @ capacity**2) - mean**2, 0.0)
        stable = mean >= made.headroom * work.updates_per_s * (1 - ROUNDING)
        if self._slack_s < 0:
            return Outlook(mean, stable, 0.0)
        spread = np.sqrt(variance * self._correlated_s2 + self._arrival_variance)
        ahead = mean * self._windows_s - self._missing
        sure = np.where(ahead >= 0, np.inf, -np.inf)
        quantiles = np.divide(ahead, spread, out=sure, where=spread > 0)
        probability = float(ndtr(quantiles.min())) - self._blackout(on_demand, spot)
        return Outlook(mean, stable, max(probability, 0.0))

    def enough(self, on_demand: int, spot: int) -> bool:
        """Tell whether so many machines do."""
        outlook = self.of(on_demand, spot)
        return outlook.stable and outlook.probability >= self._computing.probability

    def usd_per_s(self, on_demand: int, spot: int) -> float:
        """What so many machines cost while they run."""
        dear, cheap = self._on_demand.wanted_usd_per_s, self._spot.wanted_usd_per_s
        return on_demand * dear + spot * cheap

    def _blackout(self, on_demand: int, spot: int) -> float:
        """Bound the probability of a stretch without any machine that outlasts the slack."""
        if on_demand or not spot or self._availability == 1:
            return 0.0 if on_demand or spot else 1.0
        none = (1 - self._availability) ** spot
        ends_per_s = spot / (
            (1 - self._spot.availability) * self._spot.cycle_s + self._spot.start_up_s
        )
        stretches = none * (1 + ends_per_s * self._work.deadline_s)
        return min(stretches * math.exp(-ends_per_s * self._slack_s), 1.0)

    def cheapest(self) -> Plan:
        """Find the cheapest N_o + N_s <= N_tot that keep up with arrivals and meet the deadline.

        For every N_o the fewest N_s are looked for by halving, as far as they could be cheaper than
        the best so far: a machine more makes no deadline less likely.
        """
        spot_usd_per_s, best, least_usd = self.usd_per_s(0, 1), None, math.inf
        for on_demand in reversed(range(self._most_on_demand + 1)):
            limit = min(self.most_spot, self._work.workers - on_demand)
            if spot_usd_per_s and best is not None:
                spare_usd = least_usd - self.usd_per_s(on_demand, 0)
                limit = min(limit, math.floor(spare_usd / spot_usd_per_s))
            if limit < 0 or not self.enough(on_demand, limit):
                continue
            spot = bisect_left(range(limit), x=True, key=partial(self.enough, on_demand))
            if self.usd_per_s(on_demand, spot) < least_usd:
                best, least_usd = (on_demand, spot), self.usd_per_s(on_demand, spot)
        if best is None:
            return self.plan_of(max(self._most_on_demand, 1), 0, feasible=False)
        return self.plan_of(*best)

    def plan_of(self, on_demand: int, spot: int, *, feasible: bool = True) -> Plan:
        """Say what so many machines come to, of which it is known whether they do.

        The runtime is theta_0, less what the backlog took to arrive. Whose machines they are is no
        matter: the first workers are on demand, the last on spot.
        """
        work, outlook = self._work, self.of(on_demand, spot)
        # What waits already need not arrive any more.
        runtime_s = max(self._arrived_s, work.updates / outlook.capacity_per_s)
        usd = runtime_s * self.usd_per_s(on_demand, spot)
        alone_usd = work.on_demand_only_usd(self._on_demand)
        nearest = "" if feasible else "no number of machines will do; "
        machines = f"{nearest}{on_demand} on demand and {spot} on spot for {work.workers} streams"
        likely = f"on time with probability {outlook.probability:.4g}"
        capacity = f"{outlook.capacity_per_s:.4g} of {work.updates_per_s:.4g} updates/s"
        return Plan(
            feasible=feasible,
            spot=spot,
            on_demand=on_demand,
            spot_workers=np.arange(work.workers - spot, work.workers),
            expected_cost_usd=usd,
            expected_runtime_s=runtime_s,
            cost_ratio_to_on_demand=usd / alone_usd if alone_usd else 1.0,
            binding=self._binding(on_demand, spot) if feasible else "infeasible",
            reason=f"{machines}: {capacity}, {likely}",
        )

    def _binding(self, on_demand: int, spot: int) -> Binding:
        """Name what keeps it from fewer machines."""
        if on_demand and not self.most_spot:
            return "price" if self._spot.availability else "availability"
        fewer = self.of(on_demand, spot - 1) if spot else self.of(on_demand - 1, 0)
        return "deadline" if fewer.stable else "stability"


@dataclass(frozen=True, slots=True)
class Reassign:
    """As many machines as gradients need, mostly on spot; the other slots have none.

    It decides once, and again when what it decided on has moved by more than `moved`, or when the
    updates made since lag behind by more than `patience` of the slack that there was. The lag is
    then known to wait in Kafka, and is planned with. Machines that still do are kept as long as
    others would hardly be cheaper.
    """

    name: ClassVar[str] = "reassign"
    watches_outages: ClassVar[bool] = False  # the number of machines is chosen for outages
    plans_backlog: ClassVar[bool] = True
    probability: float = 0.95
    headroom: float = 1.25
    review_s: float | None = 30.0
    moved: float = 0.1  # relative; the headroom stands twice that
    patience: float = 0.5  # the other half is left to catch up in
    saves: float = 0.05  # of what machines cost; for less they are not changed

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Decide anew, or return `last` where nothing that matters has changed.

        Raises:
            ParameterError: If there is no spot pool or a number is out of range.
        """
        market = market_of(situation.pools)
        work, waiting, lag_s = situation.work, situation.waiting, 0.0
        if waiting is not None:
            lag_s = _arrive_in_s(waiting, work)
        elif last is not None:
            lag_s = _behind_s(situation, last.basis, last.basis.work.undisturbed_s)
        reason = self._reason(situation, last, lag_s)
        if last is not None and reason is None:
            return last
        backlog = min(max(lag_s, 0.0) * work.updates_per_s, work.updates)

        def prospect(longer: float = 1.0) -> Prospect:
            """With gradients that take so many times as long."""
            gradient_s = longer * situation.gradient_s
            computing = Computing(gradient_s, self.probability, self.headroom)
            return Prospect(work, market, computing, backlog)

        plan = prospect().cheapest()
        if last is not None and len(last.places) == work.workers:
            plan = self._steady(prospect, plan, last)
        places = np.full(work.workers, NOWHERE, np.int8)
        places[: plan.on_demand] = ON_DEMAND
        places[plan.spot_workers] = FIRST_SPOT
        stand_ins = np.zeros(work.workers, np.bool_)
        told = f"{reason or 'first plan'}: {plan.reason}"
        return by_slot(places, stand_ins, plan, told, situation)

    def _steady(self, prospect: Callable[[float], Prospect], plan: Plan, last: Decision) -> Plan:
        """Keep the machines that there are, where that gradients scatter may be all that changed.

        They stay if they would do for gradients a little shorter, unless it pays to change them
        even for gradients a little longer.
        """
        machines = last.plan.on_demand, last.plan.spot
        if machines == (plan.on_demand, plan.spot) or not last.plan.feasible:
            return plan
        shorter, now = prospect(1 / (1 + self.moved)), prospect(1.0)
        if machines[1] > shorter.most_spot or not shorter.enough(*machines):
            return plan
        careful = prospect(self.headroom).cheapest()
        target = careful if careful.feasible else plan
        target_usd_per_s = now.usd_per_s(target.on_demand, target.spot)
        if target_usd_per_s < (1 - self.saves) * now.usd_per_s(*machines):
            return plan
        return now.plan_of(*machines)

    def _reason(self, situation: Situation, last: Decision | None, lag_s: float) -> str | None:
        if last is None:
            return "first plan"
        basis = last.basis
        (on_demand, spot, *_), (on_demand_then, spot_then, *_) = situation.pools, basis.pools
        for what, now, then in (
            ("gradient time", situation.gradient_s, basis.gradient_s),
            ("arrivals", situation.work.records_per_s, basis.work.records_per_s),
            ("spot price", spot.usd_per_hour, spot_then.usd_per_hour),
            ("on-demand price", on_demand.usd_per_hour, on_demand_then.usd_per_hour),
            ("availability", spot.availability, spot_then.availability),
        ):
            if abs(now - then) > self.moved * then:
                return f"{what} moved from {then:.4g} to {now:.4g}"
        planned_s = basis.work.undisturbed_s
        if situation.waiting is not None:  # what was known to wait was planned with
            planned_s = last.plan.expected_runtime_s
            lag_s = max(
                _behind_s(situation, basis, planned_s),
                lag_s - _arrive_in_s(basis.waiting or 0.0, basis.work),
            )
        slack_s = max(basis.work.deadline_s - planned_s, 0.0)
        if last.plan.feasible and lag_s > max(self.patience * slack_s, self.review_s or 0.0):
            return f"updates lag {lag_s:.3g} s behind, with {slack_s:.3g} s of slack"
        return None


def _arrive_in_s(updates: float, work: Work) -> float:
    return updates / work.updates_per_s


def _behind_s(situation: Situation, basis: Situation, planned_s: float) -> float:
    """Give how much later the updates made since then are than if all took so long."""
    made = (basis.work.updates - situation.work.updates) * planned_s
    return (
        situation.now_s - basis.now_s - (made / basis.work.updates if basis.work.updates else 0.0)
    )
