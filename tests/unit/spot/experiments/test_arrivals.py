"""Records arrive by the given law, and counts and times agree with each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from common.spot.experiments.arrivals import (
    CHUNK,
    Arrivals,
    arrivals_of,
    draw_rates,
    even,
)
from common.spot.experiments.spec import ArrivalsSpec, UniformRates
from common.spot.theory.errors import ParameterError
from common.spot.traces.spec import TraceSpec
from common.spot.traces.trace import Floats, Trace

# The rate is 2 from 0 to 20 s, 0 until 30 s, and 0.75 until 50 s. Its mean is 1.1.
DAY = Trace(np.array([0.0, 20, 30]), np.array([2.0, 0, 0.75]), 50.0)
SPECS = {
    "poisson": ArrivalsSpec(),
    "trace": ArrivalsSpec(process="trace", trace=TraceSpec(file="day.csv", start_s=7.0)),
}


def stream(name: str, rate_per_s: float = 125.0, seed: int = 1) -> Arrivals:
    spec, rng = SPECS[name], np.random.default_rng(seed)
    (made,) = arrivals_of(spec, np.array([rate_per_s]), rng, DAY if spec.trace else None)
    return made


def times(arrivals: Arrivals, count: int) -> Floats:
    return np.array([arrivals.time_of(index) for index in range(count)])


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(times(stream("poisson"), 40_000), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 125, abs=5 / 125 / math.sqrt(40_000))
    assert stats.kstest(gaps, stats.expon(scale=1 / 125).cdf).pvalue > 0.001
    # Consecutive gaps are independent, even between chunks.
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 5 / math.sqrt(40_000)


def test_poisson_counts_have_a_variance_equal_to_their_mean() -> None:
    arrivals = stream("poisson")
    counts = np.diff([arrivals.count_until(t_s) for t_s in range(801)])
    assert counts.mean() == pytest.approx(125, abs=5 * math.sqrt(125 / 800))
    assert counts.var() == pytest.approx(125, rel=5 * math.sqrt(2 / 800))


def test_even_stream_has_constant_gaps_and_a_phase() -> None:
    arrived = times(even(125.0, 0.25), 1000)
    np.testing.assert_allclose(np.diff(arrived), 1 / 125)
    assert arrived[0] == 0.25 / 125


def test_trace_rate_is_scaled_to_the_requested_mean() -> None:
    # The stream begins at 7 s of the trace, so the rate changes 13, 23 and 43 s after its start.
    # The trace repeats every 50 s.
    arrivals = stream("trace")
    edges = np.array([0, 13, 23, 43, 63, 73, 93, 5043])
    counts = np.diff([arrivals.count_until(float(edge)) for edge in edges])
    day_rates = 125 / 1.1 * np.array([2, 0, 0.75, 2, 0, 0.75])
    expected = np.append(day_rates * np.diff(edges)[:-1], 125 * 4950)
    assert (counts[[1, 4]] == 0).all()
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_repeated_trace_keeps_its_hours() -> None:
    arrived = times(stream("trace", rate_per_s=5.0), 2 * CHUNK)
    hour = (arrived + 7) % 50
    assert not ((hour > 20 + 1e-6) & (hour < 30 - 1e-6)).any()
    busy, expected = (hour < 25).mean(), 2 * 20 / 55
    assert busy == pytest.approx(expected, abs=5 * math.sqrt(expected * 15 / 55 / (2 * CHUNK)))


def test_arrivals_within_a_trace_segment_are_poisson() -> None:
    arrived = times(stream("trace", rate_per_s=1000.0), 11_000)
    gaps = np.diff(arrived[arrived < 13])
    assert stats.kstest(gaps, stats.expon(scale=1.1 / 2000).cdf).pvalue > 0.001


@given(
    st.sampled_from(sorted(SPECS)),
    st.integers(0, 2**32 - 1),
    st.floats(1e-3, 1e4),
    st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=6),
)
def test_arrival_counts_and_times_agree(
    name: str, seed: int, rate_per_s: float, indexes: list[int]
) -> None:
    arrivals = stream(name, rate_per_s, seed)
    for index in indexes:
        time_s = arrivals.time_of(index)
        count = arrivals.count_until(time_s)
        assert count >= index + 1
        assert arrivals.time_of(count - 1) <= time_s < arrivals.time_of(count)
        assert arrivals.count_until(math.nextafter(time_s, -math.inf)) <= index


@pytest.mark.parametrize("name", sorted(SPECS))
def test_times_are_continuous_across_chunks(name: str) -> None:
    arrived = times(stream(name), 4 * CHUNK)
    assert (np.diff(arrived) >= 0).all()
    gaps = np.diff(arrived)
    at_ends = gaps[CHUNK - 1 :: CHUNK]
    # The trace's nightly pause is one gap.
    assert at_ends.max() < 25 * gaps.mean() + 10
    assert arrived[0] >= 0


@pytest.mark.parametrize("name", sorted(SPECS))
def test_arrivals_do_not_depend_on_query_order_or_forgetting(name: str) -> None:
    one, other = stream(name, seed=3), stream(name, seed=3)
    far = one.time_of(3 * CHUNK)
    for index in range(0, 3 * CHUNK, 1000):
        other.forget_before(index)
        assert other.time_of(index) == one.time_of(index)
    assert other.time_of(3 * CHUNK) == far
    assert other.count_until(far) == one.count_until(far)


def test_forgotten_records_are_rejected_and_the_rest_stays_counted() -> None:
    arrivals = stream("poisson")
    kept_s = arrivals.time_of(2 * CHUNK + 5)
    arrivals.forget_before(2 * CHUNK + 5)
    assert arrivals.time_of(2 * CHUNK) < kept_s
    assert arrivals.count_until(kept_s) == 2 * CHUNK + 6
    with pytest.raises(ParameterError, match="was forgotten"):
        arrivals.time_of(2 * CHUNK - 1)
    # These are already forgotten.
    arrivals.forget_before(10)
    # These are more records than were drawn, so all drawn ones are forgotten.
    arrivals.forget_before(100 * CHUNK)
    assert arrivals.time_of(3 * CHUNK) > kept_s


@pytest.mark.parametrize("name", sorted(SPECS))
def test_silent_stream_never_has_a_record(name: str) -> None:
    arrivals = stream(name, rate_per_s=0.0)
    arrivals.forget_before(5)
    assert arrivals.count_until(1e9) == 0
    assert arrivals.time_of(0) == math.inf


def test_streams_are_independent_of_each_other_and_of_query_order() -> None:
    rates = np.full(4, 50.0)
    forward = arrivals_of(SPECS["poisson"], rates, np.random.default_rng(5))
    backward = arrivals_of(SPECS["poisson"], rates, np.random.default_rng(5))
    first = [times(made, 2000) for made in forward]
    second = [times(made, 2000) for made in reversed(backward)][::-1]
    np.testing.assert_array_equal(first, second)
    correlation = np.corrcoef(np.diff(first, axis=1))
    assert np.abs(correlation - np.eye(4)).max() < 5 / math.sqrt(2000)


def test_trace_of_zeros_is_rejected() -> None:
    rng = np.random.default_rng(1)
    still = Trace(np.array([0.0, 5]), np.zeros(2), 10.0, "still.csv")
    with pytest.raises(ParameterError, match=r"trace: still\.csv must have a value above 0"):
        arrivals_of(SPECS["trace"], np.ones(1), rng, still)


def test_arrivals_combine_any_gap_law_with_any_clock() -> None:
    drawn = Arrivals(np.ones, lambda sums: sums / 4)
    assert times(drawn, 5).tolist() == [0.25, 0.5, 0.75, 1, 1.25]
    assert drawn.count_until(1.0) == 4


def test_draw_rates_draws_for_each_worker_of_each_run() -> None:
    rng = np.random.default_rng(1)
    drawn = draw_rates(UniformRates(low=1, high=250), 64, 200, rng)
    assert drawn.shape == (200, 64)
    assert stats.kstest(drawn.ravel(), stats.uniform(1, 249).cdf).pvalue > 0.001
    assert draw_rates(125.0, 3, 2, rng).tolist() == [[125.0] * 3] * 2
    given_rates = draw_rates((1.0, 0.0, 5.0), 3, 2, rng)
    assert given_rates.tolist() == [[1, 0, 5]] * 2
    # The array belongs to the caller, who may change it.
    given_rates[0, 0] = 9


@pytest.mark.parametrize("name", SPECS)
@given(st.integers(0, 3 * CHUNK), st.integers(1, 900), st.integers(0, 120))
@settings(max_examples=10)
def test_times_of_many_equal_times_one_by_one(name: str, first: int, step: int, count: int) -> None:
    indexes = range(first, first + step * count, step)
    one_by_one = stream(name)

    assert stream(name).times_of(indexes) == [one_by_one.time_of(index) for index in indexes]
