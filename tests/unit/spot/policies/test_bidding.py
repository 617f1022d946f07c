"""Bids of a job: what is acquired, kept and released as prices move and hours end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.spot.machines import Offer, PriceHistory
from common.spot.policies.bidding import Bidding, BidSettings, odds_of
from common.spot.policies.policy import Hour, MachineCount, Situation
from common.spot.theory.billing import BY_NAME
from common.spot.theory.errors import ParameterError
from common.spot.theory.work import Pool, Work

HOUR_S = 3600.0
OLD = BY_NAME["ec2-2017"]
POOLS = (
    Pool("on-demand", 1.0, billing=replace(OLD, preempted=BY_NAME["ec2"].preempted)),
    Pool("steady", 0.3, billing=OLD),
    Pool("wild", 0.1, billing=OLD),
)


def past(**usd_per_hour: tuple[float, ...]) -> dict[str, PriceHistory]:
    """Return prices every quarter of an hour, repeated for two days."""
    return {
        name.replace("_", "-"): PriceHistory(
            tuple(900.0 * at for at in range(192)),
            tuple(prices[at % len(prices)] for at in range(192)),
            900.0 * 192,
        )
        for name, prices in usd_per_hour.items()
    }


PAST = past(on_demand=(1.0,), steady=(0.3,), wild=(0.1, 0.1, 0.1, 2.0))
BIDDING = Bidding(BidSettings(), odds_of(POOLS, PAST))


def seen(
    now_s: float = 0.0,
    machines: dict[Offer, int] | None = None,
    ends_s: float = HOUR_S,
    pools: tuple[Pool, ...] = POOLS,
    waiting: float | None = 500.0,
    refusing: frozenset[str] = frozenset(),
) -> Situation:
    """Return a situation: six workers can make four updates a second, and 500 updates wait."""
    there = {offer: MachineCount(ready=count) for offer, count in (machines or {}).items()}
    prices = {pool.name: pool.usd_per_hour for pool in pools}
    return Situation(
        now_s,
        Work(np.full(6, 10.0), 4, 16, 500.0, 600.0),
        pools,
        0.25,
        np.ones(6, np.bool_),
        waiting,
        there,
        {offer: Hour(ends_s, prices[offer.pool]) for offer in there},
        refusing,
    )


def priced(**usd_per_hour: float) -> tuple[Pool, ...]:
    return tuple(
        replace(pool, usd_per_hour=usd_per_hour.get(pool.name, pool.usd_per_hour)) for pool in POOLS
    )


def test_odds_are_counted_per_pool_and_zero_for_a_constant_price() -> None:
    probability, _ = odds_of(POOLS, PAST).within([0, 1, 2], [1e-5] * 3, [HOUR_S] * 3)
    assert probability[:2].tolist() == [0.0, 0.0]
    assert probability[2] == pytest.approx(0.75, abs=0.02)


def test_missing_or_short_price_history_is_reported_with_its_pool() -> None:
    with pytest.raises(ParameterError, match="wild: its past prices are not known"):
        odds_of(POOLS, past(on_demand=(1.0,), steady=(0.3,)))
    short = PAST | {"wild": PriceHistory((0.0, 600.0), (0.1, 0.2), 3000.0)}
    with pytest.raises(ParameterError, match="wild: its past prices: are 25 of 120 s"):
        odds_of(POOLS, short)
    with pytest.raises(ParameterError, match="not known yet"):
        Bidding().reconsider(seen(), None)


def test_all_machines_are_bid_for_in_the_cheapest_pool() -> None:
    decision = BIDDING.reconsider(seen(), None)
    ((offer, count),) = decision.machines.items()
    assert (offer.pool, count) == ("wild", 6)
    assert (offer.bid_usd_per_hour or 0.0) > 0.1
    assert decision.plan.expected_runtime_s == pytest.approx(125.0)  # 500 of 4 a second
    assert decision.plan.feasible
    assert f"6 of wild at up to ${offer.bid_usd_per_hour:.6g}" in decision.reason
    assert BIDDING.reconsider(seen(10.0, dict(decision.machines)), decision) is decision


def test_lost_machines_are_replaced_under_another_bid() -> None:
    first = BIDDING.reconsider(seen(), None)
    ((offer, _),) = first.machines.items()
    some = BIDDING.reconsider(seen(10.0, {offer: 4}), first)
    assert some.machines[offer] == 4
    ((other, count),) = some.machines.items() - {(offer, 4)}
    assert (other.pool, count) == ("wild", 2)
    # All machines were lost, so the price has exceeded that bid.
    ((replacement, count),) = BIDDING.reconsider(seen(10.0), first).machines.items()
    assert (replacement.pool, count) == ("wild", 6)
    assert replacement != offer


def test_pool_whose_price_rose_is_abandoned_after_an_eviction() -> None:
    first = BIDDING.reconsider(seen(), None)
    after = BIDDING.reconsider(seen(60.0, pools=priced(wild=2.0)), first)
    assert {offer.pool: count for offer, count in after.machines.items()} == {"steady": 6}
    dear = BIDDING.reconsider(seen(60.0, pools=priced(wild=9.0, steady=3.0)), after)
    assert dict(dear.machines) == {Offer("on-demand"): 6}


def test_allocation_is_renewed_or_released_before_its_hour_ends() -> None:
    steady = Offer("steady", bid_usd_per_hour=0.7)
    pools = priced(wild=5.0)
    first = BIDDING.reconsider(seen(pools=pools), None)
    last = replace(first, machines={steady: 6})
    there = {steady: 6}
    early = BIDDING.reconsider(seen(3000.0, there, pools=priced(wild=0.02)), last)
    assert early is last  # it is paid for
    assert BIDDING.reconsider(seen(3580.0, there, pools=pools), last) is last
    moved = BIDDING.reconsider(seen(3580.0, there, pools=priced(wild=0.02)), last)
    assert {offer.pool for offer in moved.machines} == {"wild"}


def test_pools_that_refuse_or_are_full_are_skipped() -> None:
    refused = BIDDING.reconsider(seen(refusing=frozenset({"wild"})), None)
    assert {offer.pool for offer in refused.machines} == {"steady"}
    pools = (*POOLS[:2], replace(POOLS[2], capacity=5))
    decision = BIDDING.reconsider(seen(pools=pools), None)
    counts = {offer.pool: count for offer, count in decision.machines.items()}
    assert counts == {"wild": 5, "steady": 1}


def test_added_on_demand_machines_keep_the_existing_ones() -> None:
    steady, alone = Offer("steady", bid_usd_per_hour=0.5), Offer("on-demand")
    first = BIDDING.reconsider(seen(refusing=frozenset({"wild"})), None)
    last = replace(first, machines={steady: 4, alone: 2})
    evicted = BIDDING.reconsider(
        seen(600.0, {alone: 2}, refusing=frozenset({"wild", "steady"})), last
    )
    assert evicted.machines == {alone: 6}


def test_machines_without_a_backlog_only_keep_up_with_arrivals() -> None:
    first = BIDDING.reconsider(seen(), None)
    there = dict(first.machines)
    few = BIDDING.reconsider(seen(3580.0, there, waiting=0.0), first)
    # 0.94 updates/s arrive; 1 machine makes 1.
    assert sum(few.machines.values()) == 2


def test_deadline_that_bids_miss_makes_the_plan_infeasible() -> None:
    job = seen()
    late = replace(job, work=replace(job.work, deadline_s=100.0))
    plan = BIDDING.reconsider(late, None).plan
    assert not plan.feasible
    assert "too late for the deadline" in plan.reason
