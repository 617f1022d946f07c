"""Curves that a loss may follow: floor + drop * shape, which falls from 1 at the first update.

    power:      (1 + x / shift)^-power, what SGD does where the loss is not strongly convex
    geometric:  exp(-decay x), the bound of equation 10 with rho = exp(-decay)

Parameters are floor, log drop and the logarithms of the shape's; x runs from 0 to 1 over a history.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Kind: TypeAlias = Literal["power", "geometric"]
_Array: TypeAlias = npt.NDArray[np.float64]

LIMITS: dict[Kind, tuple[tuple[float, float], ...]] = {  # of the logarithms, in histories' lengths
    "power": ((-3.0, 2.3), (-11.5, 4.6)),  # power 0.05 to 10, shift 1e-5 to 100
    "geometric": ((-4.6, 9.2),),  # decay 0.01 to 10,000
}
MANY = 1e7  # a power that makes (1 + x / p)^-p exponential


def curve(kind: Kind, parameters: _Array, x: _Array) -> _Array:
    """Losses at (bins,) for parameters (p,), or (draws, bins) for (draws, p)."""
    floor, log_drop, *shape = np.moveaxis(parameters, -1, 0)[..., None]
    return np.asarray(floor + np.exp(log_drop + log_shape(kind, shape, x)))


def log_shape(kind: Kind, shape: list[_Array], x: _Array) -> _Array:
    """Logarithm of the fall from 1 at (bins,); logarithms keep far tails from becoming 0."""
    if kind == "power":
        return np.asarray(-np.exp(shape[0]) * np.log1p(x * np.exp(-shape[1])))
    return np.asarray(-np.exp(shape[0]) * x)


def jacobian(kind: Kind, parameters: _Array, x: _Array) -> _Array:
    """Derivatives of the losses at (bins,) by the parameters, (bins, p)."""
    _, log_drop, *shape = parameters
    logs = log_shape(kind, shape, x)
    fall = np.exp(log_drop + logs)
    columns = [np.ones_like(x), fall, fall * logs]
    if kind == "power":
        power, steps = np.exp(shape[0]), x * np.exp(-shape[1])
        columns.append(fall * power * steps / (1 + steps))
    return np.stack(columns, axis=-1)


def as_power(kind: Kind, parameters: _Array) -> _Array:
    """Write a geometric curve as (1 + decay j / p)^-p, of which it is the limit for large p."""
    if kind == "power":
        return parameters
    linear, log_decay = parameters[..., :2], parameters[..., 2:]
    log_power = np.full_like(log_decay, math.log(MANY))
    return np.concatenate([linear, log_power, log_power - log_decay], axis=-1)


def remaining(parameters: _Array, target_loss: float) -> _Array:
    """From the end of the history to the target, in lengths of the history, (draws,)."""
    floor, log_drop, log_power, log_shift = parameters.T
    with np.errstate(divide="ignore", over="ignore"):
        log_ratio = log_drop - np.log(np.maximum(target_loss - floor, 0.0))  # infinite: never
        x = np.exp(log_shift) * np.expm1(log_ratio * np.exp(-log_power))
    return np.asarray(np.maximum(x - 1.0, 0.0))
