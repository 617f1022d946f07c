"""All policies in every setting at constant prices: cost, runtime, deadlines met."""

from __future__ import annotations

import csv
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from common.config.policy_names import STREAM_POLICIES, StreamPolicyName
from common.spot.market.billing_spec import BillingRules
from load.paper import plots
from load.paper.document import Section, percent
from load.paper.job import (
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
# Start-up times of on-demand and of spot machines: the medians of the recorded file, used if the
# file is missing.
START_UP_S = (69.0, 87.0)
MINIMUM_S = 60.0  # EC2
# Policies that are also run with start-up times.
NAMES: tuple[StreamPolicyName, ...] = ("static", "adaptive", "chance", "pools")
# Bars of the policy `pools` at (0.9, 1.05), high price, equal rates: greatest cost share, least
# share of deadlines met.
LIMIT, LEAST = 0.59, 0.99


def run(runner: Runner) -> Section:
    """Run all policies and write the section."""
    section = Section("All policies at constant prices")
    wanted = settings(quick=runner.asked.quick)
    columns = [(name, NOTHING) for name in STREAM_POLICIES] + [("pools", each) for each in MOVES]
    cases = [Case(setting, name, change) for setting in wanted for name, change in columns]
    found = runner.simulated("all policies", cases)
    _introduce(section, runner.asked)
    for rates in RATES:
        some = [each for each in wanted if each.prices is HIGH and each.rates == rates]
        section.head(f"High price, {RATES[rates]}")
        rows = []
        for name, change in columns:
            if name == "on-demand":
                continue
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
        f"{asked.runs} runs per setting. All policies get the same rates and preemptions, and"
        " machines start at once. A cell has the mean cost as a share of on-demand machines alone,"
        " and the share of deadlines met. results.json has runtimes, intervals, `on-demand` and"
        " the low price."
    )
    section.point(
        "`static` and `adaptive` are the paper's policies. `static` and `chance` know rates and"
        " availability; `adaptive` and `pools` estimate them.",
        f"`chance` must meet the deadline with a probability of {percent(CHANCE)}; `adaptive` and"
        " `pools` aim at all deadlines.",
        "`pools` rents at most one spot machine per stream. If streams move, other workers take"
        " over the streams of preempted ones."
        f" A gradient takes {1e3 * GRADIENT_S:g} ms (Proposition 1 requires less than 32 ms), or"
        f" {1e3 * SLOW_GRADIENT_S:g} ms in the last row (a CNN of 230,000 weights on one core).",
    )


def _cell(summary: RunsSummary) -> str:
    lost = summary.runs - summary.finished
    given_up = f"; {lost} given up" if lost else ""
    return f"{percent(summary.cost_ratio.mean)}, {percent(summary.met)}{given_up}"


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
        f" settings: {verdict}. Its cost differs by {min(differences):+.1f} to"
        f" {max(differences):+.1f} points and is not lower in {dearer} settings: its"
        " reserve of time costs money, and moving workers away from machines that are out saves"
        f" some. Static meets {_range([one.met for one in static])} of the deadlines, because it"
        " reaches its deadline only on average."
    )


def _chance(section: Section, each: list[RunsSummary]) -> str:
    kept = sum(one.met >= CHANCE for one in each)
    possible = sum(one.met_high >= CHANCE for one in each)
    return (
        f"*Chance* promises {percent(CHANCE)} and met {_range([one.met for one in each])}: at least"
        f" the promise in {kept} of {len(each)} settings, and within Wilson's interval in"
        f" {possible}: {section.judge(possible == len(each), 'chance')}."
    )


def _pools(section: Section, summary: RunsSummary) -> str:
    share, limit = summary.cost_ratio.mean, least_cost_share(Setting())
    reached = share <= LIMIT and summary.met >= LEAST
    return (
        f"*Pools* costs {percent(share)} and meets {percent(summary.met)} of {summary.runs}"
        " deadlines at (0.9, 1.05), high price and equal rates. Required were at most"
        f" {percent(LIMIT, 0)} and at least {percent(LEAST, 0)}:"
        f" {section.judge(reached, 'pools')}. If streams pause with their machine, no policy can"
        f" cost less than {percent(limit)} on average, even if it knows the future."
    )


def _moving(fast: list[RunsSummary], slow: list[RunsSummary]) -> str:
    return (
        "*Pools with streams that move* costs"
        f" {_range([one.cost_ratio.mean for one in fast])} with gradients of"
        f" {1e3 * GRADIENT_S:g} ms and {_range([one.cost_ratio.mean for one in slow])} with"
        f" {1e3 * SLOW_GRADIENT_S:g} ms, because it pays only for computing. It meets at least"
        f" {percent(min(one.met for one in fast))} and {percent(min(one.met for one in slow))} of"
        f" the deadlines. The paper's policies instead keep {WORKERS} machines."
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
        f"A spot machine starts in {spot_s:.0f} s and an on-demand machine in {on_demand_s:.0f} s"
        f" ({source}). Each is paid for at least {MINIMUM_S:g} s. The first machines are already up"
        " when the job begins."
    )
    rows = [
        f"{RATES[setting.rates]}, {name} | {_cell(runner.of(setting, name).summary)}"
        f" | {_cell(runner.of(setting, name, change).summary)}"
        for setting, name in wanted
    ]
    section.table(" | at once | measured start-up", rows)
    by_name = {name: runner.of(Setting(), name, change).summary for name in NAMES}
    sure = [name for name, one in by_name.items() if one.met >= CHANCE]
    cheapest = min(sure, key=lambda name: by_name[name].cost_ratio.mean, default="none")
    section.say(
        f"At equal rates, {cheapest} is the cheapest policy that meets at least"
        f" {percent(CHANCE, 0)}. Static and chance plan without start-up times."
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
