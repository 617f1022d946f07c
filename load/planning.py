"""How long plans for 10,000 workers take, and simulations of the paper's setting.

Plans are timed inside the function, simulations whole: drawing, running and summing up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path: this checkout's packages

from common.policies.chance import plan_with_probability
from common.policies.pools import plan_hold
from common.simulation.experiments.experiment import simulate
from common.simulation.experiments.spec import Experiment
from common.theory.provisioning import plan
from common.theory.work import Pool, Work, market
from load.harness import report

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS, RATE_PER_S, GROUP_SIZE, BATCH_SIZE, UPDATES = 64, 125.0, 20, 256, 10_000  # section V-A
MANY_WORKERS = 10_000
PLANS = 20  # in one repeat
RUNS = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time, and how often in one repeat."""

    name: str
    action: Callable[[], object]
    times: int = 1
    required_s: float | None = None  # at most


def main() -> int:
    """Time every case, print a table; returns the exit status."""
    parser = report.parser(__doc__, "python load/planning.py --repeats 9", kafka=False)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every case (3)")
    arguments = parser.parse_args()
    cases = _cases()
    times = {
        case.name: [_time(case) for _ in range(arguments.repeats)]
        for case in track(cases, "cases", transient=True)
    }
    result = {
        "seconds": {name: report.spread(seconds) for name, seconds in times.items()},
        "required": {case.name: case.required_s for case in cases if case.required_s},
    }
    rows = [(case.name, *_row(case, times[case.name])) for case in cases]
    columns = ("", "min, s", "median, s", "max, s", "required, s")
    report.draw(f"{arguments.repeats} repeats", columns, rows)
    late = [c.name for c in cases if c.required_s and np.median(times[c.name]) > c.required_s]
    return report.conclude(arguments.json, report.machine(), result, late)


def _cases() -> tuple[Case, ...]:
    rng = np.random.default_rng(1)
    rates = rng.uniform(1, 250, MANY_WORKERS)
    records = UPDATES * GROUP_SIZE * BATCH_SIZE
    work = Work(rates, GROUP_SIZE, BATCH_SIZE, UPDATES, 1.05 * records / rates.sum())
    paper = market(0.286, 0.158, 0.9)
    spots = [Pool(f"spot {n}", 0.1 + n / 100, 0.7 + n / 40, capacity=2000) for n in range(9)]
    pools = (paper.on_demand, *spots)
    many = f"{MANY_WORKERS:,} heterogeneous workers"
    return (
        Case(f"plan, {many}", lambda: plan(work, paper), PLANS, 0.05),
        Case(
            f"plan with a probability, {many}",
            lambda: plan_with_probability(work, paper, 0.95),
            PLANS,
        ),
        Case(f"plan over 10 pools, {many}", lambda: plan_hold(work, pools, 0.01)),
        Case(
            f"{WORKERS} workers, {UPDATES:,} updates, whole protocol",
            lambda: simulate(_experiment("full"), Path(), 1, 1),
            required_s=10.0,
        ),
        Case(
            f"{RUNS:,} such runs, update process alone",
            lambda: simulate(_experiment("updates"), Path(), RUNS, 1),
            required_s=10.0,
        ),
    )


def _experiment(mode: str) -> Experiment:
    return Experiment.model_validate(
        {
            "workers": WORKERS,
            "rates": RATE_PER_S,
            "group_size": GROUP_SIZE,
            "batch_size": BATCH_SIZE,
            "updates": UPDATES,
            "deadline_factor": 1.05,
            "on_demand": {"usd_per_hour": 0.286},
            "spot": [{"usd_per_hour": 0.158, "availability": 0.9}],
            "mode": mode,
        }
    )


def _time(case: Case) -> float:
    """Seconds of one action."""
    began = perf_counter()
    for _ in range(case.times):
        case.action()
    return (perf_counter() - began) / case.times


def _row(case: Case, seconds: list[float]) -> tuple[str, ...]:
    told = (f"{f(seconds):.4f}" for f in (min, np.median, max))
    return (*told, "" if case.required_s is None else f"{case.required_s:g}")


if __name__ == "__main__":
    sys.exit(report.run(main))
