"""The remaining work of a job as the theory's `Work`, and a policy's decision from its record.

A job may lack a number of updates or a deadline. Without a deadline, time is free and the cheapest
machines will do. A job that stops at a loss has as many updates left as its loss curve says, once
that is certain enough. Without a number of updates, its work is what arrives until the deadline,
less a tenth: a plan for every last record would leave no time for an outage, and so forbid all spot
machines. Without either, the plan is for an hour of arrivals, without haste.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from common.spot.policies.policy import NOWHERE, ON_DEMAND, Decision, Situation, by_slot
from common.spot.theory.capacity import machines_for_stability, update_capacity_per_s
from common.spot.theory.preemption import distribution_of_running
from common.spot.theory.provisioning import Binding, Plan
from common.spot.theory.work import Pool, Rates, Work

if TYPE_CHECKING:
    from common.spot.provisioning.records import Planned
    from common.spot.provisioning.settings import ProvisionerSettings

# Share of the arrivals until the deadline, if the number of updates is unknown.
TRAINED_SHARE = 0.9
# Planned time of a job that never ends.
HORIZON_S = 3600.0
# Time for a job without a deadline, as a multiple of its time with on-demand machines alone. Even a
# pool that is available for a hundredth of the time can then have all workers.
HASTE = 1000.0
# Seconds or dollars of a plan that never ends, as a JSON number.
NEVER = 1e12


def bounded(value: float) -> float:
    """Return a number that a record can hold."""
    return float(min(max(value, 0.0), NEVER)) if value == value else NEVER  # noqa: PLR0124 -- NaN is not itself


def work_left(
    settings: ProvisionerSettings,
    rates_per_s: Rates,
    made: float,
    now_s: float,
    updates_to_loss: float | None = None,
) -> Work:
    """Return the remaining work, and the time for it.

    Args:
        settings: Settings of the job.
        rates_per_s: (N_tot,) lambda_A,n.
        made: Updates so far, as the job counts them.
        now_s: Seconds since 1970.
        updates_to_loss: Number of updates until the job stops at its loss; None if unknown.

    Raises:
        ParameterError: If there are no arrivals.
    """
    group, batch = settings.group_size, settings.batch_size
    updates_per_s = float(rates_per_s.sum()) / (group * batch)
    left_s = deadline_left_s(settings, now_s)
    updates = updates_left(settings, made, updates_to_loss)
    if updates is None:
        updates = updates_per_s * (HORIZON_S if left_s is None else TRAINED_SHARE * left_s)
    if left_s is None:
        left_s = HASTE * max(updates / updates_per_s, 1.0) if updates_per_s else HASTE
    return Work(rates_per_s, group, batch, updates, left_s)


def updates_left(
    settings: ProvisionerSettings, made: float, updates_to_loss: float | None
) -> float | None:
    """Return the number of updates until the job stops, by number or by loss; None if unknown."""
    ends = [] if updates_to_loss is None else [updates_to_loss]
    if settings.updates is not None:
        ends.append(max(settings.updates - made, 0.0))
    return min(ends, default=None)


def deadline_left_s(settings: ProvisionerSettings, now_s: float) -> float | None:
    """Return theta; None without a deadline."""
    if settings.deadline_at_s is None:
        return None
    return max(settings.deadline_at_s - now_s, 0.0)


@dataclass(frozen=True, slots=True)
class Stability:
    """Proposition 1: ability of updates to keep up with arrivals."""

    ratio: float  # capacity over arrivals
    # Number of machines of speed 1 that keep up; None if no number does.
    needed: int | None


def stability_of_plan(decision: Decision, situation: Situation) -> Stability:
    """Return the stability of the machines that a decision has on average."""
    places, pools = decision.places, situation.pools
    certain = places == ON_DEMAND
    spot = places[(places != NOWHERE) & ~certain]
    if decision.counted:
        certain = decision.pools == ON_DEMAND
        spot = decision.pools[~certain]
    shares = np.array([pool.availability for pool in pools])[spot]
    speeds = np.array([pool.speed for pool in pools])[spot]
    fixed = np.count_nonzero(certain) * pools[ON_DEMAND].speed
    if not spot.size:
        return _stability(situation, np.array([float(fixed)]), np.array([1.0]))
    machines = fixed + float(speeds.mean()) * np.arange(spot.size + 1.0)
    most = situation.work.workers * max(pool.speed for pool in pools)
    # Machines beyond the slots are spares.
    machines = np.minimum(machines, most)
    chances = np.asarray(distribution_of_running(int(spot.size), float(shares.mean())))
    return _stability(situation, machines, chances)


def stability_of_fleet(machines: float, situation: Situation) -> Stability:
    """Return the stability of running machines, given the sum of their speeds."""
    return _stability(situation, np.array([machines]), np.array([1.0]))


def _stability(situation: Situation, machines: Rates, chances: Rates) -> Stability:
    work = situation.work
    capacity = update_capacity_per_s(machines, work.group_size, situation.gradient_s)
    needed = machines_for_stability(work, situation.gradient_s, headroom=1.0)
    return Stability(float(chances @ capacity) / work.updates_per_s, needed)


def restored(record: Planned, situation: Situation, submitted_s: float) -> Decision | None:
    """Restore a decision from its record, as far as possible.

    None for other pools or another number of slots. The record has no rates of single slots; their
    ratios are assumed to be the current ones.
    """
    work = situation.work
    names = tuple(pool.name for pool in situation.pools)
    if record.pools != names or not (record.counted or len(record.places) == work.workers):
        return None
    now_per_s = work.records_per_s
    believed = record.believed
    then_per_s = believed["arrivals_per_s"].value if "arrivals_per_s" in believed else now_per_s
    then = Work(
        work.rates_per_s * (then_per_s / now_per_s if then_per_s else 1.0),
        work.group_size,
        work.batch_size,
        record.updates_left,
        work.deadline_s if record.deadline_left_s is None else record.deadline_left_s,
    )
    places = np.array(record.places, np.int8)
    ratio = record.expected_cost_usd / record.on_demand_only_usd if record.on_demand_only_usd else 1
    plan = Plan(
        feasible=record.feasible,
        spot=record.spot,
        on_demand=record.on_demand,
        spot_workers=np.flatnonzero(places > ON_DEMAND),
        expected_cost_usd=record.expected_cost_usd,
        expected_runtime_s=record.expected_runtime_s,
        cost_ratio_to_on_demand=ratio,
        binding=_binding(record.binding),
        reason=record.reason,
    )
    gradient = believed.get("gradient_s")
    basis = Situation(
        now_s=record.at_s - submitted_s,
        work=then,
        pools=tuple(_then(pool, record) for pool in situation.pools),
        gradient_s=gradient.value if gradient and gradient.value else situation.gradient_s,
        up=np.ones(work.workers, np.bool_),
    )
    if record.counted:
        return Decision(record.counts, plan, record.reason, basis)
    return by_slot(places, plan, record.reason, basis)


def _then(pool: Pool, record: Planned) -> Pool:
    """Return a pool as it was estimated when the record was written."""
    availability = record.believed.get(f"availability.{pool.name}")
    cycle_s = record.believed.get(f"cycle_s.{pool.name}")
    return replace(
        pool,
        usd_per_hour=record.usd_per_hour.get(pool.name, pool.usd_per_hour),
        availability=min(availability.value, 1.0) if availability else pool.availability,
        cycle_s=cycle_s.value if cycle_s and cycle_s.value else pool.cycle_s,
    )


def _binding(text: str) -> Binding:
    known: tuple[Binding, ...] = get_args(Binding)
    return next((binding for binding in known if binding == text), "deadline")
