"""Figures 3, 4 and 5 and Table II: costs of static and adaptive splits beside the paper's."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from load.paper import plots, stated
from load.paper.document import NONE, Section, met, percent
from load.paper.explanations import explain_adaptive, explain_drawn, explain_static
from load.paper.job import HIGH, LOW, PAIRS, RATES, WORKERS, Case, Rates, Setting, settings
from load.paper.runner import FEW, Runner

if TYPE_CHECKING:
    from common.config.policy_names import StreamPolicyName

POLICIES: tuple[StreamPolicyName, ...] = ("static", "adaptive")


def run(runner: Runner) -> Section:
    """Run the settings and write the section."""
    section = Section("Figures 3, 4 and 5, Table II")
    quick = runner.asked.quick
    pairs = PAIRS[:1] if quick else PAIRS
    wanted = settings(quick=quick) + [row.setting for row in stated.TABLE_II if not quick]
    cases = [Case(each, policy) for each in dict.fromkeys(wanted) for policy in POLICIES]
    found = runner.simulated("figures 3 to 5, Table II", cases)
    section.say(
        f"Prices are constant, in US dollars per hour: {HIGH.on_demand:g} on demand and"
        f" {HIGH.spot:g} on spot (high), or {LOW.on_demand:g} and {LOW.spot:g} (low). J = 10,000,"
        f" N = {WORKERS}, b = 256, and K = 20 unless a row says otherwise. Costs are means of"
        f" {runner.asked.runs} runs, as shares of the cost of on-demand machines alone. Brackets"
        f" are Wilson's 95 % intervals. Plots show the first {FEW} runs, because the paper made"
        f" {FEW}."
    )
    for number, rates in enumerate(RATES, 3):
        _static(section, rates, number, pairs, runner)
    panels = {
        RATES[rates]: {
            pair: runner.of(Setting(*pair, rates), "static").runs[:FEW] for pair in pairs
        }
        for rates in RATES
    }
    section.draw(
        "figures-3-4.png",
        plots.cost_against_runtime(panels, stated.STATIC),
        "Cost and runtime of 12 runs in each setting, and the means that the paper states",
    )
    explain_static(section, runner)
    explain_drawn(section, runner)
    _both(section, runner)
    explain_adaptive(section, runner)
    if not quick:
        _table_ii(section, runner)
    section.data |= {name: outcome.summary.as_dict() for name, outcome in found.items()}
    return section


def _static(
    section: Section,
    rates: Rates,
    number: int,
    pairs: tuple[tuple[float, float], ...],
    runner: Runner,
) -> None:
    """Write figure 3 or 4: the static split at the high price."""
    equal, rows = rates == "equal", []
    for pair in pairs:
        setting = Setting(*pair, rates)
        outcome, plans = runner.of(setting, "static"), runner.plans(setting)
        share = fmean(best.cost_ratio_to_on_demand for best in plans)
        rows.append(
            f"{setting.label} | {percent(stated.STATIC[rates][pair], 2)}"
            f" | {percent(setting.bound, 2) if equal else NONE}"
            f" | {percent(share, 2)}, N_s = {fmean(best.spot for best in plans):.4g}"
            f" | {percent(outcome.summary.cost_ratio.mean)} | {met(outcome.summary)}"
        )
    section.head(f"Figure {number}: static split, {RATES[rates]}, high price")
    section.table(
        f" | paper | Corollary 2 | equation {16 if equal else 22} | here | deadlines met",
        rows,
    )


def _both(section: Section, runner: Runner) -> None:
    """Write figure 5: static and adaptive at both prices."""
    rows, bars = [], []
    for prices in (HIGH,) if runner.asked.quick else (HIGH, LOW):
        for rates in RATES:
            line = Setting(prices=prices).bound if rates == "equal" else None
            said = {"static": stated.STATIC[rates][0.9, 1.05], "adaptive": stated.ADAPTIVE[rates]}
            for policy in POLICIES:
                outcome = runner.of(Setting(rates=rates, prices=prices), policy)
                paper = said[policy] if prices is HIGH else None
                rows.append(
                    f"{prices.name} price, {RATES[rates]}, {policy} | {percent(paper, 2)}"
                    f" | {percent(line, 2)} | {percent(outcome.summary.cost_ratio.mean)}"
                    f" | {met(outcome.summary)}"
                )
                label = f"{prices.name}, {RATES[rates]}\n{policy}"
                bars.append((label, outcome.few.cost_ratio, paper, line))
    section.head(f"Figure 5: static and adaptive, {Setting().label}")
    section.table(" | paper | Corollary 2 | here | deadlines met", rows)
    section.draw("figure-5.png", plots.bars(bars), "Static and adaptive cost beside the paper's")
    if not runner.asked.quick:
        _low(section, runner)


def _low(section: Section, runner: Runner) -> None:
    """Compare the savings at both prices. The paper describes them only in words."""
    low, high = (
        1 - runner.of(Setting(prices=prices), "static").summary.cost_ratio.mean
        for prices in (LOW, HIGH)
    )
    section.say(
        f"At the low price, the static split saves {percent(low)} at equal rates,"
        f" {low / high:.2f} times as much as at the high price ({percent(high)}). The paper says"
        ' "twice as much savings" without a number.'
    )


def _table_ii(section: Section, runner: Runner) -> None:
    section.head("Table II")
    section.say(
        "Here the data sets differ only in K, and the optimizer does not matter. θ₀ is 3,200 s for"
        " K = 10 and 1,280 s for K = 4."
    )
    rows, equal = [], []
    for row in stated.TABLE_II:
        static, adaptive = (runner.of(row.setting, policy).summary for policy in POLICIES)
        both = NONE
        if row.bound:
            equal.append(static)
            both = f"{percent(row.bound)} / {percent(Setting().bound)}"
        rows.append(
            f"{row.data}, {row.optimizer}, {RATES[row.rates]}, K = {row.group_size}"
            f" | {percent(row.static)} | {percent(static.cost_ratio.mean)} | {percent(static.met)}"
            f" | {percent(row.adaptive)} | {percent(adaptive.cost_ratio.mean)}"
            f" | {percent(adaptive.met)} | {both}"
        )
    section.table(
        " | static: paper | here | met | adaptive: paper | here | met | bound: paper / here", rows
    )
    shares = [each.cost_ratio.mean for each in equal]
    deviations = [each.runtime_ratio.std or 0.0 for each in equal]
    section.say(
        f"At equal rates, the static cost is {percent(min(shares), 2)} to {percent(max(shares), 2)}"
        " for every K, because equation 16 over the on-demand cost does not depend on K. Only the"
        f" standard deviation of runtimes does: {percent(deviations[0], 2)} of the deadline for"
        f" K = 20, {percent(deviations[-1], 2)} for K = 4. So the paper's differences between rows"
        " come from its tasks, optimizers and small number of runs."
    )
