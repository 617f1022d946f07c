"""Figures 3, 4 and 5 and Table II: what a static and an adaptive split cost, beside the paper's."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from common.theory.provisioning import cost_share_bound, plan
from load.paper import plots, stated
from load.paper.document import NONE, Section, cost, met, percent
from load.paper.explanations import explain_adaptive, explain_drawn, explain_static
from load.paper.job import HIGH, LOW, PAIRS, RATES, WORKERS, Setting, settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.policies.policy import PolicyName
    from load.paper.job import Rates
    from load.paper.runner import Asked, Outcome, Runner

POLICIES: tuple[PolicyName, ...] = ("static", "adaptive")


def run(asked: Asked, runner: Runner) -> Section:
    """Run them and write what came of it."""
    section = Section("Figures 3, 4 and 5, Table II")
    pairs = PAIRS[:1] if asked.quick else PAIRS
    wanted = settings(quick=asked.quick)
    wanted += [row.setting for row in stated.TABLE_II if not asked.quick]
    simulations = [
        asked.simulation(each, policy) for each in dict.fromkeys(wanted) for policy in POLICIES
    ]
    found = runner.simulated("figures 3 to 5, Table II", simulations)
    section.say(
        f"Constant prices: {HIGH.on_demand:g} $/h on demand and {HIGH.spot:g} on spot (high),"
        f" {LOW.on_demand:g} and {LOW.spot:g} (low). J = 10,000, N = {WORKERS}, K = 20 where"
        " nothing else is said, b = 256. Costs are shares of what on-demand machines alone cost."
        f" Of {asked.runs} runs the first 12 are also shown alone, as the paper made 12. In"
        " brackets: the 95 % interval of the mean; Wilson's of a share."
    )
    for number, rates in enumerate(RATES, 3):
        _static(section, rates, number, pairs, found, asked)
    section.draw(
        "figures-3-4.png",
        plots.cost_against_runtime(
            {
                RATES[rates]: {
                    pair: found[_name(Setting(*pair, rates), "static")].runs[:12] for pair in pairs
                }
                for rates in RATES
            },
            stated.STATIC,
        ),
        "Cost and runtime of 12 runs in each setting, and the means that the paper states",
    )
    explain_static(section, asked, runner)
    explain_drawn(section, asked, runner)
    _both(section, found, asked)
    explain_adaptive(section, asked, runner)
    if not asked.quick:
        _table_ii(section, found)
    for name, outcome in found.items():
        section.data[name] = outcome.summary.as_dict()
    return section


def _name(setting: Setting, policy: str) -> str:
    return f"{setting.key} {policy}"


def _static(
    section: Section,
    rates: Rates,
    number: int,
    pairs: tuple[tuple[float, float], ...],
    found: Mapping[str, Outcome],
    asked: Asked,
) -> None:
    """Figure 3 or 4: the static split at the high price."""
    section.head(f"Figure {number}: static split, {RATES[rates]}, high price")
    rows = []
    for pair in pairs:
        setting = Setting(*pair, rates)
        outcome = found[_name(setting, "static")]
        bound = cost_share_bound(pair[1], pair[0], HIGH.spot, HIGH.on_demand)
        rows.append(
            (
                setting.label,
                percent(stated.STATIC[rates][pair], 2),
                percent(bound, 2) if rates == "equal" else NONE,
                _expected(setting, asked),
                cost(outcome.few),
                cost(outcome.summary),
                met(outcome.summary),
            )
        )
    section.table(
        (
            "",
            "paper",
            "Corollary 2",
            "equation 16" if rates == "equal" else "equation 22",
            "12 runs",
            f"{len(outcome.runs)} runs",
            "deadlines met",
        ),
        rows,
    )


def _expected(setting: Setting, asked: Asked) -> str:
    works = [setting.work()]
    if setting.rates == "drawn":
        works = setting.drawn_works(asked.runs, asked.seed, asked.scratch)
    plans = [plan(work, setting.market) for work in works]
    share = fmean(best.cost_ratio_to_on_demand for best in plans)
    return f"{percent(share, 2)}, N_s = {fmean(best.spot for best in plans):.4g}"


def _both(section: Section, found: Mapping[str, Outcome], asked: Asked) -> None:
    """Figure 5: static and adaptive at both prices."""
    section.head(f"Figure 5: static and adaptive, {Setting().label}")
    rows, bars = [], []
    for prices in (HIGH,) if asked.quick else (HIGH, LOW):
        bound = cost_share_bound(1.05, 0.9, prices.spot, prices.on_demand)
        for rates in RATES:
            setting = Setting(rates=rates, prices=prices)
            pair = (setting.availability, setting.deadline_factor)
            said = {"static": stated.STATIC[rates][pair], "adaptive": stated.ADAPTIVE[rates]}
            for policy in POLICIES:
                outcome = found[_name(setting, policy)]
                paper = said[policy] if prices is HIGH else None
                rows.append(
                    (
                        f"{prices.name} price, {RATES[rates]}, {policy}",
                        percent(paper, 2),
                        percent(bound, 2) if rates == "equal" else NONE,
                        cost(outcome.few),
                        cost(outcome.summary),
                        met(outcome.summary),
                    )
                )
                label = f"{prices.name}, {RATES[rates]}\n{policy}"
                line = bound if rates == "equal" else None
                bars.append((label, outcome.few.cost_ratio, paper, line))
    columns = ("", "paper", "Corollary 2", "12 runs", f"{asked.runs} runs", "deadlines met")
    section.table(columns, rows)
    section.draw("figure-5.png", plots.bars(bars), "Static and adaptive cost beside the paper's")
    if not asked.quick:
        _low(section, found)


def _low(section: Section, found: Mapping[str, Outcome]) -> None:
    """Compare the savings at both prices: the paper gives them in words only."""
    saved = {
        prices.name: 1 - found[_name(Setting(prices=prices), "static")].summary.cost_ratio.mean
        for prices in (HIGH, LOW)
    }
    section.say(
        'At the low price the text says "twice as much savings" and no number. Here the static'
        f" split saves {percent(saved['low'])} against {percent(saved['high'])} at equal rates:"
        f" {saved['low'] / saved['high']:.2f} times as much."
    )


def _table_ii(section: Section, found: Mapping[str, Outcome]) -> None:
    section.head("Table II")
    section.say(
        "To the update process the data sets differ in K alone, the optimizers not at all. With J"
        " the same, θ₀ is 3,200 s for K = 10 and 1,280 s for K = 4, a cycle of 1,000 s as before."
    )
    rows = []
    for row in stated.TABLE_II:
        static, adaptive = (found[_name(row.setting, policy)] for policy in POLICIES)
        bound = cost_share_bound(1.05, 0.9, HIGH.spot, HIGH.on_demand)
        rows.append(
            (
                f"{row.data}, {row.optimizer}, {RATES[row.rates]}, K = {row.group_size}",
                percent(row.static),
                cost(static.summary),
                met(static.summary),
                percent(row.adaptive),
                cost(adaptive.summary),
                met(adaptive.summary),
                f"{percent(row.bound)} / {percent(bound)}" if row.bound else NONE,
            )
        )
    columns = ("", "static: paper", "here", "met", "adaptive: paper", "here", "met")
    section.table((*columns, "bound: paper / here"), rows)
    equal = [found[_name(row.setting, "static")] for row in stated.TABLE_II if row.bound]
    shares = [each.summary.cost_ratio.mean for each in equal]
    deviations = [each.summary.runtime_ratio.deviation or 0.0 for each in equal]
    section.say(
        f"At equal rates the static cost lies between {percent(min(shares), 2)} and"
        f" {percent(max(shares), 2)} whatever K is: equation 16 over the on-demand cost has no K."
        f" What K changes is how much runtimes vary: their standard deviation is"
        f" {percent(deviations[0], 2)} of the deadline for K = 20 and {percent(deviations[-1], 2)}"
        f" for K = 4, since a run of {stated.THETA_0_S * 4 / 20:,.0f} s sees fewer outages. So the"
        " differences between the paper's rows are not the update process's; they are what its"
        " tasks, their optimizers and its 12 runs made of it."
    )
