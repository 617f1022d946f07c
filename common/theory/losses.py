"""The loss curve so far, and how many updates it takes from here to a loss: J(epsilon)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from common.theory.curves import LIMITS, Kind, as_power, curve, jacobian, log_shape, remaining
from common.theory.errors import ParameterError
from common.theory.estimates import Estimate

_Array: TypeAlias = npt.NDArray[np.float64]

FEWEST = 30  # losses: five times the parameters and the noise, which all come from them
BINS = 200  # what a long history is thinned to; 50 for each power of ten is finer than any curve
DRAWS = 500  # enough for quantiles of 5 % to be good to 1 %
PROPOSALS = 4 * DRAWS  # of which as many are kept, by their weight
CERTAIN = 0.95  # share of the draws that never reach the loss, from which on it is "never"
STARTS: dict[Kind, tuple[tuple[float, ...], ...]] = {
    "power": tuple(
        (p, s) for p in (-1.4, -0.7, 0.0, 0.7) for s in (-9.0, -7.0, -5.0, -2.0, 0.0, 2.0)
    ),
    "geometric": tuple((k,) for k in (-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)),
}
NORMAL_COST = 0.71  # mean of 2 (sqrt(1 + z^2) - 1) for a standard normal z
LOOSE = 3.0  # std of the logarithms where the data say nothing: no proposal is wider


@dataclass(frozen=True, slots=True, eq=False)
class LossCurve:
    """A fitted curve and others that are as probable, of both kinds.

    All are written as powers, with the parameters (floor, log drop, log power, log shift).
    """

    kind: Kind
    parameters: _Array  # (4,) the best fit
    draws: _Array  # (draws, 4) as probable as the history makes them
    origin: int  # version of the first update
    length: float  # updates from the first to the last
    noise: float  # standard deviation of one update's loss about the curve
    misfit: float  # residuals over what noise alone would leave: about 1 where the curve is right

    @property
    def floor(self) -> Estimate:
        """What the loss tends to."""
        return Estimate(float(self.parameters[0]), float(self.draws[:, 0].std()))

    def loss(self, version: float) -> float:
        """What the curve says of an update, past or to come."""
        x = (version - self.origin) / self.length
        return float(curve("power", self.parameters, np.asarray([x]))[0])

    def remaining_draws(self, target_loss: float) -> _Array:
        """Updates from the last one to the loss, once per draw; infinite where it never gets there.

        For quantiles, and for the probability that it never does.
        """
        return remaining(self.draws, target_loss) * self.length

    def remaining(self, target_loss: float) -> Estimate:
        """Estimate the updates J(epsilon) from the last one until the loss is down to a target.

        0 where the curve is there already, infinite where (almost) no draw gets there. Between the
        two the floor's uncertainty may reach across the target: then the value is the median of
        those draws that do get there, and the standard deviation is infinite if many do not.
        """
        if remaining(self.parameters[None], target_loss)[0] == 0:
            return Estimate(0.0, 0.0, "log")
        draws = self.remaining_draws(target_loss)
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
    """Fit both kinds of curve to the losses of updates, and keep the one that explains more.

    A long history is thinned to means over bins that grow with the updates: a curve changes slower
    the older it is. How sure the fit is comes from draws, not from the covariance alone, which
    misleads where the floor is far off. What does not fit either kind counts as more noise; a
    history that does not fall yet says "never", so ask once it does. A loss that falls in two
    phases, fast and then slowly, is of neither kind and may seem to have a floor that it does not
    have: give the updates of the later phase alone.

    Args:
        versions: J of each update, increasing.
        losses: Mean per sample, before the update (prequential).
        rng: Draws what the uncertainty is told from.
        least_loss: No loss is below; 0 for cross-entropy and squared errors.

    Raises:
        ParameterError: If there are too few losses, one is not finite, the versions do not
            increase, or all losses lie below the least.
    """
    j, y = np.asarray(versions, np.float64), np.asarray(losses, np.float64)
    if y.ndim != 1 or j.shape != y.shape:
        raise ParameterError("versions", f"must be one per loss: {j.shape} against {y.shape}")
    if len(y) < FEWEST:
        raise ParameterError("losses", f"a fit takes at least {FEWEST}, got {len(y)}: wait")
    if not (np.isfinite(y).all() and np.isfinite(j).all()):
        raise ParameterError("losses", "must be finite numbers: leave out updates without a loss")
    if not (np.diff(j) > 0).all():
        raise ParameterError("versions", "must increase: sort them, and take each update once")
    if not y.mean() > least_loss:
        raise ParameterError("least_loss", f"{least_loss:g} is above the losses' mean: lower it")
    noise = _noise(y)
    x = (j - j[0]) / (j[-1] - j[0])
    history = _thin(x, y, noise)
    fits = [_fit(kind, history, least_loss) for kind in ("power", "geometric")]
    best = min(fits, key=lambda f: f.cost + 2 * len(f.parameters))
    misfit = _misfit(history.residuals(best.kind, best.parameters), len(best.parameters))
    draws = _draws(fits, history.counting(best, max(misfit, 1.0)), least_loss, rng)
    parameters = as_power(best.kind, best.parameters)
    return LossCurve(best.kind, parameters, draws, int(j[0]), float(j[-1] - j[0]), noise, misfit)


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    """Means of losses over bins of updates."""

    x: _Array  # (bins,) where in the history, 0 to 1
    losses: _Array  # (bins,)
    weights: _Array  # (bins,) one over the standard deviation of each mean

    def residuals(self, kind: Kind, parameters: _Array) -> _Array:
        """How far the means are from a curve (or from many), in standard deviations."""
        return (curve(kind, parameters, self.x) - self.losses) * self.weights

    def jacobian(self, kind: Kind, parameters: _Array) -> _Array:
        """Derivatives of the residuals, (bins, p)."""
        return jacobian(kind, parameters, self.x) * self.weights[:, None]

    def counting(self, fit: _Fit, misfit: float) -> _History:
        """The same with weights as they count in the end: less where a loss is wild."""
        residuals = self.residuals(fit.kind, fit.parameters)
        robust = (1 + residuals**2) ** -0.25  # what soft L1 leaves of a square, as a root
        return _History(self.x, self.losses, self.weights * robust / math.sqrt(misfit))


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    kind: Kind
    parameters: _Array
    cost: float


def _noise(losses: _Array) -> float:
    """Standard deviation of a loss about the curve, from neighbours, whatever the curve.

    The median holds where a few losses are wild; the rest keeps a history without noise possible.
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
    """The best floor and drop for a given shape: both are linear."""
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
    """Sum of squares, of which a wild one counts only as far as it is off (soft L1)."""
    return np.asarray(2 * (np.sqrt(1 + residuals**2) - 1).sum(axis=-1))


def _misfit(residuals: _Array, parameters: int) -> float:
    """Square of how much larger residuals are than noise, in all bins or in the later half.

    The later bins are wide, so neighbours that vary together, as a drift makes them, show there.
    """
    late = residuals[len(residuals) // 2 :]
    share = 1 - parameters / len(residuals)
    return max(float(_cost(r)) / len(r) / share for r in (residuals, late)) / NORMAL_COST


def _draws(
    fits: list[_Fit], history: _History, least_loss: float, rng: np.random.Generator
) -> _Array:
    """Draw curves as probable as the history makes them, (DRAWS, 4), by importance sampling.

    Given the shape, floor and drop are linear: their law is normal and needs no search. Shapes are
    proposed about the fit by its covariance, and all over their limits, where its tails are long.
    Both kinds are equally probable beforehand, and each shape within its kind's limits.
    """
    found = [_weighted(fit, history, least_loss, rng) for fit in fits]
    draws, log_weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
    if not np.isfinite(log_weights).any():  # the losses rise: no curve that falls is probable
        best = min(fits, key=lambda fit: fit.cost)
        return np.tile(as_power(best.kind, best.parameters), (DRAWS, 1))
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(draws[rng.choice(len(draws), DRAWS, p=weights / weights.sum())])


def _weighted(
    fit: _Fit, history: _History, least_loss: float, rng: np.random.Generator
) -> tuple[_Array, _Array]:
    """Proposals of one kind, (PROPOSALS, 4), and the logarithms of their weights."""
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
    """Shapes by Student's law with 4 degrees of freedom and by the limits, half each."""
    d = len(center)
    root = np.linalg.cholesky(covariance)
    steps = rng.standard_normal((PROPOSALS, d)) * np.sqrt(4 / rng.chisquare(4, (PROPOSALS, 1)))
    anywhere = rng.uniform(limits[:, 0], limits[:, 1], (PROPOSALS, d))
    shapes = np.where(rng.random((PROPOSALS, 1)) < 0.5, center + steps @ root.T, anywhere)
    distance = (np.linalg.solve(root, (shapes - center).T) ** 2).sum(axis=0)
    student = (1 + distance / 4) ** (-(4 + d) / 2) * math.gamma(2 + d / 2)
    student /= math.gamma(2) * (4 * math.pi) ** (d / 2) * np.diag(root).prod()
    return shapes, np.log(student + 1 / np.ptp(limits, axis=1).prod())
