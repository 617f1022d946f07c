"""Bounds on the error hold for real SGD, and their closed forms against quadrature."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import quad

from common.theory import convergence
from common.theory.convergence import Convex, NonConvex
from common.theory.errors import ParameterError
from common.theory.updates import Normal, update_interval_variance_s2, update_rate_per_s

JOB = Convex(
    learning_rate=0.1,
    smoothness=2.0,
    convexity=0.5,
    gradient_bound=30.0,
    group_size=4,
    batch_size=8,
    initial_error=5.0,
)
BELOW = replace(JOB, initial_error=0.01)  # under the floor of 0.1875


@st.composite
def jobs(draw: st.DrawFn) -> Convex:
    smoothness = draw(st.floats(0.1, 10))
    return Convex(
        learning_rate=draw(st.floats(0.001, 0.99)) / smoothness,
        smoothness=smoothness,
        convexity=draw(st.floats(0.01, 1)) * smoothness,
        gradient_bound=draw(st.floats(0, 100)),
        group_size=draw(st.integers(1, 50)),
        batch_size=draw(st.integers(1, 500)),
        initial_error=draw(st.floats(0, 100)),
    )


def by_quadrature(problem: Convex, law: Normal) -> float:
    """Equation 11 as it stands."""

    def integrand(j: float) -> float:
        density = math.exp(-(((j - law.mean) / law.std) ** 2) / 2)
        return convergence.error_after(problem, j) * density / (law.std * math.sqrt(2 * math.pi))

    # the mass lies round the mean, and where rho^j tilts it to, sigma^2 ln rho further left
    tilted = law.mean + law.variance * problem.log_contraction
    first = max(0.0, tilted - 10 * law.std)
    bends = sorted({max(0.0, place) for place in (tilted, law.mean)} - {first})
    value, _ = quad(
        integrand, first, law.mean + 10 * law.std, points=bends, limit=500, epsabs=1e-12
    )
    return float(value)


def sgd_errors(problem: Convex, runs: int, count: int) -> np.ndarray:
    """(runs, count + 1) G(w_j) - G* of SGD on a quadratic loss with curvatures from c to L.

    G(w) = sum h (w - w*)^2 / 2 over 5 dimensions, samples of w* with noise such that the variance
    of one record's gradient is B.
    """
    rng = np.random.default_rng(7)
    curvature = np.linspace(problem.convexity, problem.smoothness, 5)  # (5,) h
    noise = math.sqrt(problem.gradient_bound / 5) / curvature  # (5,) of w*, per record
    records = problem.group_size * problem.batch_size
    gap = np.full((runs, 5), math.sqrt(2 * problem.initial_error / curvature.sum()))  # w - w*
    errors = np.empty((runs, count + 1))
    for j in range(count + 1):
        errors[:, j] = (curvature * gap**2).sum(axis=1) / 2
        seen = noise * rng.standard_normal((runs, records, 5)).mean(axis=1)
        gap = gap - problem.learning_rate * curvature * (gap - seen)
    return errors


@pytest.mark.parametrize("problem", [JOB, BELOW])
def test_the_mean_error_of_sgd_stays_below_equation_10(problem: Convex) -> None:
    runs, count = 300, 120
    errors = sgd_errors(problem, runs, count)
    bound = np.array([convergence.error_after(problem, j) for j in range(count + 1)])
    chance = 4 * errors.std(axis=0) / runs**0.5
    assert (errors.mean(axis=0) - chance <= bound * (1 + 1e-12)).all()
    # what noise keeps up on a quadratic, where steps are small, is c / (2 L) of the floor
    kept_up = problem.floor * problem.convexity / (2 * problem.smoothness)
    assert errors[:, -20:].mean() == pytest.approx(kept_up, rel=0.2)


def test_equation_10_is_the_recursion_of_the_descent_lemma() -> None:
    error = JOB.initial_error
    noise = JOB.smoothness * JOB.learning_rate**2 * JOB.gradient_bound / (2 * 4 * 8)
    for j in range(50):
        assert convergence.error_after(JOB, j) == pytest.approx(error)
        error = JOB.contraction * error + noise
    assert convergence.error_after(JOB, 1e9) == JOB.floor


def test_from_below_the_floor_the_bound_rises_to_it() -> None:
    bounds = [convergence.error_after(BELOW, j) for j in (0, 1, 10, 100, 1000)]
    assert BELOW.excess < 0
    assert bounds[0] == pytest.approx(BELOW.initial_error)
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(BELOW.floor)


@given(jobs(), st.floats(0, 1000), st.floats(0.01, 300))
def test_equation_11_in_closed_form_is_the_integral(
    problem: Convex, mean: float, std: float
) -> None:
    closed = convergence.error_at(problem, Normal(mean, std**2))
    assert closed == pytest.approx(by_quadrature(problem, Normal(mean, std**2)), rel=1e-6, abs=1e-9)


@given(jobs(), st.floats(0, 1e12), st.floats(0, 1e12))
def test_equation_11_stays_between_0_and_the_larger_of_start_and_floor(
    problem: Convex, mean: float, std: float
) -> None:
    value = convergence.error_at(problem, Normal(mean, std**2))
    assert -1e-12 <= value <= max(problem.initial_error, problem.floor) * (1 + 1e-9)


@given(jobs(), st.floats(0, 1000))
def test_equation_11_without_variance_is_equation_10(problem: Convex, mean: float) -> None:
    assert convergence.error_at(problem, Normal(mean, 0.0)) == convergence.error_after(
        problem, mean
    )


@given(jobs(), st.floats(0, 1e5), st.floats(0.01, 10), st.floats(0, 3))
def test_equation_9_bounds_equation_11_wherever_it_decays(
    problem: Convex, t_s: float, rate_per_s: float, variation: float
) -> None:
    variance_s2 = variation / rate_per_s**2
    assume(convergence.decay_rate_per_s(problem, rate_per_s, variance_s2) > 0)
    law = Normal(t_s * rate_per_s, t_s * variance_s2 * rate_per_s**3)
    bound = convergence.error_in_time(problem, t_s, rate_per_s, variance_s2)
    assert convergence.error_at(problem, law) <= bound * (1 + 1e-9)


@given(jobs(), st.floats(0.01, 10), st.floats(0, 1000))
def test_equation_9_decays_while_the_variation_times_ln_rho_is_below_2(
    problem: Convex, rate_per_s: float, variation: float
) -> None:
    product = variation * -problem.log_contraction
    assume(abs(product - 2) > 1e-6)
    variance_s2 = variation / rate_per_s**2
    decays = convergence.decay_rate_per_s(problem, rate_per_s, variance_s2) > 0
    assert decays == (product < 2)
    if not decays:
        with pytest.raises(ParameterError, match="interval_variance_s2"):
            convergence.error_in_time(problem, 1.0, rate_per_s, variance_s2)


def test_in_the_papers_setting_equation_9_is_equation_11() -> None:
    """The law is narrow and far from 0: both Phi are 1."""
    rates_per_s = np.full(64, 125.0)
    rate_per_s = update_rate_per_s(rates_per_s, 20, 256)
    variance_s2 = update_interval_variance_s2(rates_per_s, 20, 256)
    problem = replace(JOB, group_size=20, batch_size=256, learning_rate=0.001)
    law = Normal(6400 * rate_per_s, 6400 * variance_s2 * rate_per_s**3)
    in_time = convergence.error_in_time(problem, 6400, rate_per_s, variance_s2)
    assert convergence.error_at(problem, law) == pytest.approx(in_time, rel=1e-9)


def test_from_below_the_floor_equation_9_is_the_floor() -> None:
    assert convergence.error_in_time(BELOW, 0.0, 1.0, 0.1) == BELOW.floor


@given(jobs(), st.floats(0, 1000), st.floats(1, 10), st.floats(0, 0.1))
def test_outages_cost_more_error_than_their_mean_says(
    problem: Convex, t_s: float, rate_per_s: float, variation: float
) -> None:
    assume(problem.excess > 0)
    mean = t_s * rate_per_s
    assume(mean > 400 * variation)  # the law has next to nothing below 0
    by_mean = convergence.error_under_preemption(problem, t_s, rate_per_s)
    law = Normal(mean, mean * variation)
    assert by_mean <= convergence.error_at(problem, law) * (1 + 1e-9)


@given(jobs(), st.floats(1.001, 1000))
def test_the_least_number_of_updates_reaches_the_error_and_one_fewer_does_not(
    problem: Convex, over_floor: float
) -> None:
    error = problem.floor * over_floor + 1e-6
    count = convergence.updates_for(problem, error)
    assert convergence.error_after(problem, count) <= error
    if count:
        assert convergence.error_after(problem, count - 1) > error
    else:
        assert problem.initial_error <= error


def test_an_error_below_the_floor_is_refused_with_what_would_allow_it() -> None:
    with pytest.raises(ParameterError, match="learning rate below") as refused:
        convergence.updates_for(JOB, JOB.floor / 4)
    assert refused.value.parameter == "error"
    assert f"{JOB.learning_rate / 4:g}" in str(refused.value)
    assert f"{32 * 4:g}" in str(refused.value)
    slower = replace(JOB, learning_rate=JOB.learning_rate / 4.001)
    larger = replace(JOB, group_size=17)
    assert convergence.updates_for(slower, JOB.floor / 4) > 0
    assert convergence.updates_for(larger, JOB.floor / 4) > 0


def test_from_below_the_floor_an_error_above_it_takes_no_update_and_one_below_is_refused() -> None:
    assert convergence.updates_for(BELOW, 0.2) == 0
    with pytest.raises(ParameterError):
        convergence.updates_for(BELOW, 0.1)  # the start is better, but the bound leaves it


@pytest.mark.parametrize(
    ("parameter", "change"),
    [
        ("learning_rate", {"learning_rate": 0.51}),
        ("learning_rate", {"learning_rate": math.nan}),
        ("learning_rate", {"learning_rate": 0.5, "convexity": 2.0}),
        ("convexity", {"convexity": 3.0}),
        ("gradient_bound", {"gradient_bound": -1.0}),
        ("group_size", {"group_size": 0}),
        ("initial_error", {"initial_error": -0.1}),
    ],
)
def test_constants_for_which_equation_10_does_not_hold_are_refused(
    parameter: str, change: dict[str, float]
) -> None:
    with pytest.raises(ParameterError) as refused:
        replace(JOB, **change)  # type: ignore[arg-type]  # counts are integers, rates are not
    assert refused.value.parameter == parameter


def test_the_gradient_of_sgd_on_a_loss_with_many_minima_stays_below_proposition_3() -> None:
    """G(w) = sum (1 - cos w), L = 1, with noise on the gradient."""
    rng = np.random.default_rng(8)
    runs, count, size, noise = 300, 200, 4, 0.5
    weights = rng.uniform(1, 5, (runs, size))
    start = float((1 - np.cos(weights)).sum(axis=1).mean())
    problem = NonConvex(
        smoothness=1.0, gradient_bound=size * (1 + noise**2), initial_error=start, step_scale=1.5
    )
    squares = np.empty(count)
    for j in range(count):
        gradient = np.sin(weights)
        squares[j] = (gradient**2).sum(axis=1).mean()
        drawn = gradient + noise * rng.standard_normal(weights.shape)
        weights = weights - problem.step_scale / math.sqrt(count) * drawn
    assert squares.mean() < convergence.squared_gradient_after(problem, count)


@given(st.floats(0.01, 10), st.floats(0, 10), st.floats(0.001, 10), st.floats(0.01, 10))
def test_the_updates_for_a_gradient_reach_it(
    smoothness: float, gradient_bound: float, initial_error: float, step_scale: float
) -> None:
    problem = NonConvex(smoothness, gradient_bound, initial_error, step_scale)
    count = convergence.updates_for_squared_gradient(problem, 0.1)
    assert convergence.squared_gradient_after(problem, count) <= 0.1 * (1 + 1e-12)
    if count > 1:
        assert convergence.squared_gradient_after(problem, count - 1) > 0.1


def test_the_gradient_falls_with_the_root_of_the_time() -> None:
    problem = NonConvex(1.0, 2.0, 3.0, 0.5)
    early, late = (convergence.squared_gradient_in_time(problem, t, 1.5625) for t in (100, 400))
    assert early == pytest.approx(2 * late)
    assert early == pytest.approx(convergence.squared_gradient_after(problem, 156.25))


def test_no_update_bounds_no_gradient() -> None:
    problem = NonConvex(1.0, 2.0, 3.0, 0.5)
    with pytest.raises(ParameterError, match="t_s"):
        convergence.squared_gradient_in_time(problem, 0.0, 1.0)
    with pytest.raises(ParameterError, match="step_scale"):
        replace(problem, step_scale=0.0)
