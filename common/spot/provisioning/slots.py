"""Which spare machine a slot is seated on: under `hold`, where machines are counted.

    slot 3      m1 ██████████ lost        m4 ███████████████    its stream waits for a look at the
    machine m4        ready: a spare ─────┘                     machines and a rejoin, no start-up

A stream has one reader at a time. So a seat is given away only after the machine that had it has
ended, or its worker has sent heartbeats and does so no more: on a machine that was given notice, or
whose worker failed. The ledger says so: a `SlotAssigned` record before that does not count. A
worker whose machine was taken for lost and lives on is fenced by the consumer group: both are the
same static member, of which the one that joined last reads on. What the other still announces is
settled as any zombie's claim.
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
    """Say how to tell whether a machine has started up by now, as far as its pool is known.

    One whose worker was heard of has, however long others take.
    """
    start_up_s = {pool.name: start_ups.start_up_s(pool) for pool in pools}

    def ready(instance: Instance) -> bool:
        since_s = instance.started_s
        return instance.running and (
            instance.launch in start_ups.reported
            or (since_s is not None and now_s >= since_s + start_up_s.get(instance.pool, 0.0))
        )

    return ready


def assign_slots(
    instances: Iterable[Instance],
    ready: Callable[[Instance], bool],
    speeds: Mapping[str, float],
    vacated_s: Mapping[int, float],
    rates_per_s: Rates,
) -> tuple[tuple[int, int], ...]:
    """Give the slots that are to be seated now, each with its machine's launch.

    Who waits longest is seated first, of two the one with more records; the fastest machines serve
    before others.

    Args:
        instances: Machines that run or may come to run.
        ready: Whether one has started up.
        speeds: By pool.
        vacated_s: By slot, when it lost its machine; those that never had one come first.
        rates_per_s: (N_tot,) of the slots' streams.
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
