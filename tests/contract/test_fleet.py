"""The contract of rented machines: in memory, as local processes, and on EC2 by moto's server."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.spot.machines import LaunchRequest
from tests.contract.fleet_providers import (
    NOWHERE,
    ON_DEMAND,
    SPOT,
    Ec2,
    Memory,
    Processes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from common.spot.machines import Fleet, Machine
    from tests.contract.fleet_providers import Ec2Server, Provider, WithPrices

pytest_plugins = ["tests.contract.fleet_fixtures"]

# Time limit for each expected event.
PATIENCE_S = 20.0


@pytest.fixture(params=["memory", "process", "ec2"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    made: Provider
    if request.param == "memory":
        made = Memory()
    elif request.param == "process":
        made = Processes(tmp_path)
    else:
        made = Ec2(request.getfixturevalue("ec2_server"), request.node.name)
    with closing(made):
        yield made


@pytest.fixture
def fleet(provider: Provider) -> Iterator[Fleet]:
    with closing(provider.fleet()) as fleet:
        yield fleet


def order(launch: int, pool: str = SPOT, token: str = "") -> LaunchRequest:
    """Return an order for the slot with the launch's number."""
    return LaunchRequest(launch, token or f"doll-{launch}", launch, pool, f"w{launch}")


def running(fleet: Fleet) -> list[int]:
    return [machine.launch for machine in fleet.machines() if machine.state == "running"]


def ended(fleet: Fleet) -> list[tuple[int, str | None]]:
    return [(each.launch, each.cause) for each in fleet.machines() if each.state == "ended"]


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came about"


def machine_of(fleet: Fleet, launch: int) -> Machine:
    (found,) = (machine for machine in fleet.machines() if machine.launch == launch)
    return found


def test_new_fleet_has_no_machines(fleet: Fleet) -> None:
    assert fleet.machines() == ()


@pytest.mark.parametrize("slot", [3, None])
def test_order_starts_machine_with_the_ordered_attributes(
    provider: Provider, fleet: Fleet, slot: int | None
) -> None:
    assert fleet.launch([LaunchRequest(7, "doll-7", slot, SPOT, "w3-7")]) == ()
    await_that(lambda: running(fleet) == [7])
    (machine,) = fleet.machines()
    assert machine[1:6] == (7, slot, SPOT, "w3-7", "running")
    assert (machine.ended_s, machine.cause, machine.detail) == (None, None, "")
    assert machine.id
    assert machine.started_s > 0
    assert bool(machine.type and machine.zone) == isinstance(provider, Ec2)


def test_machines_are_identified_by_launch_across_pools(fleet: Fleet) -> None:
    assert fleet.launch([order(3), order(1, ON_DEMAND)]) == ()
    assert fleet.launch([order(2)]) == ()
    await_that(lambda: running(fleet) == [1, 2, 3])
    assert [machine.pool for machine in fleet.machines()] == [ON_DEMAND, SPOT, SPOT]
    assert len({machine.id for machine in fleet.machines()}) == 3


def test_repeated_order_starts_no_second_machine(provider: Provider, fleet: Fleet) -> None:
    assert fleet.launch([order(1), order(1)]) == ()
    assert fleet.launch([order(1)]) == ()
    with closing(provider.fleet()) as another:
        assert another.launch([order(1), order(2)]) == ()
        await_that(lambda: running(fleet) == running(another) == [1, 2])
        assert another.machines() == fleet.machines()


def test_attributes_of_running_machine_do_not_change(provider: Provider, fleet: Fleet) -> None:
    fleet.launch([order(1)])
    await_that(lambda: running(fleet) == [1])
    before = fleet.machines()
    with closing(provider.fleet()) as another:
        # Only the process that launched a machine knows it at once.
        await_that(lambda: running(another) == [1])
        assert another.machines() == before == fleet.machines()


def test_released_machine_ends_as_released(fleet: Fleet) -> None:
    fleet.launch([order(1), order(2)])
    await_that(lambda: running(fleet) == [1, 2])
    given_back = machine_of(fleet, 1)
    fleet.release([given_back.id])
    await_that(lambda: running(fleet) == [2])
    assert ended(fleet) == [(1, "released")]
    after = machine_of(fleet, 1)
    assert after[:5] == given_back[:5]
    assert after.started_s == given_back.started_s
    # EC2 reports whole seconds.
    assert after.ended_s is None or after.ended_s >= after.started_s - 1.0


def test_release_of_ended_or_unknown_machine_does_nothing(fleet: Fleet) -> None:
    fleet.launch([order(1), order(2)])
    await_that(lambda: running(fleet) == [1, 2])
    first = machine_of(fleet, 1).id
    fleet.release([])
    fleet.release(["i-0123456789abcdef0"])
    assert running(fleet) == [1, 2]
    for _ in range(2):
        fleet.release(["i-0123456789abcdef0", first])
    await_that(lambda: running(fleet) == [2])
    fleet.release([first])
    assert ended(fleet) == [(1, "released")]


def test_token_of_ended_machine_starts_no_other(fleet: Fleet) -> None:
    fleet.launch([order(1)])
    await_that(lambda: running(fleet) == [1])
    fleet.release([machine_of(fleet, 1).id])
    await_that(lambda: ended(fleet) == [(1, "released")])
    assert fleet.launch([order(1), order(2)]) == ()
    await_that(lambda: running(fleet) == [2])
    assert ended(fleet) == [(1, "released")]


def test_machine_reclaimed_by_provider_ends_as_preempted(provider: Provider, fleet: Fleet) -> None:
    fleet.launch([order(1), order(2), order(3, ON_DEMAND)])
    await_that(lambda: running(fleet) == [1, 2, 3])
    provider.preempt(2)
    await_that(lambda: running(fleet) == [1, 3])
    assert ended(fleet) == [(2, "preempted")]
    assert machine_of(fleet, 2).detail


@pytest.mark.parametrize("provider", ["memory", "process"], indirect=True)
def test_machine_is_preempted_when_price_exceeds_its_bid(
    provider: WithPrices, fleet: Fleet
) -> None:
    bid, higher = (order(at)._replace(bid_usd_per_hour=usd) for at, usd in ((1, 0.2), (2, 0.4)))
    provider.reprice(0.1)
    assert fleet.launch([bid, higher, order(3)]) == ()
    await_that(lambda: running(fleet) == [1, 2, 3])
    provider.reprice(0.3)
    await_that(lambda: running(fleet) == [2, 3])
    assert ended(fleet) == [(1, "preempted")]
    (refused,) = fleet.launch([order(4)._replace(bid_usd_per_hour=0.2)])
    assert (refused.launch, refused.capacity) == (4, True)


def test_machine_that_exits_by_itself_ends_as_failed(provider: Provider, fleet: Fleet) -> None:
    fleet.launch([order(1), order(2, ON_DEMAND)])
    await_that(lambda: running(fleet) == [1, 2])
    provider.fail(2)
    await_that(lambda: running(fleet) == [1])
    assert ended(fleet) == [(2, "failed")]
    assert machine_of(fleet, 2).detail


def test_order_without_capacity_is_refused_permanently(provider: Provider, fleet: Fleet) -> None:
    provider.refuse()
    refused = fleet.launch([order(1), order(2, ON_DEMAND), order(3)])
    assert sorted((each.launch, each.capacity) for each in refused) == [(1, True), (3, True)]
    assert all(each.reason for each in refused)
    await_that(lambda: running(fleet) == [2])
    provider.offer()
    again = fleet.launch([order(1), order(4)])
    assert [(each.launch, each.capacity) for each in again] == [(1, True)]
    await_that(lambda: running(fleet) == [2, 4])
    assert ended(fleet) == []


def test_impossible_order_does_not_block_other_orders(fleet: Fleet) -> None:
    (refused,) = fleet.launch([order(1, NOWHERE), order(2)])
    assert (refused.launch, refused.capacity) == (1, False)
    assert refused.reason
    await_that(lambda: running(fleet) == [2])


def test_unavailable_provider_raises_and_machines_keep_running(
    provider: Provider, fleet: Fleet
) -> None:
    fleet.launch([order(1)])
    await_that(lambda: running(fleet) == [1])
    (machine,) = fleet.machines()
    provider.go_away()
    for _ in range(2):
        with pytest.raises(UnavailableError):
            fleet.machines()
        with pytest.raises(UnavailableError):
            fleet.launch([order(2)])
        with pytest.raises(UnavailableError):
            fleet.release([machine.id])
    provider.come_back()
    assert fleet.machines() == (machine,)
    assert fleet.launch([order(2)]) == ()
    await_that(lambda: running(fleet) == [1, 2])


def test_machines_outlive_the_fleet_that_launched_them(provider: Provider) -> None:
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: running(fleet) == [1])
        before = fleet.machines()
    with closing(provider.fleet()) as another:
        await_that(lambda: running(another) == [1])
        assert another.machines() == before
        another.release([before[0].id])
        await_that(lambda: ended(another) == [(1, "released")])


def test_fleet_ignores_machines_of_another_job(provider: Provider, fleet: Fleet) -> None:
    fleet.launch([order(1)])
    await_that(lambda: running(fleet) == [1])
    with closing(provider.fleet("other")) as other:
        assert other.machines() == ()
        other.release([machine_of(fleet, 1).id])
        assert running(fleet) == [1]


# --- EC2: one order, one machine -----------------------------------------------------------------


@pytest.fixture
def ec2(ec2_server: Ec2Server, request: pytest.FixtureRequest) -> Iterator[Ec2]:
    with closing(Ec2(ec2_server, request.node.name)) as made:
        yield made
    ec2_server.honours_tokens = ec2_server.shows = True


def test_tags_prevent_second_machine_if_provider_forgets_tokens(ec2: Ec2) -> None:
    ec2.server.honours_tokens = False
    with closing(ec2.fleet()) as fleet, closing(ec2.fleet()) as another:
        for each in (fleet, another, fleet):
            assert each.launch([order(1), order(2)]) == ()
        assert running(another) == [1, 2]
        another.release([machine_of(another, 1).id])
        assert fleet.launch([order(1)]) == ()
        assert running(fleet) == [2]


def test_machine_stopped_by_hand_is_listed_until_its_release(ec2: Ec2) -> None:
    with closing(ec2.fleet()) as fleet:
        fleet.launch([order(1), order(2)])
        machine = machine_of(fleet, 1)
        ec2.server.client().stop_instances(InstanceIds=[machine.id])
        await_that(lambda: machine_of(fleet, 1).state == "stopped")
        stopped = machine_of(fleet, 1)
        assert (stopped.cause, running(fleet)) == (None, [2])
        assert stopped.detail.startswith("stopped; Client.UserInitiatedShutdown")
        assert stopped.ended_s is not None
        assert stopped.ended_s >= math.floor(machine.started_s)
        fleet.release([machine.id])
        assert [launch for launch, _ in ended(fleet)] == [1]


def test_tokens_prevent_second_machine_if_listing_lags(ec2: Ec2) -> None:
    ec2.server.shows = False
    with closing(ec2.fleet()) as fleet, closing(ec2.fleet()) as another:
        for each in (fleet, another, fleet):
            assert each.launch([order(1), order(2)]) == ()
        assert another.machines() == ()
        ec2.server.shows = True
        assert running(another) == [1, 2]


def test_fleet_launches_more_orders_than_it_has_connections(ec2: Ec2) -> None:
    with closing(ec2.fleet()) as fleet:
        assert fleet.launch([order(launch) for launch in range(1, 21)]) == ()
        assert running(fleet) == list(range(1, 21))
