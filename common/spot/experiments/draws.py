"""Draws an experiment's runs: the job in each run, its pools, its market."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.spot.experiments.arrivals import draw_rates
from common.spot.experiments.policy_driver import Givens
from common.spot.experiments.preemption import Offers, offers_of
from common.spot.experiments.prices import ConstantPrices, PoolPrices, prices_of
from common.spot.theory.capacity import update_capacity_per_s
from common.spot.theory.work import Pool, gb_per_hour
from common.spot.traces.files import common_starts_s, read_once, traced
from common.spot.traces.spec import TraceSpec

if TYPE_CHECKING:
    from pathlib import Path

    from common.spot.experiments.spec import Experiment, SpotSpec
    from common.spot.traces.trace import Trace


# Time of a round besides its gradients, as measured with 4 small workers.
ROUND_OVERHEAD_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """R runs of one experiment, drawn but not yet run. Prices and offers can be used once."""

    experiment: Experiment
    givens: Givens
    # One for each pool, on-demand first.
    prices: tuple[PoolPrices, ...]
    # One for each pool, on-demand first; None if the pool always has machines.
    offers: tuple[Offers | None, ...]
    # Folder of the experiment's files.
    folder: Path
    seed: int
    # Source of draws during the runs.
    rng: np.random.Generator


@read_once()
def draws_of(experiment: Experiment, folder: Path, runs: int, seed: int) -> Draws:
    """Draw everything that does not depend on a policy's decisions.

    So the same seed gives all policies, and both modes, the same rates, prices and preemptions.

    Raises:
        UserError: If a trace cannot be read, or a number is invalid.
    """
    rates_rng, prices_rng, offers_rng, rng, starts_rng = np.random.default_rng(seed).spawn(5)
    # A backlog has no rates. Assume those at which all on-demand machines process records.
    if experiment.rates is None:
        each_per_s = _computed_per_s(experiment) / experiment.workers
        rates_per_s = np.full((runs, experiment.workers), each_per_s)
    else:
        rates_per_s = draw_rates(experiment.rates, experiment.workers, runs, rates_rng)
    if not rates_per_s.any(axis=1).all():
        raise UserError("rates: all rates of a run are 0; at least one must be above 0")
    alone = experiment.on_demand
    prices: list[PoolPrices] = [ConstantPrices(alone.usd_per_hour, runs)]
    offers: list[Offers | None] = [None]
    pools = [Pool.of(alone, name="on-demand", billing=alone.billing.rules())]
    slots_per_pool = math.ceil(experiment.workers * experiment.policy.spot_up_to)
    common_s = None
    # Recordings of several pools share a run's start, so simultaneous events stay simultaneous.
    if len(experiment.spot) > 1:
        specs = [(spot.usd_per_hour, spot.availability) for spot in experiment.spot]
        series = [spec for pool in specs for spec in pool if isinstance(spec, TraceSpec)]
        common_s = common_starts_s(series, folder, runs, starts_rng)
    for spot in experiment.spot:
        pool_prices = prices_of(spot.usd_per_hour, folder, runs, prices_rng, common_s)
        prices.append(pool_prices)
        shape = runs, slots_per_pool
        offers.append(offers_of(spot, pool_prices, folder, *shape, offers_rng, common_s))
        pools.append(spot_on_average(spot, folder, experiment.workers))
    records = experiment.updates * experiment.group_size * experiment.batch_size
    undisturbed_s = records / rates_per_s.sum(axis=1)
    if experiment.deadline_s is not None:
        deadline_s = np.full(runs, experiment.deadline_s)
    else:
        deadline_s = undisturbed_s * (experiment.deadline_factor or 1.0)
    updates_per_s = experiment.updates / float(undisturbed_s.mean())
    moved = gb_per_hour(experiment.update_mb, updates_per_s)
    givens = Givens(
        tuple(replace(pool, gb_per_hour=moved) for pool in pools),
        rates_per_s,
        experiment.group_size,
        experiment.batch_size,
        experiment.updates,
        deadline_s,
        experiment.gradient.mean_s,
        slots_per_pool,
    )
    return Draws(experiment, givens, tuple(prices), tuple(offers), folder, seed, rng)


def _computed_per_s(experiment: Experiment) -> float:
    """Return the records per second that all on-demand machines compute."""
    machines = np.array([float(experiment.workers)])
    mean_s = experiment.gradient.mean_s
    capacity = update_capacity_per_s(machines, experiment.group_size, mean_s, ROUND_OVERHEAD_S)
    return float(capacity[0]) * experiment.group_size * experiment.batch_size


def spot_on_average(spec: SpotSpec, folder: Path, workers: int) -> Pool:
    """Return a pool with its averages, which are all that a plan in advance can know.

    Args:
        spec: The pool.
        folder: Folder of its files.
        workers: Number of machines that may be wanted.

    Raises:
        UserError: If a file cannot be read.
    """
    if isinstance(spec.availability, TraceSpec):
        trace = traced(spec.availability, folder)
        availability, cycle_s = _on_average(trace, workers, together=spec.together)
    else:
        availability, cycle_s = spec.availability, spec.cycle_s
    priced = spec.usd_per_hour
    usd_per_hour = traced(priced, folder).mean() if isinstance(priced, TraceSpec) else priced
    if spec.bid_usd_per_hour is not None and not isinstance(spec.usd_per_hour, TraceSpec):
        availability *= usd_per_hour <= spec.bid_usd_per_hour
    if spec.bid_usd_per_hour is not None and isinstance(spec.usd_per_hour, TraceSpec):
        trace = traced(spec.usd_per_hour, folder)
        below = trace.values <= spec.bid_usd_per_hour
        availability *= trace.share(below)
        cycle_s = min(cycle_s, trace.end_s / max(_falls(below), 1))
        # Only prices while there is a machine are paid.
        if below.any():
            paid_s = trace.durations_s * below
            usd_per_hour = float(trace.values @ paid_s / paid_s.sum())
    return Pool.of(
        spec,
        usd_per_hour=usd_per_hour,
        availability=availability,
        cycle_s=cycle_s,
        billing=spec.billing.rules(),
    )


def _on_average(trace: Trace, workers: int, *, together: bool) -> tuple[float, float]:
    """Return availability and mean cycle of a machine, by a trace of the number of machines."""
    most = int(trace.values.max())
    places = np.zeros(1) if most <= 1 else np.arange(workers if together else min(workers, most))
    had = [trace.values > place for place in places]
    availability = float(np.mean([trace.share(holds) for holds in had]))
    falls = float(np.mean([_falls(holds) for holds in had]))
    return availability, trace.end_s / max(falls, 1.0)


def _falls(holds: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return how often a condition stops holding in one lap of a trace."""
    return int(np.count_nonzero(holds & ~np.roll(holds, -1)))
