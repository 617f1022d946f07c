"""Settings of section V, the paper's numbers for them, and inverted formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.policy_names import STREAM_POLICIES
from common.spot.theory.provisioning import cost_curve, plan
from load.paper import stated
from load.paper.explanations import most_updates, price_for, price_of_bound, updates_for
from load.paper.job import (
    HIGH,
    PAIRS,
    UPDATES,
    Case,
    Prices,
    Setting,
    Variation,
    experiment,
    least_cost_share,
    settings,
)

SETTINGS = [Setting(*pair) for pair in PAIRS]


def test_paper_job_takes_6400_s_on_demand() -> None:
    assert Setting().work().undisturbed_s == stated.THETA_0_S


def test_theorem_4_gives_the_stated_check_values() -> None:
    for pair, (spot, share, bound) in stated.CHECKS.items():
        setting = Setting(*pair)
        best = plan(setting.work(), setting.market)
        assert best.spot == spot
        assert round(best.cost_ratio_to_on_demand, 4) == share
        assert round(setting.bound, 4) == bound


def test_every_setting_policy_and_variation_has_a_unique_name() -> None:
    names = [
        Case(setting, policy, change).name
        for setting in settings(quick=False)
        for policy in STREAM_POLICIES
        for change in (Variation(), Variation("slow", gradient_s=0.1))
    ]
    assert len(names) == len(set(names)) == 2 * 2 * 3 * 5 * 2


def test_streams_are_reassigned_only_if_the_variation_moves_them() -> None:
    held = [experiment(Setting(), name).on_preemption for name in STREAM_POLICIES]
    assert set(held) == {"hold"}
    assert experiment(Setting(), "pools", Variation(moving=True)).on_preemption == "reassign"


def test_least_cost_share_equals_manual_calculation() -> None:
    assert least_cost_share(Setting()) == pytest.approx(0.577, abs=5e-4)
    assert least_cost_share(Setting(deadline_factor=1.2)) == pytest.approx(HIGH.ratio)
    assert least_cost_share(Setting(availability=0.0, deadline_factor=1.0)) == 1
    assert least_cost_share(Setting(prices=Prices("dear", 0.286, 0.3))) == 1


@given(st.floats(1, 2), st.floats(0, 1), st.floats(0, 0.2))
def test_longer_deadline_never_costs_more(factor: float, availability: float, price: float) -> None:
    setting = Setting(availability, factor, prices=Prices("any", 0.286, price))
    more = least_cost_share(setting)
    assert least_cost_share(replace(setting, deadline_factor=factor + 0.1)) <= more + 1e-12
    assert price / 0.286 - 1e-12 <= more <= 1


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.key)
@given(share=st.floats(0.6, 0.95))
def test_updates_for_a_cost_have_that_cost(setting: Setting, share: float) -> None:
    updates = updates_for(share, setting)
    best = plan(setting.work(), setting.market)
    found = best.cost_ratio_to_on_demand * updates / UPDATES
    assert found == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.key)
@given(usd_per_hour=st.floats(0.05, 0.25))
def test_price_for_a_cost_gives_that_cost(setting: Setting, usd_per_hour: float) -> None:
    work, spot = setting.work(), plan(setting.work(), setting.market).spot
    other = replace(setting, prices=Prices("other", HIGH.on_demand, usd_per_hour))
    costs_usd = cost_curve(work, other.market).costs_usd
    share = costs_usd[spot] / costs_usd[0]
    assert price_for(share, setting) == pytest.approx(usd_per_hour)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.key)
@given(usd_per_hour=st.floats(0.05, 0.25))
def test_price_of_bound_inverts_equation_19(setting: Setting, usd_per_hour: float) -> None:
    other = replace(setting, prices=Prices("other", HIGH.on_demand, usd_per_hour))
    bound = other.bound
    assert plan(other.work(), other.market).cost_ratio_to_on_demand >= bound - 1e-9
    # Otherwise all machines are on spot, and the bound is their price.
    if bound > usd_per_hour / HIGH.on_demand:
        assert price_of_bound(bound, setting) == pytest.approx(usd_per_hour)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.key)
def test_least_cost_within_the_deadline_buys_all_updates(setting: Setting) -> None:
    assert most_updates(least_cost_share(setting), setting) == UPDATES


def test_small_budget_buys_spot_machines_alone() -> None:
    share = 0.5 * Setting().prices.ratio
    assert most_updates(share, Setting()) == UPDATES // 2
