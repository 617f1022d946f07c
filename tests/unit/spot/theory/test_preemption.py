"""Preemptible machines: the two-state chain, compared with simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory import preemption
from common.spot.theory.preemption import relaxation_s


def simulated_uptime(t_s: float, availability: float, cycle_s: float, runs: int) -> np.ndarray:
    """Return the time on in [0, t], (runs,), from a stationary start."""
    rng = np.random.default_rng(6)
    on = rng.random(runs) < availability
    left, uptime = np.full(runs, t_s), np.zeros(runs)
    while left.any():
        lasts = rng.exponential(np.where(on, availability, 1 - availability) * cycle_s)
        spent = np.minimum(lasts, left)
        uptime += on * spent
        left -= spent
        on = ~on
    return uptime


@given(st.floats(0.01, 0.99), st.floats(1, 1e5))
def test_relaxation_rate_is_the_sum_of_the_rates(availability: float, cycle_s: float) -> None:
    rates_per_s = 1 / (availability * cycle_s), 1 / ((1 - availability) * cycle_s)
    assert 1 / relaxation_s(availability, cycle_s) == pytest.approx(sum(rates_per_s))


@given(st.integers(0, 300), st.floats(0, 1))
def test_number_of_running_machines_is_binomial(workers: int, availability: float) -> None:
    law = preemption.distribution_of_running(workers, availability)
    running = np.arange(workers + 1)
    assert law.sum() == pytest.approx(1)
    mean = float(law @ running)
    assert mean == pytest.approx(workers * availability, abs=1e-9)
    variance = float(law @ (running - mean) ** 2)
    assert variance == pytest.approx(workers * availability * (1 - availability), abs=1e-9)


def test_distribution_of_running_equals_the_convolution() -> None:
    law = np.ones(1)
    for _ in range(12):
        law = np.convolve(law, [0.2, 0.8])
    assert preemption.distribution_of_running(12, 0.8) == pytest.approx(law)


@pytest.mark.parametrize("t_s", [20.0, 300.0, 5000.0])
def test_variance_of_uptime_agrees_with_simulation(t_s: float) -> None:
    uptime = simulated_uptime(t_s, 0.8, 1000.0, runs := 40_000)
    variance = preemption.variance_of_uptime_s2(t_s, 0.8, 1000.0)
    error = np.std((uptime - uptime.mean()) ** 2) / runs**0.5
    assert uptime.var() == pytest.approx(variance, abs=5 * error)
    assert uptime.mean() == pytest.approx(0.8 * t_s, abs=5 * (variance / runs) ** 0.5)


@given(st.floats(0, 1), st.floats(1e-9, 1e6), st.floats(1e-3, 1e6))
def test_variance_of_uptime_lies_between_its_limits(
    availability: float, t_s: float, cycle_s: float
) -> None:
    variance = preemption.variance_of_uptime_s2(t_s, availability, cycle_s)
    state = availability * (1 - availability)
    frozen = state * t_s**2  # one state all the time
    long = 2 * state * relaxation_s(availability, cycle_s) * t_s
    assert 0 <= variance <= min(frozen, long) * (1 + 1e-6)


def test_variance_of_uptime_is_continuous_where_its_series_starts() -> None:
    tau_s = relaxation_s(0.5, 1000.0)
    below, above = (
        preemption.variance_of_uptime_s2(t_s, 0.5, 1000.0) / t_s**2
        for t_s in (0.99999e-4 * tau_s, 1.00001e-4 * tau_s)
    )
    assert below == pytest.approx(above, rel=1e-8)


@pytest.mark.parametrize("availability", [0.0, 1.0])
def test_variance_of_uptime_is_zero_for_constant_machines(availability: float) -> None:
    assert preemption.variance_of_uptime_s2(1000, availability, 500) == 0
