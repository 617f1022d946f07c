"""What outages take from a slot on spot, and what on-demand stand-ins give back for how much.

A spot machine can be had for exponential times of mean alpha cycle, and cannot for exponential
times of mean (1 - alpha) cycle. When it comes back it starts up first; whoever stands in goes on
meanwhile. From this follow three ways to run a slot, dearer from one to the next:

                                delivers            costs
    left alone during outages   availability        alpha pi_s
    with a stand-in             phi                 + pi_o for each outage, start-up included
    on demand throughout        1                   pi_o
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.theory.work import Pool


@dataclass(frozen=True, slots=True)
class Outages:
    """A slot on spot over a long time, per slot and second of the job."""

    availability: float  # share of the time that the spot machine delivers, its start-ups taken off
    per_s: float  # outages, each from one preemption to the machine that delivers again
    relaxation_s: float  # tau: after it, what was known of the machine's state counts 1/e
    stand_in_idle_s: float  # E[min(S_od, outage)], of each outage, while a stand-in starts up
    alone_usd_per_s: float  # left alone during outages
    stand_in_usd_per_s: float  # in addition, if on-demand machines stand in during all of them
    on_demand_usd_per_s: float

    @property
    def filled(self) -> float:
        """phi, the share that a slot delivers with stand-ins in all its outages."""
        return 1 - self.per_s * self.stand_in_idle_s

    @property
    def recovered(self) -> float:
        """Share of what outages take that stand-ins give back: 1 where they start at once."""
        lost = 1 - self.availability
        return (self.filled - self.availability) / lost if lost else 1.0

    @property
    def fill_usd_per_s(self) -> float:
        """Price of a second of delivery that stand-ins give back; infinite if they give none."""
        gain = self.filled - self.availability
        return self.stand_in_usd_per_s / gain if gain > 0 else math.inf

    @property
    def pin_usd_per_s(self) -> float:
        """Price of a second that on-demand throughout delivers beyond stand-ins."""
        more = self.on_demand_usd_per_s - self.alone_usd_per_s - self.stand_in_usd_per_s
        return more / (1 - self.filled) if self.filled < 1 else math.inf

    @property
    def direct_usd_per_s(self) -> float:
        """Price of a second that on-demand throughout delivers beyond a slot left alone."""
        lost = 1 - self.availability
        return (self.on_demand_usd_per_s - self.alone_usd_per_s) / lost if lost else math.inf

    @property
    def standing_in_pays(self) -> bool:
        """Whether stand-ins give time back for less than on-demand throughout does.

        Not so where outages are over before a stand-in has started, or about then.
        """
        return self.fill_usd_per_s < self.direct_usd_per_s

    @property
    def spot_pays(self) -> bool:
        """Whether a second delivered by a slot on spot is cheaper than one on demand."""
        return self.alone_usd_per_s < self.on_demand_usd_per_s * self.availability


def effective_availability(spot: Pool) -> float:
    """Give the share of the time that a spot machine delivers: alpha exp(-S / (alpha cycle)).

    Of an exponential time U of mean u = alpha cycle for which a machine can be had, S goes to its
    start-up: what is left, E[max(0, U - S)], is u exp(-S / u).
    """
    mean_up_s = spot.availability * spot.cycle_s
    if spot.availability == 1 or not mean_up_s:
        return spot.availability  # never preempted, it starts once
    return spot.availability * math.exp(-spot.start_up_s / mean_up_s)


def expected_shorter_s(limit_s: float, least_s: float, mean_s: float) -> float:
    """Give E[min(limit, least + D)] for an exponential D of that mean."""
    if limit_s <= least_s or not mean_s:
        return min(limit_s, least_s)
    return least_s - mean_s * math.expm1(-(limit_s - least_s) / mean_s)


@lru_cache(maxsize=1024)
def outages(on_demand: Pool, spot: Pool) -> Outages:
    """Work out what a slot's outages cost, with start-ups and the shortest time that is billed.

    An outage lasts D, exponential of mean (1 - alpha) cycle, and the start-up of the machine that
    comes back. Where that one is gone again before it delivers (a share 1 - exp(-S / u) of the
    returns), the outage goes on; its stand-in then is idle no second time, nor is a minimum billed
    twice. A machine that is preempted is billed for no more than its time.
    """
    alpha, cycle_s = spot.availability, spot.cycle_s
    delivers = effective_availability(spot)
    mean_off_s = (1 - alpha) * cycle_s
    restarts = delivers / alpha if alpha else 0.0  # share of the returns that come to deliver
    per_s = restarts / cycle_s if alpha < 1 else 0.0
    usual_s = spot.start_up_s, mean_off_s
    idle_s = expected_shorter_s(on_demand.start_up_s, *usual_s)
    least_s = on_demand.minimum_billing_s
    unused_s = least_s - expected_shorter_s(least_s, *usual_s)  # E[max(0, minimum - outage)]
    stood_in = 1 - delivers + per_s * unused_s
    return Outages(
        availability=delivers,
        per_s=per_s,
        relaxation_s=alpha * mean_off_s,
        stand_in_idle_s=idle_s,
        alone_usd_per_s=alpha * spot.usd_per_s,
        stand_in_usd_per_s=stood_in * on_demand.usd_per_s,
        on_demand_usd_per_s=on_demand.usd_per_s,
    )
