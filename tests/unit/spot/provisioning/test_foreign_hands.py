"""Machines that somebody else stops or terminates are losses, and stopped ones are released."""

from __future__ import annotations

from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.spot.provisioning.fleet_watch import PREDECESSOR_S
from common.spot.provisioning.records import Ended, Settled
from tests.unit.spot.provisioning.examples import SETTINGS, T0
from tests.unit.spot.provisioning.harness import ProviderThread, Street


def ends(street: Street) -> list[tuple[int, str, str]]:
    return [(each.launch, each.cause, each.detail) for each in street.written(Ended)]


def test_machine_stopped_by_hand_is_lost_replaced_and_released() -> None:
    street = Street()
    harness = ProviderThread(street)
    harness.run(20)
    street.fleet.stop(2)
    stopped_s = street.clock()
    harness.run(20)

    assert ends(street) == [(2, "lost", "stopped by a user")]
    assert street.fleet.rented[1].state == "ended"
    (release,) = harness.did(do.Release)
    assert release.machines == ("m-2",)
    assert release.reason == "the plan does not use them"
    assert len(harness.provisioner.ledger.running) == 4
    # It is paid for until the stop.
    machine = harness.provisioner.ledger.machines[2]
    assert machine.started_s is not None
    usd = 3 * (street.clock() - machine.started_s) + (stopped_s - machine.started_s)
    usd += street.clock() - (harness.provisioner.ledger.machines[5].started_s or 0.0)
    assert abs(harness.provisioner.ledger.spent_usd(street.clock()) - usd * 0.25 / 3600) < 1e-12


def test_job_is_settled_only_after_its_stopped_machines_are_released() -> None:
    street = Street()
    harness = ProviderThread(street)
    harness.run(20)
    street.fleet.stop(2)
    harness.on(events.ProvisioningWanted("stopped", "done"))
    harness.run(20)

    assert all(each.state == "ended" for each in street.fleet.rented)
    assert len(street.written(Settled)) == 1


def test_machine_terminated_by_somebody_else_is_lost() -> None:
    street = Street()
    harness = ProviderThread(street)
    harness.run(20)
    street.fleet.release(["m-2"])
    harness.run(20)

    assert ends(street) == [(2, "lost", "not released by the provisioner: given back")]
    assert harness.provisioner.ledger.ended["released"] == 0
    assert len(harness.provisioner.ledger.running) == 4


def test_machine_that_the_plan_gives_up_is_released() -> None:
    street = Street()
    harness = ProviderThread(street)
    harness.run(20)
    street.prices.set("spot", 3.0)
    harness.run(PREDECESSOR_S + 60)

    assert {cause for _, cause, _ in ends(street)} == {"released"}


def test_release_by_a_predecessor_is_not_a_loss() -> None:
    # p1   releases m-2, and dies
    # p2             takes over; later somebody terminates m-3
    street = Street()
    ProviderThread(street).run(20)
    street.fleet.release(["m-2"])
    successor = ProviderThread(street, SETTINGS, "p2")
    successor.run(PREDECESSOR_S + 20)
    assert successor.provisioner.is_leader
    assert ends(street) == [(2, "released", "given back")]
    street.fleet.release(["m-3"])
    successor.run(20)

    assert [(launch, cause) for launch, cause, _ in ends(street)] == [(2, "released"), (3, "lost")]
    assert street.clock() > T0 + PREDECESSOR_S
