"""How the answer of `doll plan` looks: as a table for people and as JSON for scripts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.planning.plan import Answer

_RANGES = 8  # of worker numbers, or so many names: a line or two
_ROWS = 12  # of the curve, about
_BAR = 30  # characters


def as_data(answer: Answer, *, with_workers: bool, with_probability: bool) -> dict[str, Any]:
    """The plan as plain data; what is infinite (nothing ever runs) becomes null as JSON."""
    plan = answer.plan
    data: dict[str, Any] = {
        "feasible": plan.feasible,
        "spot": plan.spot,
        "on_demand": plan.on_demand,
        "expected_cost_usd": plan.expected_cost_usd,
        "expected_runtime_s": plan.expected_runtime_s,
        "cost_ratio_to_on_demand": plan.cost_ratio_to_on_demand,
        "binding": plan.binding,
        "reason": plan.reason,
    }
    if with_probability:
        data["deadline_probability"] = float(answer.chances[plan.spot])
    if with_workers:
        data["spot_workers"] = sorted(plan.spot_workers.tolist())
        if answer.asked.names:
            data["workers"] = list(answer.asked.names)
    return data


def draw(answer: Answer, *, all_workers: bool = False) -> Group:
    """Draw the plan, then cost and runtime against the number of spot workers."""
    plan, work, alone = answer.plan, answer.asked.work, float(answer.curve.costs_usd[0])
    table = Table(Column(style="bold", no_wrap=True), Column(), box=None, show_header=False)
    rows = {
        "plan": f"{plan.spot} of {work.workers} workers on spot, {plan.on_demand} on demand",
        "spot workers": _which(answer, all_workers=all_workers),
        "cost": f"{_usd(plan.expected_cost_usd)}, {_percent(plan.cost_ratio_to_on_demand)} of"
        f" {_usd(alone)} on demand only",
        "runtime": f"{_seconds(plan.expected_runtime_s)} on average; the deadline is"
        f" {_seconds(work.deadline_s)}, undisturbed (theta_0) it takes"
        f" {_seconds(work.undisturbed_s)}",
        "in time": f"with probability {_percent(float(answer.chances[plan.spot]))}, if a spot"
        f" machine goes every {_seconds(answer.asked.market.spot.cycle_s)}",
        "limited by": plan.binding,
        "because": plan.reason,
    }
    if not plan.feasible:
        rows = {"feasible": "no; what comes nearest:" if not plan.spot else "no", **rows}
    for name, value in rows.items():
        table.add_row(name, Text(value, "bold red" if name == "feasible" else ""))
    return Group(table, Text(), _curve(answer))


def ranges(numbers: Iterable[int]) -> list[str]:
    """Write whole numbers as ranges: 0-2, 5, 7-9."""
    found = list[list[int]]()
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [f"{first}-{last}" if first < last else str(first) for first, last in found]


def _which(answer: Answer, *, all_workers: bool) -> str:
    workers, names = answer.plan.spot_workers.tolist(), answer.asked.names
    parts = [names[index] for index in sorted(workers)] if names else ranges(workers)
    if not parts:
        return "none"
    shown = parts if all_workers else parts[:_RANGES]
    more = "" if len(shown) == len(parts) else ", ... (all of them: --list-workers)"
    return ", ".join(shown) + more


def _curve(answer: Answer) -> Table:
    curve, chosen = answer.curve, answer.plan.spot
    count = len(curve.costs_usd) - 1
    every = math.ceil(count / _ROWS)
    rows = sorted({*range(0, count + 1, every), chosen, count})
    highest = max(filter(math.isfinite, curve.costs_usd.tolist()), default=0.0) or 1.0
    table = Table(
        Column("N_s", justify="right"),
        Column("runtime", justify="right"),
        Column("in time", justify="right"),
        Column("cost", justify="right"),
        Column("", no_wrap=True),
        box=None,
    )
    for spot in rows:
        cost, enough = float(curve.costs_usd[spot]), bool(answer.enough[spot])
        bar = "█" * round(_BAR * cost / highest) if math.isfinite(cost) else ""
        mark = " <- plan" if spot == chosen else "" if enough else " late"
        table.add_row(
            str(spot),
            _seconds(float(curve.runtimes_s[spot])),
            _percent(float(answer.chances[spot])),
            _usd(cost),
            Text(bar + mark),
            style="bold" if spot == chosen else "" if enough else "dim",
        )
    return table


def _usd(usd: float) -> str:
    if not math.isfinite(usd):
        return "never done"
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:.3g}"


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "for ever"
    return f"{seconds:,.0f} s" if seconds >= 100 or not seconds else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if math.isfinite(share) else "infinitely much"
