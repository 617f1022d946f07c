"""Backfill: its limit, what it decides, and what that comes to in a small simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policies.backfill import (
    Backfill,
    cost_share_limit,
    expected_shorter_s,
    expected_up_s,
    outages,
    steps,
)
from common.policies.policy import ON_DEMAND, Decision, Situation
from common.theory.billing import Billing
from common.theory.errors import ParameterError
from common.theory.preemption import effective_availability
from common.theory.work import Pool, Work
from tests.unit.policies.fleets import Fleet

ON_DEMAND_POOL = Pool("on-demand", 0.286)
SPOT_POOL = Pool("spot", 0.158, 0.9, 1000.0)
SLOW = (
    replace(ON_DEMAND_POOL, start_up_s=69.0, billing=Billing(minimum_s=60.0)),
    replace(SPOT_POOL, start_up_s=87.0, billing=Billing(minimum_s=60.0)),
)
EQUAL = np.full(64, 125.0)


def situation(
    *,
    pools: tuple[Pool, ...] = (ON_DEMAND_POOL, SPOT_POOL),
    rates: object = EQUAL,
    factor: float = 1.05,
    updates: float = 10_000,
    down: tuple[int, ...] = (),
    stands_in_s: dict[int, float] | None = None,
) -> Situation:
    work = Work(np.asarray(rates, np.float64), 20, 256, updates, 1.0)
    work = replace(work, deadline_s=factor * work.undisturbed_s)
    up = np.ones(work.workers, np.bool_)
    up[list(down)] = False
    stands = np.full(work.workers, np.nan)
    for slot, seconds in (stands_in_s or {}).items():
        stands[slot] = seconds
    return Situation(0.0, work, pools, 0.01, up, stands)


def stand_ins(decision: Decision) -> list[int]:
    return np.flatnonzero(decision.stand_ins).tolist()


def test_the_limit_is_the_one_that_was_worked_out_by_hand() -> None:
    assert cost_share_limit(1.05, 0.9, 0.158, 0.286) == pytest.approx(0.577, abs=5e-4)
    assert cost_share_limit(1.2, 0.9, 0.158, 0.286) == pytest.approx(0.158 / 0.286)
    assert cost_share_limit(1.0, 0.0, 0.158, 0.286) == 1
    assert cost_share_limit(1.05, 0.9, 0.3, 0.286) == 1


@given(st.floats(1, 2), st.floats(0, 1), st.floats(0, 0.2))
def test_more_time_never_costs_more(factor: float, availability: float, price: float) -> None:
    less = cost_share_limit(factor + 0.1, availability, price, 0.286)
    assert less <= cost_share_limit(factor, availability, price, 0.286) + 1e-12
    assert price / 0.286 - 1e-12 <= less <= 1


def test_a_deadline_before_theta_0_is_refused_by_the_limit() -> None:
    with pytest.raises(ParameterError, match="deadline_ratio"):
        cost_share_limit(0.99, 0.9, 0.158, 0.286)


def test_what_outages_take_agrees_with_drawn_outages() -> None:
    rng = np.random.default_rng(3)
    on_demand, spot = SLOW
    got = outages(on_demand, spot)
    on_s, off_s = rng.exponential(900.0, 200_000), rng.exponential(100.0, 200_000)
    delivers = np.maximum(on_s - 87.0, 0.0).sum() / (on_s.sum() + off_s.sum())
    assert effective_availability(spot) == pytest.approx(delivers, rel=0.01)
    late = replace(on_demand, start_up_s=150.0, billing=Billing(minimum_s=200.0))
    idle_s = np.minimum(150.0, 87.0 + off_s).mean()
    assert outages(late, spot).stand_in_idle_s == pytest.approx(idle_s, rel=0.01)
    assert expected_shorter_s(200.0, 87.0, 100.0) == pytest.approx(
        np.minimum(200.0, 87.0 + off_s).mean(), rel=0.01
    )
    assert got.availability < got.filled < 1
    assert got.fill_usd_per_s < got.pin_usd_per_s


def test_stand_ins_that_start_at_once_give_everything_back_at_their_price() -> None:
    market = outages(ON_DEMAND_POOL, SPOT_POOL)
    assert (market.filled, market.recovered) == (1, 1)
    assert market.fill_usd_per_s == pytest.approx(ON_DEMAND_POOL.usd_per_s)


def test_stand_ins_do_not_pay_where_outages_are_over_before_they_have_started() -> None:
    short = replace(SPOT_POOL, cycle_s=50.0)
    assert not outages(SLOW[0], short).standing_in_pays
    assert outages(SLOW[0], SPOT_POOL).standing_in_pays


def test_expected_time_up_agrees_with_a_simulated_chain() -> None:
    rng = np.random.default_rng(5)
    market = outages(ON_DEMAND_POOL, SPOT_POOL)
    start = np.repeat([True, False], 4000)
    up, total = start.copy(), np.zeros(8000)
    for _ in range(300):
        total += up
        up ^= rng.random(8000) < np.where(up, 1 / 900, 1 / 100)
    expected = expected_up_s(np.array([True, False]), 300.0, market)
    assert total[start].mean() == pytest.approx(expected[0], abs=5.0)  # 4 standard errors and 1 s
    assert total[~start].mean() == pytest.approx(expected[1], abs=7.0)


@given(st.lists(st.floats(0, 250), min_size=1, max_size=12), st.floats(0, 1.2))
def test_the_steps_taken_are_enough_and_none_is_too_many(rates: list[float], part: float) -> None:
    array = np.array(rates)
    lost_s = np.linspace(50.0, 90.0, len(rates))
    for pools in (SLOW, (ON_DEMAND_POOL, SPOT_POOL), (SLOW[0], replace(SPOT_POOL, cycle_s=50.0))):
        found = steps(array, lost_s, outages(*pools))
        assert found.records.sum() == pytest.approx(float(array @ lost_s))  # all of it
        missing = part * float(found.records.sum())
        (count,) = found.until(np.array([missing]))
        assert found.records[: max(count - 1, 0)].sum() <= missing + 1e-6
        if part < 1:
            assert found.records[:count].sum() >= missing - 1e-6


def test_the_first_plan_is_all_spot_and_expects_the_limit() -> None:
    first = Backfill().reconsider(situation(), None)
    assert first.plan.feasible
    assert (first.plan.spot, first.plan.on_demand, first.plan.binding) == (64, 0, "deadline")
    limit = cost_share_limit(1.05, 0.9, 0.158, 0.286)
    assert first.plan.cost_ratio_to_on_demand == pytest.approx(limit, rel=0.01)


def test_nothing_new_returns_the_very_decision() -> None:
    policy = Backfill()
    now = situation(pools=SLOW, down=(3, 9))
    first = policy.reconsider(now, None)
    later = replace(now, stands_in_s=np.where(first.stand_ins, 5.0, np.nan))
    last = policy.reconsider(later, first)
    assert policy.reconsider(later, last) is last


def test_with_time_to_spare_nobody_stands_in() -> None:
    decision = Backfill().reconsider(situation(factor=1.3, down=(0, 5)), None)
    assert not stand_ins(decision)
    assert decision.plan.binding == "workers"


def test_without_slack_everybody_has_a_stand_in() -> None:
    decision = Backfill().reconsider(situation(factor=1.001, down=(0, 5)), None)
    assert stand_ins(decision) == [0, 5]


def test_the_highest_rates_are_filled_first() -> None:
    rates = np.arange(1.0, 65.0)
    decision = Backfill().reconsider(situation(rates=rates, down=(0, 20, 40, 60, 63)), None)
    assert stand_ins(decision)[-2:] == [60, 63]
    assert 0 not in stand_ins(decision)


def test_slow_stand_ins_ask_for_pinned_slots_of_the_highest_rates() -> None:
    rates = np.arange(1.0, 65.0)
    decision = Backfill().reconsider(situation(pools=SLOW, rates=rates), None)
    pinned = np.flatnonzero(decision.places == ON_DEMAND)
    assert 0 < len(pinned) < 64
    assert pinned.min() == 64 - len(pinned)
    fewer = Backfill().reconsider(situation(pools=SLOW, rates=rates, factor=1.08), None)
    assert fewer.plan.on_demand < len(pinned)


def test_a_slot_is_pinned_later_only_when_it_is_down() -> None:
    policy = Backfill()
    last = policy.reconsider(situation(pools=SLOW, factor=1.2), None)
    assert last.plan.on_demand == 0
    decision = policy.reconsider(situation(pools=SLOW, factor=1.02, down=(7,)), last)
    assert np.flatnonzero(decision.places == ON_DEMAND).tolist() == [7]


def test_a_stand_in_goes_on_until_it_is_superfluous_by_a_band() -> None:
    policy = Backfill(review_s=None, band_s=20.0)
    reserve_s = policy.reserve_s(situation().work, outages(ON_DEMAND_POOL, SPOT_POOL), 0.0)
    none_missing = 1 / 0.9 + reserve_s / 6400
    first = policy.reconsider(situation(factor=1.0, down=(0,)), None)
    assert stand_ins(first) == [0]
    barely = situation(factor=none_missing + 0.001, down=(0,), stands_in_s={0: 50.0})
    assert stand_ins(policy.reconsider(barely, first)) == [0]
    fresh = situation(factor=none_missing + 0.001, down=(0,))
    assert not stand_ins(policy.reconsider(fresh, first))
    amply = situation(factor=none_missing + 0.02, down=(0,), stands_in_s={0: 50.0})
    assert not stand_ins(policy.reconsider(amply, first))


@pytest.mark.parametrize(("stood_s", "kept"), [(5.0, True), (45.0, False)])
def test_a_stand_in_that_is_paid_for_anyway_is_kept(stood_s: float, *, kept: bool) -> None:
    policy = Backfill(review_s=30.0)
    pools = (replace(ON_DEMAND_POOL, billing=Billing(minimum_s=60.0)), SPOT_POOL)
    first = policy.reconsider(situation(pools=pools, factor=1.001, down=(4,)), None)
    back = situation(pools=pools, factor=1.001, stands_in_s={4: stood_s})
    assert (4 in stand_ins(policy.reconsider(back, first))) is kept


@pytest.mark.parametrize("spot", [replace(SPOT_POOL, usd_per_hour=0.3), Pool("none", 0.1, 0.0)])
def test_where_spot_saves_nothing_all_is_on_demand(spot: Pool) -> None:
    decision = Backfill().reconsider(situation(pools=(ON_DEMAND_POOL, spot)), None)
    assert (decision.places == ON_DEMAND).all()
    assert decision.plan.cost_ratio_to_on_demand == pytest.approx(1)
    assert decision.plan.binding == ("price" if spot.availability else "availability")


def test_when_spot_becomes_dear_a_machine_delivers_before_its_slot_moves() -> None:
    """Spot ──▶ dear: spot and stand-in ──▶ started: on demand and stand-in ──▶ up: on demand."""
    policy = Backfill()
    dear = (SLOW[0], replace(SLOW[1], usd_per_hour=0.5))
    first = policy.reconsider(situation(pools=SLOW, factor=1.2), None)
    beside = policy.reconsider(situation(pools=dear, factor=1.2), first)
    assert (beside.places != ON_DEMAND).all()
    assert beside.stand_ins.all()
    started = situation(pools=dear, factor=1.2, stands_in_s=dict.fromkeys(range(64), 70.0))
    moved = policy.reconsider(started, beside)
    assert (moved.places == ON_DEMAND).all()
    down = replace(started, up=np.zeros(64, np.bool_))
    assert policy.reconsider(down, moved).stand_ins.all()
    assert not policy.reconsider(situation(pools=dear, factor=1.2), moved).stand_ins.any()


def test_what_cannot_be_met_is_on_demand_and_says_how_late_it_will_be() -> None:
    decision = Backfill().reconsider(situation(factor=0.95), None)
    assert not decision.plan.feasible
    assert (decision.places == ON_DEMAND).all()
    assert "late by 320 s" in decision.plan.reason


def test_without_a_spot_pool_it_says_so() -> None:
    with pytest.raises(ParameterError, match="pools"):
        Backfill().reconsider(situation(pools=(ON_DEMAND_POOL,)), None)


def test_simulated_it_costs_less_than_59_percent_and_meets_every_deadline() -> None:
    fleet = Fleet(Backfill(), (ON_DEMAND_POOL, SPOT_POOL), EQUAL, 1.05, runs=16)
    outcome = fleet.run(np.random.default_rng(11))
    assert outcome.cost_shares.mean() <= 0.59
    assert outcome.met.all()


def test_simulated_with_start_up_times_it_is_cheaper_than_theorem_4_and_in_time() -> None:
    fleet = Fleet(Backfill(), SLOW, EQUAL, 1.05, runs=4)
    outcome = fleet.run(np.random.default_rng(12))
    pinned = (1 / 1.05 - effective_availability(SLOW[1])) / (1 - effective_availability(SLOW[1]))
    theorem_4 = 1.05 * (pinned + (1 - pinned) * 0.9 * 0.158 / 0.286)
    assert outcome.cost_shares.mean() < theorem_4
    assert outcome.met.all()
