"""Loss curves: what is left to a target, how sure that is, and when it is never."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from common.theory.errors import ParameterError
from common.theory.losses import fit_loss_curve

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from common.theory.losses import LossCurve

    Curve = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


def power(j: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.3 + 4.0 * (1 + j / 50) ** -0.6


def geometric(j: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.3 + 2.0 * np.exp(-j / 1500)


def fitted(curve: Curve, updates: int, noise: float = 0.15, seed: int = 0) -> LossCurve:
    rng = np.random.default_rng(seed)
    j = np.arange(updates, dtype=np.float64)
    return fit_loss_curve(j, curve(j) + rng.normal(0, noise, updates), rng)


def truly_remaining(curve: Curve, updates: int, target_loss: float) -> float:
    reached = brentq(lambda j: float(curve(np.asarray(j))) - target_loss, 0, 1e9)
    return float(reached) - (updates - 1)


@pytest.mark.parametrize("curve", [power, geometric])
def test_the_kind_of_the_curve_is_recognised(curve: Curve) -> None:
    assert [fitted(curve, 4000, seed=seed).kind for seed in range(5)] == [curve.__name__] * 5


@pytest.mark.parametrize("curve", [power, geometric])
def test_without_noise_the_fit_is_the_curve(curve: Curve) -> None:
    fit = fitted(curve, 3000, noise=0.0)
    for version in (0, 100, 2999, 6000):
        expected = float(curve(np.asarray(float(version))))
        assert fit.loss(version) == pytest.approx(expected, rel=0.01)
    target = float(curve(np.asarray(4000.0)))
    assert float(fit.remaining(target).value) == pytest.approx(1001, rel=0.02)


@pytest.mark.parametrize(("curve", "updates"), [(power, 2000), (geometric, 2000)])
def test_the_interval_covers_what_is_left_as_often_as_it_says(curve: Curve, updates: int) -> None:
    # Half of what the loss is above its floor is still to go, with noise about as large as that.
    now = float(curve(np.asarray(updates - 1.0)))
    target = (now + 0.3) / 2
    truth, trials, hits = truly_remaining(curve, updates, target), 20, 0
    for seed in range(trials):
        estimate = fitted(curve, updates, seed=seed).remaining(target)
        low, high = estimate.interval(0.9)
        hits += float(low) <= truth <= float(high)
    assert hits >= 13  # 18 expected; four standard deviations of a binomial are 5.4


def test_a_short_history_says_that_it_does_not_know() -> None:
    estimate = fitted(geometric, 300).remaining(0.7)
    low, high = estimate.interval(0.9)
    assert float(low) <= truly_remaining(geometric, 300, 0.7) <= float(high)
    assert float(estimate.relative_std) > 0.5


def test_a_target_that_is_reached_leaves_nothing_to_do() -> None:
    fit = fitted(power, 3000)
    assert fit.remaining(1.0).value == 0
    assert fit.remaining(1.0).interval(0.9) == (0, 0)


@pytest.mark.parametrize("curve", [power, geometric])
def test_a_target_below_the_floor_is_never_reached(curve: Curve) -> None:
    fit = fitted(curve, 10000)
    low, high = fit.floor.interval(0.99)
    assert 0.1 < float(low) <= 0.3 <= float(high)
    assert fit.remaining(0.05).value == math.inf
    assert np.isinf(fit.remaining_draws(0.05)).mean() > 0.95


def test_a_target_within_the_floors_interval_is_neither_certain_nor_given_up() -> None:
    estimate = fitted(geometric, 6000).remaining(0.3)
    assert math.isfinite(float(estimate.value))
    assert float(estimate.relative_std) > 1


@given(st.floats(0.05, 3.0), st.floats(0.05, 3.0))
@settings(deadline=None)
def test_a_lower_target_never_takes_fewer_updates(one: float, other: float) -> None:
    draws = [SHARED.remaining_draws(target) for target in sorted((one, other))]
    assert (draws[0] >= draws[1]).all()


def test_versions_need_not_begin_at_0_nor_follow_without_gaps() -> None:
    rng = np.random.default_rng(2)
    j = np.arange(0.0, 6000.0, 2.0)
    y = power(j) + rng.normal(0, 0.05, len(j))
    plain, moved = (fit_loss_curve(j + k, y, np.random.default_rng(3)) for k in (0, 700))
    assert moved.loss(6700) == pytest.approx(plain.loss(6000))
    assert moved.remaining(0.5).value == pytest.approx(plain.remaining(0.5).value)


def test_a_few_wild_losses_do_not_carry_the_fit_away() -> None:
    rng = np.random.default_rng(4)
    j = np.arange(3000.0)
    y = geometric(j) + rng.normal(0, 0.1, len(j))
    y[rng.choice(len(j), 10)] = 50.0
    estimate = fit_loss_curve(j, y, rng).remaining(0.4)
    truth = truly_remaining(geometric, 3000, 0.4)
    assert float(estimate.value) == pytest.approx(truth, abs=0.35 * truth)


@pytest.mark.parametrize("losses", [np.full(100, 0.7), np.linspace(0.5, 0.9, 100)])
def test_a_loss_that_does_not_fall_never_gets_there(losses: npt.NDArray[np.float64]) -> None:
    fit = fit_loss_curve(np.arange(100.0), losses, np.random.default_rng(5))
    assert fit.remaining(0.3).value == math.inf


def test_what_makes_no_sense_is_refused_by_name() -> None:
    rng, j = np.random.default_rng(6), np.arange(100.0)
    with pytest.raises(ParameterError, match="losses: a fit takes at least 30, got 29"):
        fit_loss_curve(j[:29], j[:29], rng)
    with pytest.raises(ParameterError, match="versions: must be one per loss"):
        fit_loss_curve(j[:50], j, rng)
    with pytest.raises(ParameterError, match="losses: must be finite"):
        fit_loss_curve(j, np.where(j == 3, math.nan, 1.0), rng)
    with pytest.raises(ParameterError, match="versions: must increase"):
        fit_loss_curve(j[::-1], j, rng)
    with pytest.raises(ParameterError, match="least_loss: 0 is above"):
        fit_loss_curve(j, -j - 1, rng)


SHARED = fitted(power, 3000)
