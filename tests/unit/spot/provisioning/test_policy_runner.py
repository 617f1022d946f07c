"""The runner consults the policy at the right times, and turns its decisions into plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import pytest

from common.config.policy_names import PolicyName
from common.core.messages import GENESIS, Lead, UpdateApplied
from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.spot.provisioning.policy_runner import differences
from common.spot.provisioning.records import Planned, ReplanAsked, Reviewed
from tests.unit.core.examples import batch
from tests.unit.spot.provisioning.examples import ON_DEMAND, SETTINGS, SPOT, T0, batches, lead
from tests.unit.spot.provisioning.harness import ProviderThread, Street

if TYPE_CHECKING:
    from common.spot.provisioning.settings import ProvisionerSettings


# The job trains on all arrivals and never ends, so there is no end to plan for.
UNDECIDED = replace(SETTINGS, updates=None, deadline_at_s=math.inf)


@pytest.fixture
def street() -> Street:
    return Street()


def at_work(street: Street, settings: ProvisionerSettings = SETTINGS) -> ProviderThread:
    harness = ProviderThread(street, settings)
    harness.run(10)
    return harness


def with_policy(policy: PolicyName) -> ProvisionerSettings:
    return replace(SETTINGS, policy=policy)


def plans(street: Street) -> list[Planned]:
    return street.written(Planned)


def test_plan_stays_without_changes(street: Street) -> None:
    harness = at_work(street)
    harness.run(300)

    assert len(plans(street)) == 1


def test_price_change_leads_to_a_new_plan_with_the_reason(street: Street) -> None:
    harness = at_work(street)
    street.prices.set("spot", 3.0)
    harness.run(40)

    first, second = plans(street)
    assert set(first.places) == {1}
    assert second.why.startswith("price of spot from $0.25 to $3")
    assert set(second.places) == {0}
    assert second.usd_per_hour == {"on-demand": 1.0, "spot": 3.0}
    assert {machine.pool for machine in harness.provisioner.ledger.running} == {"on-demand"}


def test_plan_is_infeasible_while_on_demand_machines_are_refused(
    street: Street,
) -> None:
    # spot       ████ then more expensive than on demand, until the end
    # on-demand       refused ░░░░░░░░░░░░ ████████
    harness = at_work(street)
    street.fleet.faults.without.add("on-demand")
    street.prices.set("spot", 3.0)
    harness.run(60)
    review = harness.did(do.AppendPlan)[-1].record
    street.fleet.faults.without.discard("on-demand")
    harness.run(70)

    _, moved, refused, given = plans(street)
    assert (moved.feasible, refused.feasible, given.feasible) == (True, False, True)
    assert refused.why.startswith("on-demand machines are refused; the plan is unchanged")
    assert "on-demand machines are refused: the deadline may be missed" in refused.warning
    assert isinstance(review, Reviewed)
    assert "the deadline may be missed" in review.warning
    assert given.why.startswith("on-demand machines are available again")
    assert {machine.pool for machine in harness.provisioner.ledger.running} == {"on-demand"}


def test_plan_includes_and_shows_the_cost_of_transfer(street: Street) -> None:
    # 8 records a second and 40 per update are 720 updates an hour. Each machine transfers 1 GB per
    # update.
    def settings(usd_per_gb: float) -> ProvisionerSettings:
        spot = replace(SPOT, transfer_usd_per_gb=usd_per_gb)
        return replace(SETTINGS, update_mb=1000.0, pools=(ON_DEMAND, spot))

    at_work(street, settings(0.01))
    (dear,) = plans(street)
    assert (set(dear.places), dear.transfer_usd) == ({0}, 0.0)
    elsewhere = Street()
    at_work(elsewhere, settings(0.0005))
    (cheap,) = plans(elsewhere)
    assert set(cheap.places) == {1}
    assert cheap.transfer_usd == pytest.approx(0.36 / 3600 * 4 * 0.9 * cheap.expected_runtime_s)
    machines_usd = cheap.expected_cost_usd - cheap.transfer_usd
    assert cheap.predicted_usd == pytest.approx(cheap.spent_usd + machines_usd)
    assert cheap.transfer_usd / cheap.expected_cost_usd == pytest.approx(0.36 / 0.61)


def test_replan_request_gets_a_plan_even_if_nothing_changes(street: Street) -> None:
    harness = at_work(street)
    street.append(ReplanAsked(street.clock(), "ada", "to be sure"))
    harness.run(5)

    _, second = plans(street)
    assert second.why.startswith("ada requested a new plan: to be sure; the plan is unchanged")
    asked = [isinstance(record, ReplanAsked) for record in street.records].index(True)
    assert second.answers == asked
    assert not harness.provisioner.ledger.replans
    harness.run(60)
    assert len(plans(street)) == 2


def test_changed_settings_lead_to_a_new_plan_immediately(street: Street) -> None:
    harness = at_work(street)
    harness.on(events.ProvisioningChanged(replace(SETTINGS, deadline_at_s=T0 + 1000)))
    harness.run(5)

    _, second = plans(street)
    assert second.why.startswith(f"deadline_at_s from {T0 + 10_000} to {T0 + 1000}")
    assert second.deadline_left_s == pytest.approx(1000 - (second.at_s - T0))


def test_differences_names_changed_settings_and_market_file() -> None:
    other = replace(SETTINGS, pools=(ON_DEMAND, replace(SPOT, availability=0.5)))

    assert differences(SETTINGS, other) == "the market file"
    assert differences(SETTINGS, replace(SETTINGS, look_s=7.0)) == ""
    assert differences(SETTINGS, replace(SETTINGS, group_size=8)) == "group_size from 4 to 8"


@pytest.mark.parametrize("policy", ["static", "chance", "on-demand"])
def test_one_time_policy_decides_again_once_arrivals_are_known(
    street: Street, policy: PolicyName
) -> None:
    harness = at_work(street, with_policy(policy))
    harness.on(events.ClaimsRead(tuple(batches(20, 20.0))))
    harness.run(5)
    harness.run(100)

    first, second = plans(street)
    assert "arrivals are assumed to be 8/s" in first.why
    assert second.why.startswith("arrivals are known now")
    assert second.believed["arrivals_per_s"].value == pytest.approx(20, rel=0.1)
    # The policy keeps this decision, even after a restart.
    successor = ProviderThread(street, with_policy(policy), "p2")
    successor.on(events.ClaimsRead(tuple(batches(20, 20.0))))
    successor.run(100)
    assert successor.provisioner.is_leader
    assert len(plans(street)) == 2


def test_job_with_a_loss_target_is_replanned_once_its_curve_is_known(street: Street) -> None:
    harness = at_work(street, replace(SETTINGS, updates=None, loss=0.5, review_s=10.0))
    harness.on(events.ClaimsRead(tuple(batches(40, 8.0))))
    harness.run(30)
    # The loss 0.3 + 2 exp(-J / 442) is 0.5 after 1018 updates, 120 after the last observed one. The
    # mean of recent losses reaches 0.5 ten updates later.
    losses = [0.3 + 2.0 * math.exp(-version / 442) for version in range(1, 899)]
    updates = [UpdateApplied(0, n, (batch(n),), 40, loss) for n, loss in enumerate(losses, 1)]
    harness.on(events.UpdateRecordsRead(tuple(enumerate((Lead(-1, GENESIS, "c", 0), *updates)))))
    street.append(ReplanAsked(street.clock(), "ada", "the losses are known"))
    harness.run(5)

    before, after = plans(street)[0], plans(street)[-1]
    # Without losses, the plan is for 0.9 of a guess.
    assert before.updates_left == pytest.approx(9_000, rel=0.01)
    assert "loss" in before.why
    assert after.updates_left == pytest.approx(130, abs=15)
    assert "loss" not in after.why.removeprefix("ada requested a new plan: the losses are known")


def test_policy_that_watches_outages_decides_when_machines_are_lost(street: Street) -> None:
    harness = at_work(street, replace(with_policy("pools"), max_lag_s=15.0))
    harness.on(events.ClaimsRead(tuple(batches(40, 8.0))))
    harness.run(60)
    before = len(plans(street))
    street.fleet.faults.without.add("spot")
    street.fleet.preempt(*(machine.launch for machine in street.fleet.rented))
    harness.run(10)

    assert plans(street)[before].why.startswith("machines started or ended")
    assert {machine.pool for machine in harness.provisioner.ledger.running} == {"on-demand"}


def test_policy_failure_is_reported_and_retried(street: Street) -> None:
    harness = at_work(street, UNDECIDED)
    harness.run(30)

    assert not plans(street)
    assert (
        "updates: must be a number of at least 0, got inf" in street.written(Reviewed)[-1].warning
    )
    harness.on(events.ProvisioningChanged(SETTINGS))
    harness.run(40)
    assert len(plans(street)) == 1
    assert street.written(Reviewed)[-1].warning == ""


def test_previous_plan_stays_if_the_policy_fails(street: Street) -> None:
    harness = at_work(street)
    harness.on(events.ProvisioningChanged(UNDECIDED))
    harness.run(30)

    assert len(plans(street)) == 1
    assert len(harness.provisioner.ledger.running) == 4
    assert "the previous plan stays in force: updates" in street.written(Reviewed)[-1].warning


def test_market_file_prices_are_used_if_current_ones_are_unavailable(street: Street) -> None:
    street.prices.away = True
    harness = at_work(street)
    assert not plans(street)

    harness.run(40)

    assert plans(street)[0].usd_per_hour == {"on-demand": 1.0, "spot": 0.25}
    assert "current prices are unavailable" in street.written(Reviewed)[-1].warning


def test_plan_of_another_policy_is_replaced(street: Street) -> None:
    at_work(street)
    successor = ProviderThread(street, with_policy("on-demand"), "p2")
    street.append(lead(0, "p0"))
    successor.run(20)

    _, second = plans(street)
    assert second.policy == "on-demand"
    assert second.why.startswith("policy adaptive to on-demand")
    assert set(second.places) == {0}


# --- warnings of Proposition 1 -------------------------------------------------------------------


def test_fleet_too_small_for_arrivals_is_reported_with_the_reason(street: Street) -> None:
    harness = at_work(street)
    harness.run(60)
    assert street.written(Reviewed)[-1].warning == ""
    street.fleet.faults.without.add("spot")
    street.fleet.preempt(1, 2, 3)
    harness.run(60)

    review = street.written(Reviewed)[-1]
    assert review.stability < 1
    assert (review.running, review.wanted) == (1, 4)
    assert "at work: 1, needed to keep up with arrivals (Proposition 1): 2;" in review.warning
    assert "spot: will be ordered again after a refusal or failure" in review.warning


def test_plan_too_small_for_arrivals_has_a_warning(street: Street) -> None:
    # Arrivals of 100/s are 2.5 updates a second, and a gradient takes two seconds.
    harness = at_work(street, with_policy("on-demand"))
    harness.on(events.ClaimsRead(tuple(batches(40, 100.0))))
    slow = UpdateApplied(0, 1, tuple(batch(n) for n in range(4)), 40, 1.0, gradient_s=2.0)
    harness.on(events.UpdateRecordsRead(((0, Lead(-1, GENESIS, "c", 0)), (1, slow))))
    street.append(ReplanAsked(street.clock(), "ada"))
    harness.run(10)

    plan = plans(street)[-1]
    assert plan.stability < 1
    assert "one machine for each of the K gradients would not suffice" in plan.warning


def test_unreachable_provider_is_reported_until_it_answers(street: Street) -> None:
    harness = at_work(street)
    street.fleet.go_away()
    harness.run(20)
    assert "the provider does not answer: the provider of machines is unavailable" in (
        street.written(Reviewed)[-1].warning
    )

    street.fleet.come_back()
    harness.run(20)
    assert street.written(Reviewed)[-1].warning == ""


def test_reviews_are_written_at_their_interval(street: Street) -> None:
    harness = at_work(street)
    harness.run(300)

    times = [review.at_s for review in street.written(Reviewed)]
    assert 10 <= len(times) <= 14
    review = street.written(Reviewed)[-1]
    assert review.spent_usd == pytest.approx(4 * 0.25 * (review.at_s - T0) / 3600, rel=0.05)
    assert (review.running, review.wanted, review.updates_left) == (4, 4, 1000)
    assert set(review.believed) >= {"arrivals_per_s", "gradient_s", "availability.spot"}


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("on_preemption", ["hold", "reassign"])
def test_every_policy_uses_on_demand_without_a_spot_pool(
    street: Street, policy: PolicyName, on_preemption: Literal["hold", "reassign"]
) -> None:
    settings = replace(with_policy(policy), pools=(ON_DEMAND,), on_preemption=on_preemption)
    harness = at_work(street, settings)

    # The machines keep up with arrivals.
    assert plans(street)[0].on_demand >= 2
    assert len(harness.provisioner.ledger.running) == plans(street)[0].on_demand
    assert not street.written(Reviewed)[-1].warning


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_plan_for_waiting_records_includes_the_time_of_gradients(
    street: Street, policy: PolicyName
) -> None:
    harness = ProviderThread(street, with_policy(policy))
    harness.on(events.RecordsCounted(1_000_000))
    harness.run(200)

    first, *others = plans(street)
    assert first.updates_left > 0
    assert first.expected_cost_usd > 0
    if policy != "on-demand":
        # This would differ if gradients took no time.
        assert not first.on_demand
    # Waiting records alone do not cause a new plan, but machines that are kept longer do.
    assert len(others) <= 2


@pytest.mark.parametrize("on_preemption", ["hold", "reassign"])
def test_change_of_policy_keeps_the_running_machines(
    street: Street, on_preemption: Literal["hold", "reassign"]
) -> None:
    before = replace(with_policy("adaptive"), on_preemption=on_preemption)
    at_work(street, before).run(20)
    run = {machine.launch for machine in street.fleet.rented}
    after = replace(before, policy="pools", spot_up_to=1.0)
    successor = ProviderThread(street, after, "p2")
    successor.run(30)

    plan = plans(street)[-1]
    assert successor.provisioner.is_leader
    assert (plan.policy, plan.counted, plan.number) == ("pools", True, 2)
    kept = {machine.launch for machine in successor.provisioner.ledger.running}
    assert kept <= run  # none replaces a running one
    assert len(kept) == sum(plan.counts.values())
