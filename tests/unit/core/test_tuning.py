"""The tuner of K, with gradients of known noise."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.modes import MOST_STEP, SHRINK, GroupSizeTuner, Scatter, rate_scale

BATCH = 8  # records
ROUNDS = 20
# Number of parameters, large enough for a close estimate within twenty rounds.
DIMENSION = 4_000
Round = tuple[Scatter, float]


def measured(noise_scale: float, sizes: list[int], random: np.random.Generator) -> Round:
    """Return a round with messages of these sizes, drawn with this noise scale, in batches."""
    true = np.full(DIMENSION, 0.1)  # G^2 = 40
    deviation = np.sqrt(noise_scale * BATCH * 40.0 / DIMENSION)
    sums = [
        n * true + np.sqrt(n) * deviation * random.normal(size=DIMENSION)
        for n in (BATCH * size for size in sizes)
    ]
    squares = sum(float(g @ g) / (BATCH * size) for g, size in zip(sums, sizes, strict=True))
    total = sum(sums, np.zeros(DIMENSION))
    scatter = Scatter(len(sizes), sum(sizes), BATCH * sum(sizes), squares)
    return scatter, float(total @ total)


def said(noise_scale: float, messages: int = 4, size: int = 2) -> Round:
    """Return a round that measures exactly this noise scale, in batches."""
    samples = messages * size * BATCH
    noise = noise_scale * BATCH  # G^2 = 1
    squares = messages * (size * BATCH + noise)
    return Scatter(messages, messages * size, samples, squares), samples**2 + samples * noise


def feed(tuner: GroupSizeTuner, rounds: int, noise_scale: float) -> None:
    for _ in range(rounds):
        tuner.observe(*said(noise_scale))


@given(
    noise_scale=st.sampled_from([0.5, 3.0, 20.0]),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_noise_scale_is_found_for_any_message_sizes(
    noise_scale: float, sizes: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    tuner = GroupSizeTuner(4, 1, 100, ROUNDS)
    for _ in range(ROUNDS):
        tuner.observe(*measured(noise_scale, sizes, random))
    assert tuner.noise_scale == pytest.approx(noise_scale, rel=0.4)


def test_nothing_is_known_and_k_does_not_move_before_twenty_rounds() -> None:
    tuner = GroupSizeTuner(24, 2, 24, ROUNDS)
    feed(tuner, ROUNDS - 1, 1.0)
    assert (tuner.noise_scale, tuner.group_size) == (None, 24)
    feed(tuner, 1, 1.0)
    assert tuner.noise_scale == pytest.approx(1.0)
    assert tuner.group_size == 12


def test_k_halves_every_twenty_rounds_down_to_the_noise_scale() -> None:
    tuner = GroupSizeTuner(24, 2, 24, ROUNDS)
    seen = []
    for _ in range(5):
        feed(tuner, ROUNDS, 1.0)
        seen.append(tuner.group_size)
    assert seen == [12, 6, 3, 2, 2]


def test_k_grows_with_noise_up_to_its_maximum() -> None:
    tuner = GroupSizeTuner(3, 2, 16, ROUNDS)
    feed(tuner, ROUNDS, 1e6)
    assert tuner.group_size == 6
    feed(tuner, 2 * ROUNDS, 1e6)
    assert tuner.group_size == 16


def test_k_grows_if_noise_exceeds_the_mean_gradient() -> None:
    tuner = GroupSizeTuner(4, 2, 16, ROUNDS)
    scatter, _ = said(100.0)
    for _ in range(ROUNDS):
        # The messages cancel, so the estimate of G^2 is negative.
        tuner.observe(scatter, 0.0)
    assert (tuner.noise_scale, tuner.group_size) == (inf, 8)


@pytest.mark.parametrize("noise_scale", [7.5, 8.0, 9.0, 10.0])
def test_k_that_nearly_fits_does_not_move(noise_scale: float) -> None:
    tuner = GroupSizeTuner(8, 1, 100, ROUNDS)
    feed(tuner, 3 * ROUNDS, noise_scale)
    assert tuner.group_size == 8


def test_round_of_one_message_or_unknown_squares_is_ignored() -> None:
    tuner = GroupSizeTuner(24, 2, 24, ROUNDS)
    scatter, square = said(1.0)
    for _ in range(2 * ROUNDS):
        tuner.observe(*said(1.0, messages=1))
        tuner.observe(scatter._replace(squares=nan), square)
        tuner.observe(scatter, inf)
    assert (tuner.noise_scale, tuner.group_size) == (None, 24)


@given(
    st.integers(1, 40),
    st.tuples(st.integers(1, 20), st.integers(0, 20)),
    st.lists(st.floats(0, 1e9), min_size=1, max_size=80),
)
def test_k_stays_in_its_bounds_and_moves_rarely_in_bounded_steps(
    first: int, bounds: tuple[int, int], noise: list[float]
) -> None:
    least, most = bounds[0], bounds[0] + bounds[1]
    tuner = GroupSizeTuner(first, least, most, ROUNDS)
    before, kept = tuner.group_size, 0
    for noise_scale in noise:
        tuner.observe(*said(noise_scale))
        kept += 1
        assert least <= tuner.group_size <= most
        if tuner.group_size != before:
            assert kept >= ROUNDS
            assert before / MOST_STEP <= tuner.group_size <= before * MOST_STEP
            assert not SHRINK * before < tuner.group_size < before / SHRINK
            before, kept = tuner.group_size, 0


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 1e12))
def test_rate_changes_by_less_than_k(own: int, now: int, noise_scale: float) -> None:
    low, high = sorted((1.0, now / own))
    assert low * (1 - 1e-9) <= rate_scale(now, own, noise_scale) <= high * (1 + 1e-9)


def test_rate_is_constant_without_noise_and_follows_k_in_pure_noise() -> None:
    assert rate_scale(2, 8, 0.0) == 1.0
    assert rate_scale(2, 8, 2.0) == 0.625
    assert rate_scale(2, 8, inf) == rate_scale(2, 8, None) == 0.25
