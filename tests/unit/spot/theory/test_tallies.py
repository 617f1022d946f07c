"""Running tallies decay with their half-life, independent of the input's order and grouping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory.errors import ParameterError
from common.spot.theory.estimates import (
    CyclePrior,
    Estimate,
    availability_from_times,
    cycle_from_times,
    rate_from_counts,
)
from common.spot.theory.tallies import GradientTally, Sums

if TYPE_CHECKING:
    from random import Random

WEAK = CyclePrior(cycles=0.1)


def rate(sums: Sums, now_s: float) -> Estimate:
    """Return the rate from the summed records and seconds."""
    records, seconds = sums.at(now_s)
    return rate_from_counts(records, seconds)


half_lives = st.sampled_from([1.0, 30.0, math.inf])


@given(half_lives, st.lists(st.floats(0.01, 50), min_size=1, max_size=10))
def test_sums_do_not_depend_on_how_time_is_split(
    half_life_s: float, lengths_s: list[float]
) -> None:
    whole, cut, now_s = Sums(1, half_life_s), Sums(1, half_life_s), 0.0
    for length_s in lengths_s:
        cut.add(now_s, now_s + length_s, 7 * length_s)
        now_s += length_s
    whole.add(0.0, now_s, 7 * now_s)
    assert cut.at(now_s + 5) == pytest.approx(whole.at(now_s + 5))


@given(
    half_lives,
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 9)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_sums_do_not_depend_on_the_order_of_contributions(
    half_life_s: float, terms: list[tuple[float, float]], random: Random
) -> None:
    ordered, shuffled = Sums(1, half_life_s), Sums(1, half_life_s)
    for at_s, term in sorted(terms):
        ordered.add(at_s, at_s, term)
    random.shuffle(terms)
    for at_s, term in terms:
        shuffled.add(at_s, at_s, term)
    assert shuffled.at(200.0) == pytest.approx(ordered.at(200.0))


def test_contribution_counts_half_after_a_half_life() -> None:
    sums = Sums(1, 20.0)
    sums.add(10.0, 10.0, 8.0)
    assert [sums.at(now_s)[0] for now_s in (5.0, 10.0, 30.0, 70.0)] == pytest.approx([8, 8, 4, 1])


def test_sums_without_a_half_life_are_plain_totals() -> None:
    sums = Sums(2)
    sums.add(0.0, 1.0, 3.0, 1.0)
    sums.add(1.0, 5.0, 7.0, 4.0)
    assert sums.at(1e9) == [10.0, 5.0]


def test_rate_from_sums_follows_a_jump_within_a_few_half_lives() -> None:
    rng, half_life_s = np.random.default_rng(1), 50.0
    sums, found = Sums(2, half_life_s), dict[int, float]()
    for second in range(1000):
        mean = 100.0 if second < 600 else 300.0
        sums.add(second, second + 1.0, float(rng.poisson(mean)), 1.0)
        found[second] = float(rate(sums, second + 1.0).value)
    assert found[599] == pytest.approx(100, rel=0.1)
    assert found[600 + 50] == pytest.approx(200, rel=0.1)  # half-way after one half-life
    assert found[600 + 250] == pytest.approx(300, rel=0.1)


def test_interval_of_decaying_sums_has_at_least_its_coverage() -> None:
    hits, runs = 0, 1000
    for counts in np.random.default_rng(2).poisson(5.0, (runs, 200)).tolist():
        sums = Sums(2, half_life_s=20.0)
        for second, count in enumerate(counts):
            sums.add(second, second + 1.0, count, 1.0)
        low, high = rate(sums, 200.0).interval(0.9)
        hits += float(low) <= 5.0 <= float(high)
    assert hits >= 0.9 * runs


def test_decaying_sums_follow_a_drop_in_availability() -> None:
    forgetful, faithful = Sums(3, half_life_s=3000.0), Sums(3)
    for slot in range(60):  # one cycle each
        there_s = 900.0 if slot < 30 else 500.0
        for sums in (forgetful, faithful):
            sums.add(1000.0 * slot, 1000.0 * (slot + 1), there_s, 1000 - there_s, 1)
    up_s, down_s, outages = forgetful.at(60000.0)
    assert availability_from_times(up_s, down_s, outages, WEAK).value == pytest.approx(
        0.5, abs=0.03
    )
    unsure = availability_from_times(up_s, down_s, outages).std
    up_s, down_s, outages = faithful.at(60000.0)
    found = availability_from_times(up_s, down_s, outages)
    assert found.value == pytest.approx(0.7, abs=0.01)
    assert cycle_from_times(up_s, down_s, outages).value == pytest.approx(1000)
    assert float(unsure) > float(found.std)


@given(
    half_lives,
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.01, 9), st.integers(1, 5)), min_size=3, max_size=9
    ),
)
def test_gradient_tally_agrees_with_numpy_mean_and_standard_error(
    half_life_s: float, messages: list[tuple[float, float, int]]
) -> None:
    tally = GradientTally(half_life_s)
    for at_s, seconds, batches in messages:
        tally.add(at_s, seconds * batches, batches)
    times, each, m = (np.asarray(column) for column in zip(*messages, strict=True))
    fade = np.exp2((times - times.max()) / half_life_s)
    mean = np.average(each, weights=fade * m)
    assert tally.mean(100.0).value == pytest.approx(mean)
    if math.isinf(half_life_s):
        variance = (m * (each - mean) ** 2).sum() / (len(each) - 1)
        expected = (variance / m.sum()) ** 0.5
        assert tally.mean(100.0).std == pytest.approx(expected, abs=1e-7)


def test_gradient_tally_keeps_small_scatter_of_large_times() -> None:
    rng = np.random.default_rng(3)
    tally = GradientTally(half_life_s=100.0)
    for at_s in range(1000):
        tally.add(at_s, 1e4 + rng.normal(0, 1e-3))
    weight = sum(0.5 ** (age_s / 100) for age_s in range(1000))
    assert float(tally.mean(1000.0).std) == pytest.approx(1e-3 / weight**0.5, rel=0.2)


def test_interval_from_messages_of_several_batches_has_its_coverage() -> None:
    # Each message: m independent gradients of mean 0.02 s and standard deviation 0.004 s.
    rng, runs, hits = np.random.default_rng(4), 400, 0
    for _ in range(runs):
        tally = GradientTally()
        for at_s, m in enumerate(rng.integers(1, 4, 60).tolist()):
            tally.add(at_s, 0.02 * m + rng.normal(0, 0.004) * m**0.5, m)
        low, high = tally.mean(60.0).interval(0.9)
        hits += float(low) <= 0.02 <= float(high)
    assert 0.85 * runs <= hits <= 0.95 * runs


def test_single_message_gives_a_mean_with_infinite_deviation() -> None:
    tally = GradientTally()
    tally.add(0.0, 0.06, 3)
    assert tally.mean(1.0).value == pytest.approx(0.02)
    assert tally.mean(1.0).std == math.inf


def test_mean_of_an_empty_gradient_tally_is_rejected() -> None:
    with pytest.raises(ParameterError, match="seconds: no gradient was computed yet"):
        GradientTally().mean(0.0)
