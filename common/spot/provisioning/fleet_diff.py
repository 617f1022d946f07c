"""What the fleet lacks and has too much of: a decision against the machines that there are.

Where machines are counted, an offer has too few or too many. By slot, a slot has one machine. How a
slot moves to a machine of another pool depends:

    hold       ████ released, ended ── ordered ── ████    no two workers ever share a slot's stream
    reassign   ████████████████████████ released          streams go to whoever is there, so the
                      ordered ── ████████████████████     successor may be at work before
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from common.spot.policies.policy import NOWHERE
from common.spot.provisioning.records import Ended, Started

if TYPE_CHECKING:
    from common.spot.machines import Offer
    from common.spot.provisioning.fleet_ledger import Instance

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0  # of outages that last minutes, what is lost by asking so late is a fraction
LEFT_S = 150.0  # after a notice EC2 takes a machine within 120 s; given back, all of it is paid for
SOON_S = 60.0  # a machine that fails earlier would fail again: its start is what is wrong


class DesiredMachine(NamedTuple):
    """A machine that shall be there."""

    slot: int | None  # None: machines are counted
    pool: str
    offer: Offer | None = None  # where machines are counted


class FleetDiff(NamedTuple):
    """What to do about the fleet."""

    order: tuple[DesiredMachine, ...]
    release: tuple[Instance, ...]


def desired_machines(places: Sequence[int], pools: Sequence[str]) -> tuple[DesiredMachine, ...]:
    """Say which machines a decision wants."""
    return tuple(DesiredMachine(slot, pools[at]) for slot, at in enumerate(places) if at != NOWHERE)


def reconcile(
    all_desired: Iterable[DesiredMachine],
    instances: Iterable[Instance],
    may_order: Callable[[DesiredMachine], bool] = lambda _: True,
    at_work: Callable[[Instance], bool] | None = None,
) -> FleetDiff:
    """Say what to order and what to give back.

    Args:
        all_desired: At most one for each slot.
        instances: Machines that run or may come to run.
        may_order: Whether the wish's pool may be asked now, see `Backoff`.
        at_work: Whether a machine has begun to work, so that the one before it can go; None: the
            one before has to end first.
    """
    by_slot: dict[int | None, list[Instance]] = {}
    for machine in sorted(instances, key=_usefulness):
        by_slot.setdefault(machine.slot, []).append(machine)
    missing, waited_for = list[DesiredMachine](), set[int | None]()
    for desired in all_desired:
        free = by_slot.get(desired.slot, [])
        found = next((machine for machine in free if machine.pool == desired.pool), None)
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
        if machine.slot not in waited_for or not machine.running
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
    """Say the same where machines are counted.

    Of too many those are given back first that have no slot's stream. One whose worker has left is
    replaced at once, and given back if it does not end by itself. Under a bid a plan asks for a
    machine once: whether to bid again, and how much, is for the next one to say.

    Args:
        wanted: How many of each offer.
        instances: Machines that run or may come to run.
        may_order: Whether the wish's pool may be asked now, see `Backoff`.
        now_s: Since 1970.
        gone_bids: How many of each offer under a bid the plan has had already.
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
        if machine.left_s is not None and now_s >= machine.left_s + LEFT_S
    )
    return FleetDiff(order, release)


def _usefulness(machine: Instance) -> tuple[bool, int]:
    """Keep what runs before what may come to run, and what is older."""
    return (not machine.running, machine.launch)


def worker_name(
    job: str, slot: int | None, launch: int, on_preemption: Literal["hold", "reassign"]
) -> str:
    """Name the worker on a machine.

    Under `hold` a slot's workers are one static member of the consumer group, one after the other;
    under `reassign`, and while it has no slot, each has a name of its own.
    """
    if slot is None:
        return f"{job}-m{launch}"
    return f"{job}-w{slot}" if on_preemption == "hold" else f"{job}-w{slot}-{launch}"


def _whatever_bid(offer: Offer) -> Offer:
    return offer._replace(bid_usd_per_hour=None)


class _Wait:
    """One thing that is tried again later and later."""

    def __init__(self) -> None:
        self._times = 0
        self.until_s = float("-inf")

    def again(self, at_s: float) -> None:
        """It failed; failures before the wait is over are one."""
        if at_s >= self.until_s:
            wait_s = min(FIRST_WAIT_S * 2.0**self._times, LONGEST_WAIT_S)
            self._times = min(self._times + 1, 10)
            self.until_s = at_s + wait_s

    def well(self) -> None:
        """It went well: the next failure is a first one."""
        self._times = 0

    @property
    def fails(self) -> bool:
        """Whether it failed when it was tried last."""
        return self._times > 0


class Backoff:
    """When a pool that refused, or a slot whose machines fail, may be tried again.

    A refusal holds its whole pool back, until a machine of it starts. A machine that fails soon
    after its start holds its slot back. Fed with records that count, so that a successor knows.

    Attributes:
        refused: Slots whose own machine was refused and has not run since.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Wait] = {}
        self._slots: dict[int | Offer | None, _Wait] = {}  # or by offer, where they are counted
        self.refused = set[int]()

    def feed(self, record: Started | Ended, instance: Instance) -> None:
        """Take in a record that counts, with the machine that it is about."""
        match record:
            case Started():
                self._pools.setdefault(instance.pool, _Wait()).well()
                if instance.slot is not None:
                    self.refused.discard(instance.slot)
            case Ended(cause="refused"):
                self._pools.setdefault(instance.pool, _Wait()).again(record.at_s)
                if instance.slot is not None:
                    self.refused.add(instance.slot)
            case Ended(cause="failed") if instance.started_s is not None:
                key = _whatever_bid(instance.asked) if instance.counted else instance.slot
                wait = self._slots.setdefault(key, _Wait())
                if record.at_s - instance.started_s > SOON_S:
                    wait.well()
                wait.again(record.at_s)
            case _:
                pass  # says nothing of how hard machines are to be had

    def until_s(self, desired: DesiredMachine) -> float:
        """When this may be ordered."""
        key = desired.slot if desired.offer is None else _whatever_bid(desired.offer)
        waits = (self._pools.get(desired.pool), self._slots.get(key))
        return max((wait.until_s for wait in waits if wait is not None), default=float("-inf"))

    def refusing(self, now_s: float) -> frozenset[str]:
        """Which pools have just refused a machine."""
        return frozenset(pool for pool, wait in self._pools.items() if wait.until_s > now_s)

    def gives_none(self, pool: str) -> bool:
        """Whether a pool has refused since it last gave a machine."""
        return pool in self._pools and self._pools[pool].fails

    def due(self, now_s: float) -> float:
        """When the next wait is over; infinite if there is none."""
        waits = (*self._pools.values(), *self._slots.values())
        return min((wait.until_s for wait in waits if wait.until_s > now_s), default=float("inf"))
