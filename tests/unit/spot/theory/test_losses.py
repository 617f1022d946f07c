"""Loss curves: remaining updates to a target, their uncertainty, and unreachable targets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime, brentq

from common.spot.theory.losses import (
    MEANS,
    Kind,
    LossTally,
    as_power,
    curve,
    fit_loss_curve,
    jacobian,
    remaining,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from common.spot.theory.losses import LossCurve

    Curve = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


def power(j: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.3 + 4.0 * (1 + j / 50) ** -0.6


def geometric(j: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.3 + 2.0 * np.exp(-j / 1500)


def fitted(curve: Curve, updates: int, noise: float = 0.15, seed: int = 0) -> LossCurve:
    rng = np.random.default_rng(seed)
    j = np.arange(updates, dtype=np.float64)
    return fit_loss_curve(j, curve(j) + rng.normal(0, noise, updates), rng)


def loss_at(fit: LossCurve, version: float) -> float:
    x = np.asarray([(version - fit.origin) / fit.length])
    return float(curve("power", fit.parameters, x)[0])


def truly_remaining(curve: Curve, updates: int, target_loss: float) -> float:
    reached = brentq(lambda j: float(curve(np.asarray(j))) - target_loss, 0, 1e9)
    return float(reached) - (updates - 1)


@pytest.mark.parametrize("curve", [power, geometric])
def test_fit_recognizes_the_kind_of_curve(curve: Curve) -> None:
    assert [fitted(curve, 4000, seed=seed).kind for seed in range(5)] == [curve.__name__] * 5


@pytest.mark.parametrize("curve", [power, geometric])
def test_fit_without_noise_equals_the_curve(curve: Curve) -> None:
    fit = fitted(curve, 3000, noise=0.0)
    for version in (0, 100, 2999, 6000):
        expected = float(curve(np.asarray(float(version))))
        assert loss_at(fit, version) == pytest.approx(expected, rel=0.01)
    target = float(curve(np.asarray(4000.0)))
    assert float(fit.remaining(target).value) == pytest.approx(1001, rel=0.02)


@pytest.mark.parametrize(("curve", "updates"), [(power, 2000), (geometric, 2000)])
def test_interval_of_remaining_updates_has_its_stated_coverage(curve: Curve, updates: int) -> None:
    # The target is halfway between the loss now and its floor of 0.3. The noise has about the size
    # of this difference.
    now = float(curve(np.asarray(updates - 1.0)))
    target = (now + 0.3) / 2
    truth, trials, hits = truly_remaining(curve, updates, target), 20, 0
    for seed in range(trials):
        estimate = fitted(curve, updates, seed=seed).remaining(target)
        low, high = estimate.interval(0.9)
        hits += float(low) <= truth <= float(high)
    # 18 hits are expected. Four standard deviations of the binomial are 5.4.
    assert hits >= 13


def test_short_history_gives_a_wide_interval() -> None:
    estimate = fitted(geometric, 300).remaining(0.7)
    low, high = estimate.interval(0.9)
    assert float(low) <= truly_remaining(geometric, 300, 0.7) <= float(high)
    assert float(estimate.relative_std) > 0.5


def test_reached_target_has_no_remaining_updates() -> None:
    fit = fitted(power, 3000)
    assert fit.remaining(1.0).value == 0
    assert fit.remaining(1.0).interval(0.9) == (0, 0)


@pytest.mark.parametrize("curve", [power, geometric])
def test_target_below_the_floor_is_never_reached(curve: Curve) -> None:
    fit = fitted(curve, 10000)
    floors = fit.draws[:, 0]
    assert 0.1 < fit.parameters[0] - 2.6 * floors.std() <= 0.3
    assert fit.parameters[0] + 2.6 * floors.std() >= 0.3
    assert fit.remaining(0.05).value == math.inf
    assert np.isinf(remaining(fit.draws, 0.05)).mean() > 0.95


def test_target_near_the_floor_is_finite_and_uncertain() -> None:
    estimate = fitted(geometric, 6000).remaining(0.3)
    assert math.isfinite(float(estimate.value))
    assert float(estimate.relative_std) > 1


@given(st.floats(0.05, 3.0), st.floats(0.05, 3.0))
def test_lower_target_never_takes_fewer_updates(one: float, other: float) -> None:
    draws = [remaining(SHARED.draws, target) for target in sorted((one, other))]
    assert (draws[0] >= draws[1]).all()


def test_fit_accepts_versions_with_an_offset_and_gaps() -> None:
    rng = np.random.default_rng(2)
    j = np.arange(0.0, 6000.0, 2.0)
    y = power(j) + rng.normal(0, 0.05, len(j))
    plain, moved = (fit_loss_curve(j + k, y, np.random.default_rng(3)) for k in (0, 700))
    assert loss_at(moved, 6700) == pytest.approx(loss_at(plain, 6000))
    assert moved.remaining(0.5).value == pytest.approx(plain.remaining(0.5).value)


def test_fit_is_robust_to_a_few_outliers() -> None:
    rng = np.random.default_rng(4)
    j = np.arange(3000.0)
    y = geometric(j) + rng.normal(0, 0.1, len(j))
    y[rng.choice(len(j), 10)] = 50.0
    estimate = fit_loss_curve(j, y, rng).remaining(0.4)
    truth = truly_remaining(geometric, 3000, 0.4)
    assert float(estimate.value) == pytest.approx(truth, abs=0.35 * truth)


@pytest.mark.parametrize("losses", [np.full(100, 0.7), np.linspace(0.5, 0.9, 100)])
def test_loss_that_does_not_fall_never_reaches_the_target(losses: npt.NDArray[np.float64]) -> None:
    fit = fit_loss_curve(np.arange(100.0), losses, np.random.default_rng(5))
    assert fit.remaining(0.3).value == math.inf


SHARED = fitted(power, 3000)


# --- tallies -------------------------------------------------------------------------------------


def tally_of(updates: int) -> LossTally:
    noise = np.random.default_rng(3).normal(0, 0.05, updates)
    tally = LossTally()
    for version, loss in enumerate(geometric(np.arange(1.0, updates + 1)) + noise, 1):
        tally.add(version, float(loss))
    return tally


@pytest.mark.parametrize("updates", [1000, MEANS - 1, MEANS, 3 * MEANS + 1])
def test_tally_finds_the_version_at_a_loss_from_widening_means(updates: int) -> None:
    target = 0.3 + 2.0 * math.exp(-1.3 * updates / 1500)  # after 30 % more updates

    found = tally_of(updates).version_at(target, 0.2, np.random.default_rng(0))

    assert found == pytest.approx(1.3 * updates, rel=0.1)


def test_tally_returns_none_below_the_requested_certainty() -> None:
    assert tally_of(1000).version_at(0.6, 1e-6, np.random.default_rng(0)) is None
    assert tally_of(1000).version_at(0.2, 0.2, np.random.default_rng(0)) is None  # below the floor
    assert tally_of(29).version_at(0.6, 0.2, np.random.default_rng(0)) is None


def test_tally_excludes_losses_that_were_taken_back() -> None:
    tally = tally_of(1500)
    tally.take_back(1000)

    def rng() -> np.random.Generator:
        return np.random.default_rng(0)

    assert tally.version_at(0.6, 0.2, rng()) != tally_of(1500).version_at(0.6, 0.2, rng())
    for version, loss in enumerate(geometric(np.arange(1001.0, 1501.0)), 1001):
        tally.add(version, float(loss))
    assert tally.version_at(0.6, 0.2, rng()) == pytest.approx(2846, rel=0.1)


# --- the curves, compared with differences and bisection -----------------------------------------

X = np.linspace(0, 1, 7)
CURVES: list[tuple[Kind, tuple[float, ...]]] = [
    ("power", (0.3, 1.2, -0.5, -3.0)),
    ("power", (0.0, -2.0, 1.0, 0.5)),
    ("geometric", (0.3, 0.7, 1.5)),
]


@pytest.mark.parametrize(("kind", "numbers"), CURVES)
def test_jacobian_equals_numerical_derivatives(kind: Kind, numbers: tuple[float, ...]) -> None:
    expected = approx_fprime(np.asarray(numbers), lambda p: curve(kind, p, X), 1e-7)
    assert jacobian(kind, np.asarray(numbers), X) == pytest.approx(expected, abs=1e-5)


@given(st.floats(-4.0, 4.0))
def test_geometric_curve_is_a_power_curve_with_a_large_exponent(log_decay: float) -> None:
    parameters = np.asarray([0.2, 0.4, log_decay])
    power = curve("power", as_power("geometric", parameters), X)
    assert power == pytest.approx(curve("geometric", parameters, X), rel=1e-3)


@given(st.floats(-2.0, 1.0), st.floats(-5.0, 1.0), st.floats(0.31, 2.5))
def test_remaining_is_where_the_curve_meets_the_target(
    log_power: float, log_shift: float, target: float
) -> None:
    parameters = np.asarray([0.3, 1.0, log_power, log_shift])
    found = remaining(parameters[None], target)[0]
    loss = float(curve("power", parameters, np.asarray([1.0 + found]))[0])
    assert loss == pytest.approx(target, rel=1e-6) if found > 0 else loss <= target


def test_curve_of_many_parameters_equals_each_alone() -> None:
    many = np.asarray([numbers for kind, numbers in CURVES if kind == "power"])
    together = curve("power", many, X)
    assert together.shape == (2, 7)
    for row, parameters in zip(together, many, strict=True):
        assert row == pytest.approx(curve("power", parameters, X))
    assert remaining(many, 0.2)[0] == math.inf  # below its floor


def test_remaining_agrees_with_a_root_finder() -> None:
    numbers = np.asarray([0.3, 1.2, -0.5, -3.0])
    at = brentq(lambda x: float(curve("power", numbers, np.asarray([x]))[0]) - 0.45, 0, 1e6)
    assert remaining(numbers[None], 0.45)[0] == pytest.approx(float(at) - 1)
