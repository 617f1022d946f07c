"""Replayed prices depend on the clock alone, so all readers get the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.spot.fleets.prices import FixedPrices, PricesTogether, ReplayedPrices
from common.spot.machines import Offer, PriceHistory
from common.spot.traces.spec import TraceSpec
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

BEGAN_S = 1_800_000_000.0
FROM_START = TraceSpec(file="prices.csv", start_s=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prices.csv").write_text("seconds,usd\n0,0.1\n60,0.2\n120,0.3\n")
    return tmp_path


def price(folder: Path, spec: TraceSpec, at_s: float) -> float:
    """Return the price that a new reader finds at a time since the replay began."""
    clock = ManualClock(BEGAN_S + at_s)
    return ReplayedPrices({"spot": spec}, folder, BEGAN_S, clock).look()[Offer("spot")]


def test_price_series_follows_the_clock_and_repeats(folder: Path) -> None:
    clock = ManualClock(BEGAN_S)
    prices = ReplayedPrices({"spot": FROM_START}, folder, BEGAN_S, clock)
    found = []
    for _ in range(7):
        found.append(prices.look()[Offer("spot")])
        clock.advance(40.0)
    assert found == [0.1, 0.1, 0.2, 0.3, 0.3, 0.1, 0.2]  # it ends after 180 s


def test_price_series_is_replayed_at_its_speed_from_its_start(folder: Path) -> None:
    faster = FROM_START.model_copy(update={"speed": 30.0, "start_s": 60.0})
    assert [price(folder, faster, at_s) for at_s in (0.0, 1.9, 2.1, 3.9, 4.1)] == [
        *(0.2, 0.2, 0.3, 0.3, 0.1)
    ]


def test_first_price_holds_before_the_series_starts(folder: Path) -> None:
    assert price(folder, FROM_START, -500.0) == 0.1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at_s=st.floats(0, 1e5), pool=st.text(max_size=5))
def test_series_without_a_start_is_the_same_for_all_readers(
    folder: Path, at_s: float, pool: str
) -> None:
    spec = TraceSpec(file="prices.csv")
    clock = ManualClock(BEGAN_S)
    early = ReplayedPrices({pool: spec}, folder, BEGAN_S, clock)
    early.look()
    clock.advance(at_s)
    late = ReplayedPrices({pool: spec, "x": FROM_START}, folder, BEGAN_S, clock)
    assert late.look()[Offer(pool)] == early.look()[Offer(pool)] or pool == "x"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (TraceSpec(file="nowhere.csv"), "nowhere"),
        (FROM_START.model_copy(update={"column": "eur"}), "eur"),
        (FROM_START.model_copy(update={"start_s": 180.0}), "start_s"),
    ],
)
def test_invalid_price_series_is_a_user_error(folder: Path, spec: TraceSpec, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        ReplayedPrices({"spot": spec}, folder, BEGAN_S, ManualClock(BEGAN_S))


def test_price_history_ends_now_or_is_the_whole_series_at_its_start(
    folder: Path,
) -> None:
    clock = ManualClock(BEGAN_S)
    begun = FROM_START.model_copy(update={"start_s": 60.0})
    prices = ReplayedPrices({"later": begun, "spot": FROM_START}, folder, BEGAN_S, clock)
    all_of_it = PriceHistory([0.0, 60.0, 120.0], [0.1, 0.2, 0.3], 180.0)  # 60 s after the last
    assert prices.past() == {"later": PriceHistory([0.0], [0.1], 60.0), "spot": all_of_it}
    clock.advance(70.0)
    assert prices.past()["later"] == PriceHistory([0.0, 60.0, 120.0], [0.1, 0.2, 0.3], 130.0)
    together = PricesTogether([FixedPrices({Offer("od"): 1.0, Offer("od", "m5"): 2.0}), prices])
    assert together.past()["od"] == PriceHistory((0.0,), (1.0,), 3600.0)


def test_prices_without_sources_are_empty() -> None:
    assert PricesTogether([]).look() == {}
