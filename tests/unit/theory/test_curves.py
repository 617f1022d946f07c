"""The curves that a loss may follow, against differences and bisection."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime, brentq

from common.theory.curves import Kind, as_power, curve, jacobian, remaining

X = np.linspace(0, 1, 7)
CURVES: list[tuple[Kind, tuple[float, ...]]] = [
    ("power", (0.3, 1.2, -0.5, -3.0)),
    ("power", (0.0, -2.0, 1.0, 0.5)),
    ("geometric", (0.3, 0.7, 1.5)),
]


@pytest.mark.parametrize(("kind", "numbers"), CURVES)
def test_the_derivatives_are_those_of_the_curve(kind: Kind, numbers: tuple[float, ...]) -> None:
    expected = approx_fprime(np.asarray(numbers), lambda p: curve(kind, p, X), 1e-7)
    assert jacobian(kind, np.asarray(numbers), X) == pytest.approx(expected, abs=1e-5)


@given(st.floats(-4.0, 4.0))
def test_a_geometric_curve_is_a_power_of_a_very_large_exponent(log_decay: float) -> None:
    parameters = np.asarray([0.2, 0.4, log_decay])
    power = curve("power", as_power("geometric", parameters), X)
    assert power == pytest.approx(curve("geometric", parameters, X), rel=1e-3)


@given(st.floats(-2.0, 1.0), st.floats(-5.0, 1.0), st.floats(0.31, 2.5))
def test_what_remains_is_where_the_curve_meets_the_target(
    log_power: float, log_shift: float, target: float
) -> None:
    parameters = np.asarray([0.3, 1.0, log_power, log_shift])
    found = remaining(parameters[None], target)[0]
    loss = float(curve("power", parameters, np.asarray([1.0 + found]))[0])
    assert loss == pytest.approx(target, rel=1e-6) if found > 0 else loss <= target


def test_many_curves_at_once_are_each_curve_alone() -> None:
    many = np.asarray([numbers for kind, numbers in CURVES if kind == "power"])
    together = curve("power", many, X)
    assert together.shape == (2, 7)
    for row, parameters in zip(together, many, strict=True):
        assert row == pytest.approx(curve("power", parameters, X))
    assert remaining(many, 0.2)[0] == math.inf  # below its floor


def test_the_root_that_bisection_finds_is_the_same() -> None:
    numbers = np.asarray([0.3, 1.2, -0.5, -3.0])
    at = brentq(lambda x: float(curve("power", numbers, np.asarray([x]))[0]) - 0.45, 0, 1e6)
    assert remaining(numbers[None], 0.45)[0] == pytest.approx(float(at) - 1)
