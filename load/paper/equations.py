"""The formulas of sections III-B and IV-B against what the simulation gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.theory.preemption import Steps, updates_on_path
from common.theory.provisioning import cost_share_bound, plan
from common.theory.updates import partial_batches_s, runtime_of_renewal
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
    Setting,
    settings,
)

if TYPE_CHECKING:
    from load.paper.runner import Asked, Outcome, Runner

WITHIN = 0.01  # of equations 16 and 22


@dataclass(frozen=True, slots=True)
class Compared:
    """Means over runs."""

    cost_usd: float  # simulated
    expected_cost_usd: float
    runtime_s: float  # simulated
    expected_runtime_s: float
    error_usd: float  # standard error of the simulated cost's difference

    @property
    def cost_off(self) -> float:
        """Simulated over expected, less 1."""
        return self.cost_usd / self.expected_cost_usd - 1

    @property
    def runtime_off(self) -> float:
        """Simulated over expected, less 1."""
        return self.runtime_s / self.expected_runtime_s - 1


def run(asked: Asked, runner: Runner) -> Section:
    """Compare them."""
    section = Section("Equations against the simulation")
    _checks(section)
    wanted = settings(quick=asked.quick)
    simulations = {each: asked.simulation(each, "static") for each in wanted}
    done = runner.simulated("equations", list(simulations.values()))
    found = {each: _compare(each, done[s.name], asked) for each, s in simulations.items()}
    _costs(section, found, asked)
    _paths(section, done[simulations[wanted[0]].name])
    alone = asked.simulation(Setting(), "on-demand")
    _alone(section, runner.simulated("on demand", [alone])[alone.name])
    return section


def _checks(section: Section) -> None:
    """Theorem 4's check values."""
    rows, exact = [], True
    for (availability, factor), (spot, cost, bound) in stated.CHECKS.items():
        setting = Setting(availability, factor)
        best = plan(setting.work(), setting.market)
        least = cost_share_bound(factor, availability, HIGH.spot, HIGH.on_demand)
        ours = (best.spot, round(best.cost_ratio_to_on_demand, 4), round(least, 4))
        exact &= ours == (spot, cost, bound)
        rows.append(
            (
                setting.label,
                f"{spot} / {best.spot}",
                f"{percent(cost, 2)} / {percent(ours[1], 2)}",
                f"{percent(bound, 2)} / {percent(ours[2], 2)}",
            )
        )
    section.head("Theorem 4 and Corollary 2, by hand / here")
    section.table(("", "N_s*", "equation 16 over on-demand", "equation 19"), rows)
    section.say(
        f"All nine are to agree to the last digit shown: {section.judge(exact, 'Theorem 4')}."
    )
    section.data["theorem 4 agrees"] = exact


def _compare(setting: Setting, outcome: Outcome, asked: Asked) -> Compared:
    runs = outcome.runs
    works = [setting.work()] * len(runs)
    if setting.rates == "drawn":
        works = setting.drawn_works(len(runs), asked.seed, asked.scratch)
    plans = [plan(work, setting.market) for work in works]
    costs_usd = np.array([run.cost_usd for run in runs])
    expected_usd = np.array([each.expected_cost_usd for each in plans])
    return Compared(
        cost_usd=float(costs_usd.mean()),
        expected_cost_usd=float(expected_usd.mean()),
        runtime_s=float(np.mean([run.runtime_s for run in runs])),
        expected_runtime_s=float(np.mean([each.expected_runtime_s for each in plans])),
        error_usd=float((costs_usd - expected_usd).std(ddof=1) / np.sqrt(len(runs))),
    )


def _costs(section: Section, found: dict[Setting, Compared], asked: Asked) -> None:
    section.head("Cost and runtime of the static split")
    section.table(
        (
            "",
            "cost: equation 16 or 22",
            "simulated",
            "off",
            "runtime: equation 15 or 21",
            "simulated",
            "off",
        ),
        [
            (
                f"{setting.prices.name}, {RATES[setting.rates]}, {setting.label}",
                f"${one.expected_cost_usd:.2f}",
                f"${one.cost_usd:.2f}",
                f"{100 * one.cost_off:+.2f} %",
                f"{one.expected_runtime_s:,.0f} s",
                f"{one.runtime_s:,.0f} s",
                f"{100 * one.runtime_off:+.2f} %",
            )
            for setting, one in found.items()
        ],
    )
    worst = max(abs(one.cost_off) for one in found.values())
    slowest = max(abs(one.runtime_off) for one in found.values())
    off = max(abs(one.cost_usd - one.expected_cost_usd) / one.error_usd for one in found.values())
    section.say(
        f"Means of {asked.runs} runs. The cost is off by {percent(worst, 2)} at most, asked for was"
        f" {percent(WITHIN, 0)}: {section.judge(worst <= WITHIN, 'equation 16 or 22')}. The runtime"
        " is"
        f" off by {percent(slowest, 2)} at most. In standard errors of the simulated mean the"
        f" largest difference of a cost is {off:.1f}; what the equations leave out are the records"
        " in batches that are not full at the end, and that cost per second and runtime are not"
        " independent: a run with more outages costs less per second and takes longer."
    )
    section.data |= {
        setting.key: {
            "cost_usd": one.cost_usd,
            "expected_cost_usd": one.expected_cost_usd,
            "cost_off": one.cost_off,
            "runtime_s": one.runtime_s,
            "expected_runtime_s": one.expected_runtime_s,
            "runtime_off": one.runtime_off,
        }
        for setting, one in found.items()
    }


def _paths(section: Section, outcome: Outcome) -> None:
    """Equation 4: E[J_t] from the time that workers ran, in each run by itself."""
    made = []
    for run in outcome.runs:
        worked_s = sum(pool.machine_s for pool in run.pools)
        path = Steps(np.array([0.0, run.runtime_s]), np.array([worked_s / run.runtime_s]))
        made.append(updates_on_path(path, RATE_PER_S, GROUP_SIZE, BATCH_SIZE))
    late = partial_batches_s(np.full(WORKERS, RATE_PER_S), BATCH_SIZE)
    partial = late * WORKERS * RATE_PER_S / (GROUP_SIZE * BATCH_SIZE)
    mean, deviation = float(np.mean(made)), float(np.std(made, ddof=1))
    section.head("Equation 4")
    section.say(
        f"λ_A / (K b) times the machine time of each static run at the first setting above gives"
        f" {mean:,.2f} updates on average, standard deviation {deviation:.2f}; each run made"
        f" {UPDATES:,}. Records in batches that are not full are {partial:.2f} of an update more;"
        f" what is left, {mean - UPDATES - partial:+.2f}, is"
        f" {abs(mean - UPDATES - partial) / (deviation / np.sqrt(len(made))):.1f} standard errors"
        " of the mean. So preemption enters through the time that workers run, and through nothing"
        " else."
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
        f"θ₀ = J/λ_U = {law.mean:,.0f} s; with the {late_s:.2f} s of batches that are not full"
        f" {law.mean + late_s:,.2f} s. Simulated: {found.mean:,.2f} s, standard deviation"
        f" {found.deviation or 0:.2f} s where the renewal law says {law.std:.2f} s."
    )
    section.data["equation 3"] = {
        "expected_s": law.mean,
        "partial_batches_s": late_s,
        "simulated_s": found.mean,
        "simulated_std_s": found.deviation,
        "renewal_std_s": law.std,
    }
