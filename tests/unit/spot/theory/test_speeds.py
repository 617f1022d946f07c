"""Speeds of machines in several pools, from the updates that they make together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory.speeds import SpeedTally

HALF_LIFE_S = 600.0
GRADIENT_S = 0.1


def tally_of(said: list[float], true: list[float], seed: int, updates: int = 300) -> SpeedTally:
    """Observe updates with twenty gradients each, of pools in random shares."""
    rng, tally = np.random.default_rng(seed), SpeedTally(said, HALF_LIFE_S)
    for now_s in range(updates):
        made = rng.multinomial(20, rng.dirichlet(np.ones(len(true))))
        mean_s = float(made @ (GRADIENT_S / np.array(true))) / 20
        tally.add(float(now_s), made.tolist(), mean_s * rng.normal(1.0, 0.02))
    return tally


@given(
    st.lists(st.floats(0.5, 3.0), min_size=1, max_size=3),
    st.lists(st.floats(0.5, 3.0), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_speeds_are_learned_despite_wrong_priors(
    spot: list[float], said: list[float], seed: int
) -> None:
    true = [1.0, *spot]
    found = tally_of([1.0, *said[: len(spot)]], true, seed).speeds
    assert found == pytest.approx(true, rel=0.25)


def test_speed_of_an_unobserved_pool_is_its_prior() -> None:
    tally = SpeedTally([1.0, 2.0, 3.0], HALF_LIFE_S)
    assert tally.speeds.tolist() == [1.0, 2.0, 3.0]
    for now_s in range(100):
        tally.add(float(now_s), [0, 20, 0], GRADIENT_S)
    assert tally.speeds == pytest.approx([1.0, 2.0, 3.0])


def test_priors_stay_if_only_one_mix_is_observed() -> None:
    tally = SpeedTally([1.0, 2.0], HALF_LIFE_S)
    for now_s in range(100):
        tally.add(float(now_s), [10, 10], 0.75 * GRADIENT_S)
    assert tally.speeds == pytest.approx([1.0, 2.0])


def test_old_speeds_are_forgotten() -> None:
    tally = tally_of([1.0, 1.0], [1.0, 2.0], 1)
    rng = np.random.default_rng(2)
    for now_s in range(20_000, 20_300):
        fast = int(rng.integers(1, 20))
        tally.add(float(now_s), [20 - fast, fast], ((20 - fast) + fast / 3) / 20 * GRADIENT_S)
    assert tally.speeds == pytest.approx([1.0, 3.0], rel=0.05)
