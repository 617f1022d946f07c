"""What must hold of a job's provisioning, seen from outside: the log against the lender's books."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from common.provisioning.codec import decode_plan
from common.provisioning.ledger import FleetLedger
from common.provisioning.records import Planned, ReplanAsked, Settled, Started, Taken
from common.theory.policy import ON_DEMAND
from common.theory.work import HOUR_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.provisioning.records import PlanRecord
    from common.renting import LaunchOrder
    from tests.system.provisioning_world import World

PATIENCE_S = 25.0  # a calm time after which what is wanted runs
# Within it a change of a price is seen, also where a provisioner died and its successor took over.
PRICES_SEEN_S = 60.0


class Violation(NamedTuple):
    """What does not hold."""

    check: str
    detail: str


def check_order(world: World, order: LaunchOrder) -> Iterator[Violation]:
    """An order is given as it stands in the log, and not before it stands there."""
    known = world.truth.machines.get(order.launch)
    written = known and (known.slot, known.pool, known.worker)
    if written != (order.slot, order.pool, order.worker):
        yield Violation("an order is written down before it is given", str(order))


def check_record(world: World, record: PlanRecord, writer: str) -> Iterator[Violation]:
    """What each record that counts must be like."""
    if isinstance(record, Taken):
        world.in_charge = writer
    elif writer != world.in_charge and not isinstance(record, ReplanAsked):
        yield Violation("one decides at a time", f"{writer} while {world.in_charge} does: {record}")
    if isinstance(record, Planned) and not (record.why and record.reason):
        yield Violation("a plan has its reasons", str(record))
    if isinstance(record, Started):
        machines = [machine.id for machine in world.fleet.rented if machine.launch == record.launch]
        if machines != [record.machine]:
            yield Violation("one launch, one machine", f"{record} {machines}")
    if isinstance(record, Settled) and world.running() and not world.faults.hidden:
        yield Violation("nothing runs when it is settled", str(world.running()))


def check_calm(world: World) -> Iterator[Violation]:
    """After a time without faults, what is wanted on demand runs, and questions are answered."""
    plan = world.truth.plan
    since_s = max(world.faults.last_s, plan.at_s if plan else 0.0)
    if world.now_s - since_s < PATIENCE_S or world.wanted != "running":
        return
    if plan is None:
        yield Violation("there is a plan", "none")
        return
    wanted = {slot for slot, place in enumerate(plan.places) if place == ON_DEMAND}
    running = {machine.slot for machine in world.fleet.rented if machine.state == "running"}
    if not wanted <= running:
        yield Violation("what is wanted runs", f"{wanted} wanted, {running} run")
    if world.truth.replans:
        yield Violation("who asks for a plan gets one", str(world.truth.replans))


def check_end(world: World) -> Iterator[Violation]:
    """When the job is over, so is everything, and everything is accounted for."""
    if not world.over():
        left = [p.name for p in world.replicas if not p.dead and not p.machine.finished]
        yield Violation("everything comes to an end", f"{left} open {world.truth.open}")
        return
    yield from _machines(world)
    yield from _seats(world)
    yield from _cost(world)
    terms = [record.term for record in world.counted if isinstance(record, Settled)]
    if len(terms) != len(set(terms)) or world.truth.settled is None:
        yield Violation("a term is settled once, the last one for good", str(terms))


def _machines(world: World) -> Iterator[Violation]:
    """The lender's books and the ledger tell of the same machines."""
    machines = world.fleet.rented
    launches = [machine.launch for machine in machines]
    if len(set(launches)) < len(launches):
        yield Violation("one launch, one machine", str(launches))
    if world.truth.open or world.running():
        yield Violation("everything is given back", f"{world.truth.open} {world.running()}")
    for machine in machines:
        rented = world.truth.machines[machine.launch]
        told = (rented.machine, rented.started_s, rented.ended_s, rented.cause)
        true = (machine.id, machine.started_s, machine.ended_s, machine.cause)
        if told != true and machine.launch not in world.faults.hidden:
            yield Violation("machines are told of as they were", f"{rented} {machine}")


def _seats(world: World) -> Iterator[Violation]:
    """A slot has one own machine at a time, unless the lender did not name one.

    A machine that is not named for long is taken for lost, and its successor runs beside it until
    it is named again and given back. A ghost cannot bring this about: its orders are void, or used.
    Under `reassign` a slot that moves to another pool has one machine in each for a while.
    """
    moves = world.settings.on_preemption == "reassign"
    seats: dict[tuple[int, str], list[tuple[float, float, int]]] = {}
    for machine in world.fleet.rented:
        if not world.truth.machines[machine.launch].stand_in and machine.ended_s is not None:
            seat = (machine.slot, machine.pool if moves else "")
            held = (machine.started_s, machine.ended_s, machine.launch)
            seats.setdefault(seat, []).append(held)
    for seat, held_by in seats.items():
        for (_, ended_s, first), (started_s, _, second) in pairwise(sorted(held_by)):
            if started_s < ended_s and not {first, second} & world.faults.hidden:
                yield Violation("one own machine in a slot", f"{seat}: {first}, {second}")


def _cost(world: World) -> Iterator[Violation]:
    """The ledger's sum is the lender's bill, but for prices that were seen late."""
    if world.faults.hidden:
        return
    minimum_s = world.settings.minimum_billing_s
    bill = 0.0
    for machine in world.fleet.rented:
        until_s = machine.ended_s or world.now_s
        if machine.cause != "preempted":
            until_s = max(until_s, machine.started_s + minimum_s[machine.pool])
        bill += _bill_usd(world, machine.pool, machine.started_s, until_s)
    ledger = FleetLedger(minimum_s)
    for offset, data in enumerate(world.log):
        ledger.feed(offset, decode_plan(data))
    moved_usd_per_s = sum(
        abs(after[pool] - before[pool]) / HOUR_S
        for (_, before), (_, after) in pairwise(world.told_prices)
        for pool in after
    )
    slack = moved_usd_per_s * PRICES_SEEN_S * world.settings.workers * 2 + 1e-9
    told = ledger.spent_usd(world.now_s)
    if abs(told - bill) > slack:
        yield Violation("the ledger's cost is the lender's bill", f"{told} against {bill}")


def _bill_usd(world: World, pool: str, since_s: float, until_s: float) -> float:
    total = 0.0
    ends = [at_s for at_s, _ in world.told_prices[1:]] + [float("inf")]
    for (at_s, prices), end_s in zip(world.told_prices, ends, strict=True):
        seconds = min(until_s, end_s) - max(since_s, at_s)
        total += max(seconds, 0.0) * prices[pool] / HOUR_S
    return total
