"""Number of machines if streams move to the survivors: as few as keep up and meet the deadline.

Kafka keeps what arrives, so a loss takes compute capacity and leaves lag. The tolerated lag and the
deadline limit the time that all machines may stand still from now on:

    lost  spot ready            lost       lost again   on demand ready
    ------============================------------------================---
    lag grows  lag shrinks                        |     spot returns; on demand ends with the lag
                                                  on demand is ordered: spot may be too late

As many spot machines as keep up with arrivals are ordered, and ordered again when they are lost.
On-demand machines are ordered if spot machines might come too late, and stay while another loss
would exceed a limit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.spot.machines import Offer
from common.spot.policies.adaptive import LATE
from common.spot.policies.policy import ON_DEMAND, MachineCount, Situation
from common.spot.policies.spot import Spot, life_s
from common.spot.theory.capacity import HEADROOM, machines_for_rate, update_capacity_per_s
from common.spot.theory.preemption import distribution_of_running

if TYPE_CHECKING:
    from common.spot.theory.provisioning import Binding

ROUNDING = 1e-9


class Moving(NamedTuple):
    """Number of machines, and the reason."""

    spot: int
    on_demand: int
    reason: str


class Forecast(NamedTuple):
    """Forecast for some machines."""

    # Time until the work is done.
    runtime_s: float
    # Limit that no number of machines meets; None if the limits can be met.
    lacks: Binding | None


@dataclass(frozen=True, eq=False)
class Backlog:
    """The backlog, its limits, and the effect of machines on it.

    A number of machines is the sum of their speeds.
    """

    situation: Situation
    spot: Spot
    max_lag_s: float | None
    # Longest time until a loss is noticed.
    look_s: float

    @property
    def lag_s(self) -> float:
        """Time that the waiting records took to arrive."""
        return (self.situation.waiting or 0.0) / self.situation.work.updates_per_s

    @property
    def time_s(self) -> float:
        """Time until the deadline, less the possible delay of arrivals."""
        work = self.situation.work
        return work.deadline_s - LATE * math.sqrt(work.records) / work.records_per_s

    @property
    def arrives_in_s(self) -> float:
        """Time until all records of the job have arrived."""
        return max(self.situation.work.undisturbed_s - self.lag_s, 0.0)

    @property
    def ahead_s(self) -> float:
        """Time from the loss of a machine until an on-demand one works in its place."""
        return self.situation.pools[ON_DEMAND].start_up_s + self.look_s

    def made(self, machines: float) -> float:
        """Return the seconds of arrivals that are processed in a second: capacity over arrivals."""
        work, many = self.situation.work, np.array([machines])
        capacity = update_capacity_per_s(many, work.group_size, self.situation.gradient_s)
        return float(capacity[0]) / work.updates_per_s

    @cached_property
    def needed(self) -> int:
        """Number of machines of speed 1 that keep up with arrivals and meet the deadline.

        If records have waited longer than `max_lag_s`, more machines process the excess within the
        mean lifetime of a machine.
        """
        work, lives_s = self.situation.work, [life_s(pool) for pool in self.spot.pools]
        too_long_s = 0.0 if self.max_lag_s is None else max(self.lag_s - self.max_lag_s, 0.0)
        by_lag = 1 + too_long_s / max(max(lives_s, default=math.inf), 1.0)
        share = self.spot.share if self.spot.pools else 1.0
        # The job cannot end before its records have arrived.
        least_s = self.arrives_in_s + self.look_s
        by_deadline = work.undisturbed_s / max(self.time_s - self.ahead_s, least_s) / share
        pace = max(HEADROOM, by_lag, by_deadline)
        rate_per_s = pace * work.updates_per_s
        found = machines_for_rate(rate_per_s, work.group_size, self.situation.gradient_s)
        return min(work.group_size if found is None else found, work.workers)

    def before_deadline_s(self, machines: float = 0.0, seconds: float = 0.0) -> float:
        """Return the time for which all machines may stop without missing the deadline.

        Before the stop, some machines work for a while; after it, the needed machines do the rest.

        Args:
            machines: Machines that work before the stop.
            seconds: Time that they work.
        """
        left_s = self.situation.work.undisturbed_s - seconds * self.made(machines)
        takes_s = max(left_s, 0.0) / max(self.made(self.needed), ROUNDING)
        return self.time_s - seconds - takes_s

    def spare_s(self, machines: float = 0.0, seconds: float = 0.0) -> float:
        """Return the time for which all machines may stop without exceeding a limit.

        The limits are the deadline and the tolerated lag. Arguments are those of
        `before_deadline_s`.
        """
        spare_s = self.before_deadline_s(machines, seconds)
        if self.max_lag_s is None or not self.arrives_in_s:
            return spare_s
        lag_s = max(self.lag_s + seconds * (1 - self.made(machines)), 0.0)
        return min(spare_s, self.max_lag_s - lag_s)

    @property
    def late(self) -> bool:
        """True if no number of machines meets the deadline any more."""
        work, most = self.situation.work, self.made(self.needed)
        least_s = work.undisturbed_s / most if most else math.inf
        return max(least_s, self.arrives_in_s) > work.deadline_s

    def forecast(self, spots: int, on_demand: int) -> Forecast:
        """Forecast the runtime with some machines; spot machines run for a share of the time."""
        left_s = self.situation.work.undisturbed_s
        mean = float(np.mean([pool.speed for pool in self.spot.pools])) if spots else 0.0
        chances = distribution_of_running(spots, self.spot.share) if spots else np.ones(1)
        running = enumerate(chances.tolist())
        made = math.fsum(each * self.made(on_demand + mean * many) for many, each in running)
        runtime_s = max(left_s / made if made else math.inf, self.arrives_in_s)
        if self.late:
            return Forecast(runtime_s, "infeasible")
        slow = self.made(self.needed) < 1 and self.arrives_in_s
        return Forecast(runtime_s, "stability" if slow else None)

    def lost_s(self, certain: int) -> float:
        """Return the part of `spare_s` that a loss of the largest pool would use up.

        Args:
            certain: On-demand machines, which stay.
        """
        left, needed = 1 - self.spot.largest, self.needed
        return self.ahead_s * max(1 - self.made(certain + (needed - certain) * left), 0.0)


def moving(backlog: Backlog, reliable: int = 0, *, first: bool) -> Moving:
    """Return the number of spot and on-demand machines.

    Args:
        backlog: The current state.
        reliable: Number of machines that are always on demand.
        first: True if nothing was ordered before, so that nothing is missing yet.
    """
    spot, needed = backlog.spot, backlog.needed
    if not spot.pools:
        return Moving(0, max(needed, reliable), "no spot machine pays")
    alone = backlog.situation.pools[ON_DEMAND]
    there = backlog.situation.machines.get(Offer(alone.name), MachineCount())
    speeds = np.array([pool.speed for pool in spot.pools])
    ready = float(np.dot(spot.ready, speeds))
    had = float(np.dot(spot.had, speeds))
    if backlog.late:
        return _late(backlog, there, needed - had, reliable)
    missing = 0 if first else max(math.ceil(needed - ready - ROUNDING), 0)
    # Fewest on-demand machines with which a loss of the largest pool, without lag before it, would
    # stay within the limits.
    most_s = math.inf if backlog.max_lag_s is None else backlog.max_lag_s
    most_s = min(most_s, backlog.before_deadline_s())
    certain = bisect_left(range(needed), x=True, key=lambda n: backlog.lost_s(n) <= most_s)
    certain = max(certain, reliable)
    on_demand, reason = certain, "as many as keep up"
    # If all spot machines were lost now, an order at the next review might be too late.
    soon_s = backlog.spare_s(there.ready, backlog.ahead_s)
    if missing and soon_s < backlog.look_s:
        on_demand, reason = max(missing, certain), "no more time to wait for spot machines"
    elif sum(there) > certain:
        risky = backlog.spare_s() < backlog.lost_s(0)
        stays = sum(there) if risky else min(there.ready, missing)
        on_demand = max(min(stays, needed), certain)
        reason = "another loss would be too much" if risky else "until spot machines are ready"
    # Spot machines work until their on-demand replacements are ready. If these were ordered, no
    # further spot machines are, because they would be released when they have started up.
    replaced = certain if first else min(certain, there.ready)
    lacks, surplus = max(needed - certain, 0) - had, had - max(needed - replaced, 0)
    change = max(lacks, 0.0) / speeds[0] - math.floor(max(surplus, 0.0) / speeds.max() + ROUNDING)
    spots = sum(spot.had) + math.ceil(float(change) - ROUNDING)
    return Moving(min(spots, backlog.situation.work.workers), on_demand, reason)


def _late(backlog: Backlog, there: MachineCount, lacks: float, reliable: int) -> Moving:
    """Return the numbers of machines that end a job soonest which misses its deadline anyway.

    Existing machines stay, up to the job's limit, and missing ones are ordered on demand, or on
    spot if on-demand machines are refused: nothing is gained by waiting.

    Args:
        backlog: The current state.
        there: On-demand machines.
        lacks: Needed machines of speed 1, less those on spot.
        reliable: Number of machines that are always on demand.
    """
    spot, workers = backlog.spot, backlog.situation.work.workers
    missing = max(math.ceil(lacks - sum(there) - ROUNDING), 0)
    refused = backlog.situation.pools[ON_DEMAND].name in backlog.situation.refusing
    spots = sum(spot.had) + (missing if refused else 0)
    on_demand = max(sum(there) + (0 if refused else missing), reliable)
    reason = "too late for the deadline, as soon as possible"
    return Moving(min(spots, max(workers - there.ready, 0)), min(on_demand, workers), reason)
