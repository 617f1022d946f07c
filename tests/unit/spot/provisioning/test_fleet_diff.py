"""Missing machines, surplus machines, and when a refused order is retried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.machines import Offer
from common.spot.provisioning.fleet_diff import (
    LONGEST_WAIT_S,
    Backoff,
    DesiredMachine,
    desired_machines,
    reconcile,
    reconcile_counted,
    worker_name,
)
from tests.unit.spot.provisioning.examples import T0, ended, machine, started

POOLS = ("on-demand", "spot", "other")


def test_desired_machines_has_one_machine_per_used_slot() -> None:
    all_desired = desired_machines((1, 0, -1, 1), POOLS)

    assert all_desired == (
        DesiredMachine(0, "spot"),
        DesiredMachine(1, "on-demand"),
        DesiredMachine(3, "spot"),
    )


def test_reconcile_keeps_machines_that_are_desired() -> None:
    steps = reconcile(
        [DesiredMachine(0, "spot"), DesiredMachine(1, "spot")], [machine(1), machine(2, slot=1)]
    )

    assert steps == ((), ())


def test_reconcile_orders_for_a_moving_slot_after_its_release() -> None:
    moving = machine(1, pool="spot")

    assert reconcile([DesiredMachine(0, "on-demand")], [moving]) == ((), (moving,))
    assert reconcile([DesiredMachine(0, "on-demand")], []) == (
        (DesiredMachine(0, "on-demand"),),
        (),
    )


def test_reconcile_keeps_the_running_one_of_two_machines() -> None:
    coming, runs = machine(1, runs=False), machine(2)

    assert reconcile([DesiredMachine(0, "spot")], [coming, runs]).release == (coming,)


def test_reconcile_releases_unwanted_machines_and_skips_blocked_orders() -> None:
    extra = machine(1, slot=7)

    assert reconcile([DesiredMachine(0, "spot")], [extra], lambda _: False) == ((), (extra,))


slots = st.integers(0, 3)
open_machines = st.lists(st.tuples(slots, st.sampled_from(POOLS), st.booleans()), max_size=8)


@given(st.lists(st.integers(-1, 2), min_size=4, max_size=4), open_machines)
def test_reconcile_reaches_the_desired_machines_in_two_steps(
    places: list[int], there: list[tuple[int, str, bool]]
) -> None:
    all_desired = desired_machines(places, POOLS)
    rented = [machine(n, slot, pool, runs=runs) for n, (slot, pool, runs) in enumerate(there, 1)]
    number = 100
    for _ in range(2):
        steps = reconcile(all_desired, rented)
        rented = [m for m in rented if m not in steps.release]
        # No order replaces a machine that is still leaving.
        leaving = {m.slot for m in steps.release}
        assert not leaving & {desired.slot for desired in steps.order}
        for desired in steps.order:
            number += 1
            rented.append(machine(number, desired.slot, desired.pool))

    assert reconcile(all_desired, rented) == ((), ())
    assert sorted((m.slot, m.pool) for m in rented) == sorted((w.slot, w.pool) for w in all_desired)


@pytest.mark.parametrize(("mode", "name"), [("hold", "digits-w3"), ("reassign", "digits-w3-17")])
def test_worker_name_includes_the_launch_only_with_reassignment(mode: str, name: str) -> None:
    assert worker_name("digits", 3, 17, mode) == name  # type: ignore[arg-type]  # two words


# --- growing pauses ------------------------------------------------------------------------------


def refuse(backoff: Backoff, at_s: float, slot: int = 0) -> float:
    """Report a refused order for spot. Returns the time until the next one is allowed."""
    backoff.feed(ended(1, at_s, "refused"), machine(1, slot, runs=False))
    return backoff.until_s(DesiredMachine(slot, "spot")) - at_s


def test_backoff_after_refusals_doubles() -> None:
    backoff, at_s, waits = Backoff(), T0, []
    for _ in range(8):
        waits.append(refuse(backoff, at_s))
        at_s += waits[-1]

    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert backoff.until_s(DesiredMachine(3, "spot")) == at_s
    assert backoff.until_s(DesiredMachine(0, "on-demand")) < T0


def test_refusals_of_one_round_count_once() -> None:
    backoff = Backoff()
    for slot in range(5):
        assert refuse(backoff, T0, slot) == 1

    assert backoff.refused == {0, 1, 2, 3, 4}
    assert backoff.due(T0) == T0 + 1
    assert backoff.due(T0 + 1) == float("inf")


def test_started_machine_resets_the_backoff() -> None:
    backoff = Backoff()
    refuse(backoff, T0)
    refuse(backoff, T0 + 1)
    backoff.feed(started(2, T0 + 3), machine(2))

    assert not backoff.refused
    assert refuse(backoff, T0 + 100) == 1


def test_backoff_of_a_slot_doubles_if_machines_fail_at_once() -> None:
    backoff, at_s, waits = Backoff(), T0, []
    for launch in range(1, 5):
        backoff.feed(started(launch, at_s), machine(launch))
        failed = machine(launch)
        failed.started_s = at_s
        backoff.feed(ended(launch, at_s + 2, "failed"), failed)
        waits.append(backoff.until_s(DesiredMachine(0, "on-demand")) - at_s - 2)
        at_s += 2 + waits[-1]
    assert waits == [1, 2, 4, 8]
    assert backoff.until_s(DesiredMachine(1, "spot")) < T0  # another slot is not held back

    failed = machine(9)
    failed.started_s = at_s
    backoff.feed(ended(9, at_s + 1000, "failed"), failed)
    assert backoff.until_s(DesiredMachine(0, "spot")) == at_s + 1001


# --- counted -------------------------------------------------------------------------------------

SPOT, ALONE = Offer("spot"), Offer("on-demand")


def test_reconcile_counted_orders_only_missing_machines() -> None:
    there = [machine(1, None), machine(2, None, runs=False)]

    steps = reconcile_counted({SPOT: 3, ALONE: 1}, there)

    assert steps == (
        (DesiredMachine(None, "spot", offer=SPOT), DesiredMachine(None, "on-demand", offer=ALONE)),
        (),
    )


def test_reconcile_counted_releases_idle_and_then_newest_machines() -> None:
    spot = [machine(n, None) for n in (1, 2, 3)]
    serving, spare = machine(4, 0, "on-demand"), machine(5, None, "on-demand")

    steps = reconcile_counted({SPOT: 2, ALONE: 1}, [spare, *spot, serving])

    assert not steps.order
    assert sorted(each.launch for each in steps.release) == [3, 5]


def test_reconcile_counted_releases_machines_of_other_offers() -> None:
    there = [machine(1, None), machine(2, None, runs=False)]
    large = Offer("spot", "c5.large", bid_usd_per_hour=0.1)

    steps = reconcile_counted({large: 1}, there, lambda desired: desired.offer == large)

    assert steps.order == (DesiredMachine(None, "spot", offer=large),)
    assert steps.release == tuple(there)


def test_reconcile_counted_does_not_reorder_lost_bids() -> None:
    bid = SPOT._replace(bid_usd_per_hour=0.1)
    desired = DesiredMachine(None, "spot", offer=bid)

    assert reconcile_counted({bid: 3}, [], gone_bids={bid: 2}).order == (desired,)
    assert reconcile_counted({bid: 3}, [], gone_bids={bid: 5}).order == ()


def test_backoff_does_not_depend_on_the_bid() -> None:
    backoff, failed = Backoff(), machine(1, None)
    failed.asked = SPOT._replace(bid_usd_per_hour=0.1)
    backoff.feed(started(1), failed)
    backoff.feed(ended(1, T0 + 5, "failed"), failed)
    backoff.feed(ended(2, T0 + 5, "refused"), machine(2, None, "other", runs=False))

    higher = SPOT._replace(bid_usd_per_hour=0.2)
    assert backoff.until_s(DesiredMachine(None, "spot", offer=higher)) == T0 + 6
    assert backoff.refusing(T0 + 5.5) == {"other"}
    assert backoff.refusing(T0 + 6) == frozenset()


def test_machine_whose_worker_left_is_replaced_and_later_released() -> None:
    left = machine(1, 0)
    left.left_s = T0
    desired = DesiredMachine(None, "spot", offer=SPOT)

    assert reconcile_counted({SPOT: 1}, [left], now_s=T0 + 149) == ((desired,), ())
    assert reconcile_counted({SPOT: 1}, [left], now_s=T0 + 150) == ((desired,), (left,))


def test_early_failure_backs_off_that_kind_of_machine() -> None:
    backoff, desired = Backoff(), DesiredMachine(None, "spot", offer=SPOT)
    backoff.feed(started(1), machine(1, None))
    backoff.feed(ended(1, T0 + 5, "failed"), machine(1, None))

    assert backoff.until_s(desired) == T0 + 6
    assert backoff.until_s(DesiredMachine(0, "spot")) < T0
