"""Reassign: what machines can compute, and how many are enough, against Monte Carlo."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.policies.policy import NOWHERE, ON_DEMAND, Situation
from common.policies.reassign import (
    Computing,
    Prospect,
    Reassign,
    machines_for_stability,
    update_capacity_per_s,
)
from common.theory.errors import ParameterError
from common.theory.work import Market, Pool, Work

if TYPE_CHECKING:
    from common.theory.provisioning import Plan

MARKET = Market(Pool("on-demand", 0.286), Pool("spot", 0.158, 0.9, 1000.0))
EQUAL = np.full(64, 125.0)  # 1.5625 updates a second


def work(factor: float = 1.05, updates: float = 10_000) -> Work:
    given_time = Work(EQUAL, 20, 256, updates, 1.0)
    return replace(given_time, deadline_s=factor * given_time.undisturbed_s)


def cheapest(job: Work, market: Market, computing: Computing, backlog: float = 0.0) -> Plan:
    return Prospect(job, market, computing, backlog).cheapest()


def share_met(job: Work, market: Market, computing: Computing, plan: Plan, runs: int) -> float:
    """Run a fluid queue of updates in steps of 2 s, with two-state chains, from no backlog."""
    rng = np.random.default_rng(7)
    spot, step_s = market.spot, 2.0
    up = rng.random((runs, plan.spot)) < spot.availability
    lost = step_s / (spot.availability * spot.cycle_s)
    back = step_s / ((1 - spot.availability) * spot.cycle_s)
    arriving = step_s * job.updates / job.undisturbed_s
    waiting, made = np.zeros(runs), np.zeros(runs)
    for _ in range(math.ceil(job.deadline_s / step_s)):
        machines = plan.on_demand + spot.speed * up.sum(axis=1)
        capacity = step_s * update_capacity_per_s(machines, job.group_size, computing.gradient_s)
        waiting += arriving
        done = np.minimum(waiting, capacity)
        waiting -= done
        made += done
        up ^= rng.random(up.shape) < np.where(up, lost, back)
    return float((made >= job.updates).mean())


def test_gradients_of_a_round_are_computed_one_after_another() -> None:
    machines = np.array([0.0, 0.5, 1.0, 6.0, 20 / 3, 7.0, 19.0, 20.0, 50.0])
    rounds = [math.inf, 40, 20, 4, 3, 3, 2, 1, 1]
    got = update_capacity_per_s(machines, 20, 0.03, 0.1)
    assert got == pytest.approx([1 / (count * 0.03 + 0.1) for count in rounds])


def test_proposition_1_gives_the_fewest_machines_that_keep_up() -> None:
    for gradient_s in (0.01, 0.03, 0.1, 0.3, 0.49):
        computing = Computing(gradient_s)
        needed = machines_for_stability(work(), computing)
        assert needed is not None
        machines = np.array([needed - 1.0, needed])
        capacity = update_capacity_per_s(machines, 20, gradient_s)
        assert capacity[0] < 1.25 * 1.5625 <= capacity[1]
    assert machines_for_stability(work(), Computing(1.0)) is None


@pytest.mark.parametrize(
    ("gradient_s", "factor", "availability"),
    [(0.03, 1.05, 0.9), (0.1, 1.02, 0.9), (0.1, 1.02, 0.5), (0.3, 1.02, 0.7), (0.01, 1.05, 0.9)],
)
def test_the_deadline_is_met_at_least_as_often_as_promised(
    gradient_s: float, factor: float, availability: float
) -> None:
    market = Market(MARKET.on_demand, replace(MARKET.spot, availability=availability))
    computing = Computing(gradient_s)
    job = work(factor, updates=3000)
    plan = cheapest(job, market, computing)
    assert plan.feasible
    met = share_met(job, market, computing, plan, runs=400)
    assert met >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400)


@pytest.mark.parametrize(
    ("gradient_s", "factor", "availability", "price"),
    [
        (g, f, a, p)
        for g, f, a, p in product((0.03, 0.1, 0.3), (1.02, 1.3), (0.5, 0.9), (0.05, 0.158))
    ],
)
def test_no_other_combination_is_cheaper(
    gradient_s: float, factor: float, availability: float, price: float
) -> None:
    spot = replace(MARKET.spot, availability=availability, usd_per_hour=price)
    market = Market(MARKET.on_demand, spot)
    job, computing = (
        replace(work(factor), rates_per_s=np.full(24, 8000 / 24)),
        Computing(gradient_s),
    )
    plan = cheapest(job, market, computing)
    prospect = Prospect(job, market, computing)
    costs = [
        on_demand * 0.286 + spot * availability * price
        for on_demand in range(25)
        for spot in range(25 - on_demand)
        if prospect.enough(on_demand, spot)
    ]
    assert plan.feasible == bool(costs)
    if costs:
        found = plan.on_demand * 0.286 + plan.spot * availability * price
        assert found == pytest.approx(min(costs))
        paid = found * plan.expected_runtime_s / 3600
        assert plan.expected_cost_usd == pytest.approx(paid)


def test_far_fewer_machines_than_streams_are_enough() -> None:
    plan = cheapest(work(), MARKET, Computing(0.01))
    assert plan.spot + plan.on_demand < 5
    assert plan.cost_ratio_to_on_demand < 0.05
    assert plan.expected_runtime_s == pytest.approx(6400)


def test_a_lone_spot_machine_is_not_trusted_where_its_outage_would_take_the_slack() -> None:
    tight = cheapest(work(1.05), MARKET, Computing(0.01))
    lax = cheapest(work(1.4), MARKET, Computing(0.01))
    assert (lax.on_demand, lax.spot) == (0, 1)
    assert tight.on_demand + tight.spot > 1 or tight.spot == 0


@settings(max_examples=25)
@given(st.floats(0.5, 0.99), st.floats(1.005, 1.5))
def test_more_certainty_and_less_time_cost_no_less(probability: float, factor: float) -> None:
    sure = cheapest(work(factor), MARKET, Computing(0.05, probability=0.995))
    unsure = cheapest(work(factor), MARKET, Computing(0.05, probability=probability))
    later = cheapest(work(factor + 0.2), MARKET, Computing(0.05, probability=probability))
    assert unsure.expected_cost_usd <= sure.expected_cost_usd * (1 + 1e-9)
    assert later.expected_cost_usd <= unsure.expected_cost_usd * (1 + 1e-9)


@pytest.mark.parametrize(
    ("spot", "binding"),
    [
        (replace(MARKET.spot, usd_per_hour=0.3), "price"),
        (replace(MARKET.spot, availability=0.0), "availability"),
    ],
)
def test_without_useful_spot_all_machines_are_on_demand(spot: Pool, binding: str) -> None:
    plan = cheapest(work(), Market(MARKET.on_demand, spot), Computing(0.1))
    assert (plan.on_demand, plan.spot, plan.binding) == (4, 0, binding)


def test_too_slow_gradients_and_too_short_deadlines_are_infeasible() -> None:
    slow = cheapest(work(), MARKET, Computing(1.0))
    late = cheapest(work(0.9), MARKET, Computing(0.01))
    assert not slow.feasible
    assert not late.feasible
    assert slow.spot == late.spot == 0
    assert slow.binding == late.binding == "infeasible"


def test_a_backlog_that_waits_counts_as_arrived() -> None:
    behind = work(0.95)
    assert not cheapest(behind, MARKET, Computing(0.03)).feasible
    assert cheapest(behind, MARKET, Computing(0.03), backlog=1000).feasible


def test_a_share_of_certainty_out_of_range_is_refused() -> None:
    with pytest.raises(ParameterError, match="probability"):
        Computing(0.01, probability=1.0)
    with pytest.raises(ParameterError, match="headroom"):
        Computing(0.01, headroom=0.5)


def seen(job: Work, now_s: float = 0.0, gradient_s: float = 0.03) -> Situation:
    up, none = np.ones(job.workers, np.bool_), np.full(job.workers, np.nan)
    return Situation(now_s, job, (MARKET.on_demand, MARKET.spot), gradient_s, up, none)


def test_slots_without_a_machine_are_nowhere() -> None:
    decision = Reassign().reconsider(seen(work()), None)
    places = decision.places.tolist()
    assert places.count(ON_DEMAND) == decision.plan.on_demand
    assert places.count(1) == decision.plan.spot
    assert places.count(NOWHERE) == 64 - decision.plan.on_demand - decision.plan.spot
    assert not decision.stand_ins.any()


def test_it_decides_again_only_when_something_moved_or_updates_lag() -> None:
    policy = Reassign()
    first = policy.reconsider(seen(work()), None)
    job = work()
    half = replace(job, updates=5000, deadline_s=job.deadline_s - 3200)
    assert policy.reconsider(seen(half, 3200.0), first) is first
    slower = policy.reconsider(seen(half, 3200.0, 0.06), first)
    assert slower.reason.startswith("gradient time moved")
    lagging = replace(job, updates=5400, deadline_s=job.deadline_s - 3200)
    late = policy.reconsider(seen(lagging, 3200.0), first)
    assert "behind" in late.reason
    assert late.plan.feasible  # for what lags behind is there already


def test_without_a_spot_pool_it_says_so() -> None:
    with pytest.raises(ParameterError, match="pools"):
        Reassign().reconsider(replace(seen(work()), pools=(MARKET.on_demand,)), None)


def test_what_waits_was_planned_with_and_is_no_reason_to_decide_again() -> None:
    policy, job = Reassign(), work(updates=10_000)
    first = policy.reconsider(replace(seen(job), waiting=9_000.0), None)
    made = 30.0 / first.plan.expected_runtime_s * job.updates
    later = replace(job, updates=job.updates - made, deadline_s=job.deadline_s - 30.0)
    waiting = 9_000.0 - made + 30.0 * job.updates / job.undisturbed_s
    assert policy.reconsider(replace(seen(later, 30.0), waiting=waiting), first) is first
    stuck = replace(job, deadline_s=job.deadline_s - 4000.0)
    late = policy.reconsider(replace(seen(stuck, 4000.0), waiting=10_000.0), first)
    assert "behind" in late.reason


def test_gradient_times_that_scatter_do_not_order_and_release_machines_again_and_again() -> None:
    policy, rng = Reassign(), np.random.default_rng(1)
    job = Work(np.full(16, 20.0), 8, 16, 4000, 2400.0)
    decision, moved = policy.reconsider(seen(job, 0.0, 0.2), None), 0
    for _ in range(100):
        before = decision.places
        decision = policy.reconsider(seen(job, 0.0, 0.2 * rng.lognormal(0, 0.1)), decision)
        moved += int(np.count_nonzero(decision.places != before))
    assert not moved


@pytest.mark.parametrize("price_factor", [0.2, 2.5])
def test_machines_that_others_beat_by_far_are_changed_all_the_same(price_factor: float) -> None:
    policy, job = Reassign(), work()
    first = policy.reconsider(seen(job), None)
    spot = replace(MARKET.spot, usd_per_hour=price_factor * MARKET.spot.usd_per_hour)
    cheaper = replace(seen(job), pools=(MARKET.on_demand, spot))
    alone = policy.reconsider(cheaper, None)
    after = policy.reconsider(cheaper, first)
    assert after.plan.expected_cost_usd <= alone.plan.expected_cost_usd / (1 - policy.saves) + 1e-9
