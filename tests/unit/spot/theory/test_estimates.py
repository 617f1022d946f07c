"""Estimates from counts and times: their intervals have the promised coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from common.spot.theory.errors import ParameterError
from common.spot.theory.estimates import (
    CyclePrior,
    Estimate,
    Law,
    RatePrior,
    availability_from_times,
    cycle_from_times,
    pooled_prior,
    rate_from_counts,
)

TRIALS = 2000
LAWS: tuple[Law, ...] = ("normal", "gamma", "beta", "log")


def covered(estimate: Estimate, truth: float, probability: float = 0.9) -> float:
    low, high = estimate.interval(probability)
    return float(np.mean((low <= truth) & (truth <= high)))


def sojourns(
    rng: np.random.Generator, up_s: float, down_s: float, time_s: float
) -> tuple[float, float, int]:
    """Observe a stationary machine of the two-state chain. Returns time up, time down, outages."""
    up = rng.random() < up_s / (up_s + down_s)
    total, now_s, outages = {True: 0.0, False: 0.0}, 0.0, 0
    while now_s < time_s:
        stays_s = min(rng.exponential(up_s if up else down_s), time_s - now_s)
        total[up] += stays_s
        now_s += stays_s
        outages += up and now_s < time_s
        up = not up
    return total[True], total[False], outages


def test_interval_of_a_rate_has_its_stated_coverage() -> None:
    rng = np.random.default_rng(1)
    for seconds in (0.1, 1.0, 40.0):
        counts = rng.poisson(125 * seconds, TRIALS).astype(np.float64)
        # Counts around 12 take few values, so the interval cannot cover exactly 90 %.
        assert 0.85 <= covered(rate_from_counts(counts, seconds), 125.0) <= 0.95


def test_interval_of_a_rate_counted_to_a_full_batch_has_its_coverage() -> None:
    rng = np.random.default_rng(2)
    seconds = rng.gamma(255, 1 / 125, TRIALS).astype(np.float64)
    estimate = rate_from_counts(np.full(TRIALS, 255.0), seconds)
    assert covered(estimate, 125.0) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("availability", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("cycles", [20, 200])
def test_intervals_of_availability_and_cycle_have_their_coverage(
    availability: float, cycles: int
) -> None:
    rng = np.random.default_rng(cycles)
    up_s, down_s = 1000 * availability, 1000 * (1 - availability)
    trials = 400
    seen = np.asarray([sojourns(rng, up_s, down_s, 1000.0 * cycles) for _ in range(trials)])
    alpha = availability_from_times(seen[:, 0], seen[:, 1], seen[:, 2])
    assert 0.85 <= covered(alpha, availability) <= 0.95
    assert 0.85 <= covered(cycle_from_times(seen[:, 0], seen[:, 1], seen[:, 2]), 1000.0) <= 0.95


def test_certainty_of_availability_depends_on_cycles_not_seconds() -> None:
    short = availability_from_times(900.0, 100.0, 50, CyclePrior(cycle_s=20.0))
    long = availability_from_times(90000.0, 10000.0, 50, CyclePrior(cycle_s=2000.0))
    assert short.value == pytest.approx(long.value)
    assert short.std == pytest.approx(long.std)


def test_availability_with_equal_sojourns_has_a_beta_distribution() -> None:
    # Two rates have Gamma(m) distributions of one scale: the share of one in both is Beta(m, m).
    estimate = availability_from_times(9500.0, 9500.0, 19, CyclePrior(0.5, 1000.0, 1.0))
    assert estimate.interval(0.9) == pytest.approx(stats.beta(20, 20).interval(0.9))


def test_availability_without_outages_stays_below_1() -> None:
    estimates = [availability_from_times(up_s, 0.0, 0) for up_s in (0.0, 3600.0, 36000.0)]
    values = [float(e.value) for e in estimates]
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.9)
    assert values[-1] < 1
    assert float(estimates[-1].interval(0.9)[0]) < values[-1]


@pytest.mark.parametrize("law", LAWS)
def test_law_has_the_moments_of_its_estimate(law: Law) -> None:
    estimate = Estimate(0.3, 0.05, law)
    middles = (np.arange(2000) + 0.5) / 2000
    draws = np.asarray([estimate.quantile(float(p)) for p in middles])
    assert draws.std() == pytest.approx(0.05, rel=0.03)
    assert draws.mean() == pytest.approx(0.3, rel=0.02)


@given(
    st.sampled_from(LAWS),
    st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0.0, 0.2)), min_size=1, max_size=5),
    st.floats(0.05, 0.99),
)
def test_estimate_of_arrays_equals_estimates_of_numbers(
    law: Law, pairs: list[tuple[float, float]], probability: float
) -> None:
    values, stds = (np.asarray(column) for column in zip(*pairs, strict=True))
    together = Estimate(values, stds, law)
    low, high = together.interval(probability)
    for i, (value, std) in enumerate(pairs):
        alone = Estimate(value, std, law)
        assert (np.asarray(low)[i], np.asarray(high)[i]) == pytest.approx(
            alone.interval(probability)
        )
        assert np.asarray(together.relative_std)[i] == pytest.approx(alone.relative_std)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1.01, 10))
def test_rate_grows_with_records_and_its_certainty_with_more_data(
    records: float, seconds: float, factor: float
) -> None:
    rate = rate_from_counts(records, seconds)
    assert rate_from_counts(records * factor, seconds).value > rate.value
    assert rate_from_counts(records, seconds * factor).value < rate.value
    surer = rate_from_counts(records * factor, seconds * factor)
    assert surer.relative_std < rate.relative_std


def test_infinite_or_certain_value_has_an_interval_of_one_point() -> None:
    assert Estimate(math.inf, 0.0, "log").interval(0.9) == (math.inf, math.inf)
    assert Estimate(0.0, 0.0, "log").interval(0.9) == (0.0, 0.0)
    assert Estimate(3.0, 0.0).interval(0.9) == (3.0, 3.0)
    assert Estimate(3.0, math.inf, "log").interval(0.9) == (0.0, math.inf)
    assert Estimate(3.0, math.inf).quantile(0.5) == 3.0


def test_rate_of_a_worker_without_data_is_pooled_from_the_others() -> None:
    records, seconds = np.asarray([1250.0, 3750.0, 0.0]), np.asarray([10.0, 10.0, 0.0])
    rates = np.asarray(rate_from_counts(records, seconds, pooled_prior(records, seconds)).value)
    assert rates == pytest.approx([125, 375, 250], rel=0.01)


def test_rate_without_time_or_prior_is_rejected() -> None:
    with pytest.raises(ParameterError, match="seconds: must be above 0"):
        rate_from_counts(3, 0.0)
    with pytest.raises(ParameterError, match="no worker has any yet"):
        pooled_prior(np.zeros(3), np.zeros(3))
    assert rate_from_counts(0, 0.0, RatePrior(1.0, 0.01)).value == pytest.approx(100)
