"""Orders and machines: requests to the fleet, and conclusions from its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.spot.machines import LaunchRequest, Machine, Refused
from common.spot.provisioning.events import MachinesSeen
from common.spot.provisioning.fleet_watch import AGAIN_S, FleetWatch
from common.spot.provisioning.records import (
    Ended,
    LaunchRequested,
    PlanRecord,
    Started,
    client_token,
)
from tests.unit.spot.provisioning.examples import SETTINGS, T0, ended, fold, lead, ordered, started

if TYPE_CHECKING:
    from common.spot.provisioning.fleet_ledger import FleetLedger


def watch(*records: PlanRecord) -> tuple[FleetWatch, FleetLedger]:
    ledger = fold([lead(), *records])
    return FleetWatch(SETTINGS, ledger), ledger


def there(launch: int, name: str = "") -> Machine:
    return Machine(name or f"m-{launch}", launch, 0, "spot", "w", "running", T0 + 1)


def look(watched: FleetWatch, at_s: float, *machines: Machine) -> list[Started | Ended]:
    watched.seen(MachinesSeen(machines, at_s))
    return list(watched.records(at_s))


def test_order_is_repeated_until_it_is_answered() -> None:
    watched, _ = watch(ordered(1))
    order = LaunchRequest(1, client_token("digits", 1), 0, "spot", "digits-w0-1")

    assert watched.orders(T0) == (order,)
    assert not watched.orders(T0 + 1)
    assert watched.orders(T0 + AGAIN_S) == (order,)
    watched.answered([1], [], T0 + AGAIN_S)
    assert not watched.orders(T0 + 3 * AGAIN_S)


def test_open_orders_of_a_predecessor_are_repeated() -> None:
    watched, _ = watch(ordered(1), started(1), ordered(2), ordered(3), ended(3, cause="refused"))

    assert [order.launch for order in watched.orders(T0)] == [2]


def test_refusal_ends_the_order() -> None:
    watched, _ = watch(ordered(1))
    watched.answered([1], [Refused(1, capacity=True, reason="none left")], T0)

    assert list(watched.records(T0)) == [Ended(0, 1, T0, "refused", "none left")]


def test_listed_machine_started_when_the_provider_says() -> None:
    watched, ledger = watch(ordered(1))

    assert look(watched, T0 + 5, there(1)) == [Started(0, 1, T0 + 1, "m-1")]
    ledger.feed(2, started(1, T0 + 1))
    assert look(watched, T0 + 6, there(1)) == []


def test_machine_that_came_and_ended_between_polls_is_recorded() -> None:
    watched, _ = watch(ordered(1))
    gone = there(1)._replace(state="ended", ended_s=T0 + 3, cause="preempted", detail="no room")

    assert look(watched, T0 + 5, gone) == [
        Started(0, 1, T0 + 1, "m-1"),
        Ended(0, 1, T0 + 3, "preempted", "no room"),
    ]


def test_older_poll_is_ignored() -> None:
    watched, _ = watch(ordered(1), started(1))
    gone = there(1)._replace(state="ended", ended_s=T0 + 3, cause="preempted")

    assert look(watched, T0 + 5, there(1)) == []
    assert look(watched, T0 + 4, gone) == []
    assert look(watched, T0 + 5, gone) == []


def test_machine_is_lost_after_it_is_unlisted_for_long_enough() -> None:
    # The first poll without the machine is at T0 + 10. It is lost if polls lack it for 15 s.
    watched, _ = watch(ordered(1), started(1))

    assert look(watched, T0 + 9, there(1)) == []
    assert [look(watched, T0 + at_s) for at_s in (10, 12, 24)] == [[], [], []]
    (lost,) = look(watched, T0 + 25)
    assert (lost.launch, lost.at_s) == (1, T0 + 10)
    assert isinstance(lost, Ended)
    assert lost.cause == "lost"


def test_machine_that_is_listed_again_is_not_lost() -> None:
    watched, _ = watch(ordered(1), started(1))

    for at_s in (10, 12, 14):
        assert look(watched, T0 + at_s) == []
    assert look(watched, T0 + 15, there(1)) == []
    assert look(watched, T0 + 30) == []


def test_released_machine_that_is_no_longer_listed_has_ended() -> None:
    watched, ledger = watch(ordered(1), started(1))
    assert watched.releases(ledger.open, T0) == ("m-1",)
    assert not watched.releases(ledger.open, T0 + 1)
    assert watched.releases(ledger.open, T0 + AGAIN_S) == ("m-1",)

    found = [look(watched, T0 + at_s) for at_s in (10, 12, 30)]

    (gone,) = found[2]
    assert isinstance(gone, Ended)
    assert gone.cause == "released"


def test_order_without_a_machine_is_lost_long_after_its_answer() -> None:
    watched, _ = watch(ordered(1))
    for at_s in (0, 60, 200, 400):  # the order was not sent yet
        assert look(watched, T0 + at_s) == []
    watched.answered([1], [], T0 + 500)

    assert [look(watched, T0 + at_s) for at_s in (499, 501, 550, 600)] == [[], [], [], []]
    (lost,) = look(watched, T0 + 501 + SETTINGS.unseen_s)
    assert isinstance(lost, Ended)
    assert lost.cause == "lost"


def test_machine_of_an_ended_order_is_released_immediately() -> None:
    watched, ledger = watch(ordered(1), ended(1, cause="lost"))
    look(watched, T0, there(1))

    assert watched.releases(ledger.open, T0) == ("m-1",)


def test_second_machine_of_an_order_is_released() -> None:
    watched, ledger = watch(ordered(1), started(1))

    assert look(watched, T0, there(1), there(1, "m-ghost")) == []
    assert watched.releases((), T0) == ("m-ghost",)
    assert [rented.machine for rented in ledger.running] == ["m-1"]


def test_machine_without_an_order_is_released_after_the_grace_time() -> None:
    # The machine may have been ordered by a successor whose records were not read yet.
    watched, _ = watch()
    for at_s in (0, 5, 10):
        look(watched, T0 + at_s, there(7))
        assert not watched.releases((), T0 + at_s)
    look(watched, T0 + SETTINGS.grace_s, there(7))

    assert watched.releases((), T0 + SETTINGS.grace_s) == ("m-7",)


def test_machine_whose_order_is_read_in_time_is_kept() -> None:
    watched, ledger = watch()
    look(watched, T0, there(1))
    ledger.feed(1, ordered(1))
    look(watched, T0 + 99, there(1))

    assert not watched.strangers


def test_order_without_a_machine_is_not_released() -> None:
    watched, ledger = watch(ordered(1))

    assert not watched.releases(ledger.open, T0)


def test_order_has_its_slot_pool_and_worker() -> None:
    ledger = fold([lead(), LaunchRequested(0, 1, T0, 3, "on-demand", "digits-w3")])
    watched = FleetWatch(replace(SETTINGS, job="other"), ledger)

    (order,) = watched.orders(T0)

    assert order == LaunchRequest(1, client_token("other", 1), 3, "on-demand", "digits-w3")
