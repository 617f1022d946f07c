"""BidBrain as the policy of a job with a backlog: live bids, from past prices of machines.

A decision is a number of machines for each offer. An offer with its bid is an allocation of
`bidbrain`. Lost machines are not replaced under the same bid. Before an allocation's hour ends, the
policy renews or releases it. On-demand machines are one more market, whose price never passes a
bid. The paper's reliable machines, which do no work and always run, are those of the coordinator,
Kafka and Redis. The policy ignores deadlines, but a plan that misses one is not feasible.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.spot.machines import Offer, PriceHistory
from common.spot.policies.bidbrain import Allocation, Array, BidBrain, EvictionOdds, eviction_odds
from common.spot.policies.policy import ON_DEMAND, Decision, Policy, Situation, renewal_s
from common.spot.theory.billing import HOUR_S
from common.spot.theory.capacity import machines_for_stability, update_capacity_per_s
from common.spot.theory.errors import ParameterError
from common.spot.theory.provisioning import Plan

if TYPE_CHECKING:
    from common.spot.theory.work import Pool

# Reviews per hour: the paper's two minutes.
REVIEWS = 30
# Number of on-demand machines for the coordinator, Kafka and Redis. If they cost nothing, time
# would cost nothing either, and the policy would only ever use the cheapest market.
SERVERS = 1
# Distance of two bids that would otherwise be equal: the provider's smallest.
BID_STEP_USD = 1e-6


@dataclass(frozen=True, slots=True)
class BidSettings:
    """Time that a job loses when its machines change."""

    # Time that all machines stand still after an eviction (lambda).
    lambda_s: float = 30.0
    # Time that all machines stand still when machines are added or removed (sigma). If None, the
    # longest start-up of all pools.
    start_s: float | None = None


def odds_of(pools: Sequence[Pool], past: Mapping[str, PriceHistory]) -> EvictionOdds:
    """Count evictions in past prices of each pool.

    Raises:
        ParameterError: If a pool's past prices are unknown, or shorter than an hour.
    """
    hour_s = min(pool.billing.hour_s for pool in pools)
    step_s = hour_s / REVIEWS
    found = []
    for pool in pools:
        if pool.name not in past:
            raise ParameterError(pool.name, "its past prices are not known yet")
        times_s, usd_per_hour, until_s = past[pool.name]
        constant = len(set(usd_per_hour)) == 1
        end_s = times_s[0] + 2 * hour_s if constant else until_s
        grid = np.arange(times_s[0], end_s, step_s)
        prices = np.array(usd_per_hour)[np.searchsorted(times_s, grid, side="right") - 1]
        try:
            found.append(eviction_odds(prices[None], step_s, hour_s=hour_s))
        except ParameterError as error:
            raise ParameterError(pool.name, f"its past {error}") from error
    return replace(
        found[0],
        probability=np.concatenate([each.probability for each in found]),
        median_s=np.concatenate([each.median_s for each in found]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Bidding(Policy):
    """Bids for machines of a job whose streams move to the survivors, up to the job's maximum."""

    settings: BidSettings = field(default_factory=BidSettings)
    # Odds of evictions, for the same pools as in each situation; None if unknown so far.
    odds: EvictionOdds | None = None
    name: ClassVar[str] = "bidbrain"
    watches_outages: ClassVar[bool] = True
    plans_backlog: ClassVar[bool] = True

    @property
    def review_s(self) -> float | None:
        """Time between reviews: two minutes, or less if hours are shorter."""
        return (HOUR_S if self.odds is None else self.odds.hour_s) / REVIEWS

    def reconsider(self, situation: Situation, last: Decision | None) -> Decision:
        """Renew allocations that end, and acquire those that make work cheaper.

        Raises:
            ParameterError: If past prices are unknown so far.
        """
        brain, prices = self._brain(situation), _prices(situation.pools)
        now_s, room = situation.now_s, _room(situation)
        soon_s = now_s + renewal_s(brain.odds.hour_s)
        there, asked = _there(situation, last), () if last is None else last.machines
        footprint = {offer: each for offer, each in there.items() if each.ends_s > soon_s}
        for offer, each in there.items():
            if offer in footprint:
                continue
            others, speed = [*footprint.values()], brain.work_per_s[each.market]
            has = sum(other.machines * brain.work_per_s[other.market] for other in others)
            if has + each.machines * speed <= brain.most_per_s and brain.renews(
                others, each, now_s, prices, room
            ):
                ends_s = max(each.ends_s, now_s) + brain.odds.hour_s
                price_usd = float(prices[each.market])
                footprint[offer] = replace(each, price_usd=price_usd, ends_s=ends_s)
        while more := brain.acquire([*footprint.values()], now_s, prices, room):
            offer = _offer(situation, more, {*footprint, *asked})
            # Only an on-demand offer can be in the footprint already.
            has = footprint[offer].machines if offer in footprint else 0
            footprint[offer] = replace(more, machines=has + more.machines)
            room[more.market] -= more.machines
        machines = {offer: each.machines for offer, each in footprint.items()}
        if last is not None and machines == last.machines:
            return last
        plan = _plan(situation, brain, [*footprint.values()])
        return Decision(machines, plan, plan.reason, situation)

    def _brain(self, situation: Situation) -> BidBrain:
        if self.odds is None:
            raise ParameterError("bidbrain", "the past prices of machines are not known yet")
        settings, work, pools = self.settings, situation.work, situation.pools
        most = work.workers
        # Without a backlog, machines only have to keep up with arrivals.
        if situation.waiting is not None and situation.waiting < 1:
            most = min(machines_for_stability(work, situation.gradient_s) or most, most)
        start_s = settings.start_s
        return BidBrain(
            self.odds,
            np.array([pool.speed for pool in pools]),
            float(most),
            SERVERS * pools[ON_DEMAND].usd_per_hour,
            settings.lambda_s,
            max(pool.start_up_s for pool in pools) if start_s is None else start_s,
            np.array([float(pool.billing.preempted.hour_refunded) for pool in pools]),
        )


def _there(situation: Situation, last: Decision | None) -> dict[Offer, Allocation]:
    """Return existing allocations of the last decision. If the hour is unknown, it ends now."""
    names, found = [pool.name for pool in situation.pools], {}
    for offer, count in ({} if last is None else last.machines).items():
        ready, coming = situation.machines.get(offer, (0, 0))
        machines = min(ready + coming, count)
        if machines and offer.pool in names:
            market = names.index(offer.pool)
            bid_usd = np.inf if offer.bid_usd_per_hour is None else offer.bid_usd_per_hour
            usd, ends_s = situation.pools[market].usd_per_hour, situation.now_s
            if offer in situation.hours:
                ends_s, usd = situation.hours[offer]
            found[offer] = Allocation(market, machines, bid_usd, usd, ends_s)
    return found


def _plan(situation: Situation, brain: BidBrain, footprint: Sequence[Allocation]) -> Plan:
    """Return the plan if these machines run until the end."""
    work, pools = situation.work, situation.pools
    speed = sum(each.machines * brain.work_per_s[each.market] for each in footprint)
    capacity = update_capacity_per_s(np.array([speed]), work.group_size, situation.gradient_s)
    with np.errstate(divide="ignore"):
        runtime_s = float(np.divide(work.updates, capacity)[0]) if work.updates else 0.0
    arrives_s = (work.updates - (situation.waiting or 0.0)) / work.updates_per_s
    runtime_s = max(runtime_s, arrives_s if situation.waiting is not None else 0.0)
    odds, usd_per_hour, words = brain.odds, 0.0, []
    for each in footprint:
        delta = np.array([each.bid_usd - each.price_usd])
        evicted = float(odds.within([each.market], delta, [odds.hour_s])[0][0])
        refunded = evicted * float(np.broadcast_to(brain.refunded, len(pools))[each.market])
        usd_per_hour += (1 - refunded) * each.machines * each.price_usd
        bid = f" at up to ${each.bid_usd:.6g}" if np.isfinite(each.bid_usd) else ""
        lost = f" (evicted within an hour: {100 * evicted:.0f} %)" if evicted else ""
        words.append(f"{each.machines} of {pools[each.market].name}{bid}{lost}")
    alone = sum(each.machines for each in footprint if each.market == ON_DEMAND)
    feasible = runtime_s <= work.deadline_s
    late = "" if feasible else "; too late for the deadline, which bids do not look at"
    usd = usd_per_hour / HOUR_S * runtime_s if np.isfinite(runtime_s) else np.inf
    alone_usd = work.on_demand_only_usd(pools[ON_DEMAND])
    return Plan(
        feasible=feasible,
        spot=sum(each.machines for each in footprint) - alone,
        on_demand=alone,
        spot_workers=np.zeros(0, np.int64),
        expected_cost_usd=usd,
        expected_runtime_s=runtime_s,
        cost_ratio_to_on_demand=usd / alone_usd if alone_usd else 1.0,
        binding="price" if feasible else "infeasible",
        reason=(", ".join(words) or "no machine makes work cheaper than none") + late,
    )


def _prices(pools: Sequence[Pool]) -> Array:
    return np.array([pool.usd_per_hour for pool in pools])


def _room(situation: Situation) -> Array:
    """Return (M,) numbers of machines that each pool still has; 0 for one that just refused."""
    most = [np.inf if pool.capacity is None else float(pool.capacity) for pool in situation.pools]
    room = np.array(most)
    names = [pool.name for pool in situation.pools]
    for offer, count in situation.machines.items():
        if offer.pool in names:
            room[names.index(offer.pool)] -= count.ready + count.coming
    room[[name in situation.refusing for name in names]] = 0.0
    return room.clip(0.0)


def _offer(situation: Situation, each: Allocation, taken: Container[Offer]) -> Offer:
    """Return the offer of a new allocation, with a bid that no current or lost offer has."""
    pool = situation.pools[each.market].name
    if each.market == ON_DEMAND:
        return Offer(pool)
    offer = Offer(pool, bid_usd_per_hour=round(each.bid_usd, 6))
    while offer in taken or offer in situation.machines:
        bid_usd = round((offer.bid_usd_per_hour or 0.0) + BID_STEP_USD, 6)
        offer = offer._replace(bid_usd_per_hour=bid_usd)
    return offer
