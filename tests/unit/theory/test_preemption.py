"""Workers that come and go: paths against sums by hand, the two-state chain against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.theory import preemption
from common.theory.errors import ParameterError
from common.theory.preemption import SpotChain, Steps
from common.theory.updates import expected_runtime_s, expected_updates


def steps(times_s: list[float], values: list[float]) -> Steps:
    return Steps(np.array(times_s), np.array(values))


@st.composite
def paths(draw: st.DrawFn, end_s: float = 100.0) -> Steps:
    inner = draw(st.sets(st.integers(1, 99), max_size=8))
    times = np.array([0.0, *sorted(inner), end_s])
    values = draw(st.lists(st.floats(0, 64), min_size=len(times) - 1, max_size=len(times) - 1))
    return Steps(times, np.array(values))


def simulated_uptime(t_s: float, chain: SpotChain, runs: int) -> np.ndarray:
    """(runs,) time on in [0, t], from a stationary start."""
    rng = np.random.default_rng(6)
    on = rng.random(runs) < chain.availability
    left, uptime = np.full(runs, t_s), np.zeros(runs)
    while left.any():
        lasts = rng.exponential(np.where(on, chain.mean_on_s, chain.mean_off_s))
        spent = np.minimum(lasts, left)
        uptime += on * spent
        left -= spent
        on = ~on
    return uptime


def test_expected_updates_are_the_area_below_the_path() -> None:
    #  running   10 |──────|                       |──────
    #             0        |───────────────────────|
    #               0     100                     300    400
    path = steps([0, 100, 300, 400], [10, 0, 10])
    assert preemption.updates_on_path(path, 8.0, 4, 2) == pytest.approx(10 * 200 * 8 / (4 * 2))


def test_with_nobody_running_nothing_is_updated() -> None:
    assert preemption.update_rate_of_running_per_s(0, 125.0, 20, 256) == 0
    assert preemption.updates_on_path(steps([0, 5], [0]), 125.0, 20, 256) == 0


@given(st.integers(1, 64), st.floats(0.1, 500), st.floats(0.1, 1e5))
def test_with_all_running_equation_4_is_corollary_1(
    workers: int, rate_per_s: float, t_s: float
) -> None:
    path = steps([0, t_s], [workers])
    constant = expected_updates(t_s, np.full(workers, rate_per_s), 20, 256)
    assert preemption.updates_on_path(path, rate_per_s, 20, 256) == pytest.approx(constant)


@given(paths(), paths())
def test_the_exact_integral_is_a_sum_over_seconds(running: Steps, rates_per_s: Steps) -> None:
    seconds = np.arange(100.0)
    by_hand = float(running.at(seconds) @ rates_per_s.at(seconds)) / (20 * 256)
    exact = preemption.updates_on_paths(running, rates_per_s, 20, 256)
    assert exact == pytest.approx(by_hand, abs=1e-9)
    seconds_apart = np.cov(running.at(seconds), rates_per_s.at(seconds), ddof=0)[0, 1]
    printed = preemption.updates_on_paths_by_means(running, rates_per_s, 20, 256)
    assert exact - printed == pytest.approx(100 * seconds_apart / (20 * 256), abs=1e-9)


def test_records_that_come_while_nobody_runs_count_in_the_printed_form_alone() -> None:
    day = steps([0, 12, 24], [0, 10])  # workers run in the second half
    night = steps([0, 12, 24], [10, 0])  # records arrive in the first
    assert preemption.updates_on_paths(day, night, 1, 1) == 0
    assert preemption.updates_on_paths_by_means(day, night, 1, 1) == pytest.approx(600)


@pytest.mark.parametrize(
    ("parameter", "times_s", "values"),
    [
        ("times_s", [0, 5, 3, 9], [1, 1, 1]),
        ("times_s", [0, 5, 5, 9], [1, 1, 1]),
        ("times_s", [1, 5], [1]),
        ("times_s", [0, math.nan, 9], [1, 1]),
        ("times_s", [0, 5], [1, 1]),
        ("times_s", [0], []),
        ("values", [0, 5], [-1]),
        ("values", [0, 5], [math.nan]),
    ],
)
def test_a_path_with_gaps_or_out_of_order_is_refused(
    parameter: str, times_s: list[float], values: list[float]
) -> None:
    with pytest.raises(ParameterError) as refused:
        steps(times_s, values)
    assert refused.value.parameter == parameter


def test_paths_that_end_apart_are_refused() -> None:
    with pytest.raises(ParameterError, match="rates_per_s: end at 6 s, workers at 5 s"):
        preemption.updates_on_paths(steps([0, 5], [1]), steps([0, 6], [1]), 1, 1)


@given(st.floats(0.01, 0.99), st.floats(1, 1e5))
def test_the_chain_relaxes_at_the_sum_of_its_rates(availability: float, cycle_s: float) -> None:
    chain = SpotChain(availability, cycle_s)
    assert 1 / chain.relaxation_s == pytest.approx(1 / chain.mean_on_s + 1 / chain.mean_off_s)
    assert chain.mean_on_s + chain.mean_off_s == pytest.approx(cycle_s)
    assert chain.mean_on_s / cycle_s == pytest.approx(availability)


@given(st.integers(0, 300), st.floats(0, 1))
def test_the_number_that_runs_is_binomial(workers: int, availability: float) -> None:
    law = preemption.distribution_of_running(workers, availability)
    running = np.arange(workers + 1)
    assert law.sum() == pytest.approx(1)
    mean = float(law @ running)
    assert mean == pytest.approx(preemption.expected_running(workers, availability), abs=1e-9)
    variance = float(law @ (running - mean) ** 2)
    assert variance == pytest.approx(workers * availability * (1 - availability), abs=1e-9)


def test_the_distribution_is_that_of_machines_drawn_one_by_one() -> None:
    law = np.ones(1)
    for _ in range(12):
        law = np.convolve(law, [0.2, 0.8])
    assert preemption.distribution_of_running(12, 0.8) == pytest.approx(law)


@pytest.mark.parametrize("t_s", [20.0, 300.0, 5000.0])
def test_the_variance_of_the_uptime_is_that_of_simulated_machines(t_s: float) -> None:
    uptime = simulated_uptime(t_s, SpotChain(0.8, 1000.0), runs := 40_000)
    variance = preemption.variance_of_uptime_s2(t_s, 0.8, 1000.0)
    error = np.std((uptime - uptime.mean()) ** 2) / runs**0.5
    assert uptime.var() == pytest.approx(variance, abs=5 * error)
    assert uptime.mean() == pytest.approx(0.8 * t_s, abs=5 * (variance / runs) ** 0.5)


@given(st.floats(0, 1), st.floats(1e-9, 1e6), st.floats(1e-3, 1e6))
def test_the_variance_of_the_uptime_lies_between_its_limits(
    availability: float, t_s: float, cycle_s: float
) -> None:
    variance = preemption.variance_of_uptime_s2(t_s, availability, cycle_s)
    state = availability * (1 - availability)
    frozen = state * t_s**2  # one state all the time
    long = 2 * state * SpotChain(availability, cycle_s).relaxation_s * t_s
    assert 0 <= variance <= min(frozen, long) * (1 + 1e-6)


def test_the_variance_of_the_uptime_has_no_seam_where_its_series_begins() -> None:
    tau_s = SpotChain(0.5, 1000.0).relaxation_s
    below, above = (
        preemption.variance_of_uptime_s2(t_s, 0.5, 1000.0) / t_s**2
        for t_s in (0.99999e-4 * tau_s, 1.00001e-4 * tau_s)
    )
    assert below == pytest.approx(above, rel=1e-8)


@pytest.mark.parametrize("availability", [0.0, 1.0])
def test_a_machine_that_never_changes_has_no_variance(availability: float) -> None:
    assert preemption.variance_of_uptime_s2(1000, availability, 500) == 0


def test_equation_6_is_what_simulated_paths_take_in_the_long_run() -> None:
    """64 machines at alpha = 0.8: worker-seconds within t against E[N] t."""
    chain, t_s = SpotChain(0.8, 1000.0), 50_000.0
    uptime = simulated_uptime(t_s, chain, 64)
    made = uptime.sum() * 125 / (20 * 256)
    running = preemption.expected_running(64, 0.8)
    runtime_s = preemption.effective_runtime_s(made, running, 125, 20, 256)
    std_s = (64 * preemption.variance_of_uptime_s2(t_s, 0.8, 1000.0)) ** 0.5 / running
    assert runtime_s == pytest.approx(t_s, abs=4 * std_s)


def test_without_preemption_equation_6_is_corollary_1() -> None:
    theta_0 = expected_runtime_s(10_000, np.full(64, 125.0), 20, 256)
    assert preemption.effective_runtime_s(10_000, 64, 125, 20, 256) == pytest.approx(theta_0)


def test_where_no_worker_ever_runs_updates_take_for_ever() -> None:
    assert preemption.effective_runtime_s(1, 0, 125, 20, 256) == math.inf
    assert preemption.effective_runtime_s(0, 0, 125, 20, 256) == 0


def test_a_chain_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ParameterError, match="availability"):
        SpotChain(1.2, 1000.0)
    with pytest.raises(ParameterError, match="cycle_s"):
        preemption.variance_of_uptime_s2(10, 0.5, 0)
