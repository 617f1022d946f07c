"""What the plans topic says of a job's machines, as the API tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.api.answers import Life, WorkerAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.api.answers import MachineKind, WorkerStatus
    from common.provisioning.ledger import FleetLedger

LIVES = 2000  # on a timeline: more could not be told apart


def kind_of(ledger: FleetLedger, pool: str) -> MachineKind:
    """How machines of a pool are paid, as the plan in force names the pools."""
    if ledger.plan is None or pool not in ledger.plan.pools:
        return "unknown"
    return "on-demand" if ledger.plan.pools.index(pool) == 0 else "spot"


def lives_of(ledger: FleetLedger, most: int = LIVES) -> tuple[Life, ...]:
    """The newest machines that ran, and orders that were refused, by launch."""
    lives = list[Life]()
    for launch in range(ledger.launches, 0, -1):
        rented = ledger.machines[launch]
        if rented.started_s is None and rented.open:
            continue
        lives.append(
            Life(
                slot=rented.slot,
                worker=rented.worker,
                pool=rented.pool,
                kind=kind_of(ledger, rented.pool),
                from_s=rented.ordered_s if rented.started_s is None else rented.started_s,
                to_s=rented.ended_s,
                cause=rented.cause,
            )
        )
        if len(lives) == most:
            break
    return tuple(reversed(lives))


def workers_of(
    ledger: FleetLedger, statuses: Mapping[str, str] | None, samples: Mapping[str, int]
) -> tuple[WorkerAnswer, ...]:
    """Everybody who sends heartbeats, and machines whose worker gives none, by name.

    Args:
        ledger: Of the job's machines.
        statuses: Who sends heartbeats; None: Redis is unavailable, and nobody is known to be.
        samples: By worker, of late.
    """
    rented = {each.worker: each for each in ledger.open}
    known = statuses or {}
    answers = list[WorkerAnswer]()
    for name in sorted({*rented, *known}):
        machine = rented.get(name)
        answers.append(
            WorkerAnswer(
                name=name,
                status=status_of(name, statuses),
                slot=machine.slot if machine else None,
                kind=kind_of(ledger, machine.pool) if machine else "unknown",
                pool=machine.pool if machine else None,
                machine=(machine.machine or None) if machine else None,
                since_s=machine.started_s if machine else None,
                samples=samples.get(name, 0),
            )
        )
    return tuple(answers)


def status_of(worker: str, statuses: Mapping[str, str] | None) -> WorkerStatus:
    """What its heartbeats say of a worker; None: Redis is unavailable."""
    if statuses is None:
        return "unknown"
    if worker not in statuses:
        return "silent"
    return "alive" if statuses[worker] == "alive" else "leaving"
