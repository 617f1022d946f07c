"""Several zones that open and close as a whole: the cost of `pools` beside the lowest possible.

A zone has room for all machines or for none, as recorded, at its true speed. Sped up, lives would
be no longer than start-ups. All zones of a run begin at one time of the recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.errors import UserError
from common.spot.experiments.draws import draws_of
from common.spot.experiments.experiment import simulate
from common.spot.experiments.spec import Experiment
from load.paper.policies import MINIMUM_S, START_UP_S

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.traces.trace import Bools, Floats

# USD per hour of a machine with one V100 in 2023.
SPOT_USD, ON_DEMAND_USD = 0.918, 3.06
STREAMS, RATE_PER_S, GROUP_SIZE, BATCH_SIZE = 16, 125.0, 20, 256
HOURS_S = 24 * 3600.0
FACTORS = (1.05, 1.25)  # theta / theta_0
# A third of the recording's interval.
LOOK_S = 65.0
# Steps of the search for the best price of work. Each leaves two thirds of the interval.
SEARCH = 40


@dataclass(frozen=True, slots=True)
class Work:
    """A job on some zones. Picklable."""

    zones: tuple[Path, ...]
    deadline_factor: float
    runs: int
    seed: int


class Found(NamedTuple):
    """Means over runs. Costs are shares of the cost of on-demand machines alone."""

    cost: float
    clairvoyant: float
    met: int


def measured(work: Work) -> Found:
    """Run a job, and compute its lowest possible cost if all zones' times are known."""
    job = job_of(work)
    folder = work.zones[0].parent
    runs = simulate(job, folder, work.runs, work.seed)
    draws = draws_of(job, folder, work.runs, work.seed)
    looks = np.arange(0, HOURS_S, LOOK_S)
    up = np.array([[offers(at_s)[:, 0] for at_s in looks] for offers in draws.offers if offers])
    least_usd = least_machine_usd(up.transpose(1, 0, 2), HOURS_S / work.deadline_factor)
    alone_usd = ON_DEMAND_USD / 3600 * HOURS_S / work.deadline_factor
    return Found(
        fmean(run.cost_ratio for run in runs),
        float(least_usd.mean()) / alone_usd,
        sum(run.met for run in runs),
    )


def job_of(work: Work) -> Experiment:
    """Return the job: a day of sixteen streams."""
    per_update = GROUP_SIZE * BATCH_SIZE
    billing = {"minimum_s": MINIMUM_S}
    alone_s, spot_s = START_UP_S
    return Experiment.model_validate(
        {
            "workers": STREAMS,
            "rates": RATE_PER_S,
            "group_size": GROUP_SIZE,
            "batch_size": BATCH_SIZE,
            "updates": round(HOURS_S / work.deadline_factor * RATE_PER_S * STREAMS / per_update),
            "deadline_s": HOURS_S,
            "on_demand": {
                "usd_per_hour": ON_DEMAND_USD,
                "start_up_s": alone_s,
                "billing": billing,
            },
            "spot": [
                {
                    "name": f"{path.parent.name} {path.name.partition('.')[0]}",
                    "usd_per_hour": SPOT_USD,
                    "availability": {"file": path.name},
                    "together": True,
                    "start_up_s": spot_s,
                    "billing": billing,
                }
                for path in work.zones
            ],
            "policy": {"name": "pools", "spot_up_to": 1.5},
        }
    )


def zones_in(folder: Path) -> tuple[Path, ...]:
    """Return the zones: recordings of one machine, side by side in one folder.

    Raises:
        UserError: If the folder has no zones.
    """
    found = sorted((*folder.glob("*.json"), *folder.glob("*.json.gz")))
    if not found:
        raise UserError(f"{folder}: has no recorded zones (JSON with metadata.gap_seconds)")
    return tuple(found)


def least_machine_usd(up: Bools, work_s: float) -> Floats:
    """Return a lower bound of one machine's cost if all zones' times are known, (R,) USD.

    Suppose that each second of work earns a price. Then the best schedule is a shortest path
    through time: in each step, the machine is idle, in one zone, or on demand, and a move costs the
    work of a start-up. At the price with the greatest bound, the bound is the optimum of the linear
    program with fractional machines (Lagrangian dual).

    Args:
        up: (T, Z, R) True if a zone has room, every `LOOK_S`.
        work_s: Seconds of work.
    """
    zones, runs = up.shape[1:]
    usd_per_s = np.array([0.0, *[SPOT_USD] * zones, ON_DEMAND_USD])[:, None] / 3600
    start_s = np.array([0.0, *[START_UP_S[1]] * zones, START_UP_S[0]])[:, None]
    works = np.array([0.0, *[1.0] * (zones + 1)])[:, None]
    closed = np.zeros((len(up), zones + 2, runs))
    closed[:, 1:-1][~up] = np.inf

    def bound(price: Floats) -> Floats:
        steps = (usd_per_s - price * works) * LOOK_S
        least = np.zeros((zones + 2, runs))
        for index, shut in enumerate(closed):
            if index:
                least = np.minimum(least, least.min(axis=0) + price * start_s)
            least = least + steps + shut
        total: Floats = least.min(axis=0) + price * work_s
        return total

    low, high = np.zeros(runs), np.full(runs, 2 * ON_DEMAND_USD / 3600)
    for _ in range(SEARCH):
        third = (high - low) / 3
        left_is_less = bound(low + third) < bound(high - third)
        low, high = (
            np.where(left_is_less, low + third, low),
            np.where(left_is_less, high, high - third),
        )
    return bound((low + high) / 2)
