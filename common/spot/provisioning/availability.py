"""Availability of spot machines of each pool, by this job's own experience.

    slot's machine   ====================  refused ..  ====================
                     Started       Ended preempted     Started
    up               ~~~~~~~~~~~~~~~~~~~~              ~~~~~~~~~~~~~~~~~~~~
    down                                 ~~~~~~~~~~~~~~

Time without a wanted machine does not count: after a slot moved elsewhere, while the job is
paused, or without a provisioner.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common.spot.policies.policy import NOWHERE
from common.spot.provisioning.records import (
    Ended,
    Planned,
    PlanRecord,
    ProvisionerLead,
    Settled,
    Started,
)
from common.spot.theory.estimates import (
    CyclePrior,
    Estimate,
    availability_from_times,
    cycle_from_times,
)

if TYPE_CHECKING:
    from common.spot.provisioning.fleet_ledger import Instance
    from common.spot.theory.work import Pool

# Highest availability of a prior. A prior of 1 could never change.
SURE = 0.999


class _Since(NamedTuple):
    pool: str
    at_s: float


@dataclass(slots=True)
class _Times:
    """Times of one pool that are over."""

    up_s: float = 0.0
    down_s: float = 0.0
    outages: int = 0


@dataclass(slots=True)
class Availability:
    """Estimates alpha and cycle of each pool from every valid record of the plans topic."""

    _times: defaultdict[str, _Times] = field(default_factory=lambda: defaultdict(_Times))
    _up: dict[int, _Since] = field(default_factory=dict)  # keyed by launch
    # Keyed by slot, or by pool if machines are counted.
    _down: dict[int | str, _Since] = field(default_factory=dict)
    _lead_s: float = float("-inf")
    _last_record_s: float = float("-inf")

    def feed(self, record: PlanRecord, instance: Instance | None) -> None:
        """Add a record that counts, with its machine."""
        match record:
            case ProvisionerLead():
                self.unwanted(self._last_record_s)
                self._lead_s = record.at_s
            case Planned():
                self._planned(record)
            case Settled():
                self.unwanted(record.at_s)
            case Started() if instance is not None:
                self._up[instance.launch] = _Since(instance.pool, record.at_s)
                self._rise(_place(instance), record.at_s)
            case Ended() if instance is not None:
                self._ended(record, instance)
            case _:
                pass
        self._last_record_s = max(self._last_record_s, record.at_s)

    def unwanted(self, at_s: float) -> None:
        """Record that no machines are wanted from now on."""
        for slot in list(self._down):
            self._rise(slot, at_s)

    def availability(self, pool: Pool, now_s: float) -> Estimate:
        """Estimate alpha; before any observation, return the market file's."""
        return availability_from_times(*self._seen(pool.name, now_s), prior_of(pool))

    def cycle(self, pool: Pool, now_s: float) -> Estimate:
        """Estimate the mean time between preemptions; at first, return the market file's."""
        return cycle_from_times(*self._seen(pool.name, now_s), prior_of(pool))

    def _seen(self, pool: str, now_s: float) -> tuple[float, float, float]:
        times = self._times[pool]
        up_s, down_s = (
            sum(max(now_s - since.at_s, 0.0) for since in open_.values() if since.pool == pool)
            for open_ in (self._up, self._down)
        )
        return times.up_s + up_s, times.down_s + down_s, float(times.outages)

    def _planned(self, planned: Planned) -> None:
        counted = {each.pool for each in planned.machines if each.count}
        by_slot = dict(enumerate(planned.places))
        for slot, since in list(self._down.items()):
            if isinstance(slot, str):
                wanted = slot in counted
            else:
                place = by_slot.get(slot, NOWHERE)
                wanted = place != NOWHERE and planned.pools[place] == since.pool
            if not wanted:
                self._rise(slot, planned.at_s)

    def _ended(self, ended: Ended, instance: Instance) -> None:
        up = self._up.pop(instance.launch, None)
        if up is not None:
            times = self._times[up.pool]
            times.up_s += max(ended.at_s - up.at_s, 0.0)
            if ended.cause == "preempted":
                times.outages += 1
                # A counted machine is replaced at once, so its pool does not count as down.
                if not instance.counted:
                    since = _Since(up.pool, max(ended.at_s, self._lead_s))
                    self._down[_place(instance)] = since
        elif ended.cause == "refused" and _place(instance) not in self._down:
            self._down[_place(instance)] = _Since(instance.pool, instance.ordered_s)

    def _rise(self, slot: int | str, at_s: float) -> None:
        down = self._down.pop(slot, None)
        if down is not None:
            self._times[down.pool].down_s += max(at_s - down.at_s, 0.0)


def _place(instance: Instance) -> int | str:
    return instance.pool if instance.counted or instance.slot is None else instance.slot


def prior_of(pool: Pool) -> CyclePrior:
    """Return the market file's values as one observed cycle."""
    return CyclePrior(min(max(pool.availability, 1 - SURE), SURE), pool.cycle_s)
