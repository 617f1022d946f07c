"""Assignments of slots to spare machines: when they happen, and which of them count."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.spot.provisioning.records import LaunchRequested, Left, PlanRecord, SlotAssigned
from common.spot.provisioning.slots import assign_slots, readiness
from common.spot.provisioning.startup_times import StartUps
from common.spot.theory.work import Pool
from tests.unit.spot.provisioning.examples import T0, ended, fold, lead, machine, started

EQUAL = np.ones(3)
SLOW, FAST = Pool("spot", 0.25, 0.9, 100.0, start_up_s=5.0), Pool("fast", 0.25, speed=2.0)
SPEEDS = {"spot": 1.0, "fast": 2.0}


def counted(launch: int, term: int = 0) -> LaunchRequested:
    """Return an order without a slot."""
    return LaunchRequested(term, launch, T0, None, "spot", f"digits-m{launch}")


def assigned(slot: int, launch: int, at_s: float = T0) -> SlotAssigned:
    return SlotAssigned(0, at_s, slot, launch, f"digits-w{slot}")


def two_spares() -> list[PlanRecord]:
    return [lead(), counted(1), counted(2), started(1), started(2)]


def test_empty_slot_gets_a_spare_that_has_started_up() -> None:
    there = [machine(1, 0), machine(2, None), machine(3, None, runs=False)]
    ready = readiness([SLOW, FAST], StartUps(), T0 + 5)

    assert assign_slots(there, ready, SPEEDS, {}, EQUAL) == ((1, 2),)
    assert (
        assign_slots(there, readiness([SLOW, FAST], StartUps(), T0 + 4.9), SPEEDS, {}, EQUAL) == ()
    )


def test_longest_waiting_then_busiest_slot_gets_the_fastest_spare() -> None:
    there = [machine(1, None), machine(2, None, "fast"), machine(3, None)]
    ready = readiness([SLOW, FAST], StartUps(), T0 + 5)
    vacated_s = {0: T0 - 1, 1: T0 - 2, 2: T0 - 2}

    found = assign_slots(there, ready, SPEEDS, vacated_s, np.array([9.0, 1.0, 2.0]))

    assert found == ((2, 2), (1, 1), (0, 3))


def test_assigned_machine_has_the_slot_and_its_name_until_it_ends() -> None:
    ledger = fold([*two_spares(), assigned(3, 1)])
    assert (ledger.machines[1].slot, ledger.machines[1].member) == (3, "digits-w3")
    assert (ledger.machines[1].worker, ledger.machines[2].slot) == ("digits-m1", None)

    after = fold([*two_spares(), assigned(3, 1), ended(1, T0 + 9), assigned(3, 2)])
    assert after.machines[2].slot == 3
    assert after.vacated_s == {3: T0 + 9}


def test_assignment_of_a_taken_slot_or_machine_is_ignored() -> None:
    taken = [*two_spares(), assigned(3, 1)]
    for extra in (
        assigned(3, 2),
        assigned(4, 1),
        assigned(4, 7),
        SlotAssigned(5, T0, 4, 2, "digits-w4"),
    ):
        assert fold([*taken, extra]).machines[2].slot is None
    coming = fold([lead(), counted(1), assigned(0, 1)])
    assert coming.machines[1].slot is None
    beside = LaunchRequested(0, 3, T0, 4, "on-demand", "digits-w4")
    assert fold([*two_spares(), beside, assigned(4, 1)]).machines[1].slot is None


def test_slot_whose_worker_left_is_free_and_its_machine_no_spare() -> None:
    left = [*two_spares(), assigned(3, 1), Left(0, T0 + 7, 1)]
    ledger = fold([*left, Left(0, T0 + 8, 1), Left(0, T0 + 8, 2), assigned(3, 2), ended(1, T0 + 9)])

    assert ledger.machines[1].left_s == T0 + 7
    assert not ledger.machines[2].left  # it had no slot then
    assert ledger.machines[2].slot == 3
    assert ledger.vacated_s == {3: T0 + 7}
    there = fold(left).open
    assert assign_slots(there, readiness([FAST], StartUps(), T0), SPEEDS, {}, np.ones(4))[-1:] == (
        (0, 2),
    )


@given(
    held=st.lists(st.integers(0, 4) | st.none(), max_size=8),
    runs=st.lists(st.booleans(), min_size=8, max_size=8),
    slots=st.integers(1, 5),
)
def test_assignment_fills_all_slots_it_can_without_sharing(
    held: list[int | None], runs: list[bool], slots: int
) -> None:
    once = [slot if slot not in held[:n] else None for n, slot in enumerate(held)]
    there = [
        machine(n, slot, runs=run) for n, (slot, run) in enumerate(zip(once, runs, strict=False))
    ]
    found = assign_slots(there, readiness([FAST], StartUps(), T0), SPEEDS, {}, np.ones(slots))
    free = set(range(slots)) - set(once)
    spares = {each.launch for each in there if each.slot is None and each.running}
    assert {slot for slot, _ in found} <= free
    assert {launch for _, launch in found} <= spares
    assert len(found) == len({launch for _, launch in found}) == min(len(free), len(spares))
