"""Recorded prices and availability instead of a constant price and the two-state chain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from common.spot.experiments.draws import draws_of
from load.paper import plots
from load.paper.document import Section, percent
from load.paper.job import ALPHA, CYCLE_S, GRADIENT_S, Case, Setting, experiment
from load.paper.runner import FEW, Asked, Runner
from load.paper.series import SPEED, Found, Series, find

if TYPE_CHECKING:
    from common.config.policy_names import StreamPolicyName
    from common.spot.experiments.results import RunsSummary

POLICIES: tuple[StreamPolicyName, ...] = ("static", "adaptive", "pools")


class _Measured(NamedTuple):
    series: Series
    availability: float
    summaries: dict[StreamPolicyName, RunsSummary]


def run(runner: Runner) -> Section:
    """Run every usable trace and write the section."""
    section = Section("Recorded prices and availability")
    found = find(runner.asked)
    if found is None or not found.series:
        section.say(
            "This part was not run, because there is no data folder with traces (`--data`)."
        )
        return section
    cases = {
        (each.change.name, policy): Case(each.setting, policy, each.change)
        for each in found.series
        for policy in POLICIES
    }
    done = runner.simulated("traces", cases.values(), FEW)
    groups = defaultdict[str, list[_Measured]](list)
    for each in found.series:
        name, prices = each.change.name, each.setting.prices
        summaries = {policy: done[cases[name, policy].name].summary for policy in POLICIES}
        drawn = draws_of(experiment(*cases[name, "static"]), runner.asked.scratch, 1, 0)
        availability = drawn.givens.pools[1].availability
        groups[each.group].append(_Measured(each, availability, summaries))
        section.data[name] = {
            "group": each.group,
            "speed": each.speed,
            "on_demand_usd_per_hour": prices.on_demand,
            "mean_spot_usd_per_hour": prices.spot,
            "availability": availability,
            **{policy: one.as_dict() for policy, one in summaries.items()},
        }
    section.data["unused"] = [{"what": what, "why": why} for what, why in found.unused]
    _introduce(section, found, runner.asked)
    section.table(
        " | ".join(("", "series", ALPHA, "lowest possible", *POLICIES)),
        [_row(group, some) for group, some in groups.items()],
    )
    costs = {
        group: {
            each.series.name: {
                policy: one.cost_ratio.mean for policy, one in each.summaries.items()
            }
            for each in some
        }
        for group, some in groups.items()
    }
    section.draw("traces.png", plots.series(costs), "Mean cost of 12 runs on every series")
    _conclude(section, [each for some in groups.values() for each in some])
    section.say("results.json lists the recordings that were not used, with reasons.")
    section.point(*(f"{what}: {why}." for what, why in found.unused))
    return section


def _introduce(section: Section, found: Found, asked: Asked) -> None:
    section.say(
        f"{len(found.series)} series, {FEW} runs on each with different starts, θ = 1.05 θ₀, λ ="
        f" 125, gradients of {1e3 * GRADIENT_S:g} ms. Streams pause without their machine,"
        " and machines start at once. A cell has the mean cost as a share of on-demand machines"
        " alone, and the deadlines met by all runs of the group."
        + (" Quick: one series of each group." if asked.quick else "")
    )
    section.point(
        f"*Prices* are replayed at {SPEED:,.0f} times their speed, as in the paper; those of 2022"
        " at their own speed, because the recording is shorter than six hours. Until 2017, all"
        " machines"
        " are preempted while the price is above the bid, which is the on-demand price. Later"
        " prices do not preempt; each machine is preempted independently with"
        f" {ALPHA} = {Setting().availability:g}. On-demand prices come from price lists"
        " (2015), a tenth of the highest price (2016, when bids were limited to ten times), or the"
        " snapshot of 2022 (later, within about 5 %).",
        f"*Availability* is replayed so that a machine's mean cycle is {CYCLE_S:,.0f} s, but not"
        " faster than one record per step of 2 s. Each worker follows its own part of the trace,"
        " as in the paper, or all follow the same part. Prices are those of the trace if it has"
        " any, otherwise 0.286 and 0.158 $/h.",
        "*Lowest possible* is the mean spot price while machines are available, over the on-demand"
        " price.",
    )


def _row(group: str, some: Sequence[_Measured]) -> str:
    shares = [each.availability for each in some]
    spread = f"{min(shares):.2f} to {max(shares):.2f}" if len(some) > 1 else f"{shares[0]:.2f}"
    lowest = fmean(min(each.series.setting.prices.ratio, 1.0) for each in some)
    cells = []
    for policy in POLICIES:
        found = [one.summaries[policy] for one in some]
        runs = sum(one.runs for one in found)
        cells.append(f"{percent(_mean_cost(found))}; {_met(found)} of {runs}")
    return " | ".join((group, str(len(some)), spread, percent(lowest), *cells))


def _mean_cost(each: Sequence[RunsSummary]) -> float:
    return fmean(one.cost_ratio.mean for one in each)


def _met(each: Sequence[RunsSummary]) -> int:
    return sum(round(one.met * one.runs) for one in each)


def _conclude(section: Section, everything: Sequence[_Measured]) -> None:
    static, adaptive, pools = (
        [each.summaries[policy] for each in everything] for policy in POLICIES
    )
    cheaper = sum(p.cost_ratio.mean < s.cost_ratio.mean for s, p in zip(static, pools, strict=True))
    more = sum(a.met >= s.met for s, a in zip(static, adaptive, strict=True))
    section.say(
        f"Over all {len(everything)} series, static costs {percent(_mean_cost(static))}, adaptive"
        f" {percent(_mean_cost(adaptive))} and pools {percent(_mean_cost(pools))};"
        f" they meet {_met(static)}, {_met(adaptive)} and {_met(pools)} of"
        f" {sum(one.runs for one in static)} deadlines. Pools is cheaper than static on"
        f" {cheaper} series. Adaptive meets at least as many deadlines as static on {more}."
    )
