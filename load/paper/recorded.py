"""Recorded prices and availability instead of a constant price and the two-state chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.simulation.experiments.setting import setting_of
from load.paper import plots
from load.paper.document import Section, percent
from load.paper.job import ALPHA, CYCLE_S, GRADIENT_S, Setting, experiment
from load.paper.runner import FEW
from load.paper.series import SPEED, find

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.policies.policy import PolicyName
    from common.simulation.experiments.outcome import Summary
    from load.paper.runner import Asked, Outcome, Runner, Simulation
    from load.paper.series import Found, Series

POLICIES: tuple[PolicyName, ...] = ("static", "adaptive", "backfill")


def run(asked: Asked, runner: Runner) -> Section:
    """Run every usable trace and write what came of it."""
    section = Section("Recorded prices and availability")
    found = find(asked)
    if found is None or not found.series:
        section.say("There was no data folder with traces (`--data`), so nothing of this was run.")
        return section
    simulations: dict[tuple[str, str], Simulation] = {
        (each.change.name, policy): asked.simulation(each.setting, policy, each.change, FEW)
        for each in found.series
        for policy in POLICIES
    }
    done = runner.simulated("traces", list(simulations.values()))
    outcomes = {key: done[simulation.name] for key, simulation in simulations.items()}
    _introduce(section, found, asked)
    groups: dict[str, list[Series]] = {}
    for each in found.series:
        groups.setdefault(each.group, []).append(each)
    rows = [_row(group, some, outcomes, asked) for group, some in groups.items()]
    columns = ("", "series", ALPHA, "lowest possible", *POLICIES)
    section.table(columns, rows)
    section.draw(
        "traces.png",
        plots.series(
            {
                group: {each.name: _costs(each, outcomes) for each in some}
                for group, some in groups.items()
            }
        ),
        "Mean cost of 12 runs on every series",
    )
    _conclude(section, groups, outcomes)
    section.head("What was not used")
    section.point(*(f"{what}: {why}." for what, why in found.unused))
    for each in found.series:
        section.data[each.change.name] = {
            "group": each.group,
            "speed": each.speed,
            "on_demand_usd_per_hour": each.prices.on_demand,
            "mean_spot_usd_per_hour": each.prices.spot,
            "availability": _availability(each, asked),
            **{policy: outcomes[each.change.name, policy].summary.as_dict() for policy in POLICIES},
        }
    section.data["unused"] = [{"what": what, "why": why} for what, why in found.unused]
    return section


def _introduce(section: Section, found: Found, asked: Asked) -> None:
    section.say(
        f"{len(found.series)} series, {FEW} runs on each, θ = 1.05 θ₀, λ = 125, the job of section"
        f" V (gradients of {1e3 * GRADIENT_S:g} ms). Each run begins somewhere else in its trace."
        " A cell: mean cost as a share of what on-demand machines alone cost, deadlines met of all"
        " runs of the group. On-demand machines see neither prices nor outages: 100 %, and all"
        " deadlines." + (" Quick: one series of each group." if asked.quick else "")
    )
    section.point(
        f"*Prices* are gone through at {SPEED:,.0f} times their speed, as in the paper; those of"
        " 2022 as they were, since less than six hours are recorded. Until 2017 a machine was taken"
        " away when the price passed its bid, which is the on-demand price here, from all workers"
        " at once. After it prices do not preempt: the two-state chain does, with"
        f" {ALPHA} = {Setting().availability:g}. On-demand prices are list prices for 2015, a tenth"
        " of the highest price of 2016 (bids were limited to ten times), and from 2020 on those"
        " that the snapshot of 2022 implies, good to some 5 %.",
        f"*Availability* is gone through so fast that the mean cycle of a machine is"
        f" {CYCLE_S:,.0f} s, as that of the paper's chain, and a run of 6,400 s sees several"
        " outages; but no faster than one record in a step of 2 s. At its own speed most runs"
        " would see none, and a few nothing else. Either each worker has a part of the trace for"
        " itself, as the paper's chains are independent, or all have the same, as the traces of 16"
        " machines suggest (mostly all or none); then no more workers have one than there are."
        " Prices are the trace's where it has some, else 0.286 and 0.158 $/h.",
        "*Lowest possible* is the mean spot price, while machines are had, over the on-demand"
        " price: what all workers on spot cost, however long they take.",
    )


def _row(
    group: str,
    some: Sequence[Series],
    outcomes: Mapping[tuple[str, str], Outcome],
    asked: Asked,
) -> tuple[str, ...]:
    shares = [_availability(each, asked) for each in some]
    spread = f"{min(shares):.2f} to {max(shares):.2f}" if len(some) > 1 else f"{shares[0]:.2f}"
    lowest = float(np.mean([min(each.prices.ratio, 1.0) for each in some]))
    return (group, str(len(some)), spread, percent(lowest), *_cells(some, outcomes))


def _cells(some: Sequence[Series], outcomes: Mapping[tuple[str, str], Outcome]) -> list[str]:
    cells = []
    for policy in POLICIES:
        each = [outcomes[one.change.name, policy].summary for one in some]
        cells.append(f"{percent(_mean_cost(each))}; {_met(each)} of {sum(o.runs for o in each)}")
    return cells


def _mean_cost(each: Sequence[Summary]) -> float:
    return float(np.mean([one.cost_ratio.mean for one in each]))


def _met(each: Sequence[Summary]) -> int:
    return sum(round(one.met * one.runs) for one in each)


def _costs(one: Series, outcomes: Mapping[tuple[str, str], Outcome]) -> dict[str, float]:
    return {
        policy: outcomes[one.change.name, policy].summary.cost_ratio.mean for policy in POLICIES
    }


def _availability(each: Series, asked: Asked) -> float:
    setting = setting_of(experiment(each.setting, "static", each.change), asked.scratch, 1, 0)
    return setting.givens.pools[1].availability


def _conclude(
    section: Section,
    groups: Mapping[str, Sequence[Series]],
    outcomes: Mapping[tuple[str, str], Outcome],
) -> None:
    everything = [each for some in groups.values() for each in some]
    found = {
        policy: [outcomes[each.change.name, policy].summary for each in everything]
        for policy in POLICIES
    }
    total = sum(one.runs for one in found["static"])
    static, backfill = found["static"], found["backfill"]
    cheaper = sum(
        b.cost_ratio.mean < s.cost_ratio.mean for s, b in zip(static, backfill, strict=True)
    )
    more = sum(a.met >= s.met for s, a in zip(static, found["adaptive"], strict=True))
    section.say(
        f"Over all {len(everything)} series static costs {percent(_mean_cost(static))}, adaptive"
        f" {percent(_mean_cost(found['adaptive']))} and backfill {percent(_mean_cost(backfill))};"
        f" they meet {_met(static)}, {_met(found['adaptive'])} and {_met(backfill)} of {total}"
        f" deadlines. Backfill is cheaper than static on {cheaper} series, adaptive meets at least"
        f" as many deadlines as static on {more}."
    )
