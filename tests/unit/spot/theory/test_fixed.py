"""Policies that decide once: their decisions, and that they never change them."""

import dataclasses

import numpy as np
import pytest

from common.spot.policies.fixed import OnDemandOnly, Static
from common.spot.policies.policy import Policy, Situation
from common.spot.theory.errors import ParameterError
from common.spot.theory.provisioning import plan_of
from common.spot.theory.work import PaperMarket, Pool, Work

POOLS = (Pool("on-demand", 0.286), Pool("spot", 0.158, 0.9))
WORKERS = 64


def situation(ratio: float = 1.05, pools: tuple[Pool, ...] = POOLS) -> Situation:
    return Situation(
        now_s=0.0,
        work=Work(np.full(WORKERS, 125.0), 20, 256, 10_000, 6_400 * ratio),
        pools=pools,
        gradient_s=0.01,
        up=np.ones(WORKERS, np.bool_),
    )


def test_static_policy_equals_theorem_4() -> None:
    decided = Static().reconsider(situation(), None)

    assert decided.plan.spot == np.count_nonzero(decided.places) == 30
    assert (decided.places[decided.plan.spot_workers] == 1).all()
    assert "30 of 64" in decided.reason


def test_static_policy_uses_a_given_number_of_spot_workers() -> None:
    decided = Static(spot=40).reconsider(situation(), None)

    assert np.count_nonzero(decided.places) == 40
    assert not decided.plan.feasible


def test_static_policy_with_an_unreachable_deadline_runs_on_demand() -> None:
    decided = Static().reconsider(situation(0.9), None)

    assert not decided.places.any()
    assert decided.plan.binding == "infeasible"


def test_on_demand_only_costs_the_plan_without_spot_workers() -> None:
    decided = OnDemandOnly().reconsider(situation(pools=POOLS[:1]), None)

    assert not decided.places.any()
    reference = plan_of(situation().work, PaperMarket(*POOLS), 0)
    assert decided.plan.expected_cost_usd == reference.expected_cost_usd
    assert decided.plan.cost_ratio_to_on_demand == 1


@pytest.mark.parametrize("policy", [OnDemandOnly(), Static(), Static(spot=3)])
def test_decision_of_a_fixed_policy_never_changes(policy: Policy) -> None:
    first = policy.reconsider(situation(), None)
    dearer = dataclasses.replace(POOLS[1], usd_per_hour=0.28, availability=0.5)

    assert policy.reconsider(situation(1.0, (POOLS[0], dearer)), first) is first
    assert policy.review_s is None
    assert not policy.watches_outages


def test_fixed_policies_have_the_names_of_the_experiments() -> None:
    assert [OnDemandOnly().name, Static().name] == ["on-demand", "static"]


def test_static_policy_without_a_spot_pool_is_rejected() -> None:
    with pytest.raises(ParameterError, match="pools: must have the on-demand pool"):
        Static().reconsider(situation(pools=POOLS[:1]), None)
