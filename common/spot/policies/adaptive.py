"""The adaptive policy of section V-C: Theorems 4 and 5 applied repeatedly to the remaining work.

As in the paper, it begins with all workers on spot and solves again when a price changes, with
running estimates of rates and availability. Three things are ours. It also solves again when an
estimate or the pace has moved, to use time that was gained and make up for time that was lost.
Workers only move if the move gains something. And it keeps a time reserve, because a plan for
exactly the deadline would be slightly late half of the time.

The reserve is the time that an outage of all spot machines until the next review would cost, plus
the delay of arrivals. So if on-demand machines can meet the deadline now, they can still meet it at
the next review in any case. Close to that limit, all workers run on demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.policies.fixed import FIRST_SPOT, decision, market_of
from common.spot.policies.policy import NOWHERE, ON_DEMAND, Decision, Places, Policy, Situation
from common.spot.theory.provisioning import (
    TOLERANCE,
    Order,
    Plan,
    as_plan,
    choose,
    cost_curve,
    plan_of,
)
from common.spot.theory.work import partial_batches_s

if TYPE_CHECKING:
    from common.spot.theory.work import PaperMarket, Work

Values: TypeAlias = npt.NDArray[np.float64]

BEGINNING = "all on spot, until the first review"

# Delay of arrivals that a plan allows for, in standard deviations of a Poisson stream. One job in
# 700 has a longer delay.
LATE = 3.0


# The next four constants are changes that justify another solution. Relative change of a price:
# smaller ones hardly change N_s, which follows from the deadline.
PRICE_MOVED = 0.01
# Absolute change of alpha. N_s is proportional to 1 / (1 - alpha): at 0.9, this changes N_s by a
# tenth.
AVAILABILITY_MOVED = 0.01
# Sum of the changes of all rates, over the sum of rates. Rates counted for a minute at 100 per
# second differ by a hundredth by chance alone. A change of their sum shows in the pace.
RATES_MOVED = 0.05
# Difference between the remaining runtime and the remaining time, as a share of that time. At
# alpha = 0.9 and with 64 workers, this moves 3 workers from spot to on demand.
PACE_MOVED = 0.005


def moved(before: Situation, now: Situation, places: Places, time_s: float) -> str:
    """Return a reason to solve again; empty without a reason.

    Args:
        before: The situation of the decision in force.
        now: The current situation.
        places: Pools of the workers.
        time_s: Time for the plan: the remaining time without the reserve.
    """
    return next(_reasons(before, now, places, time_s), "")


def _reasons(before: Situation, now: Situation, places: Places, time_s: float) -> Iterator[str]:
    if [pool.name for pool in before.pools] != [pool.name for pool in now.pools]:
        yield "other pools are on offer"
    for was, pool in zip(before.pools, now.pools, strict=True):
        if abs(pool.usd_per_hour - was.usd_per_hour) > PRICE_MOVED * was.usd_per_hour:
            yield f"price of {pool.name} from ${was.usd_per_hour:g} to ${pool.usd_per_hour:g}"
        if abs(pool.availability - was.availability) > AVAILABILITY_MOVED:
            yield f"availability of {pool.name} from {was.availability:.3f} to"
            f" {pool.availability:.3f}"
    old, new = before.work.rates_per_s, now.work.rates_per_s
    change = float(np.abs(new - old).sum() / old.sum())
    if change > RATES_MOVED:
        yield f"rates changed by {100 * change:.2g} %"
    takes_s, needs_s = runtime_of_s(places, now), now.work.undisturbed_s
    if needs_s > time_s and (places > ON_DEMAND).any():
        yield f"close to the deadline: on-demand machines alone need {needs_s:,.6g} of"
        f" {time_s:,.6g} s"
    if abs(takes_s - time_s) > PACE_MOVED * max(time_s, 0.0):
        word = "behind" if takes_s > time_s else "ahead"
        yield f"{word}: the remaining work would take {takes_s:,.6g} of {time_s:,.6g} s"


def runtime_of_s(places: Places, situation: Situation) -> float:
    """Return the mean remaining runtime with workers in these places, by equation 21."""
    shares = np.array([pool.availability for pool in situation.pools])
    up = np.where(places == NOWHERE, 0.0, shares[places])
    rate = float(situation.work.rates_per_s @ up)
    if not situation.work.records:
        return 0.0
    return situation.work.records / rate if rate else math.inf


@dataclass(frozen=True, slots=True)
class Adaptive(Policy):
    """Solves again at every price change and review; compares pools and uses the cheapest."""

    name: ClassVar[str] = "adaptive"
    # Outages last minutes and deadlines hours, so half a minute is soon enough for both. It
    # adds a quarter of a per cent of the paper's 6,400 s to the reserve if half of the workers are
    # on spot.
    review_s: ClassVar[float] = 30.0

    def reserve_of_s(self, situation: Situation, lost: float | Values) -> float | Values:
        """Return the time reserve if workers on spot have the share `lost` of all arrivals.

        It covers late arrivals, and an outage of all spot machines until the next review has
        started on-demand machines.
        """
        work = situation.work
        late_s = partial_batches_s(work.rates_per_s, work.batch_size)
        late_s += LATE * math.sqrt(work.records) / work.records_per_s
        return late_s + lost * (self.review_s + situation.pools[ON_DEMAND].start_up_s)

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Solve again if something has moved.

        Raises:
            ParameterError: If there is no spot pool.
        """
        if last is None:
            return self._begin(situation)
        why = self._why(last, situation)
        if not why:
            return last
        if situation.work.undisturbed_s > situation.work.deadline_s:
            return self._late(situation, last)
        best, pool = self._solve(situation, last)
        decided = decision(situation, best, pool, f"{why}: {best.reason}")
        return last if np.array_equal(decided.places, last.places) else decided

    def _begin(self, situation: Situation) -> Decision:
        work = situation.work
        best, pool = self._solve(situation, None)
        all_out_s = work.undisturbed_s + float(self.reserve_of_s(situation, 1.0))
        if not best.spot or all_out_s > work.deadline_s:
            return decision(situation, best, pool, best.reason)
        market = market_of(situation.pools, pool)
        most = plan_of(work, market, market.spot.at_most(work.workers))
        return decision(situation, most, pool, BEGINNING)

    def _late(self, situation: Situation, last: Decision) -> Decision:
        """Keep running machines, since a move would delay the job; order others on demand."""
        kept = np.flatnonzero(situation.up & (last.places > ON_DEMAND))
        pool, work = max(int(last.places.max()), FIRST_SPOT), situation.work
        reason = f"{len(kept)} running workers stay on spot, the others are on demand: at least"
        reason += f" {work.undisturbed_s - work.deadline_s:,.6g} s late"
        plan = plan_of(work, market_of(situation.pools, pool), len(kept))
        plan = replace(plan, feasible=False, spot_workers=kept, binding="infeasible", reason=reason)
        late = decision(situation, plan, pool, reason)
        known = np.array_equal(late.places, last.places) and not last.plan.feasible
        return last if known else late

    def _why(self, last: Decision, now: Situation) -> str:
        if now.work.updates == 0:
            return ""
        if last.reason == BEGINNING and now.now_s > last.basis.now_s:
            return "first review"
        rates = now.work.rates_per_s
        lost = float(rates[last.places > ON_DEMAND].sum() / rates.sum())
        time_s = now.work.deadline_s - float(self.reserve_of_s(now, lost))
        return moved(last.basis, now, last.places, time_s)

    def _solve(self, situation: Situation, last: Decision | None) -> tuple[Plan, int]:
        """Return the cheapest plan and its spot pool.

        The pool in use stays unless another one saves more than `PRICE_MOVED`.
        """
        used = ON_DEMAND if last is None else int(last.places.max())
        order = self._order(situation, last)
        # This call raises if there is no spot pool.
        market_of(situation.pools)
        plans = {
            pool: self._plan(situation, market_of(situation.pools, pool), order)
            for pool in range(FIRST_SPOT, len(situation.pools))
        }

        def price(pool: int) -> float:
            return plans[pool].expected_cost_usd * (1 - PRICE_MOVED * (pool == used))

        pool = min(plans, key=price)
        return plans[pool], pool

    def _plan(self, situation: Situation, market: PaperMarket, order: Order | None) -> Plan:
        """Apply Theorem 5 with the time that each N_s leaves after its own reserve."""
        work = situation.work
        curve = cost_curve(work, market, order)
        first = np.concatenate(([0.0], np.cumsum(work.rates_per_s[curve.order])))
        kept_s = self.reserve_of_s(situation, first / first[-1]) + np.zeros(work.workers + 1)
        in_time = curve.runtimes_s + kept_s <= work.deadline_s * (1 + TOLERANCE)
        # If no updates are left, no plan is late.
        if work.updates:
            curve = replace(curve, feasible=curve.feasible & in_time)
        spot, binding = choose(curve, market)
        if binding == "infeasible":
            return replace(plan_of(work, market, 0), reason=_all_on_demand(work, kept_s[0]))
        reason = (
            f"{spot} of {work.workers} workers on spot, limited by {binding}, take "
            f"{curve.runtimes_s[spot]:,.6g} s of {work.deadline_s:,.6g} s on average, "
            f"with a reserve of {kept_s[spot]:,.3g} s"
        )
        return as_plan(curve, spot, binding, reason)

    def _order(self, situation: Situation, last: Decision | None) -> Order | None:
        """Order workers by rate, lowest first; at about the same rate, those on spot come first.

        Estimates of equal rates differ by chance, which is no reason to move a worker. Of the
        workers on spot, those without a machine move to on demand first, because their streams then
        run again at once.
        """
        if last is None:
            return None
        on_spot = last.places > ON_DEMAND
        running = on_spot & situation.up
        bonus = (1 + RATES_MOVED) ** (on_spot.astype(np.float64) + running)
        return np.argsort(situation.work.rates_per_s / bonus, kind="stable")


def _all_on_demand(work: Work, kept_s: float) -> str:
    needs_s, left_s = work.undisturbed_s, work.deadline_s
    if needs_s > left_s:
        return f"all on demand, and about {needs_s - left_s:,.6g} s late"
    return f"all on demand: {needs_s:,.6g} s of {left_s:,.6g} s, with a reserve of {kept_s:,.3g} s"
