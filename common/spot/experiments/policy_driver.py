"""Asks policies and applies their decisions, for many runs at once.

A policy knows either the true rates and availabilities, as for a static plan, or estimates from
what could be observed so far: running tallies and a weak prior, as in section V-C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.experiments.results import PolicyChange
from common.spot.machines import Offer
from common.spot.policies.policy import ON_DEMAND, Decision, MachineCount, Policy, Situation
from common.spot.theory.capacity import waiting_for_policy
from common.spot.theory.estimates import (
    ONE_CYCLE,
    availability_from_times,
    cycle_from_times,
    rate_from_counts,
)
from common.spot.theory.work import Pool, Work

if TYPE_CHECKING:
    from common.spot.experiments.fleet import SimulatedFleet
    from common.spot.theory.estimates import CyclePrior, RatePrior

Array: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Indexes: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Givens:
    """The job in each of R runs, and the pools that it can rent from."""

    # On-demand first, with average values.
    pools: tuple[Pool, ...]
    # (R, N) lambda_A,n of each worker's stream.
    rates_per_s: Array
    group_size: int  # K
    batch_size: int  # b
    updates: int  # J(epsilon)
    deadline_s: Array  # (R,) theta
    gradient_s: float  # mu_C, on the first pool
    # Machines of one pool at a time, if they are counted; if 0, one for each worker.
    slots_per_pool: int = 0

    @property
    def runs(self) -> int:
        """R."""
        return len(self.rates_per_s)

    @property
    def workers(self) -> int:
        """N_tot, one per stream."""
        return int(self.rates_per_s.shape[1])

    @property
    def records(self) -> int:
        """J K b, the records of all updates."""
        return self.updates * self.group_size * self.batch_size

    @property
    def undisturbed_s(self) -> Array:
        """(R,) theta_0."""
        undisturbed: Array = self.records / self.rates_per_s.sum(axis=1)
        return undisturbed

    @property
    def on_demand_only_usd(self) -> Array:
        """(R,) cost of theta_0 with all workers on demand."""
        return self.undisturbed_s * self.workers * self.pools[ON_DEMAND].wanted_usd_per_s


@dataclass(frozen=True, slots=True, eq=False)
class Priors:
    """Assumptions about a job before any observation."""

    # Prior of every stream; its time must be above 0.
    rate: RatePrior
    # Prior of every pool that may be preempted.
    machines: CyclePrior = ONE_CYCLE


# Observations of the streams so far: (n, N) records of each stream in some runs, and the seconds in
# which they arrived.
Tallies: TypeAlias = Callable[[Indexes], tuple[Array, Array]]


class PolicyDriver:
    """Asks a policy for each run, passes its orders to the fleet and keeps its decisions.

    A policy decides at time 0, when a price has changed, at its reviews and, if it watches
    outages, when the machines differ from those that it knows. At time 0, nothing runs yet and
    every machine counts as up: a missing machine is noticed one step later.

    Attributes:
        last: Last decision of each run.
        history: All decisions of each run that differed from the previous one.

    Args:
        unknown: None if policies know the true state; otherwise their priors, and their
            observations of the streams. Prices are always known.
    """

    def __init__(
        self,
        policy: Policy,
        fleet: SimulatedFleet,
        givens: Givens,
        unknown: tuple[Priors, Tallies] | None = None,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._givens = givens
        self._unknown = unknown
        # Pools that each run's policy saw last.
        self._pools = [givens.pools] * givens.runs
        self._known_up = np.ones((givens.runs, givens.workers), np.bool_)
        ready, coming = fleet.machines()
        # Machines that each run's policy saw last.
        self._machines = ready.copy(), coming.copy()
        self._begun = False
        self._review_at_s = 0.0
        self.last: list[Decision | None] = [None] * givens.runs
        self.history: list[list[PolicyChange]] = [[] for _ in range(givens.runs)]

    def consider(
        self,
        now_s: float,
        usd_per_hour: Sequence[Array],
        price_changed: Flags,
        updates_left: Array,
        going: Flags,
        waiting: Array | None = None,
        lag_s: Array | None = None,
    ) -> None:
        """Ask the policy in every run in which it has a reason to decide.

        Args:
            now_s: Time since the job began; not earlier than in the last call.
            usd_per_hour: For each pool (R,), the current price.
            price_changed: (R,) True if a price has changed since the last call.
            updates_left: (R,) remaining updates.
            going: (R,) runs that are not over.
            waiting: (R,) updates whose records have arrived; None if streams pause.
            lag_s: (R, N) waiting time of each stream's records; None if unknown.
        """
        due = going & self._due(now_s, price_changed)
        runs = np.flatnonzero(due)
        if not runs.size:
            return
        givens, fleet = self._givens, self._fleet
        if self._begun:
            self._known_up[runs] = fleet.active[runs]
        self._begun = True
        ready, coming = fleet.machines()
        for known, now in zip(self._machines, (ready, coming), strict=True):
            known[:, runs] = now[:, runs]
        up = self._known_up[runs]
        rates_per_s = self._rates_per_s(runs)
        deadlines_s = np.maximum(givens.deadline_s[runs] - now_s, 0.0).tolist()
        lefts = updates_left[runs].tolist()
        pools = self._pools_now(runs, usd_per_hour)
        for row, run in enumerate(runs.tolist()):
            work = Work(
                rates_per_s[row], givens.group_size, givens.batch_size, lefts[row], deadlines_s[row]
            )
            waiting_updates = None
            if waiting is not None:
                much, gradient_s = float(waiting[run]), givens.gradient_s
                work, waiting_updates = waiting_for_policy(
                    work, much, gradient_s, backlog=self._policy.plans_backlog
                )
            machines = {
                Offer(pool.name): MachineCount(int(ready[index, run]), int(coming[index, run]))
                for index, pool in enumerate(pools[row])
            }
            situation = Situation(
                now_s,
                work,
                pools[row],
                givens.gradient_s,
                up[row],
                waiting_updates,
                machines,
                lag_s=None if lag_s is None else lag_s[run],
            )
            self._ask(run, situation)

    def _due(self, now_s: float, price_changed: Flags) -> Flags:
        policy = self._policy
        everybody = np.ones_like(price_changed)
        if policy.review_s is not None and now_s >= self._review_at_s:
            self._review_at_s = now_s + policy.review_s
            return everybody
        if not self._begun:
            return everybody
        if policy.watches_outages:
            moved = np.any(self._fleet.active ^ self._known_up, axis=1)
            for known, now in zip(self._machines, self._fleet.machines(), strict=True):
                moved |= self._fleet.counted & np.any(known != now, axis=0)
            return np.logical_or(price_changed, moved)
        return price_changed

    def _ask(self, run: int, situation: Situation) -> None:
        decision = self._policy.reconsider(situation, self.last[run])
        if decision is self.last[run]:
            return
        self.last[run] = decision
        self._fleet.order(run, decision)
        change = PolicyChange(situation.now_s, decision.reason, decision.spot, decision.on_demand)
        self.history[run].append(change)

    def _rates_per_s(self, runs: Indexes) -> Array:
        """Return (n, N) rates, estimated or true."""
        if self._unknown is None:
            return self._givens.rates_per_s[runs]
        beliefs, tallies = self._unknown
        records, seconds = tallies(runs)
        return np.asarray(rate_from_counts(records, seconds, beliefs.rate).value)

    def _pools_now(self, runs: Indexes, usd_per_hour: Sequence[Array]) -> list[tuple[Pool, ...]]:
        """Return the pools as each run's policy knows them; unchanged ones are the same objects."""
        pools: list[list[Pool]] = [[] for _ in runs]
        for index, prices in enumerate(usd_per_hour):
            availability, cycle_s = self._availability(index, runs)
            rows = zip(
                runs.tolist(),
                prices[runs].tolist(),
                availability.tolist(),
                cycle_s.tolist(),
                strict=True,
            )
            for row, (run, usd, alpha, cycle) in enumerate(rows):
                pool = self._pools[run][index]
                if (pool.usd_per_hour, pool.availability, pool.cycle_s) != (usd, alpha, cycle):
                    pool = replace(pool, usd_per_hour=usd, availability=alpha, cycle_s=cycle)
                pools[row].append(pool)
        for row, run in enumerate(runs.tolist()):
            self._pools[run] = tuple(pools[row])
        return [self._pools[run] for run in runs.tolist()]

    def _availability(self, index: int, runs: Indexes) -> tuple[Array, Array]:
        """Return (n,) alpha and mean cycle of a pool, from this job's own experience."""
        pool = self._givens.pools[index]
        if self._unknown is None or index == ON_DEMAND:
            return np.full(len(runs), pool.availability), np.full(len(runs), pool.cycle_s)
        beliefs, _ = self._unknown
        usage = self._fleet.usage
        up_s = usage.machine_s[index, runs]
        # Rounding might make the difference negative.
        down_s = np.maximum(usage.wanted_s[index, runs] - up_s, 0.0)
        outages = usage.preemptions[index, runs].astype(np.float64)
        availability = availability_from_times(up_s, down_s, outages, beliefs.machines)
        cycle_s = cycle_from_times(up_s, down_s, outages, beliefs.machines)
        return np.asarray(availability.value), np.asarray(cycle_s.value)
