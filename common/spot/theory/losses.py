"""The loss curve so far, and the number of updates from here to a loss: J(epsilon).

A loss is assumed to follow floor + drop * shape. The shape falls from 1 at the first update:

    power:      (1 + x / shift)^-power, as for SGD if the loss is not strongly convex
    geometric:  exp(-decay x), the bound of equation 10 with rho = exp(-decay)

A curve's parameters are floor, log(drop) and the logarithms of power and shift, or of decay. x is
the position in the history: 0 at its first update and 1 at its last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from common.spot.theory.estimates import Estimate

Kind: TypeAlias = Literal["power", "geometric"]
_Array: TypeAlias = npt.NDArray[np.float64]

# Limits of the logarithms of the shape's parameters: power 0.05 to 10, shift 1e-5 to 100, and decay
# 0.01 to 10,000. Shift and decay are in lengths of the history.
LIMITS: dict[Kind, tuple[tuple[float, float], ...]] = {
    "power": ((-3.0, 2.3), (-11.5, 4.6)),
    "geometric": ((-4.6, 9.2),),
}
# Power p with which (1 + x / p)^-p is practically exp(-x).
MANY = 1e7
# Minimum number of losses for a fit, from which up to four parameters and the noise are estimated.
FEWEST = 30
# Number of bins of a long history. 50 for each power of ten are finer than any curve.
BINS = 200
# Number of curves that are sampled. A quantile of 5 % then has an error of 1 %.
DRAWS = 500
# Number of proposed curves of each kind, from which `DRAWS` are sampled by weight.
PROPOSALS = 4 * DRAWS
# Share of draws that never reach the loss, above which the answer is "never".
CERTAIN = 0.95
# Logarithms of the shape's parameters that are tried as the start of a fit.
STARTS: dict[Kind, tuple[tuple[float, ...], ...]] = {
    "power": tuple(
        (p, s) for p in (-1.4, -0.7, 0.0, 0.7) for s in (-9.0, -7.0, -5.0, -2.0, 0.0, 2.0)
    ),
    "geometric": tuple((k,) for k in (-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)),
}
# Mean of 2 (sqrt(1 + z^2) - 1) for a standard normal z.
NORMAL_COST = 0.71
# Largest standard deviation of the logarithms in a proposal, for data that say nothing about them.
LOOSE = 3.0
# Number of means at which a tally merges pairs of them. A fit uses fewer.
MEANS = 2000


def curve(kind: Kind, parameters: _Array, x: _Array) -> _Array:
    """Return losses (bins,) at x for parameters (p,); (draws, bins) for parameters (draws, p)."""
    floor, log_drop, *shape = np.moveaxis(parameters, -1, 0)[..., None]
    return np.asarray(floor + np.exp(log_drop + log_shape(kind, shape, x)))


def log_shape(kind: Kind, shape: list[_Array], x: _Array) -> _Array:
    """Return the logarithm (bins,) of the shape at x. It keeps far tails from becoming 0."""
    if kind == "power":
        return np.asarray(-np.exp(shape[0]) * np.log1p(x * np.exp(-shape[1])))
    return np.asarray(-np.exp(shape[0]) * x)


def jacobian(kind: Kind, parameters: _Array, x: _Array) -> _Array:
    """Return derivatives (bins, p) of the losses at x by the parameters."""
    _, log_drop, *shape = parameters
    logs = log_shape(kind, shape, x)
    fall = np.exp(log_drop + logs)
    columns = [np.ones_like(x), fall, fall * logs]
    if kind == "power":
        power, steps = np.exp(shape[0]), x * np.exp(-shape[1])
        columns.append(fall * power * steps / (1 + steps))
    return np.stack(columns, axis=-1)


def as_power(kind: Kind, parameters: _Array) -> _Array:
    """Write a geometric curve as a power curve: exp(-y) is the limit of (1 + y / p)^-p."""
    if kind == "power":
        return parameters
    linear, log_decay = parameters[..., :2], parameters[..., 2:]
    log_power = np.full_like(log_decay, math.log(MANY))
    return np.concatenate([linear, log_power, log_power - log_decay], axis=-1)


def remaining(parameters: _Array, target_loss: float) -> _Array:
    """Return (draws,) distances from the history's end to the target, in lengths of the history."""
    floor, log_drop, log_power, log_shift = parameters.T
    with np.errstate(divide="ignore", over="ignore"):
        log_ratio = log_drop - np.log(np.maximum(target_loss - floor, 0.0))  # infinite: never
        x = np.exp(log_shift) * np.expm1(log_ratio * np.exp(-log_power))
    return np.asarray(np.maximum(x - 1.0, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class LossCurve:
    """The curve that fits best, and a sample of all probable curves of both kinds.

    All are written as power curves, with the parameters (floor, log drop, log power, log shift).
    """

    kind: Kind
    parameters: _Array  # (4,) the best fit
    # (draws, 4) sampled curves, given the history.
    draws: _Array
    origin: float  # version of the first update
    # Number of updates from the first to the last.
    length: float

    def remaining(self, target_loss: float) -> Estimate:
        """Estimate the updates J(epsilon) from the last one until the loss reaches a target.

        The value is 0 if the best curve has reached the target already, and infinite if fewer than
        5 % of the sampled curves ever do. Otherwise it is the median of those that do. The standard
        deviation is infinite if 16 % or more never do, because their floor is too high.
        """
        if remaining(self.parameters[None], target_loss)[0] == 0:
            return Estimate(0.0, 0.0, "log")
        draws = remaining(self.draws, target_loss) * self.length
        reaching = draws[np.isfinite(draws)]
        if len(reaching) < (1 - CERTAIN) * len(draws):
            return Estimate(math.inf, 0.0, "log")
        value = max(float(np.median(reaching)), 1.0)
        low, high = np.quantile(draws, (0.159, 0.841), method="nearest")  # one standard deviation
        if not math.isfinite(high):
            return Estimate(value, math.inf, "log")
        spread = math.log(max(high, 1.0) / max(low, 1.0)) / 2
        return Estimate(value, value * math.sqrt(math.expm1(min(spread, 20.0) ** 2)), "log")


def fit_loss_curve(
    versions: npt.ArrayLike,
    losses: npt.ArrayLike,
    rng: np.random.Generator,
    least_loss: float = 0.0,
) -> LossCurve:
    """Fit both kinds of curve to the losses of updates, and keep the better one.

    A long history is thinned to means over bins that grow with the updates, because a curve changes
    more slowly the older it is. The uncertainty comes from sampled curves of both kinds, not from
    the covariance alone, which misleads if the floor is far off. If even the better curve misses
    the losses by more than their noise, the noise counts as larger. A history that does not fall
    yet gives "never", so call this once it does. A loss that falls in two phases, fast and then
    slowly, is of neither kind, and may seem to have a floor that it does not have: pass only the
    updates of the later phase.

    Args:
        versions: Version of each update, increasing; at least `FEWEST` of them.
        losses: Mean per sample, before the update (prequential).
        rng: Source of the draws.
        least_loss: Lower bound of losses; 0 for cross-entropy and squared errors.
    """
    j, y = np.asarray(versions, np.float64), np.asarray(losses, np.float64)
    x = (j - j[0]) / (j[-1] - j[0])
    history = _thin(x, y, _noise(y))
    fits = [_fit(kind, history, least_loss) for kind in ("power", "geometric")]
    best = min(fits, key=lambda f: f.cost + 2 * len(f.parameters))
    misfit = _misfit(history.residuals(best.kind, best.parameters), len(best.parameters))
    draws = _draws(fits, history.counting(best, max(misfit, 1.0)), least_loss, rng)
    parameters = as_power(best.kind, best.parameters)
    return LossCurve(best.kind, parameters, draws, float(j[0]), float(j[-1] - j[0]))


class LossTally:
    """Losses of all updates, in bounded memory.

    It keeps means over equally many updates, and merges pairs of them when there are `MEANS`.
    """

    def __init__(self) -> None:
        # Mean version and mean loss of the updates of each.
        self._means: list[tuple[float, float]] = []
        self._each = 1  # updates in a mean
        # Updates of the next mean.
        self._open: list[tuple[float, float]] = []

    def add(self, made: float, loss: float) -> None:
        """Add the next update's loss; `made` is the number of updates, including it."""
        self._open.append((made, loss))
        if len(self._open) == self._each:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == MEANS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [_mean(pair) for pair in pairs]
            self._each *= 2

    def take_back(self, base: float) -> None:
        """Drop updates after `base`."""
        self._means = [mean for mean in self._means if mean[0] <= base]
        self._open = [update for update in self._open if update[0] <= base]

    def version_at(self, loss: float, certainty: float, rng: np.random.Generator) -> float | None:
        """Estimate the version at which the curve reaches a loss.

        None if there are too few updates, if the curve never reaches the loss, or if the standard
        deviation is more than `certainty` times the version.
        """
        if len(self._means) < FEWEST:
            return None
        versions, losses = np.transpose(self._means)
        fit = fit_loss_curve(versions, losses, rng, min(0.0, float(losses.min())))
        left = fit.remaining(loss)
        version = fit.origin + fit.length + float(left.value)
        sure = math.isfinite(version) and float(left.std) <= certainty * version
        return version if sure else None


def _mean(updates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    versions, losses = zip(*updates, strict=True)
    return sum(versions) / len(updates), sum(losses) / len(updates)


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    """Means of losses over bins of updates."""

    # (bins,) position in the history, 0 to 1.
    x: _Array
    losses: _Array  # (bins,)
    # (bins,) one over the standard deviation of each mean.
    weights: _Array

    def residuals(self, kind: Kind, parameters: _Array) -> _Array:
        """Return distances of the means from one or many curves, in standard deviations."""
        return (curve(kind, parameters, self.x) - self.losses) * self.weights

    def jacobian(self, kind: Kind, parameters: _Array) -> _Array:
        """Return derivatives of the residuals, (bins, p)."""
        return jacobian(kind, parameters, self.x) * self.weights[:, None]

    def counting(self, fit: _Fit, misfit: float) -> _History:
        """Return the history with weights that are smaller for outliers of a fit.

        Args:
            fit: The fit.
            misfit: Result of `_misfit`, by which the noise is larger than assumed.
        """
        residuals = self.residuals(fit.kind, fit.parameters)
        # Soft L1 gives a square the weight (1 + r^2)^-1/2, so its residual gets the root of that.
        robust = (1 + residuals**2) ** -0.25
        return _History(self.x, self.losses, self.weights * robust / math.sqrt(misfit))


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    kind: Kind
    parameters: _Array
    cost: float


def _noise(losses: _Array) -> float:
    """Estimate the standard deviation of losses about their curve, from neighbouring losses.

    The median resists a few outliers. The two small terms keep the result above 0 without noise.
    """
    steps = np.abs(np.diff(losses))
    return float(np.median(steps) / (0.6745 * math.sqrt(2)) + 1e-6 * np.ptp(losses) + 1e-12)


def _thin(x: _Array, losses: _Array, noise: float) -> _History:
    starts = np.unique(np.geomspace(1, len(x), BINS, endpoint=False).astype(np.int64)) - 1
    counts = np.diff(np.append(starts, len(x)))
    means = [np.add.reduceat(values, starts) / counts for values in (x, losses)]
    return _History(means[0], means[1], np.sqrt(counts) / noise)


def _fit(kind: Kind, history: _History, least_loss: float) -> _Fit:
    spread = float(np.ptp(history.losses)) + 1e-9
    log_drops = (math.log(1e-6 * spread), math.log(100 * spread))
    lower, upper = zip(
        (least_loss, max(float(history.losses.max()), least_loss + spread)),
        log_drops,
        *LIMITS[kind],
        strict=True,
    )
    starts = (_start(kind, shape, history, least_loss) for shape in STARTS[kind])
    start = min(starts, key=lambda p: _cost(history.residuals(kind, p)))
    inside = 1e-6 * (np.asarray(upper) - lower)
    solution = least_squares(
        lambda p: history.residuals(kind, p),
        np.clip(start, lower + inside, upper - inside),
        jac=lambda p: history.jacobian(kind, p),
        bounds=(lower, upper),
        loss="soft_l1",
        x_scale="jac",
        max_nfev=200,
    )
    return _Fit(kind, solution.x, 2 * float(solution.cost))


def _start(kind: Kind, shape: tuple[float, ...], history: _History, least_loss: float) -> _Array:
    """Return the best floor and drop for a given shape; the curve is linear in both."""
    falls = np.exp(log_shape(kind, [np.asarray(s) for s in shape], history.x))
    squares = history.weights**2 / (history.weights**2).sum()
    mean, loss = squares @ falls, squares @ history.losses
    falls_about = falls - mean
    drop = float(squares @ (falls_about * history.losses) / (squares @ falls_about**2))
    floor = float(loss - drop * mean)
    if floor < least_loss:
        floor = least_loss
        drop = float(squares @ (falls * (history.losses - floor)) / (squares @ falls**2))
    return np.asarray([floor, math.log(max(drop, 1e-12)), *shape])


def _cost(residuals: _Array) -> _Array:
    """Return the sum of squares; outliers count only linearly (soft L1)."""
    return np.asarray(2 * (np.sqrt(1 + residuals**2) - 1).sum(axis=-1))


def _misfit(residuals: _Array, parameters: int) -> float:
    """Return how many times larger than pure noise the squared residuals are.

    The result is the larger of the ratios for all bins and for the later half. Later bins are means
    of many updates, so a drift, which moves neighbouring losses together, shows there.
    """
    late = residuals[len(residuals) // 2 :]
    share = 1 - parameters / len(residuals)
    return max(float(_cost(r)) / len(r) / share for r in (residuals, late)) / NORMAL_COST


def _draws(
    fits: list[_Fit], history: _History, least_loss: float, rng: np.random.Generator
) -> _Array:
    """Draw curves (DRAWS, 4) from their distribution given the history, by importance sampling.

    Given the shape, floor and drop are linear: their distribution is normal and needs no search.
    Shapes are proposed about the fit by its covariance, and over all of their limits, because the
    distribution has long tails. A priori, both kinds are equally probable, as is each shape within
    its kind's limits.
    """
    found = [_weighted(fit, history, least_loss, rng) for fit in fits]
    draws, log_weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # No falling curve is probable because the losses rise.
    if not np.isfinite(log_weights).any():
        best = min(fits, key=lambda fit: fit.cost)
        return np.tile(as_power(best.kind, best.parameters), (DRAWS, 1))
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(draws[rng.choice(len(draws), DRAWS, p=weights / weights.sum())])


def _weighted(
    fit: _Fit, history: _History, least_loss: float, rng: np.random.Generator
) -> tuple[_Array, _Array]:
    """Return proposals of one kind, (PROPOSALS, 4), and the logarithms of their weights."""
    kind, limits, weights = fit.kind, np.asarray(LIMITS[fit.kind]), history.weights**2
    slopes = history.jacobian(kind, fit.parameters)
    loose = np.diag([0.0, *[LOOSE**-2] * (len(fit.parameters) - 1)])
    covariance = np.asarray(np.linalg.inv(slopes.T @ slopes + loose), np.float64)[2:, 2:]
    shapes, log_proposal = _propose(fit.parameters[2:], covariance, limits, rng)

    # A weighted regression of the losses on each shape's fall from 1, (PROPOSALS, bins).
    falls = np.exp(log_shape(kind, list(shapes.T[..., None]), history.x))
    total = weights.sum()
    loss, mean = weights @ history.losses / total, falls @ weights / total
    falls -= mean[:, None]
    varied = np.maximum(falls**2 @ weights, 1e-12)
    together = falls @ (weights * (history.losses - loss))
    drop = together / varied + rng.standard_normal(PROPOSALS) / np.sqrt(varied)
    floor = loss + rng.standard_normal(PROPOSALS) / math.sqrt(total) - drop * mean

    inside = ((shapes >= limits[:, 0]) & (shapes <= limits[:, 1])).all(axis=-1)
    possible = inside & (floor >= least_loss) & (drop > 0)
    log_likelihood = together**2 / varied / 2 - np.log(varied) / 2
    log_prior = -np.log(np.ptp(limits, axis=1)).sum()
    log_weight = np.where(possible, log_likelihood + log_prior - log_proposal, -np.inf)
    draws = np.column_stack([floor, np.log(np.where(possible, drop, 1.0)), shapes])
    return as_power(kind, draws), log_weight


def _propose(
    center: _Array, covariance: _Array, limits: _Array, rng: np.random.Generator
) -> tuple[_Array, _Array]:
    """Draw shapes, each from Student's distribution or uniformly between the limits.

    Both are equally probable; Student's has 4 degrees of freedom. Returns the shapes and the
    logarithms of their densities, up to a constant.
    """
    d = len(center)
    root = np.linalg.cholesky(covariance)
    steps = rng.standard_normal((PROPOSALS, d)) * np.sqrt(4 / rng.chisquare(4, (PROPOSALS, 1)))
    anywhere = rng.uniform(limits[:, 0], limits[:, 1], (PROPOSALS, d))
    shapes = np.where(rng.random((PROPOSALS, 1)) < 0.5, center + steps @ root.T, anywhere)
    distance = (np.linalg.solve(root, (shapes - center).T) ** 2).sum(axis=0)
    student = (1 + distance / 4) ** (-(4 + d) / 2) * math.gamma(2 + d / 2)
    student /= math.gamma(2) * (4 * math.pi) ** (d / 2) * np.diag(root).prod()
    return shapes, np.log(student + 1 / np.ptp(limits, axis=1).prod())
