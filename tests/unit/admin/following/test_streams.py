"""Rates and lag of streams, from looks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.messages import Standing
from common.core.spans import Partition
from services.admin.following.streams import Streams

A, B, C = Partition("a", 0), Partition("a", 1), Partition("b", 0)
FIRST = {A: 0, B: 10, C: 20}


def standing(claimed: int, settled: int, waiting: int) -> Standing:
    def of(count: int) -> dict[Partition, int]:
        return {place: first + count for place, first in FIRST.items()}

    return Standing(0, 1, of(claimed), 1, waiting, 1, of(settled))


def test_a_rate_is_the_growth_of_the_last_ten_seconds() -> None:
    streams = Streams(("a", "b"), FIRST)
    assert [state.rate_per_s for state in streams.states()] == [None, None]
    for second in range(31):
        count = 5 * second if second <= 20 else 100 + 50 * (second - 20)
        streams.look(float(second), {A: count, B: count, C: 7}, None, 10, 0)
    assert [state.rate_per_s for state in streams.states()] == [pytest.approx(100.0), 0.0]


def test_without_kafka_rate_and_lag_become_unknown_after_a_while() -> None:
    streams = Streams(("a", "b"), FIRST)
    for second in range(5):
        streams.look(float(second), dict(FIRST), standing(0, 0, 0), 10, 1)
    streams.look(6.0, None, standing(0, 0, 0), 10, 1)
    assert streams.lag == 0  # one answer that does not come says nothing yet
    streams.look(30.0, None, standing(0, 0, 0), 10, 1)
    assert streams.lag is None
    assert [state.rate_per_s for state in streams.states()] == [None, None]


def test_without_a_standing_lag_is_unknown_once_somebody_has_led() -> None:
    streams = Streams(("a", "b"), FIRST)
    streams.look(1.0, {A: 5, B: 15, C: 25}, None, 10, 0)
    assert streams.lag == 15
    streams.look(2.0, {A: 5, B: 15, C: 25}, None, 10, 1)
    assert streams.lag is None
    assert [sample.lag for sample in streams.samples()] == [(10, 5), (None, None)]


@settings(deadline=None)  # other tests run beside it
@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 50))
def test_what_waits_is_spread_and_never_more_than_is_claimed(
    claimed: int, settled: int, waiting: int
) -> None:
    settled = min(settled, claimed)
    streams = Streams(("a", "b"), FIRST)
    ends = {place: first + 100 for place, first in FIRST.items()}
    streams.look(1.0, ends, standing(claimed, settled, waiting), 10, 1)
    unclaimed, uncovered = 3 * (100 - claimed), 3 * (claimed - settled)
    assert streams.lag == unclaimed + min(10 * waiting, uncovered)
    states = streams.states()
    assert sum(state.lag or 0 for state in states) == streams.lag
    assert [state.settled for state in states] == [2 * settled, settled]
