"""How the answer of `doll plan` looks: as a table for people and as JSON for scripts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.api.plan import ToldCurve, ToldPlan

_TOLD = (
    *("feasible", "spot", "on_demand", "expected_cost_usd", "expected_runtime_s"),
    *("cost_ratio_to_on_demand", "binding", "reason"),
)
_RANGES = 8  # of worker numbers, or so many names: a line or two
POINTS = 12  # of the curve, about: what a screen holds
_BAR = 30  # characters


def as_data(plan: ToldPlan, *, with_workers: bool, with_probability: bool) -> dict[str, Any]:
    """The plan as plain data; what is infinite (nothing ever runs) is null."""
    data: dict[str, Any] = {name: getattr(plan, name) for name in _TOLD}
    if with_probability:
        data["deadline_probability"] = plan.deadline_probability
    if with_workers:
        data["spot_workers"] = list(plan.spot_workers or ())
        if plan.names:
            data["workers"] = list(plan.names)
    return data


def draw(plan: ToldPlan, *, all_workers: bool = False) -> Group:
    """Draw the plan, then cost and runtime against the number of spot workers."""
    table = Table(Column(style="bold", no_wrap=True), Column(), box=None, show_header=False)
    rows = {
        "plan": f"{plan.spot} of {plan.workers} workers on spot, {plan.on_demand} on demand",
        "spot workers": _which(plan, all_workers=all_workers),
        "cost": f"{_usd(plan.expected_cost_usd)}, {_percent(plan.cost_ratio_to_on_demand)} of"
        f" {_usd(plan.on_demand_only_usd)} on demand only",
        "runtime": f"{_seconds(plan.expected_runtime_s)} on average; the deadline is"
        f" {_seconds(plan.deadline_s)}, undisturbed (theta_0) it takes"
        f" {_seconds(plan.undisturbed_s)}",
        "in time": f"with probability {_percent(plan.deadline_probability)}, if a spot"
        f" machine goes every {_seconds(plan.cycle_s)}",
        "limited by": plan.binding,
        "because": plan.reason,
    }
    if not plan.feasible:
        rows = {"feasible": "no; what comes nearest:" if not plan.spot else "no", **rows}
    for name, value in rows.items():
        table.add_row(name, Text(value, "bold red" if name == "feasible" else ""))
    return Group(table, Text(), *([] if plan.curve is None else [_curve(plan, plan.curve)]))


def ranges(numbers: Iterable[int]) -> list[str]:
    """Write whole numbers as ranges: 0-2, 5, 7-9."""
    found = list[list[int]]()
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [f"{first}-{last}" if first < last else str(first) for first, last in found]


def _which(plan: ToldPlan, *, all_workers: bool) -> str:
    workers, names = plan.spot_workers or (), plan.names
    parts = [names[index] for index in workers] if names else ranges(workers)
    if not parts:
        return "none"
    shown = parts if all_workers else parts[:_RANGES]
    more = "" if len(shown) == len(parts) else ", ... (all of them: --list-workers)"
    return ", ".join(shown) + more


def _curve(plan: ToldPlan, curve: ToldCurve) -> Table:
    every = math.ceil(len(curve.spot) / POINTS)
    highest = max((cost for cost in curve.cost_usd if cost is not None), default=0.0) or 1.0
    table = Table(
        Column("N_s", justify="right"),
        Column("runtime", justify="right"),
        Column("in time", justify="right"),
        Column("cost", justify="right"),
        Column("", no_wrap=True),
        box=None,
    )
    for index, spot in enumerate(curve.spot):
        if index % every and spot not in (plan.spot, plan.workers):
            continue  # there are many for a plot
        cost, enough = curve.cost_usd[index], curve.enough[index]
        bar = "" if cost is None else "█" * round(_BAR * cost / highest)
        mark = " <- plan" if spot == plan.spot else "" if enough else " late"
        table.add_row(
            str(spot),
            _seconds(curve.runtime_s[index]),
            _percent(curve.in_time[index]),
            _usd(cost),
            Text(bar + mark),
            style="bold" if spot == plan.spot else "" if enough else "dim",
        )
    return table


def _usd(usd: float | None) -> str:
    if usd is None:
        return "never done"
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:.3g}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "for ever"
    return f"{seconds:,.0f} s" if seconds >= 100 or not seconds else f"{seconds:.3g} s"


def _percent(share: float | None) -> str:
    return "infinitely much" if share is None else f"{100 * share:.2f} %"
