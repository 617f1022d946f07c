"""The window covers the last ten seconds, even if the clock jumps."""

from __future__ import annotations

import pytest

from common.jobs.progress import WINDOW_S, RecentRates
from tests.unit.admin.live.helpers import update

RATE_PER_S = 10


def made(recent: RecentRates, first: int, updates: int, from_s: float) -> float:
    """Record updates at `RATE_PER_S`. Returns the time of the last one."""
    for number in range(updates):
        recent.add(update(0, first + number), from_s + number / RATE_PER_S)
    return from_s + (updates - 1) / RATE_PER_S


def test_rates_cover_the_window() -> None:
    recent = RecentRates()
    until_s = made(recent, 1, 500, 1000.0)
    updates_per_s, _ = recent.rates(until_s)
    assert updates_per_s == pytest.approx(RATE_PER_S, rel=0.02)


@pytest.mark.parametrize("back_s", [5.0, 3600.0])
def test_rates_recover_soon_after_the_clock_is_set_back(back_s: float) -> None:
    recent = RecentRates()
    before_s = made(recent, 1, 500, 10_000.0)
    now_s = made(recent, 501, int(3 * WINDOW_S * RATE_PER_S), before_s - back_s)
    updates_per_s, _ = recent.rates(now_s)
    assert updates_per_s == pytest.approx(RATE_PER_S, rel=0.02)
