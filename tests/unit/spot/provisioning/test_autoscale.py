"""Finds the number of workers that are worth their cost."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.provisioning.autoscale import (
    UPDATES,
    WINDOW_S,
    FleetSize,
    RoundTimes,
    workers_wanted,
)

GRADIENT_S = 0.04
ONCE_S, EACH_S = 0.004, 0.0015


def update_s(workers: int, group_size: int = 24) -> float:
    return ceil(group_size / workers) * GRADIENT_S + ONCE_S + workers * EACH_S


def measure(times: RoundTimes, workers: int, updates: int = 400, *, backlog: bool = True) -> None:
    """Observe updates by this number of workers, each in the time that they need for it."""
    fleet, each_s = FleetSize(workers, 24), update_s(workers)
    for version in range(updates):
        times.observe(fleet, version, GRADIENT_S, version * each_s, backlog=backlog)


def test_times_of_one_fleet_size_are_taken_as_cost_per_worker() -> None:
    times = RoundTimes()
    assert times.update_s(24, GRADIENT_S) is None
    measure(times, 24)
    found = times.update_s(24, GRADIENT_S)
    assert found is not None
    assert found(24) == pytest.approx(update_s(24))
    assert found(12) == pytest.approx(2 * GRADIENT_S + (ONCE_S + 24 * EACH_S) / 2)


def test_times_of_two_fleet_sizes_separate_the_fixed_cost() -> None:
    times = RoundTimes()
    measure(times, 24)
    measure(times, 12)
    found = times.update_s(24, GRADIENT_S)
    assert found is not None
    for workers in (1, 6, 12, 24):
        assert found(workers) == pytest.approx(update_s(workers))


def test_updates_without_a_backlog_or_in_bulk_are_not_measured() -> None:
    times = RoundTimes()
    measure(times, 24, backlog=False)
    for version in range(0, 10_000, 1_000):
        times.observe(
            FleetSize(4, 24), version, GRADIENT_S, WINDOW_S * version / 1_000, backlog=True
        )
    assert times.update_s(24, GRADIENT_S) is None


def test_change_of_fleet_or_rollback_restarts_the_measurement() -> None:
    times = RoundTimes()
    for version, workers in ((0, 4), (UPDATES, 5), (1, 5), (UPDATES, 5)):
        times.observe(FleetSize(workers, 24), version, 0.0, version * WINDOW_S, backlog=True)
    assert times.update_s(24, GRADIENT_S) is None


def test_workers_wanted_minimizes_time_times_cost() -> None:
    # Twelve workers compute two gradients each, but exchange half as many messages as 24.
    assert workers_wanted(update_s, 24, 24) == 12
    assert workers_wanted(lambda p: update_s(p, 2), 24, 24) == 2
    assert workers_wanted(lambda p: ceil(24 / p) * GRADIENT_S, 4, 24) == 24


def test_small_gain_does_not_change_the_number_of_workers() -> None:
    assert workers_wanted(lambda p: {3: 0.913, 4: 0.8}.get(p, 9.0), 4, 4) == 4  # saves 2 %
    assert workers_wanted(lambda p: {3: 0.88, 4: 0.8}.get(p, 9.0), 4, 4) == 3  # saves 9 %


def test_workers_wanted_keeps_up_with_arrivals() -> None:
    slow_per_s, fast_per_s = 1 / update_s(12), 1 / update_s(24)
    assert workers_wanted(update_s, 24, 24, slow_per_s) == 12
    assert workers_wanted(update_s, 24, 24, fast_per_s) == 24
    assert workers_wanted(update_s, 12, 24, fast_per_s) == 24
    assert workers_wanted(update_s, 24, 24, 10 * fast_per_s) == 12  # no number keeps up


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    *(st.floats(0, 1) for _ in range(3)),
)
def test_workers_wanted_is_within_5_percent_of_the_optimum(
    now: int, group_size: int, gradient_s: float, once_s: float, each_s: float
) -> None:
    def takes_s(workers: int) -> float:
        return ceil(group_size / workers) * gradient_s + once_s + workers * each_s

    wanted = workers_wanted(takes_s, now, 40)
    assert 1 <= wanted <= 40
    least = min(p * takes_s(p) ** 2 for p in range(1, 41))
    assert 0.95 * wanted * takes_s(wanted) ** 2 <= least
