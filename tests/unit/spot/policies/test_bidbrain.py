"""BidBrain: odds from counted prices, the paper's equations by hand, and consequences."""

from __future__ import annotations

import numpy as np
import pytest

from common.spot.policies.bidbrain import (
    Allocation,
    BidBrain,
    Terms,
    eviction_odds,
    expected_cost_usd,
    overhead_s,
)
from common.spot.theory.errors import ParameterError

STEP_S = 900.0  # four an hour


def steady(*usd: float, steps: int = 40) -> np.ndarray:
    return np.repeat(np.array(usd)[:, None], steps, axis=1)


def brain(prices: np.ndarray, reliable_usd: float = 0.0, **more: float) -> BidBrain:
    cores = np.full(len(prices), 4.0)
    return BidBrain(eviction_odds(prices, STEP_S), cores, 40.0, reliable_usd, **more)


def test_eviction_odds_come_from_past_prices_by_delta_and_time_left() -> None:
    # The price is 1, 1, 1 and 3 in turn. A bid of 0.5 above it survives the hour only if it is made
    # when the price is 3.
    prices = np.tile([1.0, 1.0, 1.0, 3.0], 10)[None]
    odds = eviction_odds(prices, STEP_S, np.array([0.5, 2.0]))
    probability, median_s = odds.within([0, 0, 0], [0.5, 0.5, 2.0], [3600.0, 1800.0, 3600.0])
    assert probability == pytest.approx([0.75, 0.25, 0.0])
    assert median_s[:2] == pytest.approx([1800.0, 900.0])  # after 900, 1,800, 2,700 s
    assert odds.within(0, 1.9, 3600.0)[0] == pytest.approx(0.75)  # the next lower bid's odds
    assert odds.within(0, -1.0, 3600.0)[0] == pytest.approx(0.75)


def test_eviction_after_the_hour_does_not_count() -> None:
    prices = np.tile([1.0, 1.0, 1.0, 1.0, 3.0], 10)[None]
    probability, _ = eviction_odds(prices, STEP_S, np.array([0.5])).within(0, 0.5, 3600.0)
    assert probability == pytest.approx(0.6, abs=0.02)  # the fourth step is too late


@pytest.mark.parametrize("steps", [1, 4])
def test_eviction_odds_need_prices_of_more_than_an_hour(steps: int) -> None:
    with pytest.raises(ParameterError, match="odds of an hour need 5"):
        eviction_odds(steady(1.0, steps=steps), STEP_S)


def test_equations_1_and_2_agree_with_manual_calculation() -> None:
    terms = Terms(*(np.array([value]) for value in (8.0, 1.0, 4.0, 0.25, 3000.0)))
    assert expected_cost_usd(terms) == pytest.approx(6.0)
    assert overhead_s(np.array(0.75 * 0.5), 40.0, 7.0) == pytest.approx(0.625 * 40 + 7)


def test_acquire_takes_the_cheapest_market_up_to_the_needed_machines() -> None:
    prices = steady(0.3, 0.2)
    found = brain(prices).acquire([], 0.0, prices[:, 0])
    assert found is not None
    assert (found.market, found.machines, found.price_usd) == (1, 10, 0.2)
    assert found.bid_usd > 0.2
    assert found.ends_s == 3600.0
    assert brain(prices).acquire([found], 0.0, prices[:, 0]) is None  # there is no room


def test_acquire_raises_cost_only_to_share_reliable_machines() -> None:
    prices = steady(0.1, 0.5)
    there = Allocation(0, 5, 0.2, 0.1, 3600.0)
    # The first market's price has risen.
    now = np.array([9.0, 0.5])
    assert brain(prices).acquire([there], 0.0, now) is None
    shared = brain(prices, 30.0).acquire([there], 0.0, now)
    assert shared is not None
    assert shared.market == 1


def test_acquire_bids_low_only_if_evictions_are_cheap() -> None:
    # The price jumps once an hour. The jump evicts a low bid, whose hour is then free of charge. A
    # high bid is never evicted and always paid.
    prices = np.tile([0.2, 0.2, 0.2, 0.25], 20)[None]
    eager, careful = (
        brain(prices, eviction_s=lost_s).acquire([], 0.0, np.array([0.2]))
        for lost_s in (10.0, 3400.0)
    )
    assert eager is not None
    assert careful is not None
    assert eager.bid_usd < 0.25 <= careful.bid_usd


def test_hour_is_renewed_unless_another_market_is_cheaper() -> None:
    prices = steady(0.2, 0.3)
    ending = Allocation(0, 10, 0.6, 0.2, 3600.0)
    assert brain(prices).renews([], ending, 3600.0, np.array([0.2, 0.3]))
    assert not brain(prices).renews([], ending, 3600.0, np.array([0.5, 0.3]))
    assert brain(prices, change_s=1700.0).renews([], ending, 3600.0, np.array([0.5, 0.3]))


def test_renewal_uses_the_odds_of_its_bid_above_the_current_price() -> None:
    # The price is 0.2 and jumps to 0.25 once an hour. The jump evicts a bid of 0.21, but not one of
    # 0.5.
    prices = np.tile([0.2, 0.2, 0.2, 0.25], 20)[None]
    slow = brain(prices, eviction_s=3400.0)
    above = Allocation(0, 10, 0.5, 0.2, 3600.0)
    below = Allocation(0, 10, 0.21, 0.2, 3600.0)
    assert slow.renews([], above, 3600.0, np.array([0.2]))
    assert not slow.renews([], below, 3600.0, np.array([0.2]))
