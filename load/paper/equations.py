"""Compares the formulas of sections III-B and IV-B with the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.spot.theory.provisioning import plan
from common.spot.theory.work import partial_batches_s
from load.paper import stated
from load.paper.document import Section, percent
from load.paper.job import (
    BATCH_SIZE,
    GROUP_SIZE,
    HIGH,
    RATE_PER_S,
    RATES,
    UPDATES,
    WORKERS,
    Case,
    Setting,
    settings,
)
from load.paper.updates_law import runtime_of_renewal

if TYPE_CHECKING:
    from load.paper.runner import Outcome, Runner

WITHIN = 0.01  # equations 16 and 22


def run(runner: Runner) -> Section:
    """Compare each formula with the simulation."""
    section = Section("Equations against the simulation")
    _checks(section)
    wanted = settings(quick=runner.asked.quick)
    runner.simulated("equations", [Case(each, "static") for each in wanted])
    _costs(section, wanted, runner)
    _paths(section, runner.of(wanted[0], "static"))
    _alone(section, runner.of(Setting(), "on-demand"))
    return section


def _checks(section: Section) -> None:
    """Compare Theorem 4 with values computed by hand."""
    exact = True
    for (availability, factor), (spot, cost, bound) in stated.CHECKS.items():
        setting = Setting(availability, factor)
        best = plan(setting.work(), setting.market)
        ours = (best.spot, round(best.cost_ratio_to_on_demand, 4), round(setting.bound, 4))
        exact &= ours == (spot, cost, bound)
    section.say(
        "N_s*, equation 16 over on-demand and equation 19 in figure 3's settings must equal the"
        f" values computed by hand to 0.01 %: {section.judge(exact, 'Theorem 4')}."
    )
    section.data["theorem 4 agrees"] = exact


def _costs(section: Section, wanted: list[Setting], runner: Runner) -> None:
    rows, cost_off, runtime_off, errors = [], list[float](), list[float](), list[float]()
    for setting in wanted:
        runs, plans = runner.of(setting, "static").runs, runner.plans(setting)
        costs_usd = np.array([run.cost_usd for run in runs])
        expected_usd = np.array([each.expected_cost_usd for each in plans])
        cost_usd, law_usd = float(costs_usd.mean()), float(expected_usd.mean())
        runtime_s = float(np.mean([run.runtime_s for run in runs]))
        law_s = float(np.mean([each.expected_runtime_s for each in plans]))
        cost_off.append(cost_usd / law_usd - 1)
        runtime_off.append(runtime_s / law_s - 1)
        error_usd = (costs_usd - expected_usd).std(ddof=1) / np.sqrt(len(runs))
        errors.append(abs(cost_usd - law_usd) / error_usd)
        if setting.prices is HIGH:
            rows.append(
                f"{RATES[setting.rates]}, {setting.label} | ${law_usd:.2f}"
                f" | ${cost_usd:.2f} | {100 * cost_off[-1]:+.2f} %"
                f" | {law_s:,.0f} s | {runtime_s:,.0f} s | {100 * runtime_off[-1]:+.2f} %"
            )
        section.data[setting.key] = {
            "cost_usd": cost_usd,
            "expected_cost_usd": law_usd,
            "cost_off": cost_off[-1],
            "runtime_s": runtime_s,
            "expected_runtime_s": law_s,
            "runtime_off": runtime_off[-1],
        }
    section.head("Cost and runtime of the static split")
    section.table(
        " | cost: equation 16 or 22 | simulated | off"
        " | runtime: equation 15 or 21 | simulated | off",
        rows,
    )
    worst = max(map(abs, cost_off))
    section.say(
        f"Means of {runner.asked.runs} runs at the high price. Over both prices, the cost is off by"
        f" at most {percent(worst, 2)} (allowed: {percent(WITHIN, 0)},"
        f" {section.judge(worst <= WITHIN, 'equation 16 or 22')}) and the runtime by at most"
        f" {percent(max(map(abs, runtime_off)), 2)}. The largest difference of a cost is"
        f" {max(errors):.1f} standard errors, because the equations leave out records in incomplete"
        " batches at the end, and that a run with more outages costs less per second and takes"
        " longer."
    )


def _paths(section: Section, outcome: Outcome) -> None:
    """Equation 4: E[J_t] = lambda_A / (K b) times the integral of N(t), in each run separately."""
    made = []
    for run in outcome.runs:
        worked_s = sum(pool.machine_s for pool in run.pools)
        made.append(worked_s * RATE_PER_S / (GROUP_SIZE * BATCH_SIZE))
    late = partial_batches_s(np.full(WORKERS, RATE_PER_S), BATCH_SIZE)
    partial = late * WORKERS * RATE_PER_S / (GROUP_SIZE * BATCH_SIZE)
    mean, deviation = float(np.mean(made)), float(np.std(made, ddof=1))
    rest, error = mean - UPDATES - partial, deviation / np.sqrt(len(made))
    section.head("Equation 4")
    section.say(
        "λ_A / (K b) times the machine time of each static run at the first setting gives"
        f" {mean:,.2f} updates on average (standard deviation {deviation:.2f}); each run made"
        f" {UPDATES:,}. Records in incomplete batches are {partial:.2f} updates; the rest,"
        f" {rest:+.2f}, is {abs(rest) / error:.1f} standard errors. So preemption matters only"
        " through the time that workers run."
    )
    section.data["equation 4"] = {"mean": mean, "std": deviation, "partial": partial}


def _alone(section: Section, outcome: Outcome) -> None:
    """Corollary 1: the runtime without preemption."""
    rates = np.full(WORKERS, RATE_PER_S)
    law = runtime_of_renewal(UPDATES, rates, GROUP_SIZE, BATCH_SIZE)
    late_s = partial_batches_s(rates, BATCH_SIZE)
    found = outcome.summary.runtime_s
    section.head("Equation 3, on-demand machines alone")
    section.say(
        f"θ₀ = J/λ_U = {law.mean:,.0f} s, or {law.mean + late_s:,.2f} s with {late_s:.2f} s for"
        f" incomplete batches. Simulated: {found.mean:,.2f} s, with a standard deviation of"
        f" {found.std or 0:.2f} s (renewal law: {law.std:.2f} s)."
    )
    section.data["equation 3"] = {
        "expected_s": law.mean,
        "partial_batches_s": late_s,
        "simulated_s": found.mean,
        "simulated_std_s": found.std,
        "renewal_std_s": law.std,
    }
