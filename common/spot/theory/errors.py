"""Errors in inputs of the formulas. A message names the parameter, the problem and the remedy."""

from __future__ import annotations

import math

from common.errors import UserError


class ParameterError(UserError):
    """A number outside the valid range of a formula.

    Attributes:
        parameter: Name of the number, as the caller passed it.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter


def positive(parameter: str, value: float) -> None:
    """Check that a number is finite and above 0.

    Raises:
        ParameterError: If it is not.
    """
    if not (math.isfinite(value) and value > 0):
        raise ParameterError(parameter, f"must be a number above 0, got {value:g}")


def not_negative(parameter: str, value: float) -> None:
    """Check that a number is finite and at least 0.

    Raises:
        ParameterError: If it is not.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ParameterError(parameter, f"must be a number of at least 0, got {value:g}")


def share(parameter: str, value: float) -> None:
    """Check that a number lies in [0, 1].

    Raises:
        ParameterError: If it does not.
    """
    if not 0 <= value <= 1:
        raise ParameterError(parameter, f"must lie between 0 and 1, got {value:g}")
