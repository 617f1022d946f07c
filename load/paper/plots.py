"""The plots of docs/explain/paper: figures without a window and without global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from load.paper.job import HIGH, Setting

if TYPE_CHECKING:
    from common.config.policy_names import StreamPolicyName
    from common.spot.experiments.results import LearningPoint, RunsSummary, SimulatedRun, Spread

Pair = tuple[float, float]
_SHARE = "cost, % of on-demand machines alone"
_GREY = "0.5"


@dataclass(frozen=True, slots=True)
class Curve:
    """Learning curve of one run."""

    points: tuple[LearningPoint, ...]
    runtime_s: float
    cost_usd: float
    cost_ratio: float
    updates: float


def cost_against_runtime(
    panels: Mapping[str, Mapping[Pair, Sequence[SimulatedRun]]],
    stated: Mapping[Any, Mapping[Pair, float]],
) -> Figure:
    """Figures 3a and 4: a dot for each run, a cross for their mean, a line for the paper's mean."""
    figure, axes = _panels(len(panels), (10, 4.5))
    for axis, (title, settings), paper in zip(axes, panels.items(), stated.values(), strict=True):
        for number, (pair, runs) in enumerate(settings.items()):
            colour = f"C{number}"
            times = np.array([run.runtime_s for run in runs])
            costs = 100 * np.array([run.cost_ratio for run in runs])
            label = Setting(*pair).label
            axis.scatter(times, costs, 16, color=colour, alpha=0.6, label=label)
            axis.plot(times.mean(), costs.mean(), "X", color=colour, markersize=11, mec="black")
            axis.axhline(100 * paper[pair], color=colour, linestyle="--", linewidth=1)
        axis.set_title(f"{title} (dashed: the paper's mean; X: ours)", fontsize="medium")
        axis.set(xlabel="runtime, s", ylabel=_SHARE)
        axis.legend(fontsize="small")
    return figure


def bars(found: Sequence[tuple[str, Spread, float | None, float | None]]) -> Figure:
    """Figure 5: ours with the deviation of single runs, the paper's, and Corollary 2."""
    figure, (axis,) = _panels(1, (10, 4.5))
    at = np.arange(len(found))
    ours = [100 * spread.mean for _, spread, _, _ in found]
    deviations = [100 * (spread.std or 0.0) for _, spread, _, _ in found]
    axis.bar(at - 0.2, ours, 0.4, yerr=deviations, capsize=3, label="12 runs here")
    paper = [(x, 100 * said) for x, (_, _, said, _) in zip(at, found, strict=True) if said]
    axis.bar([x + 0.2 for x, _ in paper], [y for _, y in paper], 0.4, label="paper")
    bounds = [(x, 100 * bound) for x, (*_, bound) in zip(at, found, strict=True) if bound]
    for x, y in bounds:
        axis.hlines(y, x - 0.45, x + 0.45, color="black", linestyle="--")
    axis.hlines([], 0, 0, color="black", linestyle="--", label="Corollary 2")
    axis.set_xticks(at, [label for label, _, _, _ in found], fontsize="x-small")
    axis.set(ylabel=_SHARE, ylim=(40, 105))
    axis.legend(ncols=3)
    return figure


def policies(panels: Mapping[str, Mapping[StreamPolicyName, RunsSummary]]) -> Figure:
    """Cost against the share of deadlines met, a dot for each policy."""
    figure, axes = _panels(len(panels), (4.2 * max(len(panels), 1.6), 4.5))
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        for number, (name, one) in enumerate(points.items()):
            error = [[100 * (one.met - one.met_low)], [100 * (one.met_high - one.met)]]
            mark, colour, share = "os^vDPX"[number], f"C{number}", one.cost_ratio.mean
            axis.errorbar(100 * share, 100 * one.met, error, fmt=mark, color=colour, label=name)
        axis.axvline(100 * HIGH.ratio, color=_GREY, linestyle=":")
        axis.set_title(f"{title}, high price", fontsize="medium")
        axis.set(xlabel=_SHARE, ylim=(0, 104))
    axes[0].set_ylabel("deadlines met, %")
    axes[0].legend(fontsize="small", loc="lower left")
    return figure


def series(groups: Mapping[str, Mapping[str, Mapping[StreamPolicyName, float]]]) -> Figure:
    """Cost on every series, a row for each and a mark for each policy."""
    rows = sum(len(some) + 2 for some in groups.values())
    figure, (axis,) = _panels(1, (9, 1 + 0.13 * rows))
    at, labels = 0, dict[int, str]()
    for group, some in groups.items():
        axis.text(0.5, at, group, fontsize=7, weight="bold", va="center")
        for name, costs in some.items():
            at += 1
            for number, (policy, share) in enumerate(costs.items()):
                label = None if labels else policy
                mark, colour = "osD"[number], f"C{number}"
                axis.plot(100 * share, at, mark, color=colour, ms=4, alpha=0.8, label=label)
            labels[at] = name
        at += 2
    axis.set_yticks(list(labels), list(labels.values()), fontsize=5.5)
    axis.axvline(100, color="black", linewidth=0.8)
    axis.set_xlim(left=0)
    axis.set(xlabel=_SHARE, ylim=(at, -1))
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    return figure


def dispersion(
    curves: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], printed: float, renewal: float
) -> Figure:
    """Variance of J_t over its mean against time."""
    figure, (axis,) = _panels(1, (8, 4.5))
    for number, (label, curve) in enumerate(curves.items()):
        axis.loglog(curve["times_s"], curve["dispersion"], "o-", color=f"C{number}", label=label)
    axis.axhline(printed, color="black", linestyle="--", label="Theorem 1: 1 / K")
    axis.axhline(renewal, color="black", linestyle=":", label="renewal streams: 1 / (K b)")
    axis.set(xlabel="t, s", ylabel="variance of $J_t$ over its mean")
    axis.legend()
    return figure


def accuracy(found: Mapping[str, Curve]) -> Figure:
    """Figure 3b: accuracy over time, and over cost."""
    figure, (over_time, over_cost) = _panels(2, (10, 4.5))
    for label, curve in found.items():
        times = np.array([point.at_s for point in curve.points])
        reached = [100 * point.accuracy for point in curve.points]
        over_time.plot(times, reached, label=label)
        over_cost.plot(times * curve.cost_usd / curve.runtime_s, reached, label=label)
    for axis in (over_time, over_cost):
        # Below that all curves are steep and alike.
        axis.set_ylim(bottom=60)
    over_time.set(xlabel="time, s", ylabel="accuracy on the held-out part, %")
    over_cost.set_xlabel("cost, USD")
    over_cost.legend(fontsize="small")
    return figure


def _panels(columns: int, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False).ravel())
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes
