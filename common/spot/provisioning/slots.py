"""Assignment of slots to spare machines: under `hold`, if machines are counted.

    slot 3      m1 ██████████ lost        m4 ███████████████    its stream waits for a poll of the
    machine m4        ready: a spare ─────┘                     machines and a rejoin, no start-up

A stream has one reader at a time. So a slot is reassigned only after its machine has ended, or
after the worker's heartbeats have stopped: because of a notice, or because the worker failed. The
ledger enforces this: an earlier `SlotAssigned` record does not count. If a machine counted as lost
but its worker still runs, the consumer group fences that worker: both workers are the same static
member, and the one that joined last reads on. Claims of the other one are handled like those of any
worker that has lost its partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.spot.provisioning.fleet_ledger import Instance
    from common.spot.provisioning.startup_times import StartUps
    from common.spot.theory.work import Pool, Rates


def readiness(
    pools: Iterable[Pool], start_ups: StartUps, now_s: float
) -> Callable[[Instance], bool]:
    """Return a function that returns True if a machine is ready to read a stream.

    It is ready if its worker has sent heartbeats, or if it has run for its pool's start-up time and
    polls did not find it silent.
    """
    start_up_s = {pool.name: start_ups.start_up_s(pool) for pool in pools}

    def ready(instance: Instance) -> bool:
        since_s = instance.started_s
        if since_s is None or not instance.running or instance.never_reported:
            return False
        silent = start_ups.silent_s(instance) > start_ups.patience_s
        over = now_s >= since_s + start_up_s.get(instance.pool, 0.0)
        return instance.launch in start_ups.reported or (over and not silent)

    return ready


def assign_slots(
    instances: Iterable[Instance],
    ready: Callable[[Instance], bool],
    speeds: Mapping[str, float],
    vacated_s: Mapping[int, float],
    rates_per_s: Rates,
) -> tuple[tuple[int, int], ...]:
    """Return the slots to assign now, each with its machine's launch.

    The slot that waits longest is first. Of slots that wait equally long, the one with the highest
    rate is first. The fastest machines are used first.

    Args:
        instances: Machines that run or may start.
        ready: Returns True if a machine has started up.
        speeds: Speeds by pool.
        vacated_s: Time at which each slot lost its machine; slots that never had one come first.
        rates_per_s: (N_tot,) rates of the slots' streams.
    """
    there = tuple(instances)
    taken = {instance.slot for instance in there if instance.has_slot}
    free = sorted(
        (slot for slot in range(len(rates_per_s)) if slot not in taken),
        key=lambda slot: (vacated_s.get(slot, float("-inf")), -rates_per_s[slot], slot),
    )
    spares = sorted(
        (instance for instance in there if instance.slot is None and ready(instance)),
        key=lambda instance: (-speeds.get(instance.pool, 1.0), instance.launch),
    )
    return tuple((slot, spare.launch) for slot, spare in zip(free, spares, strict=False))
