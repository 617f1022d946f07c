"""Machines whose workers never send a heartbeat are replaced, and do not count as working."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest

from common.spot.provisioning.records import Ended, LaunchRequested, Left, Planned, Reviewed
from tests.unit.spot.provisioning.examples import ON_DEMAND, SETTINGS, SPOT, T0
from tests.unit.spot.provisioning.harness import ProviderThread, Street

if TYPE_CHECKING:
    from common.config.policy_names import PolicyName
    from common.spot.provisioning.settings import ProvisionerSettings

START_S = 50.0
POOLS = replace(ON_DEMAND, start_up_s=START_S), replace(SPOT, start_up_s=START_S)
Modes = pytest.mark.parametrize(
    ("policy", "mode"),
    [("adaptive", "reassign"), ("adaptive", "hold"), ("pools", "reassign"), ("pools", "hold")],
)


def settings(
    policy: PolicyName = "adaptive", mode: Literal["hold", "reassign"] = "reassign"
) -> ProvisionerSettings:
    return replace(SETTINGS, pools=POOLS, policy=policy, on_preemption=mode)


def never_reported(street: Street) -> list[Left]:
    return [each for each in street.written(Left) if each.never_reported]


class OneDeadWorker(Street):
    """The worker of the first machine never starts."""

    def joins(self, launch: int, pool: str) -> float:
        """Return the time from a machine's start to its worker's first heartbeat."""
        return float("inf") if launch == 1 else super().joins(launch, pool)


@Modes
def test_machine_without_a_heartbeat_is_replaced_after_three_start_ups(
    policy: PolicyName, mode: Literal["hold", "reassign"]
) -> None:
    # machine 1  ░░░░░░░░░░░░░░░░░░ never reported, released
    # another                       ░░░░██████████
    street = OneDeadWorker(joins_s={"on-demand": START_S, "spot": START_S})
    harness = ProviderThread(street, settings(policy, mode))
    harness.run(3 * START_S - 10)
    assert not never_reported(street)
    before = len(street.fleet.rented)
    harness.run(4 * START_S)

    (left,) = never_reported(street)
    started_s = street.fleet.rented[0].started_s
    # Under `hold`, the silence of a spare begins when it gets a slot.
    assert left.launch == 1
    assert 3 * START_S - 5 <= left.at_s - started_s <= 4 * START_S + 10
    ended = next(each for each in street.written(Ended) if each.launch == 1)
    assert (ended.cause, ended.detail) == (
        "failed",
        "released, because its worker never reported",
    )
    assert len(street.fleet.rented) == before + 1
    assert not harness.provisioner.ledger.machines[before + 1].left


def test_machine_that_starts_up_or_never_reports_does_not_count_as_working() -> None:
    street = Street(joins_s={"on-demand": START_S})
    harness = ProviderThread(street, settings())
    harness.run(START_S + 30)

    review = street.written(Reviewed)[-1]
    assert (review.running, review.stability) == (4, 0.0)
    assert "machines at work: 0, needed to keep up" in review.warning
    assert "4 are starting" in review.warning


@pytest.mark.parametrize("mode", ["reassign", "hold"])
def test_pool_whose_workers_never_report_is_tried_ever_less_often(
    mode: Literal["hold", "reassign"],
) -> None:
    street = Street(joins_s={"other": START_S})
    harness = ProviderThread(street, settings("on-demand", mode))
    harness.run(6 * 3600, step_s=5.0)

    orders = [each.at_s - T0 for each in street.written(LaunchRequested)]
    # After the first four, one machine at a time is tried.
    assert max(orders[:4]) < 10
    assert len(orders) <= 4 + 10
    assert orders[-1] - orders[-2] > 3600
    assert sum(each.state == "running" for each in street.fleet.rented) <= 1
    review = street.written(Reviewed)[-1]
    assert "workers on machines of on-demand never report: " in review.warning
    assert "useless, because their workers never report" in review.warning
    assert not street.written(Planned)[-1].feasible


def test_pool_is_used_again_in_full_once_one_of_its_workers_reports() -> None:
    street = Street(joins_s={"other": START_S})
    harness = ProviderThread(street, settings())
    harness.run(200)
    assert len(never_reported(street)) == 4
    street.joins_s |= {"on-demand": START_S, "spot": START_S}
    harness.run(400)

    assert len(never_reported(street)) == 4
    assert len(harness.provisioner.ledger.running) == 4
    assert "never report" not in street.written(Reviewed)[-1].warning


def test_slow_workers_are_awaited_longer_after_a_few_machines() -> None:
    # The market file says 50 s, but workers take 200 s, longer than three of these times.
    street = Street(joins_s={"on-demand": 200.0, "spot": 200.0})
    harness = ProviderThread(street, settings())
    harness.run(1500)

    assert len(never_reported(street)) <= 8
    assert len(harness.provisioner.ledger.running) == 4
    assert len(harness.provisioner.ledger.open) == 4


def test_worker_that_reports_after_it_was_given_up_is_released() -> None:
    street = Street(joins_s={"other": START_S})
    harness = ProviderThread(street, settings())
    harness.run(3 * START_S)
    street.fleet.go_away()
    harness.run(10)
    assert len(never_reported(street)) == 4
    street.joins_s |= {"spot": START_S}
    harness.run(30)
    street.fleet.come_back()
    harness.run(300)

    # The workers of the given-up machines reported before the provider could release them.
    assert {each.cause for each in street.written(Ended)} == {"failed"}
    assert [each.launch for each in street.fleet.rented if each.state == "running"] == [5, 6, 7, 8]


def test_machines_are_kept_while_redis_is_unavailable() -> None:
    street = Street()
    harness = ProviderThread(street, settings())
    harness.run(10 * START_S)

    assert not street.written(Left)
    assert len(harness.provisioner.ledger.running) == 4
    assert street.written(Reviewed)[-1].warning == ""


def test_successor_gives_workers_three_start_ups_from_its_own_first_poll() -> None:
    street = Street(joins_s={"other": START_S})
    ProviderThread(street, settings()).run(2 * START_S)
    successor = ProviderThread(street, settings(), "p2")
    successor.run(2 * START_S)
    assert successor.provisioner.is_leader
    assert not never_reported(street)
    successor.run(2 * START_S)
    assert len(never_reported(street)) == 4
