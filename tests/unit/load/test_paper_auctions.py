"""Costs of jobs on the old spot market, by hand and compared with its billing rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.errors import UserError
from common.spot.policies.bidbrain import BidBrain, eviction_odds
from common.spot.theory.billing import BY_NAME
from load.paper.auctions import (
    AuctionRun,
    Auctions,
    Job,
    Standard,
    clairvoyant_usd,
    run_auction,
)

STEP_S = 600.0


def auctions(*prices: list[float], on_demand: float = 1.0) -> Auctions:
    count = len(prices)
    return Auctions(np.array(prices), STEP_S, np.full(count, on_demand), np.full(count, 2.0))


def standard(market: Auctions, machines: int = 1) -> Standard:
    return Standard(market.on_demand_usd, market.work_per_s, 2.0 * machines)


def done(market: Auctions, hours: float, first: int = 0, **more: float) -> AuctionRun:
    return run_auction(market, Job(hours * 7200.0, **more), standard(market), first)


def test_hours_cost_their_starting_price_and_the_last_is_prorated() -> None:
    bill = done(auctions([0.4, *[0.5] * 5, 0.6, *[0.7] * 20]), 1.5)
    assert bill.usd == pytest.approx(0.4 + 0.6 / 2)
    assert (bill.runtime_s, bill.free, bill.evictions) == (5400.0, 0.0, 0)
    assert bill.paid == pytest.approx(5400.0 * 2)


@pytest.mark.parametrize("ran_steps", [3, 6, 8])
def test_cost_of_an_eviction_equals_the_old_billing_rules(ran_steps: int) -> None:
    # After `ran_steps` steps, the price exceeds the bid for one step. Another machine then
    # completes the job.
    prices = [0.5] * ran_steps + [2.0] + [0.5] * 200
    bill = done(auctions(prices), 10.0, eviction_s=0.0)
    first_usd = 0.5 * BY_NAME["ec2-2017"].paid_s(ran_steps * STEP_S, preempted=True) / 3600
    rest_s = 36_000.0 - ran_steps * STEP_S
    assert bill.usd == pytest.approx(first_usd + 0.5 * rest_s / 3600)
    # Nothing runs while the price exceeds the bid.
    assert bill.runtime_s == 36_000.0 + STEP_S
    assert bill.free == pytest.approx(ran_steps % 6 * STEP_S * 2)
    assert bill.evictions == 1


def test_start_up_checkpoints_and_reliable_machines_add_time_or_cost() -> None:
    idle = auctions([0.5] * 200)
    assert done(idle, 1.0, start_s=90.0).runtime_s == pytest.approx(3690.0)
    assert done(idle, 1.0, checkpoint_share=0.2).runtime_s == pytest.approx(4500.0)
    assert done(idle, 1.0, reliable_usd_per_hour=3.0).usd == pytest.approx(3.5)
    lost = done(auctions([0.5, 2.0] + [0.5] * 200), 1.0, eviction_s=90.0)
    assert lost.runtime_s == pytest.approx(3600.0 + STEP_S)  # it stood still anyway


def test_evicted_job_moves_to_the_currently_cheapest_market() -> None:
    bill = done(auctions([0.3, 2.0] + [0.3] * 20, [0.5] * 22), 2.0, eviction_s=60.0)
    assert bill.runtime_s == pytest.approx(7260.0)
    assert bill.usd == pytest.approx(0.5 + (0.5 * 3060 / 3600))
    assert bill.free == pytest.approx(STEP_S * 2)


def test_bidbrain_cost_is_between_the_clairvoyant_and_the_standard() -> None:
    rng = np.random.default_rng(1)
    jumps = rng.random((3, 2000)) < 0.1
    market = auctions(*np.where(jumps, 1.5, rng.uniform(0.2, 0.4, jumps.shape)).tolist())
    brain = BidBrain(eviction_odds(market.prices[:, :1000], STEP_S), market.work_per_s, 2.0)
    later, job = replace(market, prices=market.prices[:, 1000:]), Job(24 * 7200.0)
    ours, theirs = (run_auction(later, job, who, 0) for who in (brain, standard(market)))
    steps = round(24 * 3600 / STEP_S)
    assert clairvoyant_usd(later.prices[:, :steps], STEP_S) <= ours.usd < theirs.usd
    assert ours.free > theirs.free


def test_clairvoyant_pays_only_hours_without_a_price_rise() -> None:
    assert clairvoyant_usd(np.full((2, 12), 0.5), STEP_S) == pytest.approx(1.0)
    assert clairvoyant_usd(np.full((1, 9), 0.5), STEP_S) == pytest.approx(0.75)
    rises = np.array([[0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]])
    assert clairvoyant_usd(rises, STEP_S) == pytest.approx(0.6)  # half an hour for nothing


def test_prices_above_every_bid_are_rejected() -> None:
    with pytest.raises(UserError, match="prices: too high to do"):
        done(auctions([2.0] * 20), 1.0)
