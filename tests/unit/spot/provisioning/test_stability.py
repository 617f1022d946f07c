"""Remaining work in the theory's terms, and conversions between decisions and records."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from common.spot.policies.adaptive import Adaptive
from common.spot.policies.fixed import OnDemandOnly, decision
from common.spot.policies.policy import Decision, Situation
from common.spot.provisioning.estimators import Estimator
from common.spot.provisioning.fleet_diff import Backoff
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.spot.provisioning.policy_runner import PolicyRunner
from common.spot.provisioning.stability import (
    HASTE,
    HORIZON_S,
    NEVER,
    TRAINED_SHARE,
    bounded,
    restored,
    stability_of_fleet,
    stability_of_plan,
    work_left,
)
from common.spot.theory.provisioning import plan_of
from common.spot.theory.work import PaperMarket, Work
from tests.unit.spot.provisioning.examples import ON_DEMAND, PRICES, SETTINGS, SPOT, T0
from tests.unit.spot.provisioning.examples import planned as example

if TYPE_CHECKING:
    from common.spot.provisioning.records import Planned

# 8 records/s: an update takes 5 s.
RATES = np.full(4, 2.0)


def situation(now_s: float = 0.0, gradient_s: float = 0.5) -> Situation:
    work = Work(RATES, 4, 10, 1000.0, 10_000.0 - now_s)
    return Situation(now_s, work, (ON_DEMAND, SPOT), gradient_s, np.ones(4, np.bool_))


def split(spot: int, gradient_s: float = 0.5) -> tuple[Decision, Situation]:
    """Return a decision with this number of the four slots on spot."""
    given = situation(gradient_s=gradient_s)
    plan = plan_of(given.work, PaperMarket(ON_DEMAND, SPOT), spot)
    return decision(given, plan, 1, "scripted decision"), given


def test_work_left_has_remaining_updates_and_time() -> None:
    work = work_left(SETTINGS, RATES, 400, T0 + 1000)

    assert (work.updates, work.deadline_s) == (600, 9000)


def test_work_left_past_both_limits_is_zero() -> None:
    work = work_left(SETTINGS, RATES, 4000, T0 + 99_000)

    assert (work.updates, work.deadline_s) == (0, 0)


def test_job_without_a_deadline_uses_spot_if_it_is_cheaper() -> None:
    free = replace(SETTINGS, deadline_at_s=None)
    work = work_left(free, RATES, 0, T0)
    given = replace(situation(), work=work)

    assert work.deadline_s == HASTE * work.undisturbed_s
    assert Adaptive().reconsider(given, None).plan.spot == 4
    dear = replace(SPOT, usd_per_hour=2.0)
    assert Adaptive().reconsider(replace(given, pools=(ON_DEMAND, dear)), None).plan.spot == 0


def test_work_without_a_number_of_updates_is_what_arrives_by_the_deadline() -> None:
    work = work_left(replace(SETTINGS, updates=None), RATES, 123, T0 + 5000)

    assert work.deadline_s == 5000
    assert work.updates == pytest.approx(TRAINED_SHARE * 5000 / 5)
    assert work.undisturbed_s < work.deadline_s


def test_work_left_to_a_loss_comes_from_its_curve() -> None:
    to_loss = replace(SETTINGS, updates=None, loss=0.5)

    assert work_left(to_loss, RATES, 123, T0, updates_to_loss=700.0).updates == 700
    # The first limit that is reached ends the job.
    both = replace(to_loss, updates=1000)
    assert work_left(both, RATES, 400, T0, updates_to_loss=700.0).updates == 600
    assert work_left(both, RATES, 200, T0, updates_to_loss=700.0).updates == 700


def test_work_without_limits_is_planned_for_one_hour() -> None:
    work = work_left(replace(SETTINGS, updates=None, deadline_at_s=None), RATES, 0, T0)

    assert work.undisturbed_s == pytest.approx(HORIZON_S)
    assert work.deadline_s == pytest.approx(HASTE * HORIZON_S)


# --- Proposition 1 -------------------------------------------------------------------------------


def test_stability_ratio_is_update_capacity_over_arrivals() -> None:
    # Two machines compute an update's four gradients in two rounds of 2.5 s. One needs four rounds.
    given = situation(gradient_s=2.5)

    assert stability_of_fleet(2, given).ratio == pytest.approx(1.0)
    assert stability_of_fleet(2, given).needed == 2
    assert stability_of_fleet(1, given).ratio == pytest.approx(0.5)
    assert stability_of_fleet(0, given).ratio == 0


def test_stability_is_impossible_if_one_gradient_is_too_slow() -> None:
    assert stability_of_fleet(4, situation(gradient_s=5.5)).needed is None


def test_plan_stability_is_the_mean_over_running_machines() -> None:
    all_on_demand, given = split(0, gradient_s=2.5)
    all_spot, _ = split(4, gradient_s=2.5)

    assert stability_of_plan(all_on_demand, given).ratio == pytest.approx(2.0)
    # Each of four spot machines runs with a probability of 0.9, so their number is binomial.
    capacity = [0.0, 0.1, 0.2, 0.2, 0.4]
    chances = [0.0001, 0.0036, 0.0486, 0.2916, 0.6561]
    expected = sum(c * p for c, p in zip(capacity, chances, strict=True)) * 5
    assert stability_of_plan(all_spot, given).ratio == pytest.approx(expected)


# --- records -------------------------------------------------------------------------------------


def planned(made: Decision, given: Situation) -> Planned:
    runner = PolicyRunner(SETTINGS, Estimator(SETTINGS), FleetLedger(), Backoff())
    return msgspec.structs.replace(runner.record(made, given, "first plan", T0), believed={})


def test_planned_record_contains_the_whole_decision() -> None:
    made, given = split(3)
    record = planned(made, given)

    assert record.pools == ("on-demand", "spot")
    assert sorted(record.places) == [0, 1, 1, 1]
    assert (record.spot, record.on_demand, record.binding) == (3, 1, made.plan.binding)
    assert record.reason == "scripted decision"
    assert record.usd_per_hour == PRICES
    assert record.expected_cost_usd == made.plan.expected_cost_usd
    assert record.on_demand_only_usd == pytest.approx(4 * 5000 / 3600)
    assert type(record.places[0]) is int  # numpy's integers are no JSON


def test_planned_cost_of_a_kept_decision_is_for_the_remaining_work() -> None:
    made, given = split(3)
    later = replace(given, work=replace(given.work, updates=250.0))

    record = planned(made, later)

    assert record.expected_cost_usd == pytest.approx(made.plan.expected_cost_usd / 4)


def test_bounded_replaces_non_finite_numbers() -> None:
    assert bounded(float("inf")) == bounded(float("nan")) == NEVER
    assert bounded(-1e-12) == 0


def test_restored_plan_leads_to_the_same_decisions() -> None:
    policy = Adaptive()
    first = policy.reconsider(situation(), None)
    record = planned(first, situation())

    again = restored(record, situation(), T0)

    assert again is not None
    assert again.reason == first.reason
    assert again.places.tolist() == first.places.tolist()
    assert again.basis.work.updates == first.basis.work.updates
    # Nothing but the time has changed. The policy reviews both decisions for the first time.
    later = situation(now_s=31.0)
    assert policy.reconsider(later, again).places.tolist() == (
        policy.reconsider(later, first).places.tolist()
    )


def test_one_time_policy_keeps_a_restored_decision() -> None:
    first = OnDemandOnly().reconsider(situation(), None)
    record = planned(first, situation())

    again = restored(record, situation(), T0)

    assert OnDemandOnly().reconsider(situation(50.0), again) is again


def test_plan_for_other_pools_or_slots_is_not_restored() -> None:
    assert restored(example(places=(1, 0)), situation(), T0) is None
    assert restored(msgspec.structs.replace(example(), pools=("x", "y")), situation(), T0) is None
