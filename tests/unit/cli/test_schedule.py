"""Arrival schedules: the rate holds, whatever the moments at which somebody looks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.commands.schedule import Schedule


def test_a_steady_stream_is_due_at_its_rate() -> None:
    schedule = Schedule(100)
    assert [schedule.due(at) for at in (0.0, 0.0101, 0.1001, 1.0001, 100.00001)] == [
        0,
        1,
        10,
        100,
        10_000,
    ]
    assert schedule.next_s(100.00001) == pytest.approx(100.01)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    schedule = Schedule(1000, np.random.default_rng(0))
    counts = np.diff([schedule.due(second) for second in range(201)])
    assert counts.mean() == pytest.approx(1000, rel=0.01)
    assert counts.var() == pytest.approx(1000, rel=0.3)  # variance = mean


@given(
    st.floats(0.01, 1e5),
    st.one_of(st.none(), st.integers(0, 9)),
    st.lists(st.floats(0, 2), max_size=20),
)
def test_looking_more_often_changes_nothing(
    rate: float, seed: int | None, looks: list[float]
) -> None:
    def make() -> Schedule:
        return Schedule(rate, None if seed is None else np.random.default_rng(seed))

    looked, once = make(), make()
    seen = [looked.due(at) for at in sorted(looks)]
    assert seen == sorted(seen)
    assert looked.due(2.0) == once.due(2.0)
    assert once.next_s(2.0) > 2.0


def test_the_next_arrival_is_the_one_after_those_due() -> None:
    schedule = Schedule(10, np.random.default_rng(3))
    for at in np.arange(0.0, 5.0, 0.37):
        due, following = schedule.due(at), schedule.next_s(at)
        assert schedule.due(following) == due + 1
