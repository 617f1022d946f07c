"""Estimates of a job from its topics, and their uncertainty."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace as with_

from common.core.job_completion import LOSS_WINDOW
from common.core.messages import (
    GENESIS,
    AuditRecord,
    Lead,
    ModelId,
    SpanExpired,
    Synchrony,
    UpdateApplied,
    WorkerId,
)
from common.spot.provisioning.estimators import Estimator
from common.spot.provisioning.fleet_ledger import FleetLedger
from tests.unit.core.examples import batch
from tests.unit.spot.provisioning.examples import (
    PRICES,
    SETTINGS,
    T0,
    batches,
    ended,
    fold,
    lead,
    ordered,
    started,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.spot.provisioning.records import PlanRecord
    from common.spot.provisioning.settings import ProvisionerSettings

HOLD = replace(SETTINGS, on_preemption="hold")


def update(version: int, epoch: int = 0, gradient_s: float = 0.0) -> UpdateApplied:
    made = tuple(batch(4 * version + n) for n in range(4))
    return UpdateApplied(epoch, version, made, 40, 1.0, gradient_s=gradient_s)


def audited(*records: AuditRecord) -> Estimator:
    estimator = Estimator(SETTINGS)
    estimator.updates(enumerate((Lead(-1, GENESIS, "c", 0), *records)), T0)
    return estimator


def to_loss(losses: Sequence[float], loss: float = 0.5) -> Estimator:
    """Return an estimator that has seen these losses, for a job that stops at a loss."""
    estimator = Estimator(replace(SETTINGS, updates=None, loss=loss))
    updates = (
        UpdateApplied(0, version, (batch(version),), 40, value)
        for version, value in enumerate(losses, 1)
    )
    estimator.updates(enumerate((Lead(-1, GENESIS, "c", 0), *updates)), T0)
    return estimator


def falling(updates: int) -> list[float]:
    """Losses reach 0.5 after 1019 updates. Their mean over 20 reaches it after about 1029."""
    noise = np.random.default_rng(7).normal(0, 0.02, updates)
    return list(0.3 + 2.0 * np.exp(-np.arange(updates) / 442.0) + noise)


def feed_records(estimator: Estimator, *records: PlanRecord) -> None:
    ledger = FleetLedger()
    for offset, record in enumerate((lead(), *records)):
        assert ledger.feed(offset, record)
        estimator.fleet(record, ledger)


def test_estimator_without_observations_reports_its_guesses() -> None:
    # 1000 updates of 40 records in 10,000 s are 4/s. Arrivals are assumed to be twice that.
    estimator = Estimator(SETTINGS)

    assert float(estimator.arrivals(T0).value) == pytest.approx(8.0)
    assert not estimator.arrivals_known(T0)
    assert estimator.rates_per_s(T0).tolist() == [2.0] * 4
    # An update's 40 records arrive in 5 s. The guess is the time with which half of the four
    # machines, with two gradients each, could make 1.25 times as many updates as arrive.
    assert float(estimator.gradient(T0).value) == pytest.approx(5.0 / 1.25 / 2)
    assert estimator.guesses(T0) == (
        "not measured yet: arrivals are assumed to be 8/s, a gradient is assumed to take 2 s"
    )
    believed = estimator.believed(T0)
    assert set(believed) == {*("arrivals_per_s", "gradient_s", "availability.spot", "cycle_s.spot")}
    assert believed["arrivals_per_s"].low < 1
    assert believed["arrivals_per_s"].high > 20


@pytest.mark.parametrize("made", [600, 900])
def test_updates_to_loss_comes_from_the_loss_curve(made: int) -> None:
    assert to_loss(falling(made)).updates_to_loss() == pytest.approx(1029 - made, abs=0.1 * 1029)


def test_updates_to_loss_falls_with_each_update_between_fits() -> None:
    estimator = to_loss(falling(900))
    before = estimator.updates_to_loss()
    assert before is not None
    more = [UpdateApplied(0, v, (batch(v),), 40, 9.9) for v in range(901, 906)]
    estimator.updates(enumerate(more, 901), T0)
    assert estimator.updates_to_loss() == before - 5


def test_updates_to_loss_at_the_target_is_half_the_window() -> None:
    assert to_loss(falling(1400)).updates_to_loss() == LOSS_WINDOW / 2


@pytest.mark.parametrize(
    "losses", [[], falling(29), falling(60), [1.0] * 500, list(np.linspace(1, 2, 500))]
)
def test_updates_to_loss_is_unknown_for_unclear_losses(losses: list[float]) -> None:
    estimator = to_loss(losses)

    assert estimator.updates_to_loss() is None
    assert "loss" in estimator.guesses(T0)


def test_updates_to_loss_is_unknown_for_an_unreachable_loss() -> None:
    assert to_loss(falling(2000), loss=0.1).updates_to_loss() is None


def test_updates_to_loss_excludes_losses_taken_back_by_a_leader() -> None:
    losses = falling(1600)
    estimator, faithful = to_loss(losses), to_loss(losses[:800])
    estimator.updates([(1601, Lead(0, ModelId(0, 800), "d", 1601))], T0)

    value, expected = estimator.updates_to_loss(), faithful.updates_to_loss()
    assert value is not None
    assert value == pytest.approx(expected, rel=0.1)


def test_updates_to_loss_is_unknown_for_a_job_without_a_loss() -> None:
    estimator = to_loss(falling(900))
    estimator.settings = SETTINGS

    assert estimator.updates_to_loss() is None
    assert "loss" not in estimator.guesses(T0)


def test_arrivals_without_a_goal_are_one_batch_per_second_and_slot() -> None:
    endless = replace(SETTINGS, updates=None)

    assert float(Estimator(endless).arrivals(T0).value) == 40.0


def test_arrivals_count_the_records_of_all_workers() -> None:
    # Two streams of 20/s and 5/s. Two workers claim their batches in turn.
    estimator = Estimator(SETTINGS)
    fast = batches(80, 20.0, worker="digits-w0-1")
    slow = batches(20, 5.0, worker="somebody", partition=1)
    estimator.claims(fast, T0 + 40)
    estimator.claims(slow, T0 + 40)

    assert estimator.arrivals_known(T0 + 40)
    assert float(estimator.arrivals(T0 + 40).value) == pytest.approx(25.0, rel=0.03)
    assert np.ptp(estimator.rates_per_s(T0 + 40)) == 0
    belief = estimator.believed(T0 + 40)["arrivals_per_s"]
    assert belief.low < 25 < belief.high


def test_arrivals_are_unknown_after_the_first_batches() -> None:
    estimator = Estimator(SETTINGS)
    estimator.claims(batches(7, 100.0), T0 + 1)

    assert not estimator.arrivals_known(T0 + 1)
    assert float(estimator.arrivals(T0 + 1).value) == pytest.approx(8.0)


def test_repeated_or_overlapping_claim_counts_once() -> None:
    once, twice = Estimator(SETTINGS), Estimator(SETTINGS)
    claims = batches(20, 10.0)
    once.claims(claims, T0 + 20)
    twice.claims(
        [*claims, *claims[5:9], None, SpanExpired(claims[0].worker, claims[0].address)], T0 + 20
    )

    assert twice.arrivals(T0 + 20).value == once.arrivals(T0 + 20).value


def test_each_slot_has_its_own_rate_with_held_streams() -> None:
    estimator = Estimator(HOLD)
    estimator.claims(batches(80, 20.0, worker="digits-w0"), T0 + 40)
    estimator.claims(batches(20, 5.0, worker="digits-w3", partition=1), T0 + 40)
    estimator.claims(batches(20, 5.0, worker="by-hand", partition=2), T0 + 40)

    rates = estimator.rates_per_s(T0 + 40)
    assert rates[0] == pytest.approx(20.0, rel=0.05)
    assert rates[3] == pytest.approx(5.0, rel=0.2)
    # Slots without observations have the mean rate of the others.
    assert rates[1] == rates[2] == pytest.approx(12.5, rel=0.1)


def test_rate_of_a_slot_is_kept_after_its_machine_ended() -> None:
    present, away = Estimator(HOLD), Estimator(HOLD)
    for estimator in (present, away):
        feed_records(estimator, ordered(1), started(1))
        estimator.claims(batches(80, 20.0, worker="digits-w0"), T0 + 40)
    ledger = fold([lead(), ordered(1), started(1), ended(1, T0 + 40)])
    away.fleet(ended(1, T0 + 40), ledger)

    assert away.rates_per_s(T0 + 400)[0] == pytest.approx(20.0, rel=0.05)
    assert present.rates_per_s(T0 + 400)[0] < 5  # present, but silent


def test_gradient_time_comes_from_the_updates() -> None:
    estimator = audited(*(update(n, gradient_s=0.2 + 0.1 * (n % 2)) for n in range(1, 9)))

    gradient = estimator.believed(T0)["gradient_s"]
    assert gradient.value == pytest.approx(0.25)
    assert gradient.low < 0.25 < gradient.high
    assert "gradient" not in estimator.guesses(T0)


def test_single_gradient_time_has_a_deviation_of_its_own_size() -> None:
    gradient = audited(update(1, gradient_s=0.2)).believed(T0)["gradient_s"]

    assert (gradient.value, gradient.std) == (0.2, 0.2)


def test_gradient_time_is_normalized_to_the_first_pool() -> None:
    # A gradient takes 0.2 s in the first pool. A machine twice as fast made half of the batches.
    fast = replace(SETTINGS.pools[1], speed=2.0)
    estimator = Estimator(replace(SETTINGS, pools=(SETTINGS.pools[0], fast)))
    ledger = FleetLedger()
    records: list[PlanRecord] = [lead(), ordered(1), started(1)]
    for offset, record in enumerate(records):
        ledger.feed(offset, record)
        estimator.fleet(record, ledger)
    made = (batch(1, WorkerId("digits-w0-1")), batch(2))
    applied = UpdateApplied(0, 1, made, 40, 1.0, gradient_s=0.15)
    estimator.updates(enumerate((Lead(-1, GENESIS, "c", 0), applied)), T0)

    assert estimator.gradient(T0).value == pytest.approx(0.2)


def test_speed_of_a_pool_is_corrected_by_observations() -> None:
    # The market file says twice as fast, but it is half as fast: 0.2 s on demand, 0.4 s there.
    slow = replace(SETTINGS.pools[1], speed=2.0)
    estimator = Estimator(replace(SETTINGS, pools=(SETTINGS.pools[0], slow)))
    ledger = FleetLedger()
    records: list[PlanRecord] = [lead(), ordered(1), started(1)]
    for offset, record in enumerate(records):
        ledger.feed(offset, record)
        estimator.fleet(record, ledger)
    trail: list[AuditRecord] = [Lead(-1, GENESIS, "c", 0)]
    for version in range(1, 801):
        by = [WorkerId("digits-w0-1")] * (1 + version % 9) + [WorkerId("by-hand")] * 4
        made = tuple(batch(20 * version + at, worker) for at, worker in enumerate(by))
        mean_s = (0.4 * (len(by) - 4) + 0.2 * 4) / len(by)
        trail.append(UpdateApplied(0, version, made, 40, 1.0, gradient_s=mean_s))
    for offset, each in enumerate(trail):
        estimator.updates([(offset, each)], T0 + offset)

    pools = estimator.pools({}, T0 + 800)
    assert pools[1].speed == pytest.approx(0.5, rel=0.2)
    assert estimator.gradient(T0 + 800).value == pytest.approx(0.2, rel=0.2)


def test_gradient_time_stays_a_guess_if_updates_have_none() -> None:
    estimator = audited(update(1), update(2))

    assert (estimator.version, estimator.samples) == (2, 80)
    assert "a gradient is assumed to take" in estimator.guesses(T0)


def test_lead_takes_back_updates_and_their_samples() -> None:
    taken_back = Lead(0, ModelId(0, 1), "c2", 4)
    estimator = audited(update(1), update(2), update(3), taken_back, update(2, epoch=4))

    assert (estimator.version, estimator.samples) == (2, 80)


def test_updates_by_a_rule_count_as_equivalents_of_the_jobs_k() -> None:
    half = with_(update(2), equivalent=1.5)
    estimator = audited(update(1), half, with_(update(3), equivalent=2.0))
    assert (estimator.version, estimator.progress) == (3, 2.0)

    estimator.updates([(4, Lead(0, ModelId(0, 2), "c2", 4))], T0)
    assert (estimator.version, estimator.progress) == (2, 1.5)


def test_repeated_update_is_ignored() -> None:
    estimator = audited(update(1))
    estimator.updates([(1, update(1))], T0)

    assert estimator.samples == 40


def test_pools_have_current_prices_and_observed_availability() -> None:
    estimator = Estimator(SETTINGS)
    feed_records(estimator, ordered(1), started(1), ended(1, T0 + 1, "preempted"))

    on_demand, spot = estimator.pools({**PRICES, "spot": 0.7}, T0 + 200)

    assert (on_demand.usd_per_hour, on_demand.availability) == (1.0, 1.0)
    assert spot.usd_per_hour == 0.7
    assert spot.availability < 0.5
    estimator.unwanted(T0 + 200)
    assert estimator.pools(PRICES, T0 + 900) == estimator.pools(PRICES, T0 + 200)


def test_transfer_comes_from_measured_updates() -> None:
    formula = replace(SETTINGS, update_mb=8.0)
    records = [with_(update(1), moved=2_000_000), update(2), with_(update(3), moved=2_000_000)]

    def after(settings: ProvisionerSettings, updates: Sequence[AuditRecord]) -> Estimator:
        estimator = Estimator(settings)
        estimator.updates(enumerate((Lead(-1, GENESIS, "c", 0), *updates)), T0)
        return estimator

    assert after(formula, [update(1)]).update_mb == 8.0
    assert "update_mb" not in after(formula, [update(1)]).believed(T0)
    measured = after(formula, records)
    assert measured.update_mb == pytest.approx(2.0)
    assert measured.believed(T0)["update_mb"].value == pytest.approx(2.0)

    dear = replace(SETTINGS.pools[1], transfer_usd_per_gb=0.01)
    pools = replace(formula, pools=(SETTINGS.pools[0], dear))
    before, now = (after(pools, each).pools(PRICES, T0)[1] for each in ((), records))
    assert now.gb_per_hour == pytest.approx(before.gb_per_hour / 4)


def test_transfer_of_an_update_of_another_k_is_scaled() -> None:
    half = Synchrony(group_size=SETTINGS.group_size // 2)
    estimator = audited(with_(update(1), moved=1_000_000, synchrony=half, equivalent=0.5))
    assert estimator.update_mb == pytest.approx(2.0)


def test_transfer_follows_a_change_of_compression() -> None:
    sizes = [8_000_000] * 300 + [1_000_000] * 700
    records = [with_(update(version), moved=moved) for version, moved in enumerate(sizes, 1)]
    assert audited(*records).update_mb == pytest.approx(1.0, rel=0.1)
