"""All policies in every setting at constant prices: cost, runtime, deadlines met."""

from __future__ import annotations

import csv
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from common.config.policy_names import STREAM_POLICIES, StreamPolicyName
from common.spot.market.billing_spec import BillingRules
from load.paper import plots
from load.paper.document import Section, interval, met, percent
from load.paper.job import (
    CYCLE_S,
    GRADIENT_S,
    HIGH,
    NOTHING,
    RATES,
    SLOW_GRADIENT_S,
    WORKERS,
    Case,
    Setting,
    Variation,
    least_cost_share,
    settings,
)

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.experiments.results import RunsSummary
    from load.paper.runner import Asked, Outcome, Runner

MOVING = Variation("moving", moving=True)
SLOW = Variation("slow gradients", gradient_s=SLOW_GRADIENT_S, moving=True)
MOVES: dict[Variation, str] = {
    each: f", streams move, {1e3 * each.gradient_s:g} ms" for each in (MOVING, SLOW)
}
# Probability promised by `chance`.
CHANCE = 0.95
# On-demand, spot: the medians of the file, used if the file is missing.
START_UP_S = (69.0, 87.0)
MINIMUM_S = 60.0  # EC2
# Policies that are also run with start-up times.
NAMES: tuple[StreamPolicyName, ...] = ("static", "adaptive", "chance", "pools")
# Bars of pools at (0.9, 1.05), high price, equal rates.
LIMIT, LEAST = 0.59, 0.99


def run(runner: Runner) -> Section:
    """Run all policies and write the section."""
    section = Section("All policies at constant prices")
    wanted = settings(quick=runner.asked.quick)
    columns = [(name, NOTHING) for name in STREAM_POLICIES] + [("pools", each) for each in MOVES]
    cases = [Case(setting, name, change) for setting in wanted for name, change in columns]
    found = runner.simulated("all policies", cases)
    _introduce(section, runner.asked)
    for prices in dict.fromkeys(each.prices for each in wanted):
        for rates in RATES:
            some = [each for each in wanted if each.prices == prices and each.rates == rates]
            section.head(f"{prices.name.capitalize()} price, {RATES[rates]}")
            rows = []
            for name, change in columns:
                label = name + MOVES.get(change, "")
                cells = [_cell(runner.of(each, name, change).summary) for each in some]
                rows.append(" | ".join((label, *cells)))
            section.table(" | ".join(("", *(each.label for each in some))), rows)
    panels = {
        each.label: {name: runner.of(each, name).summary for name in STREAM_POLICIES}
        for each in wanted
        if each.rates == "equal" and each.prices is HIGH
    }
    section.draw("policies.png", plots.policies(panels), "Cost and deadlines met")
    section.head("What the tables say")

    def summaries(policy: StreamPolicyName, change: Variation = NOTHING) -> list[RunsSummary]:
        return [runner.of(each, policy, change).summary for each in wanted]

    section.point(
        _adaptive_and_static(section, summaries("static"), summaries("adaptive")),
        _chance(section, summaries("chance")),
        _pools(section, runner.of(Setting(), "pools").summary),
        _moving(summaries("pools", MOVING), summaries("pools", SLOW)),
    )
    _start_up(section, runner)
    section.data |= {name: _data(outcome) for name, outcome in found.items()}
    return section


def _introduce(section: Section, asked: Asked) -> None:
    section.say(
        f"{asked.runs} runs each; all policies see the same rates and preemptions. A cell: mean"
        " cost as a share of what on-demand machines alone cost, mean runtime over the deadline,"
        " share of deadlines met with Wilson's 95 % interval. Machines start at once here."
    )
    section.point(
        "`on-demand`, `static` and `adaptive` are the paper's; `static` and `chance` know rates"
        " and availability, `adaptive` and `pools` learn them as they go.",
        f"`chance` is to meet the deadline with a probability of {percent(CHANCE)}; `pools` and"
        " `adaptive` aim at all.",
        "`pools` has as many spot machines as streams at most, as the others; where streams move"
        " those of preempted workers are taken over."
        f" A gradient takes {1e3 * GRADIENT_S:g} ms (Proposition 1 asks for less than 32), in the"
        f" last row {1e3 * SLOW_GRADIENT_S:g} ms: a CNN of 230,000 weights on one core, which"
        " breaks Proposition 1 for the other policies and which they are not charged for.",
    )


def _cell(summary: RunsSummary) -> str:
    lost = summary.runs - summary.finished
    given_up = f"; {lost} given up" if lost else ""
    runtime = f"{summary.runtime_ratio.mean:.3f} θ"
    return f"{percent(summary.cost_ratio.mean)}; {runtime}; {met(summary)}{given_up}"


def _range(shares: list[float]) -> str:
    return f"{percent(min(shares))} to {percent(max(shares))}"


def _points_more(some: list[RunsSummary], others: list[RunsSummary]) -> list[float]:
    """Return the cost differences of paired runs, in points of the on-demand cost."""
    pairs = zip(some, others, strict=True)
    return [100 * (one.cost_ratio.mean - other.cost_ratio.mean) for one, other in pairs]


def _adaptive_and_static(
    section: Section, static: list[RunsSummary], adaptive: list[RunsSummary]
) -> str:
    more = sum(a.met >= s.met for s, a in zip(static, adaptive, strict=True))
    differences = _points_more(adaptive, static)
    dearer = sum(difference >= 0 for difference in differences)
    verdict = section.judge(more == len(static), "adaptive against static")
    return (
        f"*Adaptive* meets at least as many deadlines as static in {more} of {len(static)}"
        f" settings: {verdict}. Its cost differs from static's by {min(differences):+.1f} to"
        f" {max(differences):+.1f} points and is not lower in {dearer}: at a constant price"
        " Theorems 4 and 5 give about the same mix at the end as at the beginning. Static ends at"
        f" its deadline on average and often misses it ({_range([one.met for one in static])} met)."
        " What adaptive keeps in reserve to be in time has to be bought on demand, which makes it"
        " dearer; that of its spot workers those move to on-demand machines first that are out just"
        " then makes it cheaper, the more the smaller the differences between rates are, which"
        " otherwise decide who moves."
    )


def _chance(section: Section, each: list[RunsSummary]) -> str:
    kept = sum(one.met >= CHANCE for one in each)
    possible = sum(one.met_high >= CHANCE for one in each)
    return (
        f"*Chance* was to meet {percent(CHANCE)}; it met {_range([one.met for one in each])}, at"
        f" least the promised share in {kept} of {len(each)} settings, and within Wilson's interval"
        f" or more in {possible}: {section.judge(possible == len(each), 'chance')}."
    )


def _pools(section: Section, summary: RunsSummary) -> str:
    share, limit = summary.cost_ratio.mean, least_cost_share(Setting())
    reached = share <= LIMIT and summary.met >= LEAST
    return (
        f"*Pools* at (0.9, 1.05), high price, equal rates: {percent(share)} of the on-demand"
        f" cost with {percent(summary.met)} of {summary.runs} deadlines met; asked for were at most"
        f" {percent(LIMIT, 0)} and at least {percent(LEAST, 0)}:"
        f" {section.judge(reached, 'pools')}. The limit for any policy of this kind, who"
        f" knew the future included, is {percent(limit)}: streams pause with their machine, which"
        " starts at once and is lost by itself once in 1,000 s."
    )


def _moving(fast: list[RunsSummary], slow: list[RunsSummary]) -> str:
    return (
        "*Pools*, where streams move, pays for compute alone, not for streams:"
        f" {_range([one.cost_ratio.mean for one in fast])} with gradients of"
        f" {1e3 * GRADIENT_S:g} ms and {_range([one.cost_ratio.mean for one in slow])} with"
        f" {1e3 * SLOW_GRADIENT_S:g} ms, where it meets"
        f" {percent(min(one.met for one in fast))} and {percent(min(one.met for one in slow))} of"
        f" the deadlines at least. It is not to be compared with the paper's policies: those keep"
        f" {WORKERS} machines because a preempted worker's stream waits for it."
    )


def _start_up(section: Section, runner: Runner) -> None:
    """Repeat some settings with the measured start-up times of machines."""
    on_demand_s, spot_s, source = start_up_s(runner.asked.data)
    change = Variation(
        "start-up", start_up_s=(on_demand_s, spot_s), billing=BillingRules(minimum_s=MINIMUM_S)
    )
    wanted = [(Setting(rates=rates), name) for rates in RATES for name in NAMES]
    cases = [Case(*each, some) for some in (NOTHING, change) for each in wanted]
    found = runner.simulated("with start-up times", cases)
    section.head(f"With start-up times and minimum billing, {Setting().label}, high price")
    section.say(
        f"A spot machine is up {spot_s:.0f} s and an on-demand machine {on_demand_s:.0f} s after it"
        f" is asked for ({source}), and each is paid for {MINIMUM_S:g} s at least. The"
        " fleet that a job begins with is up when its clock begins."
    )
    rows = [
        f"{RATES[setting.rates]}, {name} | {_cell(runner.of(setting, name).summary)}"
        f" | {_cell(runner.of(setting, name, change).summary)}"
        for setting, name in wanted
    ]
    section.table(" | at once | measured start-up", rows)
    by_name = {name: runner.of(Setting(), name, change).summary for name in NAMES}
    pools = by_name["pools"]
    outage_s = (1 - Setting().availability) * CYCLE_S
    sure = [name for name, one in by_name.items() if one.met >= CHANCE]
    cheapest = min(sure, key=lambda name: by_name[name].cost_ratio.mean, default="none")
    section.say(
        f"An outage lasts {outage_s:.0f} s on average, so a spot machine is away for"
        f" {outage_s + spot_s:.0f} s of every {CYCLE_S:,.0f}, and whoever stands in for it needs"
        f" {on_demand_s:.0f} s of them to start. Pools then costs"
        f" {percent(pools.cost_ratio.mean)} and meets"
        f" {percent(pools.met)} {interval(pools.met_low, pools.met_high)} of the"
        f" deadlines; at equal rates {cheapest} is the cheapest of those that meet at least"
        f" {percent(CHANCE, 0)}. The paper's formulas know no start-up: static and chance, planned"
        f" as if there were none, meet {percent(by_name['static'].met)} and"
        f" {percent(by_name['chance'].met)}."
    )
    section.data |= {name: _data(one) for name, one in found.items()}


def start_up_s(data: Path | None) -> tuple[float, float, str]:
    """Return the median start-up of on-demand and of spot machines, and their source."""
    said = "medians of 55 and 45 GPU machines of GCE"
    path = data and data / "spot-traces" / "gce-gpu-vm-startup-seconds.csv"
    if not path or not path.exists():
        return (*START_UP_S, said)
    stages = ("provisioning_s", "staging_s", "booting_s")
    times = defaultdict[str, list[float]](list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            times[row["kind"]].append(sum(float(row[name]) for name in stages))
    spot_kind = next(kind for kind in times if kind != "on-demand")
    return median(times["on-demand"]), median(times[spot_kind]), said


def _data(outcome: Outcome) -> dict[str, object]:
    return {**outcome.summary.as_dict(), "changes": outcome.changes}
