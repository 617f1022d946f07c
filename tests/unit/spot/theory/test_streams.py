"""The rate of a stream from its batch indicators, in every order of arrival."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory.errors import ParameterError
from common.spot.theory.estimates import RatePrior
from common.spot.theory.streams import StreamTally

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random


class Indicator(NamedTuple):
    """Fields of a BatchReady that a tally reads."""

    key: int
    samples: int
    first_s: float
    last_s: float


def cut(arrivals_s: Iterable[float], batch_size: int, key: int = 0) -> list[Indicator]:
    """Return indicators of full batches. The remainder is still open."""
    times = list(arrivals_s)
    ends = range(batch_size, len(times) + 1, batch_size)
    return [
        Indicator(key + end, batch_size, times[end - batch_size], times[end - 1]) for end in ends
    ]


def tally(
    indicators: Iterable[Indicator], half_life_s: float = math.inf, now_s: float | None = None
) -> StreamTally:
    found = StreamTally(0.0, half_life_s)
    for batch in indicators:
        found.batch(*batch, now_s=batch.last_s if now_s is None else now_s)
    return found


def poisson(rng: np.random.Generator, rate_per_s: float, records: int) -> list[float]:
    return list(np.cumsum(rng.exponential(1 / rate_per_s, records)))


def test_single_batch_counts_its_gaps_over_its_span() -> None:
    assert tally([Indicator(0, 256, 10.0, 12.0)]).counts(12.0) == (255.0, 2.0)


def test_time_between_two_batches_counts() -> None:
    #  0 ..... 2        8 ..... 10    no record arrived in between
    indicators = [Indicator(0, 10, 0.0, 2.0), Indicator(1, 10, 8.0, 10.0)]
    assert tally(indicators).counts(10.0) == (19.0, 10.0)


@pytest.mark.parametrize("batch_size", [1, 16, 256])
def test_interval_of_a_stream_rate_has_its_stated_coverage(batch_size: int) -> None:
    rng, hits, trials = np.random.default_rng(batch_size), 0, 400
    records = max(batch_size, 64)
    for _ in range(trials):
        found = tally(cut(poisson(rng, 125.0, records), batch_size))
        low, high = found.rate(0.0).interval(0.9)
        hits += float(low) <= 125 <= float(high)
    assert 0.85 <= hits / trials <= 0.95


@given(
    st.lists(st.floats(0, 0.5), min_size=4, max_size=60),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_tally_does_not_depend_on_order_repetition_or_delay(
    gaps_s: list[float], batch_size: int, random: Random
) -> None:
    times = list(np.cumsum(gaps_s) + 1)
    indicators = cut(times, batch_size)
    expected = tally(indicators).counts(100.0)
    again = indicators + random.choices(indicators, k=3) if indicators else []
    random.shuffle(again)
    assert tally(again, now_s=100.0).counts(100.0) == pytest.approx(expected)


@given(st.lists(st.floats(0, 0.5), min_size=24, max_size=48), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_tally_does_not_depend_on_the_batch_size(gaps_s: list[float], batch_size: int) -> None:
    times = list(np.cumsum(gaps_s[: 12 * (len(gaps_s) // 12)]) + 1)
    expected = len(times) - 1, times[-1] - times[0]
    assert tally(cut(times, batch_size)).counts(100.0) == pytest.approx(expected)


def test_decaying_tally_hardly_depends_on_the_batch_size() -> None:
    times = poisson(np.random.default_rng(1), 50.0, 12800)
    rates = [float(tally(cut(times, b), 60.0).rate(0.0).value) for b in (1, 16, 64)]
    assert rates == pytest.approx([rates[0]] * 3, rel=0.01)


def test_tally_adds_up_batches_of_several_partitions() -> None:
    # Each poll returned one partition's records of the last seconds, so the batches' spans overlap.
    rng = np.random.default_rng(2)
    one, other = (cut(poisson(rng, 60.0, 6000), 100, key) for key in (0, 100000))
    mixed = [batch for pair in zip(one, other, strict=True) for batch in pair]
    assert tally(mixed, now_s=200.0).rate(200.0).value == pytest.approx(120, rel=0.05)


def test_batches_without_a_span_count() -> None:
    indicators = [Indicator(i, 5, float(i), float(i)) for i in range(1, 5)]
    assert tally(indicators).counts(4.0) == (19.0, 3.0)


def test_batch_without_a_known_time_is_not_counted() -> None:
    found = tally([Indicator(1, 10, 1e9, 1e9 + 5)])
    found.batch(2, 10, 0.0, 0.0, now_s=1e9 + 6)
    found.batch(3, 0, 1e9 + 6, 1e9 + 6, now_s=1e9 + 6)  # no record of it decoded
    assert found.counts(1e9 + 6) == (9.0, 5.0)


def test_arrival_in_the_future_is_clipped_to_now() -> None:
    found = StreamTally(0.0)
    found.batch(0, 11, 90.0, 5000.0, now_s=100.0)
    assert found.counts(100.0) == (10.0, 10.0)


def test_stream_without_a_reader_is_counted_when_it_is_read_again() -> None:
    times = [i / 10 for i in range(1, 1001)]
    found = StreamTally(0.0)
    for batch in cut(times, 50):
        if batch.last_s <= 30:
            found.batch(*batch, now_s=batch.last_s)
        elif not batch.first_s > 90:
            found.gone(30.0)
    assert found.rate(90.0, 49).value == pytest.approx(10, rel=0.02)  # away, so not silent
    found.returned(90.0)
    # It is not silent immediately after its return, either.
    assert found.rate(91.0, 49).value == pytest.approx(10, rel=0.02)
    for batch in cut(times, 50):
        found.batch(*batch, now_s=max(batch.last_s, 91.0))
    assert found.rate(100.0, 49).value == pytest.approx(10, rel=0.02)


def test_rate_of_a_silent_stream_falls_after_an_open_batch_is_overdue() -> None:
    found = tally(cut([i / 10 for i in range(1, 1001)], 100))
    rates = [float(found.rate(now_s, 99).value) for now_s in (100.0, 109.0, 120.0, 200.0, 1e6)]
    assert rates[:2] == pytest.approx([10, 10], rel=0.01)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.01


def test_stream_rate_follows_a_jump_within_a_few_half_lives() -> None:
    rng = np.random.default_rng(5)
    slow = poisson(rng, 50.0, 15000)  # 300 s
    fast = [slow[-1] + s for s in poisson(rng, 200.0, 40000)]  # 200 s
    found = tally(cut(slow, 100), half_life_s=30.0)
    assert found.rate(300.0).value == pytest.approx(50, rel=0.1)
    for batch in cut(fast, 100, 100000):
        found.batch(*batch, now_s=batch.last_s)
    assert found.rate(500.0).value == pytest.approx(200, rel=0.1)


def test_rate_of_an_unseen_stream_is_its_prior_and_then_falls() -> None:
    found, prior = StreamTally(0.0), RatePrior(1.0, 0.1)
    with pytest.raises(ParameterError, match="seconds: must be above 0"):
        found.rate(5.0, 99)
    assert found.rate(5.0, 99, prior).value == pytest.approx(10)
    assert float(found.rate(1000.0, 99, prior).value) < 0.11
