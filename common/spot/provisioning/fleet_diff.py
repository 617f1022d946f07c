"""Missing and surplus machines of the fleet: a decision compared with the existing machines.

If machines are counted, each offer may have too few or too many. If a plan is by slot, each slot
has one machine, and moves to a machine of another pool in one of two ways:

    hold       ████ released, ended ── ordered ── ████    no two workers ever share a slot's stream
    reassign   ████████████████████████ released          survivors read the streams, so the
                      ordered ── ████████████████████     successor may start before
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from common.spot.policies.policy import NOWHERE
from common.spot.provisioning.records import Ended, Left, Started

if TYPE_CHECKING:
    from common.spot.machines import Offer
    from common.spot.provisioning.fleet_ledger import Instance

FIRST_WAIT_S = 1.0
# Outages last minutes, and a retry this late loses a fraction of that.
LONGEST_WAIT_S = 60.0
# Time from the departure of a worker to the release of its machine. EC2 takes a machine away within
# 120 s of its notice. If we release it before, all of its time must be paid.
LEFT_S = 150.0
# A machine that fails earlier would fail again, because its start is the problem.
SOON_S = 60.0
# Shortest and longest time between attempts in a pool whose workers never report. A broken image
# needs a person, and a machine is paid for in each attempt.
SILENT_S, LONGEST_SILENT_S = 60.0, 3600.0


class DesiredMachine(NamedTuple):
    """A machine that the decision wants."""

    # None if machines are counted.
    slot: int | None
    pool: str
    # Set if machines are counted.
    offer: Offer | None = None


class FleetDiff(NamedTuple):
    """Changes to make to the fleet."""

    order: tuple[DesiredMachine, ...]
    release: tuple[Instance, ...]


def desired_machines(places: Sequence[int], pools: Sequence[str]) -> tuple[DesiredMachine, ...]:
    """Return the machines that a decision wants."""
    return tuple(DesiredMachine(slot, pools[at]) for slot, at in enumerate(places) if at != NOWHERE)


def reconcile(
    all_desired: Iterable[DesiredMachine],
    instances: Iterable[Instance],
    may_order: Callable[[DesiredMachine], bool] = lambda _: True,
    at_work: Callable[[Instance], bool] | None = None,
) -> FleetDiff:
    """Return the machines to order and to release.

    Args:
        all_desired: At most one for each slot.
        instances: Machines that run or may start.
        may_order: Returns True if the machine's pool may be asked now, see `Backoff`.
        at_work: Returns True if a machine has begun to work, so that its predecessor can be
            released. If None, the predecessor must end first.
    """
    by_slot: dict[int | None, list[Instance]] = {}
    for machine in sorted(instances, key=_usefulness):
        by_slot.setdefault(machine.slot, []).append(machine)
    missing, waited_for = list[DesiredMachine](), set[int | None]()
    for desired in all_desired:
        free = by_slot.get(desired.slot, [])
        alike = (each for each in free if each.pool == desired.pool and not each.left)
        found = next(alike, None)
        if found is None:
            missing.append(desired)
        else:
            free.remove(found)
        if at_work is not None and (found is None or not at_work(found)):
            waited_for.add(desired.slot)
    release = tuple(
        machine
        for machines in by_slot.values()
        for machine in machines
        if machine.slot not in waited_for or not machine.running or machine.left
    )
    leaving = {machine.slot for machine in release if at_work is None}
    order = tuple(
        desired for desired in missing if desired.slot not in leaving and may_order(desired)
    )
    return FleetDiff(order, release)


def reconcile_counted(
    wanted: Mapping[Offer, int],
    instances: Iterable[Instance],
    may_order: Callable[[DesiredMachine], bool] = lambda _: True,
    now_s: float = 0.0,
    gone_bids: Mapping[Offer, int] = MappingProxyType({}),
) -> FleetDiff:
    """Return the machines to order and to release if machines are counted.

    Of surplus machines, those without a slot are released first. A machine whose worker has left is
    replaced at once, and released if it does not end by itself; one whose worker never reported is
    released at once. A machine under a bid that has
    ended is not replaced: the next plan decides on another bid.

    Args:
        wanted: Number of machines of each offer.
        instances: Machines that run or may start.
        may_order: Returns True if the machine's pool may be asked now, see `Backoff`.
        now_s: Seconds since 1970.
        gone_bids: Machines of each offer under a bid that have ended since the plan.
    """
    there: dict[Offer, list[Instance]] = {}
    each_of = tuple(instances)
    useful = (machine for machine in each_of if not machine.left)
    for machine in sorted(useful, key=lambda each: (each.slot is None, *_usefulness(each))):
        there.setdefault(machine.asked, []).append(machine)
    order = tuple(
        desired
        for offer, count in wanted.items()
        for desired in [DesiredMachine(None, offer.pool, offer=offer)]
        for _ in range(count - len(there.get(offer, ())) - gone_bids.get(offer, 0))
        if may_order(desired)
    )
    release = tuple(
        machine for offer, machines in there.items() for machine in machines[wanted.get(offer, 0) :]
    ) + tuple(
        machine
        for machine in each_of
        if machine.left_s is not None
        and (machine.never_reported or now_s >= machine.left_s + LEFT_S)
    )
    return FleetDiff(order, release)


def _usefulness(machine: Instance) -> tuple[bool, int]:
    """Return a sort key: running machines first, then older ones."""
    return (not machine.running, machine.launch)


def worker_name(
    job: str, slot: int | None, launch: int, on_preemption: Literal["hold", "reassign"]
) -> str:
    """Return the name of the worker on a machine.

    Under `hold`, the workers of a slot have the same name one after the other, because they are the
    same static member of the consumer group. Under `reassign`, and without a slot, each worker has
    its own name.
    """
    if slot is None:
        return f"{job}-m{launch}"
    return f"{job}-w{slot}" if on_preemption == "hold" else f"{job}-w{slot}-{launch}"


def _whatever_bid(offer: Offer) -> Offer:
    return offer._replace(bid_usd_per_hour=None)


class _Wait:
    """An exponential backoff, between a first and a longest time."""

    def __init__(self, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._times = 0
        self.until_s = float("-inf")

    def again(self, at_s: float) -> None:
        """Record a failure. Failures before the wait is over count as one."""
        if at_s >= self.until_s:
            wait_s = min(self._first_s * 2.0**self._times, self._longest_s)
            self._times = min(self._times + 1, 10)
            self.until_s = at_s + wait_s

    def well(self) -> None:
        """Record a success: the next failure is a first one."""
        self._times = 0

    @property
    def fails(self) -> bool:
        """True if the last try failed."""
        return self._times > 0


class Backoff:
    """Backoff of pools that refused or whose workers never report, and of slots that fail.

    A refusal blocks its whole pool until one of its machines starts. A machine that fails soon
    after its start blocks its slot. One whose worker never reports blocks its pool until a worker
    reports. Only records that count are fed, so that a successor has the same state.

    Attributes:
        refused: Slots whose own machine was refused and has not run since.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Wait] = {}
        # Keyed by slot, or by offer if machines are counted.
        self._slots: dict[int | Offer | None, _Wait] = {}
        # Pools whose last workers never reported.
        self._silent: dict[str, _Wait] = {}
        self.refused = set[int]()

    def feed(self, record: Started | Left | Ended, instance: Instance) -> None:
        """Add a record that counts, with its machine."""
        match record:
            case Started():
                self._pools.setdefault(instance.pool, _Wait()).well()
                if instance.slot is not None:
                    self.refused.discard(instance.slot)
            case Ended(cause="refused"):
                self._pools.setdefault(instance.pool, _Wait()).again(record.at_s)
                if instance.slot is not None:
                    self.refused.add(instance.slot)
            case Left(never_reported=True):
                wait = self._silent.setdefault(instance.pool, _Wait(SILENT_S, LONGEST_SILENT_S))
                wait.again(record.at_s)
            case Ended(cause="failed") if instance.started_s is not None:
                key = _whatever_bid(instance.asked) if instance.counted else instance.slot
                wait = self._slots.setdefault(key, _Wait())
                if record.at_s - instance.started_s > SOON_S:
                    wait.well()
                wait.again(record.at_s)
            case _:
                # Other records say nothing about the supply of machines.
                pass

    def until_s(self, desired: DesiredMachine) -> float:
        """Return the earliest time at which this may be ordered."""
        key = desired.slot if desired.offer is None else _whatever_bid(desired.offer)
        pool = desired.pool
        waits = (self._pools.get(pool), self._slots.get(key), self._silent.get(pool))
        return max((wait.until_s for wait in waits if wait is not None), default=float("-inf"))

    def refusing(self, now_s: float) -> frozenset[str]:
        """Return the pools that have refused a machine and may not be asked again yet."""
        waits = (*self._pools.items(), *self._silent.items())
        return frozenset(pool for pool, wait in waits if wait.until_s > now_s)

    @property
    def silent(self) -> frozenset[str]:
        """Pools whose workers never report."""
        return frozenset(self._silent)

    def reports(self, pool: str) -> None:
        """Record that a worker of a new machine of this pool has sent a heartbeat."""
        self._silent.pop(pool, None)

    def gives_none(self, pool: str) -> bool:
        """Return True if a pool has refused, or its workers are silent, since it last gave one."""
        return pool in self._silent or (pool in self._pools and self._pools[pool].fails)

    def due(self, now_s: float) -> float:
        """Return the end of the next wait; infinite without a wait."""
        waits = (*self._pools.values(), *self._slots.values(), *self._silent.values())
        return min((wait.until_s for wait in waits if wait.until_s > now_s), default=float("inf"))
