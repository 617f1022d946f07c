"""What `--plot` draws: figures without a window and without global state.

matplotlib is not installed with DOLL and takes long to load: it is imported where it is needed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from common.api.answers import ToldPlan
    from common.spot.experiments.results import Point, Run

_WIDTH, _HEIGHT, _DPI = 8.0, 5.5, 120  # inches, and dots in each
_GREY = "0.6"


def check(path: Path) -> None:
    """See beforehand that a figure can be drawn and kept, so that no work is done for nothing.

    Raises:
        UserError: If matplotlib is missing, or the file cannot be.
    """
    _figure(1)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"--plot: {path}: must end with .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise UserError(f"--plot: {path}: there is no folder {path.parent}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file, in the format that the file's name says.

    Raises:
        UserError: If it cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise UserError(f"--plot: {path}: cannot be written: {error}") from error


def plan_figure(plan: ToldPlan) -> Figure:
    """Draw expected cost, runtime and its probability against the number of spot workers.

    Raises:
        UserError: If matplotlib is missing.
    """
    figure, (cost, runtime, chance) = _figure(3)
    curve = plan.curve
    spot = np.array([] if curve is None else curve.spot)
    enough = np.array([] if curve is None else curve.enough, np.bool_)
    label = f"{'plan' if plan.feasible else 'infeasible'}: {plan.spot} on spot"
    for axes, values, chosen, unit in (
        (cost, curve and curve.cost_usd, plan.expected_cost_usd, "expected cost, USD"),
        (runtime, curve and curve.runtime_s, plan.expected_runtime_s, "expected runtime, s"),
        (chance, curve and curve.in_time, plan.deadline_probability, "probability in time"),
    ):
        shown = np.array(values or (), np.float64)  # None becomes nan, which is not drawn
        axes.plot(spot, shown, color=_GREY, linestyle=":", label="too late")
        inside = np.where(enough, shown, np.nan)
        axes.plot(spot, inside, color="C0", linewidth=2, label="in time")
        axes.plot(plan.spot, math.nan if chosen is None else chosen, "o", color="C3", label=label)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    runtime.axhline(plan.deadline_s, color="C3", linestyle="--", label="deadline")
    chance.set_ylim(0, 1.05)
    chance.set_xlabel("workers on spot machines, $N_s$")
    cost.legend()
    runtime.legend()
    figure.suptitle(
        f"{plan.workers:,} workers, {plan.arrivals_per_s:,.6g} records/s,"
        f" K={plan.group_size}, b={plan.batch_size}, J={plan.updates:,.6g}\n"
        f"available {100 * plan.availability:g} % of the time;"
        f" \\${plan.spot_usd_per_hour:g} an hour on spot,"
        f" \\${plan.on_demand_usd_per_hour:g} on demand",
        fontsize="medium",
    )
    return figure


def runs_figure(
    title: str,
    runs: Mapping[str, Sequence[Run]],
    curves: Mapping[str, Sequence[Sequence[Point]]] | None = None,
) -> Figure:
    """Draw cost against runtime, a dot for each run and a colour for each policy.

    Where runs have deadlines of their own (rates that are drawn anew), runtimes are in deadlines.

    Args:
        title: What was simulated.
        runs: By policy.
        curves: By policy, one per run; where there are some, they are drawn below.

    Raises:
        UserError: If matplotlib is missing.
    """
    learned = curves is not None and any(any(each) for each in curves.values())
    figure, (axes, *more) = _figure(1 + learned)
    deadlines = [run.deadline_s for each in runs.values() for run in each]
    same = bool(np.allclose(deadlines, deadlines[0]))
    for number, (policy, each) in enumerate(runs.items()):
        for finished, marker, label in ((True, "o", policy), (False, "x", f"{policy}: given up")):
            some = [run for run in each if run.finished is finished]
            times = [run.runtime_s / (1 if same else run.deadline_s) for run in some]
            if some:
                costs = [100 * run.cost_ratio for run in some]
                axes.scatter(
                    times, costs, 18, color=f"C{number}", marker=marker, alpha=0.6, label=label
                )
    axes.axvline(deadlines[0] if same else 1.0, color="black", linestyle="--", label="deadline")
    axes.set_xlabel("runtime, s" if same else "runtime, as a share of the deadline")
    axes.set_ylabel("cost, % of on-demand machines only")
    axes.grid(alpha=0.3)
    axes.legend()
    for below in more:
        _accuracies(below, curves or {})
    figure.suptitle(title.replace("$", "\\$"), fontsize="medium")
    return figure


def _accuracies(axes: Axes, curves: Mapping[str, Sequence[Sequence[Point]]]) -> None:
    for number, (policy, each) in enumerate(curves.items()):
        for index, curve in enumerate(each):
            axes.plot(
                [point.at_s for point in curve],
                [100 * point.accuracy for point in curve],
                color=f"C{number}",
                alpha=0.6,
                label="" if index else policy,
            )
    axes.set_xlabel("time, s")
    axes.set_ylabel("accuracy on the held-out part, %")
    axes.grid(alpha=0.3)
    axes.legend()


def _figure(rows: int) -> tuple[Figure, tuple[Any, ...]]:
    """Make a figure of some axes above each other."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot: needs matplotlib: pip install 'doll[plots]'") from error
    height = _HEIGHT * math.sqrt(rows)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, tuple(figure.subplots(rows, 1, squeeze=False)[:, 0])
