"""Measures the time of plans for 10,000 workers, and of simulations of the paper's setting.

Plans are timed inside the function; simulations include drawing, running and summing up. Policies
that count machines decide after a loss in each pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from timeit import repeat
from typing import NamedTuple

import numpy as np
from rich.progress import track

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from common.spot.experiments.experiment import simulate
from common.spot.experiments.spec import Experiment
from common.spot.machines import PriceHistory
from common.spot.policies.bidding import Bidding, odds_of
from common.spot.policies.chance import plan_with_probability
from common.spot.policies.policy import Hour, MachineCount, Policy, Situation
from common.spot.policies.pools import Pools
from common.spot.theory.billing import HOUR_S
from common.spot.theory.provisioning import plan
from common.spot.theory.work import Pool, Work, market
from load.harness import report

WORKERS, RATE_PER_S, GROUP_SIZE, BATCH_SIZE, UPDATES = 64, 125.0, 20, 256, 10_000  # section V-A
MANY_WORKERS = 10_000
PLANS = 20  # per repeat
RUNS = 1000
DECISION_S = 0.02  # at most
LOST = 3  # lost machines of each pool
PAST_S, PAST_STEP_S = 48 * HOUR_S, 900.0  # prices


class Case(NamedTuple):
    """An action to time, and its number of calls in one repeat."""

    name: str
    action: Callable[[], object]
    times: int = 1
    required_s: float = inf  # at most


def main() -> int:
    """Time every case and print a table. Returns the exit status."""
    parser = report.parser(__doc__, "python load/planning.py --repeats 9", kafka=False)
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="repeats of every case (3)"
    )
    arguments = parser.parse_args()
    cases = _cases()
    seconds, rows = dict[str, dict[str, float]](), []
    for name, action, times, required_s in track(cases, "cases", transient=True):
        # `repeat` would disable the garbage collector.
        setup = "import gc; gc.enable()"
        found = repeat(action, setup, number=times, repeat=arguments.repeats)
        seconds[name] = report.spread([taken_s / times for taken_s in found])
        shown = (f"{seconds[name][which]:.4f}" for which in ("min", "median", "max"))
        rows.append((name, *shown, f"{required_s:g}" if required_s < inf else ""))
    columns = ("", "min, s", "median, s", "max, s", "required, s")
    report.draw(f"{arguments.repeats} repeats", columns, rows)
    required = {case.name: case.required_s for case in cases if case.required_s < inf}
    late = [name for name, most_s in required.items() if seconds[name]["median"] > most_s]
    result = {"seconds": seconds, "required": required}
    return report.conclude(arguments.json, report.machine(), result, late)


def _cases() -> tuple[Case, ...]:
    rng = np.random.default_rng(1)
    rates = rng.uniform(1, 250, MANY_WORKERS)
    records = UPDATES * GROUP_SIZE * BATCH_SIZE
    work = Work(rates, GROUP_SIZE, BATCH_SIZE, UPDATES, 1.05 * records / rates.sum())
    paper = market(0.286, 0.158, 0.9)
    spots = [Pool(f"spot {n}", 0.1 + n / 300, 0.7 + n / 120, capacity=2000) for n in range(29)]
    pools = (paper.on_demand, *spots)
    many = f"{MANY_WORKERS:,} heterogeneous workers"
    return (
        Case(f"plan, {many}", lambda: plan(work, paper), PLANS, 0.05),
        Case(
            f"plan with a probability, {many}",
            lambda: plan_with_probability(work, paper, 0.95),
            PLANS,
        ),
        *_decisions(work, pools, many),
        Case(
            f"{WORKERS} workers, {UPDATES:,} updates, whole protocol",
            lambda: simulate(_experiment("protocol"), Path(), 1, 1),
            required_s=8.0,
        ),
        Case(
            f"{RUNS:,} such runs, update process alone",
            lambda: simulate(_experiment("analytic"), Path(), RUNS, 1),
            required_s=10.0,
        ),
    )


def _decisions(work: Work, pools: tuple[Pool, ...], many: str) -> Iterator[Case]:
    rng, times_s = np.random.default_rng(1), np.arange(0, PAST_S, PAST_STEP_S)
    past = {
        pool.name: PriceHistory(
            tuple(times_s.tolist()),
            tuple((pool.usd_per_hour * rng.uniform(0.8, 1.5, len(times_s))).tolist()),
            PAST_S,
        )
        for pool in pools
    }
    policies: dict[str, Policy] = {
        "pools": Pools(),
        "pools where streams move": Pools("reassign"),
        "bids": Bidding(odds=odds_of(pools, past)),
    }
    up = np.ones(MANY_WORKERS, np.bool_)
    for name, policy in policies.items():
        waiting = float(UPDATES) if policy.plans_backlog else None
        situation = Situation(0.0, work, pools, 0.001, up, waiting)
        first = policy.reconsider(situation, None)
        there = {
            offer: MachineCount(max(count - LOST, 0)) for offer, count in first.machines.items()
        }
        hours = {offer: Hour(HOUR_S, pools[0].usd_per_hour) for offer in there}
        later = replace(situation, now_s=60.0, machines=there, hours=hours)
        action = partial(policy.reconsider, later, first)
        yield Case(f"decision over {len(pools)} pools, {name}, {many}", action, PLANS, DECISION_S)


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


if __name__ == "__main__":
    sys.exit(report.run(main))
