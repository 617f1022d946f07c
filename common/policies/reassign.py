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

from common.policies.policy import NOWHERE, ON_DEMAND, Decision
from common.theory.errors import ParameterError, not_negative, positive
from common.theory.preemption import (
    distribution_of_running,
    effective_availability,
    variance_of_uptime_s2,
)
from common.theory.provisioning import Plan
from common.theory.work import Market

if TYPE_CHECKING:
    from common.policies.policy import Situation
    from common.theory.provisioning import Binding
    from common.theory.work import Pool, Work


Array: TypeAlias = npt.NDArray[np.float64]

WINDOWS = 32  # of each plan; twice as many change no plan that was tried
ROUNDING = 1e-9  # 20 / (20 / 3) is 3 rounds, not 4
SPOT = 1  # of the pools; others are not used


@dataclass(frozen=True, slots=True)
class Computing:
    """What gradients take, and how sure the plan shall be.

    Raises:
        ParameterError: If a number is out of range.
    """

    gradient_s: float  # mu_C, of one batch on the first pool
    round_overhead_s: float = 0.0  # of an update: trigger, model and gradients on their way
    probability: float = 0.95  # of the deadline
    # Capacity over arrivals. At a load of 1 / 1.25 = 0.8 an update waits for about two others
    # (M/D/1: load / (2 (1 - load))), and a gradient time underestimated by a fifth is no harm.
    headroom: float = 1.25

    def __post_init__(self) -> None:
        positive("gradient_s", self.gradient_s)
        not_negative("round_overhead_s", self.round_overhead_s)
        if not 0 < self.probability < 1:
            raise ParameterError("probability", f"must lie in (0, 1), got {self.probability:g}")
        if not self.headroom >= 1:
            raise ParameterError("headroom", f"must be at least 1, got {self.headroom:g}")


def update_capacity_per_s(
    machines: Array, group_size: int, gradient_s: float, round_overhead_s: float
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


def machines_for_stability(work: Work, computing: Computing) -> int | None:
    """Give the machines of speed 1 with which updates keep up with arrivals (Proposition 1).

    K b / sum(lambda), the time from one group to the next, must be at least `headroom` times
    ceil(K / m) mu_C + overhead. None: not even a machine for each of the K gradients does.
    """
    interval_s = work.group_size * work.batch_size / float(work.rates_per_s.sum())
    left_s = interval_s / computing.headroom - computing.round_overhead_s
    rounds = math.floor(left_s / computing.gradient_s + ROUNDING)
    return math.ceil(work.group_size / rounds) if rounds >= 1 else None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a number of machines comes to."""

    capacity_per_s: float  # mean, of updates
    stable: bool  # capacity above arrivals with the headroom
    probability: float  # that the updates are made by theta


class Prospect:
    """Says of any numbers of machines how likely they meet the deadline.

    With arrivals A and capacity C the updates made by theta are the least, over s, of A(s) +
    C(s, theta): the backlog was empty last at s. They reach J if for every window u = theta - s
    before the deadline C(theta - u, theta) >= J - A(theta - u). Three approximations:

    - the least probable of the windows stands for all of them (its *dominant time scale*);
    - C over a window is normal, with the mean and variance that the stationary binomial law of the
      running machines gives, and covariance falling as exp(-t / tau), tau = alpha (1 - alpha)
      cycle. For a linear capacity that is exact, the bends of any other one forget faster;
    - with no on-demand machine at all, stretches without any machine that outlast the slack are
      added on top: the normal law does not know them.
    """

    def __init__(self, work: Work, market: Market, computing: Computing, backlog: float) -> None:
        self._work = work
        self._computing = computing
        self._spot = market.spot
        self._speed = market.spot.speed
        self._availability = effective_availability(market.spot)
        self.arrivals_per_s = float(work.rates_per_s.sum()) / (work.group_size * work.batch_size)
        self.arrived_s = max((work.updates - backlog) / self.arrivals_per_s, 0.0)
        self.slack_s = work.deadline_s - self.arrived_s
        shortest = max(min(self.slack_s, work.deadline_s), 1e-3)
        self._windows_s = np.geomspace(shortest, max(work.deadline_s, shortest), WINDOWS)
        missing = work.updates - backlog - self.arrivals_per_s * (work.deadline_s - self._windows_s)
        missing[-1] = work.updates
        self._missing = missing
        per_update = work.group_size * work.batch_size
        before_s = np.maximum(work.deadline_s - self._windows_s, 0.0)
        self._arrival_variance = float(work.rates_per_s.sum()) * before_s / per_update**2
        cycle_s = market.spot.cycle_s
        scatter = self._availability * (1 - self._availability)
        self._correlated_s2 = np.zeros(WINDOWS)  # 2 tau (u - tau (1 - exp(-u / tau)))
        if scatter:
            self._correlated_s2[:] = [
                variance_of_uptime_s2(float(window), self._availability, cycle_s) / scatter
                for window in self._windows_s
            ]

    def of(self, on_demand: int, spot: int) -> Outlook:
        """Look at so many machines of each kind."""
        running = distribution_of_running(spot, self._availability)
        machines = on_demand + self._speed * np.arange(spot + 1.0)
        made = self._computing
        capacity = update_capacity_per_s(
            machines, self._work.group_size, made.gradient_s, made.round_overhead_s
        )
        mean = float(running @ capacity)
        variance = max(float(running @ capacity**2) - mean**2, 0.0)
        stable = mean >= made.headroom * self.arrivals_per_s * (1 - ROUNDING)
        if self.slack_s < 0:
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

    def _blackout(self, on_demand: int, spot: int) -> float:
        """Bound the probability of a stretch without any machine that outlasts the slack."""
        if on_demand or not spot or self._availability == 1:
            return 0.0 if on_demand or spot else 1.0
        none = (1 - self._availability) ** spot
        ends_per_s = spot / (
            (1 - self._spot.availability) * self._spot.cycle_s + self._spot.start_up_s
        )
        stretches = none * (1 + ends_per_s * self._work.deadline_s)
        return min(stretches * math.exp(-ends_per_s * self.slack_s), 1.0)


def plan_reassign(work: Work, market: Market, computing: Computing, backlog: float = 0.0) -> Plan:
    """Find the cheapest N_o + N_s <= N_tot that keep up with arrivals and meet the deadline.

    For every N_o the fewest N_s are looked for by halving, as far as they could be cheaper than the
    best so far: a machine more makes no deadline less likely. The runtime is theta_0 then, less
    what the backlog took to arrive. Whose machines they are is no matter: the first workers are on
    demand, the last on spot.

    Args:
        work: What is left.
        market: Of both kinds; a capacity is respected.
        computing: What gradients take.
        backlog: Updates whose records wait already.
    """
    prospect = Prospect(work, market, computing, backlog)
    most = most_spot(work, market)
    spot_usd = market.spot.availability * market.spot.usd_per_s
    best, least_usd = None, math.inf
    for on_demand in reversed(range(_most(work, market.on_demand) + 1)):
        usd_per_s = on_demand * market.on_demand.usd_per_s
        limit = min(most, work.workers - on_demand)
        if spot_usd and math.isfinite(least_usd):
            limit = min(limit, math.floor((least_usd - usd_per_s) / spot_usd))
        if limit < 0 or not prospect.enough(on_demand, limit):
            continue
        spot = bisect_left(range(limit), x=True, key=partial(prospect.enough, on_demand))
        if usd_per_s + spot * spot_usd < least_usd:
            best, least_usd = (on_demand, spot), usd_per_s + spot * spot_usd
    return _as_plan(work, market, prospect, best)


def plan_of_machines(
    work: Work, market: Market, computing: Computing, backlog: float, machines: tuple[int, int]
) -> Plan:
    """Say what machines come to of which it is known that they do, on demand and on spot."""
    return _as_plan(work, market, Prospect(work, market, computing, backlog), machines)


def _most(work: Work, pool: Pool) -> int:
    """Limit machines: one for each of the K gradients and each slot, and as many as there are."""
    useful = min(work.workers, math.ceil(work.group_size / pool.speed))
    return useful if pool.capacity is None else min(useful, pool.capacity)


def most_spot(work: Work, market: Market) -> int:
    """Limit spot machines likewise, with so many that K of them run almost always."""
    spot, alpha = market.spot, effective_availability(market.spot)
    if not alpha or spot.usd_per_s >= market.on_demand.usd_per_s * spot.speed:
        return 0
    needed = work.group_size / spot.speed / alpha
    most = min(work.workers, math.ceil(needed + 10 * math.sqrt(needed * (1 - alpha) / alpha)) + 10)
    return most if spot.capacity is None else min(most, spot.capacity)


def _as_plan(work: Work, market: Market, prospect: Prospect, best: tuple[int, int] | None) -> Plan:
    on_demand, spot = best or (max(_most(work, market.on_demand), 1), 0)
    outlook = prospect.of(on_demand, spot)
    # What waits already need not arrive any more.
    runtime_s = max(prospect.arrived_s, work.updates / outlook.capacity_per_s)
    spot_usd_per_s = market.spot.availability * market.spot.usd_per_s
    usd = runtime_s * (on_demand * market.on_demand.usd_per_s + spot * spot_usd_per_s)
    alone_usd = work.workers * work.undisturbed_s * market.on_demand.usd_per_s
    binding = _binding(work, market, prospect, best)
    nearest = "" if best else "no number of machines will do; "
    machines = f"{nearest}{on_demand} on demand and {spot} on spot for {work.workers} streams"
    likely = f"on time with probability {outlook.probability:.4g}"
    capacity = f"{outlook.capacity_per_s:.4g} of {prospect.arrivals_per_s:.4g} updates/s"
    return Plan(
        feasible=best is not None,
        spot=spot,
        on_demand=on_demand,
        spot_workers=np.arange(work.workers - spot, work.workers),
        expected_cost_usd=usd,
        expected_runtime_s=runtime_s,
        cost_ratio_to_on_demand=usd / alone_usd if alone_usd else 1.0,
        binding=binding,
        reason=f"{machines}: {capacity}, {likely}",
    )


def _binding(
    work: Work, market: Market, prospect: Prospect, best: tuple[int, int] | None
) -> Binding:
    """Name what keeps it from fewer machines."""
    if best is None:
        return "infeasible"
    on_demand, spot = best
    if on_demand and not most_spot(work, market):
        return "availability" if not market.spot.availability else "price"
    fewer = prospect.of(on_demand, spot - 1) if spot else prospect.of(on_demand - 1, 0)
    return "deadline" if fewer.stable else "stability"


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be planned for."""

    work: Work
    market: Market
    computing: Computing
    backlog: float  # updates whose records wait already

    def cheapest(self) -> Plan:
        """Plan it anew, whatever there is."""
        return plan_reassign(self.work, self.market, self.computing, self.backlog)

    def with_gradients(self, times: float) -> _Task:
        """The same with gradients that take so many times as long."""
        gradient_s = self.computing.gradient_s * times
        return replace(self, computing=replace(self.computing, gradient_s=gradient_s))

    def do(self, on_demand: int, spot: int) -> bool:
        """Tell whether so many machines do, and can still be had."""
        there = spot <= most_spot(self.work, self.market)
        prospect = Prospect(self.work, self.market, self.computing, self.backlog)
        return there and prospect.enough(on_demand, spot)

    def usd_per_s(self, on_demand: int, spot: int) -> float:
        """What so many machines cost while they run."""
        market = self.market
        spot_usd_per_s = market.spot.availability * market.spot.usd_per_s
        return on_demand * market.on_demand.usd_per_s + spot * spot_usd_per_s

    def plan_of(self, on_demand: int, spot: int) -> Plan:
        """Say what so many machines come to, which do."""
        machines = on_demand, spot
        return plan_of_machines(self.work, self.market, self.computing, self.backlog, machines)


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
    probability: float = 0.95
    round_overhead_s: float = 0.0
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
        if len(situation.pools) <= SPOT:
            raise ParameterError("pools", "reassign needs a spot pool after the on-demand one")
        if situation.waiting is not None:
            lag_s = _arrive_in_s(situation.waiting, situation.work)
        else:
            lag_s = (
                0.0
                if last is None
                else _behind_s(situation, last.basis, last.basis.work.undisturbed_s)
            )
        reason = self._reason(situation, last, lag_s)
        if last is not None and reason is None:
            return last
        work, market = situation.work, Market(situation.pools[ON_DEMAND], situation.pools[SPOT])
        computing = Computing(
            situation.gradient_s, self.round_overhead_s, self.probability, self.headroom
        )
        backlog = max(lag_s, 0.0) * _rate_per_s(situation) / (work.group_size * work.batch_size)
        task = _Task(work, market, computing, min(backlog, work.updates))
        plan = task.cheapest()
        if last is not None and len(last.places) == work.workers:
            plan = self._steady(task, plan, last)
        places = np.full(work.workers, NOWHERE, np.int8)
        places[: plan.on_demand] = ON_DEMAND
        places[plan.spot_workers] = SPOT
        stand_ins = np.zeros(work.workers, np.bool_)
        told = f"{reason or 'first plan'}: {plan.reason}"
        return Decision(places, stand_ins, plan, told, situation)

    def _steady(self, task: _Task, plan: Plan, last: Decision) -> Plan:
        """Keep the machines that there are, where that gradients scatter may be all that changed.

        They stay if they would do for gradients a little shorter, unless it pays to change them
        even for gradients a little longer.
        """
        machines = last.plan.on_demand, last.plan.spot
        if machines == (plan.on_demand, plan.spot) or not last.plan.feasible:
            return plan
        if not task.with_gradients(1 / (1 + self.moved)).do(*machines):
            return plan
        careful = task.with_gradients(self.headroom).cheapest()
        target = careful if careful.feasible else plan
        if task.usd_per_s(target.on_demand, target.spot) < (1 - self.saves) * task.usd_per_s(
            *machines
        ):
            return plan
        return task.plan_of(*machines)

    def _reason(self, situation: Situation, last: Decision | None, lag_s: float) -> str | None:
        if last is None:
            return "first plan"
        basis = last.basis
        for what, now, then in (
            ("gradient time", situation.gradient_s, basis.gradient_s),
            ("arrivals", _rate_per_s(situation), _rate_per_s(basis)),
            ("spot price", situation.pools[SPOT].usd_per_hour, basis.pools[SPOT].usd_per_hour),
            ("on-demand price", situation.pools[0].usd_per_hour, basis.pools[0].usd_per_hour),
            ("availability", situation.pools[SPOT].availability, basis.pools[SPOT].availability),
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


def _rate_per_s(situation: Situation) -> float:
    return float(situation.work.rates_per_s.sum())


def _arrive_in_s(updates: float, work: Work) -> float:
    return updates * work.group_size * work.batch_size / float(work.rates_per_s.sum())


def _behind_s(situation: Situation, basis: Situation, planned_s: float) -> float:
    """Give how much later the updates made since then are than if all took so long."""
    made = (basis.work.updates - situation.work.updates) * planned_s
    return (
        situation.now_s - basis.now_s - (made / basis.work.updates if basis.work.updates else 0.0)
    )
