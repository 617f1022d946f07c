"""Several pools against brute force, on instances small enough to try everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.policies.policy import NOWHERE, ON_DEMAND, Situation
from common.policies.pools import PoolPlan, Pools, classes_of, plan_hold, plan_machines
from common.policies.reassign import Computing, machines_for_stability
from common.theory.errors import ParameterError
from common.theory.provisioning import plan as theorem_5
from common.theory.work import Market, Pool, Work

ON_DEMAND_POOL = Pool("on-demand", 0.286)
GRADIENT_S = 0.001


def counts_of(found: PoolPlan, pools: int = 2) -> tuple[int, ...]:
    return tuple(int(np.count_nonzero(found.places == pool)) for pool in range(pools))


def work(rates: list[float], factor: float = 1.05) -> Work:
    job = Work(np.array(rates), 4, 16, 100, 1.0)
    return replace(job, deadline_s=factor * job.undisturbed_s)


def cheapest(job: Work, pools: tuple[Pool, ...]) -> float | None:
    """Try all placements: the least expected cost in dollars (equation 22 for pools)."""
    alphas = np.array([pool.availability for pool in pools])
    prices = np.array([pool.availability * pool.usd_per_s for pool in pools])
    best = None
    for places in product(range(len(pools)), repeat=job.workers):
        index = np.array(places)
        counts = np.bincount(index, minlength=len(pools))
        if any(
            p.capacity is not None and c > p.capacity for p, c in zip(pools, counts, strict=True)
        ):
            continue
        rate = float(alphas[index] @ job.rates_per_s)
        if rate * job.deadline_s >= job.records * (1 - 1e-9):
            cost = job.records / rate * float(prices[index].sum())
            best = cost if best is None else min(best, cost)
    return best


rates_lists = st.lists(st.floats(1, 250), min_size=1, max_size=5)
spots = st.builds(
    Pool,
    name=st.just("spot"),
    usd_per_hour=st.floats(0.02, 0.25),
    availability=st.floats(0.3, 1.0),
    capacity=st.none() | st.integers(0, 3),
)


@settings(max_examples=40)
@given(rates_lists, st.lists(spots, min_size=1, max_size=2), st.floats(1.0, 1.6))
def test_no_placement_is_cheaper(rates: list[float], some: list[Pool], factor: float) -> None:
    pools = (ON_DEMAND_POOL, *some)
    job = work(rates, factor)
    found = plan_hold(job, pools, GRADIENT_S)
    best = cheapest(job, pools)
    assert best is not None
    assert found.plan.feasible
    assert found.plan.expected_cost_usd == pytest.approx(best, rel=2e-4)
    assert found.plan.expected_runtime_s <= job.deadline_s * (1 + 1e-6)
    for pool, count in zip(pools, counts_of(found, len(pools)), strict=True):
        assert pool.capacity is None or count <= pool.capacity


@pytest.mark.parametrize(
    ("availability", "factor", "spot"), [(0.9, 1.05, 30), (0.8, 1.05, 15), (0.8, 1.1, 29)]
)
def test_one_spot_pool_of_equal_rates_gives_theorem_4(
    availability: float, factor: float, spot: int
) -> None:
    job = Work(np.full(64, 125.0), 20, 256, 10_000, 6400 * factor)
    found = plan_hold(job, (ON_DEMAND_POOL, Pool("spot", 0.158, availability)), 0.01)
    assert counts_of(found) == (64 - spot, spot)
    assert found.plan.binding == "deadline"


@pytest.mark.parametrize("seed", range(4))
def test_one_spot_pool_of_different_rates_gives_theorem_5(seed: int) -> None:
    rates = np.random.default_rng(seed).uniform(1, 250, 30)
    job = work(rates.tolist(), 1.03 + 0.04 * seed)
    spot = Pool("spot", 0.158, 0.8)
    found = plan_hold(job, (ON_DEMAND_POOL, spot), GRADIENT_S).plan
    reference = theorem_5(job, Market(ON_DEMAND_POOL, spot))
    assert found.expected_cost_usd == pytest.approx(reference.expected_cost_usd, rel=2e-4)
    assert abs(found.spot - reference.spot) <= 1  # which of equal cost is found is open


def test_many_rates_are_put_in_classes_that_keep_all_workers_and_their_sum() -> None:
    rates = np.random.default_rng(2).uniform(1, 250, 500)
    classes = classes_of(rates, most=32)
    assert len(classes.members) == 32
    assert sorted(np.concatenate(classes.members).tolist()) == list(range(500))
    assert classes.sizes @ classes.mean_per_s == pytest.approx(rates.sum())
    assert len(classes_of(np.full(500, 125.0)).members) == 1
    nearly = 125 * (1 + 0.01 * np.random.default_rng(3).random(100))
    assert len(classes_of(nearly, tolerance=0.05).members) == 1


def test_classes_err_towards_the_deadline() -> None:
    rates = np.random.default_rng(4).uniform(1, 250, 300)
    job = work(rates.tolist())
    spots = Pool("a", 0.1, 0.7, capacity=80), Pool("b", 0.15, 0.9)
    plan = plan_hold(job, (ON_DEMAND_POOL, *spots), GRADIENT_S).plan
    assert plan.feasible
    assert plan.expected_runtime_s <= job.deadline_s


def test_low_rates_go_to_the_least_available_pool() -> None:
    rates = np.arange(1.0, 41.0)
    spots = Pool("rare", 0.05, 0.6), Pool("usual", 0.12, 0.9)
    found = plan_hold(work(rates.tolist()), (ON_DEMAND_POOL, *spots), GRADIENT_S)
    highest = [rates[found.places == pool].max() for pool in (1, 2)]
    assert highest[0] < rates[found.places == 2].min()
    assert highest[1] < rates[found.places == ON_DEMAND].min()


def test_a_pool_too_slow_for_a_stream_is_not_for_that_worker() -> None:
    job = work([10.0, 200.0], 3.0)
    slow = Pool("slow", 0.01, 1.0, speed=0.1)
    found = plan_hold(job, (ON_DEMAND_POOL, slow), gradient_s=0.04)  # keeps up to 40 records/s
    assert found.places.tolist() == [1, ON_DEMAND]


def test_too_few_machines_are_a_plan_that_says_so() -> None:
    pools = replace(ON_DEMAND_POOL, capacity=1), Pool("spot", 0.1, 0.9, capacity=1)
    found = plan_hold(work([1.0, 2.0, 3.0]), pools, GRADIENT_S)
    assert not found.plan.feasible
    assert found.plan.binding == "capacity"
    assert found.places.tolist() == [NOWHERE, 1, ON_DEMAND]
    assert "too few machines" in found.plan.reason


def test_what_no_pool_can_do_is_a_plan_that_says_so() -> None:
    late = plan_hold(work([1.0, 2.0], 0.9), (ON_DEMAND_POOL, Pool("spot", 0.1, 0.9)), GRADIENT_S)
    assert (late.plan.feasible, late.plan.binding, counts_of(late)) == (False, "infeasible", (2, 0))
    slow = plan_hold(work([100.0]), (ON_DEMAND_POOL,), gradient_s=1.0)
    assert (slow.plan.feasible, slow.plan.binding) == (False, "stability")


@pytest.mark.parametrize(
    ("spot", "binding"),
    [(Pool("spot", 0.3, 0.9), "price"), (Pool("spot", 0.1, 0.0), "availability")],
)
def test_useless_spot_stays_unused_even_with_time_to_spare(spot: Pool, binding: str) -> None:
    found = plan_hold(work([1.0, 200.0], 2.0), (ON_DEMAND_POOL, spot), GRADIENT_S)
    assert (counts_of(found), found.plan.binding) == ((2, 0), binding)


@settings(max_examples=40)
@given(st.lists(spots, min_size=1, max_size=2), st.floats(0.001, 0.3))
def test_no_numbers_of_machines_are_cheaper(some: list[Pool], gradient_s: float) -> None:
    pools = (ON_DEMAND_POOL, *some)
    job = work([30.0] * 6)
    needed = machines_for_stability(job, Computing(gradient_s))
    found = plan_machines(job, pools, gradient_s)
    costs = [
        sum(c * p.availability * p.usd_per_hour for c, p in zip(counts, pools, strict=True))
        for counts in product(range(7), repeat=len(pools))
        if needed is not None
        and sum(counts) <= 6
        and all(p.capacity is None or c <= p.capacity for c, p in zip(counts, pools, strict=True))
        and sum(c * p.availability for c, p in zip(counts, pools, strict=True)) >= needed - 1e-6
    ]
    assert found.plan.feasible == bool(costs)
    if costs:
        hours = job.undisturbed_s / 3600
        assert found.plan.expected_cost_usd == pytest.approx(min(costs) * hours, rel=2e-4)


def seen(job: Work, pools: tuple[Pool, ...], now_s: float = 0.0) -> Situation:
    up, none = np.ones(job.workers, np.bool_), np.full(job.workers, np.nan)
    return Situation(now_s, job, pools, GRADIENT_S, up, none)


def test_it_decides_again_only_when_a_price_or_an_estimate_moved_much() -> None:
    pools = ON_DEMAND_POOL, Pool("a", 0.1, 0.9), Pool("b", 0.12, 0.9)
    job = work([100.0] * 8)
    job = replace(job, updates=100_000, deadline_s=1000 * job.deadline_s)  # hours, not seconds
    policy = Pools()
    first = policy.reconsider(seen(job, pools), None)
    half = replace(job, updates=50_000, deadline_s=job.deadline_s / 2)
    assert policy.reconsider(seen(half, pools), first) is first
    dear = ON_DEMAND_POOL, replace(pools[1], usd_per_hour=0.15), pools[2]
    moved = policy.reconsider(seen(half, dear), first)
    assert moved.reason.startswith("price of a moved")
    assert set(moved.places.tolist()) == {ON_DEMAND, 2}
    behind = replace(half, updates=52_000)
    assert policy.reconsider(seen(behind, pools), first).reason.startswith("pace moved")


def test_whoever_can_stay_stays() -> None:
    pools = ON_DEMAND_POOL, Pool("spot", 0.1, 0.8)
    job = work([100.0] * 10, 1.1)
    policy = Pools()
    first = policy.reconsider(seen(job, pools), None)
    noisy = replace(job, rates_per_s=100 + np.random.default_rng(1).uniform(-1, 1, 10))
    later = policy.reconsider(seen(replace(noisy, updates=99.0), pools), first)
    changed = later.places != first.places
    assert np.count_nonzero(changed) == abs(later.plan.spot - first.plan.spot)


def test_machines_that_move_streams_are_fewer_than_slots() -> None:
    pools = ON_DEMAND_POOL, Pool("spot", 0.1, 0.9)
    decision = Pools("reassign").reconsider(seen(work([50.0] * 12), pools), None)
    assert decision.plan.feasible
    assert (decision.places == NOWHERE).any()


def test_without_any_pool_it_says_so() -> None:
    with pytest.raises(ParameterError, match="pools"):
        plan_hold(work([1.0]), (), GRADIENT_S)
    with pytest.raises(ParameterError, match="pools"):
        plan_machines(work([1.0]), (), 0.1)


def test_where_on_demand_machines_alone_are_just_in_time_all_run_on_demand() -> None:
    pools = ON_DEMAND_POOL, Pool("a", 0.1, 0.9)
    job = work([100.0] * 8)
    job = replace(job, updates=100_000, deadline_s=1000 * job.deadline_s)
    policy = Pools()
    first = policy.reconsider(seen(job, pools), None)
    close = replace(job, deadline_s=job.undisturbed_s + 1)
    late = replace(job, deadline_s=job.undisturbed_s - 1)

    assert (first.places != ON_DEMAND).any()
    for situation, feasible in ((close, True), (late, False)):
        decided = policy.reconsider(seen(situation, pools), first)
        assert set(decided.places.tolist()) == {ON_DEMAND}
        assert decided.plan.feasible == feasible
        assert policy.reconsider(seen(situation, pools), decided) is decided
