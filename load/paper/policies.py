"""All policies in every setting at constant prices: cost, runtime, deadlines met."""

from __future__ import annotations

import csv
from statistics import median
from typing import TYPE_CHECKING

from common.policies.backfill import cost_share_limit
from common.policies.policy import POLICY_NAMES
from common.simulation.experiments.outcome import wilson
from load.paper import plots
from load.paper.document import Section, interval, met, percent
from load.paper.job import (
    ALPHA,
    CYCLE_S,
    GRADIENT_S,
    HIGH,
    LOW,
    RATES,
    SLOW_GRADIENT_S,
    WORKERS,
    Setting,
    Variation,
    second_pool,
    settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from common.policies.policy import PolicyName
    from common.simulation.experiments.outcome import Summary
    from load.paper.runner import Asked, Outcome, Runner

SLOW = Variation("slow gradients", gradient_s=SLOW_GRADIENT_S)
CHANCE = 0.95  # what `chance` and `reassign` promise
START_UP_S = (69.0, 87.0)  # on-demand, spot: what the file's medians are, where it is not at hand
MINIMUM_BILLING_S = 60.0  # EC2
NAMES: tuple[PolicyName, ...] = ("static", "adaptive", "chance", "backfill")  # with start-up
LIMIT, LEAST = 0.59, 0.99  # backfill at (0.9, 1.05), high price, equal rates


def run(asked: Asked, runner: Runner) -> Section:
    """Run all policies and write what came of it."""
    section = Section("All policies at constant prices")
    wanted = settings(quick=asked.quick)
    columns = [(name, Variation()) for name in POLICY_NAMES] + [("reassign", SLOW)]
    simulations = [
        asked.simulation(setting, name, change) for setting in wanted for name, change in columns
    ]
    found = runner.simulated("all policies", simulations)
    _introduce(section, asked)
    for prices in dict.fromkeys(each.prices for each in wanted):
        for rates in RATES:
            some = [each for each in wanted if each.prices == prices and each.rates == rates]
            section.head(f"{prices.name.capitalize()} price, {RATES[rates]}")
            section.table(*_table(some, found))
    section.draw("policies.png", plots.policies(_points(wanted, found)), "Cost and deadlines met")
    section.head("What the tables say")
    section.point(
        _adaptive_and_static(section, wanted, found),
        _chance(section, wanted, found),
        _backfill(section, found),
        _reassign(wanted, found),
        _pools(wanted, found),
    )
    _start_up(section, asked, runner)
    section.data |= {name: _data(outcome) for name, outcome in found.items()}
    return section


def _introduce(section: Section, asked: Asked) -> None:
    high, low = (second_pool(Setting(prices=prices)) for prices in (HIGH, LOW))
    section.say(
        f"{asked.runs} runs each; all policies see the same rates and preemptions. A cell: mean"
        " cost as a share of what on-demand machines alone cost, mean runtime over the deadline,"
        " share of deadlines met with Wilson's 95 % interval. Machines start at once here."
    )
    section.point(
        "`on-demand`, `static` and `adaptive` are the paper's; `static` and `chance` know rates"
        " and availability, `adaptive` and `backfill` learn them as they go.",
        f"`chance` and `reassign` are to meet the deadline with a probability of {percent(CHANCE)}."
        " `backfill` and `adaptive` aim at all.",
        f"`reassign` has streams of preempted workers taken over. A gradient takes"
        f" {1e3 * GRADIENT_S:g} ms (Proposition 1 asks for less than 32), in the last row"
        f" {1e3 * SLOW_GRADIENT_S:g} ms: a CNN of 230,000 weights on one core, which breaks"
        " Proposition 1 for the other policies and which they are not charged for.",
        f"`pools` may also use {high.capacity} machines of a second spot pool with"
        f" {ALPHA} = {high.availability:g} at {high.usd_per_hour:g} $/h (beside the low price:"
        f" {low.usd_per_hour:g}), which no other policy has.",
    )


def _table(
    some: list[Setting], found: Mapping[str, Outcome]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = [each.label for each in some]
    rows = []
    for name, change in [*((name, "") for name in POLICY_NAMES), ("reassign", SLOW.name)]:
        label = f"{name}, {1e3 * SLOW_GRADIENT_S:g} ms" if change else name
        cells = [_cell(_of(found, each, name, change)) for each in some]
        rows.append((label, *cells))
    return ("", *heads), rows


def _cell(summary: Summary) -> str:
    lost = summary.runs - summary.finished
    given_up = f"; {lost} given up" if lost else ""
    runtime = f"{summary.runtime_ratio.mean:.3f} θ"
    return f"{percent(summary.cost_ratio.mean)}; {runtime}; {met(summary)}{given_up}"


def _of(found: Mapping[str, Outcome], setting: Setting, policy: str, change: str = "") -> Summary:
    return found[" ".join(filter(None, (setting.key, policy, change)))].summary


def _adaptive_and_static(
    section: Section, wanted: list[Setting], found: Mapping[str, Outcome]
) -> str:
    pairs = [(_of(found, each, "static"), _of(found, each, "adaptive")) for each in wanted]
    more = sum(adaptive.met >= static.met for static, adaptive in pairs)
    differences = [
        100 * (adaptive.cost_ratio.mean - static.cost_ratio.mean) for static, adaptive in pairs
    ]
    dearer = sum(difference >= 0 for difference in differences)
    late = [static.met for static, _ in pairs]
    verdict = section.judge(more == len(pairs), "adaptive against static")
    return (
        f"*Adaptive* meets at least as many deadlines as static in {more} of {len(pairs)}"
        f" settings: {verdict}. Its cost differs from static's by {min(differences):+.1f} to"
        f" {max(differences):+.1f} points and is not lower in {dearer}: at a constant price"
        " Theorems 4 and 5 give about the same mix at the end as at the beginning. Static ends at"
        f" its deadline on average and often misses it ({percent(min(late))} to"
        f" {percent(max(late))} met). What adaptive keeps in reserve to be in time has to be bought"
        " on demand, which makes it dearer; that of its spot workers those move to on-demand"
        " machines first that are out just then makes it cheaper, the more the smaller the"
        " differences between rates are, which otherwise decide who moves."
    )


def _chance(section: Section, wanted: list[Setting], found: Mapping[str, Outcome]) -> str:
    each = [_of(found, setting, "chance") for setting in wanted]
    kept = sum(one.met >= CHANCE for one in each)
    possible = sum(one.met_high >= CHANCE for one in each)
    return (
        f"*Chance* was to meet {percent(CHANCE)}; it met {percent(min(one.met for one in each))} to"
        f" {percent(max(one.met for one in each))}, at least the promised share in {kept} of"
        f" {len(each)} settings, and within Wilson's interval or more in {possible}:"
        f" {section.judge(possible == len(each), 'chance')}."
    )


def _backfill(section: Section, found: Mapping[str, Outcome]) -> str:
    outcome = found[f"{Setting().key} backfill"].summary
    share, limit = outcome.cost_ratio.mean, cost_share_limit(1.05, 0.9, HIGH.spot, HIGH.on_demand)
    reached = share <= LIMIT and outcome.met >= LEAST
    return (
        f"*Backfill* at (0.9, 1.05), high price, equal rates: {percent(share)} of the on-demand"
        f" cost with {percent(outcome.met)} of {outcome.runs} deadlines met; asked for were at most"
        f" {percent(LIMIT, 0)} and at least {percent(LEAST, 0)}:"
        f" {section.judge(reached, 'backfill')}. The limit for any policy of this kind is"
        f" {percent(limit)}."
    )


def _reassign(wanted: list[Setting], found: Mapping[str, Outcome]) -> str:
    fast = [_of(found, each, "reassign") for each in wanted]
    slow = [_of(found, each, "reassign", SLOW.name) for each in wanted]
    return (
        "*Reassign* pays for compute alone, not for streams:"
        f" {percent(min(one.cost_ratio.mean for one in fast))} to"
        f" {percent(max(one.cost_ratio.mean for one in fast))} with gradients of"
        f" {1e3 * GRADIENT_S:g} ms and {percent(min(one.cost_ratio.mean for one in slow))} to"
        f" {percent(max(one.cost_ratio.mean for one in slow))} with"
        f" {1e3 * SLOW_GRADIENT_S:g} ms, where it meets"
        f" {percent(min(one.met for one in fast))} and {percent(min(one.met for one in slow))} of"
        f" the deadlines at least. It is not to be compared with the paper's policies: those keep"
        f" {WORKERS} machines because a preempted worker's stream waits for it."
    )


def _pools(wanted: list[Setting], found: Mapping[str, Outcome]) -> str:
    more = [
        100
        * (_of(found, each, "pools").cost_ratio.mean - _of(found, each, "adaptive").cost_ratio.mean)
        for each in wanted
    ]
    mets = [_of(found, each, "pools").met for each in wanted]
    return (
        f"*Pools*, with the second pool, differs from adaptive's cost by {min(more):+.1f} to"
        f" {max(more):+.1f} points and meets {percent(min(mets))} to {percent(max(mets))} of the"
        " deadlines."
    )


def _start_up(section: Section, asked: Asked, runner: Runner) -> None:
    """Once more with the times that machines were measured to need to start."""
    on_demand_s, spot_s, source = start_up_s(asked.data)
    change = Variation(
        "start-up", start_up_s=(on_demand_s, spot_s), minimum_billing_s=MINIMUM_BILLING_S
    )
    wanted = [Setting(rates=rates) for rates in RATES]
    plain = [asked.simulation(setting, name) for setting in wanted for name in NAMES]
    slow = [asked.simulation(setting, name, change) for setting in wanted for name in NAMES]
    found = runner.simulated("with start-up times", [*plain, *slow])
    section.head(f"With start-up times and minimum billing, {Setting().label}, high price")
    section.say(
        f"A spot machine is up {spot_s:.0f} s and an on-demand machine {on_demand_s:.0f} s after it"
        f" is asked for ({source}), and each is paid for {MINIMUM_BILLING_S:g} s at least. The"
        " fleet that a job begins with is up when its clock begins."
    )
    rows = [
        (
            f"{RATES[setting.rates]}, {name}",
            _cell(_of(found, setting, name)),
            _cell(_of(found, setting, name, change.name)),
        )
        for setting in wanted
        for name in NAMES
    ]
    section.table(("", "at once", "measured start-up"), rows)
    outcome = _of(found, Setting(), "backfill", change.name)
    outage_s = (1 - Setting().availability) * CYCLE_S
    costs = {name: _of(found, Setting(), name, change.name).cost_ratio.mean for name in NAMES}
    sure = [name for name in NAMES if _of(found, Setting(), name, change.name).met >= CHANCE]
    cheapest = min(sure, key=lambda name: costs[name], default=None)
    section.say(
        f"An outage lasts {outage_s:.0f} s on average, so a spot machine is away for"
        f" {outage_s + spot_s:.0f} s of every {CYCLE_S:,.0f}, and whoever stands in for it needs"
        f" {on_demand_s:.0f} s of them to start. Backfill then costs"
        f" {percent(outcome.cost_ratio.mean)} and meets"
        f" {percent(outcome.met)} {interval(outcome.met_low, outcome.met_high)} of the deadlines;"
        f" at equal rates {cheapest or 'none'} is the cheapest of those that meet at least"
        f" {percent(CHANCE, 0)}. The paper's formulas know no start-up: static and chance, planned"
        " as if there were none, meet"
        f" {percent(_of(found, Setting(), 'static', change.name).met)} and"
        f" {percent(_of(found, Setting(), 'chance', change.name).met)}."
    )
    section.data |= {f"{name}": _data(one) for name, one in found.items()}


def start_up_s(data: Path | None) -> tuple[float, float, str]:
    """Give the median start-up of on-demand and of spot machines, and where it is from."""
    said = "medians of 55 and 45 GPU machines of GCE"
    path = data and data / "spot-traces" / "gce-gpu-vm-startup-seconds.csv"
    if not path or not path.exists():
        return (*START_UP_S, said)
    stages = ("provisioning_s", "staging_s", "booting_s")
    times: dict[str, list[float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            times.setdefault(row["kind"], []).append(sum(float(row[name]) for name in stages))
    spot_kind = next(kind for kind in times if kind != "on-demand")
    return median(times["on-demand"]), median(times[spot_kind]), said


def _points(
    wanted: list[Setting], found: Mapping[str, Outcome]
) -> dict[str, dict[str, tuple[float, float, float, float]]]:
    """Cost, share met and its interval, by setting and policy, at equal rates and high price."""
    some = [each for each in wanted if each.rates == "equal" and each.prices is HIGH]
    points: dict[str, dict[str, tuple[float, float, float, float]]] = {}
    for each in some:
        points[each.label] = {}
        for name in POLICY_NAMES:
            one = _of(found, each, name)
            low, high = wilson(round(one.met * one.runs), one.runs)
            points[each.label][name] = (one.cost_ratio.mean, one.met, low, high)
    return points


def _data(outcome: Outcome) -> dict[str, object]:
    return {**outcome.summary.as_dict(), "changes": outcome.changes}
