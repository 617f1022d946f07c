"""Local processes as machines: preempted in time, launched once, and never orphaned for long."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import psutil
import pytest
from msgspec.structs import replace

from common.spot.fleets.local.records import OrderRecord, OrderRecords
from common.spot.fleets.local.table import Table
from common.spot.machines import LaunchRequest, Offer
from common.spot.provisioning.bill import Bill
from common.spot.theory.billing import BY_NAME
from tests.contract.fleet_providers import ON_DEMAND, SPOT, Processes
from tests.fakes.clock import ManualClock
from tests.memory_fleet import MemoryPrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from common.spot.fleets.local.fleet import ProcessFleet, StartedProcess
    from common.spot.machines import Machine

PATIENCE_S = 120.0
DEAF = ("sh", "-c", "trap '' TERM; echo ready; sleep 600 & wait; sleep 600")
WITH_A_SESSION = ("sh", "-c", "setsid sh -c 'echo ready; exec sleep 600' & wait")
NOON_S = 1_800_000_000.0


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Processes]:
    with closing(Processes(tmp_path, clock=ManualClock(NOON_S))) as made:
        yield made


def order(launch: int, pool: str = SPOT) -> LaunchRequest:
    return LaunchRequest(launch, f"doll-{launch}", launch, pool, f"w{launch}")


RECORD = OrderRecord(1, 1, SPOT, "w1", NOON_S)


def records(provider: Processes) -> OrderRecords:
    return OrderRecords(provider.folder / "digits" / "machines")


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        pause.wait(0.002)


def state(fleet: ProcessFleet, launch: int) -> str:
    return machine_of(fleet, launch).state


def machine_of(fleet: ProcessFleet, launch: int) -> Machine:
    (found,) = (machine for machine in fleet.machines() if machine.launch == launch)
    return found


def advance(provider: Processes, seconds: float) -> None:
    assert isinstance(provider.clock, ManualClock)
    provider.clock.advance(seconds)


# --- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("billing", "usd"),
    [
        ("ec2", (0.0, 0.158 * 0.25 + 0.2 * 1.25, 0.2 * 0.5)),
        ("ec2-2017", (0.0, 0.158 + 0.2, 0.2)),
        ("gce", (0.158 * 0.25, 0.158 * 0.25 + 0.2 * 1.25, 0.2 * 0.5)),
    ],
)
def test_bill_of_a_run_is_exact(provider: Processes, billing: str, usd: tuple[float, ...]) -> None:
    # price   0.158     0.2
    # 1       ========| preempted
    # 2       =================================| released
    # 3                             ===========| released
    # minute  0        15           60         90
    provider.prices = prices = MemoryPrices({SPOT: 0.158})
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1), order(2)])
        await_that(lambda: provider.running().keys() == {1, 2})
        advance(provider, 900.0)
        provider.preempt(1)
        await_that(lambda: state(fleet, 1) == "ended")
        preempted = machine_of(fleet, 1)
        prices.set(SPOT, 0.2)
        advance(provider, 2700.0)
        fleet.launch([order(3)])
        await_that(lambda: provider.running().keys() == {2, 3})
        advance(provider, 1800.0)
        fleet.release([order(2).token, order(3).token])
        await_that(lambda: not provider.running())
        machines = preempted, machine_of(fleet, 2), machine_of(fleet, 3)

    assert [machine.usd_per_hour for machine in machines] == [0.158, 0.158, 0.2]
    for machine, expected in zip(machines, usd, strict=True):
        offer, ended_s, cause = Offer(machine.pool), machine.ended_s, machine.cause
        assert machine.usd_per_hour is not None
        assert ended_s is not None
        assert cause is not None
        bill = Bill({SPOT: BY_NAME[billing]})
        bill.price(offer, machine.started_s, machine.usd_per_hour)
        bill.price(offer, NOON_S + 900.0, 0.2)
        bill.started(1, offer, machine.started_s)
        bill.ended(1, ended_s, cause)
        assert bill.spent_usd(ended_s) == pytest.approx(expected)


# --- ends ----------------------------------------------------------------------------------------


def test_preempted_machine_ends_without_being_polled(provider: Processes) -> None:
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1), order(2)])
        await_that(lambda: provider.running().keys() == {1, 2})
        provider.preempt(1)
        await_that(lambda: provider.running().keys() == {2})
        assert machine_of(fleet, 1).cause == "preempted"


def test_outage_between_two_polls_preempts_the_machine(
    provider: Processes,
) -> None:
    provider.schedule.outages_s[1] = (30.0, 40.0)
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1), order(2)])
        await_that(lambda: provider.running().keys() == {1, 2})
        fleet.machines()
        advance(provider, 60.0)
        await_that(lambda: state(fleet, 1) == "ended")
        assert state(fleet, 2) == "running"


def test_outage_while_no_fleet_ran_does_not_preempt(
    provider: Processes,
) -> None:
    provider.schedule.outages_s[1] = (30.0, 40.0)
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: provider.running().keys() == {1})
    advance(provider, 60.0)
    with closing(provider.fleet()) as fleet:
        assert state(fleet, 1) == "running"
        assert fleet.launch([order(2)]) == ()


def test_preemption_with_notice_kills_only_after_the_notice(provider: Processes) -> None:
    provider.program, provider.notice_s = DEAF, 30.0
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: (provider.folder / "w1.log").read_text() == "ready\n")
        provider.preempt(1)
        for _ in range(3):
            assert state(fleet, 1) == "running"
            advance(provider, 9.0)
        advance(provider, 9.0)
        await_that(lambda: state(fleet, 1) == "ended")
        ended = machine_of(fleet, 1)
        assert (ended.cause, ended.detail) == ("preempted", "exit code -9")


def test_machine_that_exits_on_notice_is_preempted(
    provider: Processes,
) -> None:
    provider.notice_s = 30.0
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: provider.running().keys() == {1})
        provider.preempt(1)
        await_that(lambda: state(fleet, 1) == "ended")
        ended = machine_of(fleet, 1)
        assert (ended.cause, ended.detail) == ("preempted", "exit code -15")


def test_released_machine_that_does_not_exit_is_killed(provider: Processes) -> None:
    provider.program = DEAF
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1, ON_DEMAND)])
        await_that(lambda: (provider.folder / "w1.log").read_text() == "ready\n")
        (below,) = provider.running()[1].children()
        fleet.release([machine_of(fleet, 1).id])
        advance(provider, provider.leave_s - 1)
        assert state(fleet, 1) == "running"
    advance(provider, 1.0)
    # The successor completes the release.
    with closing(provider.fleet()) as another:
        await_that(lambda: state(another, 1) == "ended")
        ended = machine_of(another, 1)
        assert (ended.cause, ended.detail) == ("released", "exit status unknown")
        # Processes on the machine end with it.
        await_that(lambda: not alive(below))


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_ended_machine_is_listed_for_an_hour_and_keeps_its_token(
    provider: Processes,
) -> None:
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        fleet.release([order(1).token])
        await_that(lambda: state(fleet, 1) == "ended")
        advance(provider, 3599.0)
        assert [machine.ended_s for machine in fleet.machines()] == [NOON_S]
        advance(provider, 2.0)
        assert fleet.machines() == ()
        assert fleet.launch([order(1)]) == ()
        assert provider.running() == {}


def test_release_before_the_process_is_found_sends_sigterm(
    provider: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        with monkeypatch.context() as before_exec:
            # Before exec, the process has its parent's environment, so it cannot be identified.
            before_exec.setattr(Table, "find", lambda _: {})
            fleet.release([order(1).token])
        await_that(lambda: state(fleet, 1) == "ended")
        assert machine_of(fleet, 1).detail == "exit code -15"


# --- once ----------------------------------------------------------------------------------------


def test_concurrent_launches_carry_out_each_order_once(provider: Processes) -> None:
    orders = [order(launch) for launch in range(1, 9)]
    fleets = [provider.fleet() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        refused = list(threads.map(lambda fleet: fleet.launch(orders), fleets))
    assert refused == [()] * 4
    assert len(provider.started) == 8
    for fleet in fleets:
        await_that(lambda fleet=fleet: len(fleet.machines()) == 8)  # type: ignore[misc] # bound now


def test_order_whose_launcher_died_fails_after_ten_seconds(provider: Processes) -> None:
    records(provider).claim("doll-1", RECORD)
    with closing(provider.fleet()) as fleet:
        assert fleet.launch([order(1)]) == ()
        advance(provider, 9.0)
        assert fleet.machines() == ()
        advance(provider, 2.0)
        assert (machine_of(fleet, 1).cause, state(fleet, 1)) == ("failed", "ended")
        assert provider.running() == {}


def test_machine_released_by_a_dead_provisioner_ends_when_gone(
    provider: Processes,
) -> None:
    records(provider).claim("doll-1", replace(RECORD, leaving="preempted", leave_by_s=NOON_S + 1))
    advance(provider, 2.0)
    with closing(provider.fleet()) as fleet:
        found = machine_of(fleet, 1)
        assert (found.cause, found.ended_s) == ("preempted", NOON_S + 2)  # not 10 s after its start


def test_process_that_appears_after_its_order_failed_is_ended(provider: Processes) -> None:
    given_up = replace(RECORD, at_s=NOON_S - 60, ended_s=NOON_S - 50, cause="failed")
    records(provider).claim("doll-1", given_up)
    provider.start("w1", Table("digits", provider.folder).environment("doll-1"))
    with closing(provider.fleet()) as fleet:
        await_that(lambda: state(fleet, 1) == "ended" and not provider.running())


def test_machine_whose_record_was_deleted_is_ended(provider: Processes) -> None:
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: provider.running().keys() == {1})
        for path in (provider.folder / "digits" / "machines").iterdir():
            path.unlink()
        assert fleet.machines() == ()
        await_that(lambda: not provider.running())


@pytest.mark.parametrize(("pool", "tier"), [(SPOT, "spot"), (ON_DEMAND, "reliable")])
def test_machine_gets_its_tier_in_the_environment(
    provider: Processes, pool: str, tier: str
) -> None:
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1, pool)])
        await_that(lambda: 1 in provider.running())
        await_that(lambda: provider.running()[1].environ().get("DOLL_TIER") == tier)


def test_child_process_of_a_machine_is_not_a_machine(provider: Processes) -> None:
    provider.program = DEAF
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: (provider.folder / "w1.log").read_text() == "ready\n")
        main = provider.running()[1]
        assert [child.environ()["FLEET_MACHINE"] for child in main.children()]
        assert len(fleet.machines()) == 1
        main.kill()
        await_that(lambda: machine_of(fleet, 1).cause == "failed")


def test_child_process_with_its_own_session_is_not_a_machine(provider: Processes) -> None:
    provider.program = WITH_A_SESSION
    with closing(provider.fleet()) as fleet:
        fleet.launch([order(1)])
        await_that(lambda: (provider.folder / "w1.log").read_text() == "ready\n")
        assert len(provider.running()[1].children()) == 1


def test_fleets_in_different_folders_are_independent(
    provider: Processes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        closing(Processes(tmp_path_factory.mktemp("another"))) as another,
        closing(provider.fleet()) as fleet,
        closing(another.fleet()) as elsewhere,
    ):
        assert fleet.launch([order(1)]) == elsewhere.launch([order(1)]) == ()
        await_that(lambda: provider.running().keys() == another.running().keys() == {1})
        elsewhere.release([order(1).token])
        await_that(lambda: state(elsewhere, 1) == "ended")
        assert state(fleet, 1) == "running"


LAUNCHER = """
import sys
from pathlib import Path
from common.spot.fleets.local.fleet import LocalMarket, ProcessFleet
from common.spot.fleets.local.market import schedule_of
from common.embedded.process import Child
from common.spot.market.market_file import Market, OnDemandPool
from common.spot.machines import LaunchRequest
def start(worker, environment):
    return Child(["sleep", "600"], Path(sys.argv[1], worker), environment, stays=True)
market = Market(on_demand=OnDemandPool(usd_per_hour=1.0))
fleet = ProcessFleet(
    LocalMarket(market, schedule_of(market, Path(), 0.0)),
    *("digits", Path(sys.argv[1]), start, 1.0, lambda: 1.8e9),
)
fleet.launch([LaunchRequest(1, "doll-1", 1, "on-demand", "w1")])
print("launched", flush=True)
sys.stdin.read()
"""


def test_machine_survives_its_launcher_and_is_found_again(provider: Processes) -> None:
    with subprocess.Popen(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-c", LAUNCHER, str(provider.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "launched\n"
        launcher.kill()
    await_that(lambda: provider.running().keys() == {1})
    provider.started.extend(provider.running().values())
    with closing(provider.fleet()) as fleet:
        assert fleet.launch([order(1)]) == ()
        assert (state(fleet, 1), len(fleet.machines())) == ("running", 1)
        provider.running()[1].kill()
        await_that(lambda: state(fleet, 1) == "ended")
        ended = machine_of(fleet, 1)
        assert (ended.cause, ended.detail) == ("failed", "exit status unknown")


# --- refusals ------------------------------------------------------------------------------------


def test_pool_refuses_machines_beyond_its_capacity(provider: Processes) -> None:
    provider.capacity = 2
    with closing(provider.fleet()) as fleet:
        (refused,) = fleet.launch([order(1), order(2), order(3), order(4, ON_DEMAND)])
        assert (refused.launch, refused.capacity) == (3, True)
        fleet.release([order(1).token])
        await_that(lambda: state(fleet, 1) == "ended")
        assert fleet.launch([order(5)]) == ()


def test_launch_in_a_slot_with_an_outage_is_refused(provider: Processes) -> None:
    provider.schedule.outages_s[1] = (0.0, 40.0)
    with closing(provider.fleet()) as fleet:
        (refused,) = fleet.launch([order(1), order(2)])
        assert (refused.launch, refused.capacity) == (1, True)
        assert "slot 1" in refused.reason
        advance(provider, 41.0)
        again = order(3)._replace(slot=1)
        assert fleet.launch([again]) == ()


def test_machine_without_a_slot_uses_any_available_place_of_its_pool(provider: Processes) -> None:
    provider.schedule.outages_s.update({0: (0.0, 40.0), 2: (10.0, 40.0)})
    free = [order(launch)._replace(slot=None) for launch in (1, 2, 3)]
    with closing(provider.fleet()) as fleet:
        # The pool's first slot has an outage.
        assert fleet.launch(free[:2]) == ()
        advance(provider, 11.0)
        await_that(lambda: state(fleet, 2) == "ended")
        assert (state(fleet, 1), machine_of(fleet, 2).cause) == ("running", "preempted")
        assert fleet.launch([free[2]]) == ()
        await_that(lambda: state(fleet, 3) == "running")
        provider.schedule.outages_s.update(dict.fromkeys(range(40), (0.0, 90.0)))
        (refused,) = fleet.launch([order(4)._replace(slot=None)])
        assert (refused.capacity, "slot" in refused.reason) == (True, False)


def test_launch_without_room_for_a_process_is_refused(provider: Processes) -> None:
    def full(worker: str, environment: Mapping[str, str]) -> StartedProcess:
        raise BlockingIOError(f"no room for {worker}, {len(environment)} variables")

    provider.start = full  # type: ignore[method-assign, assignment] # for this provider alone
    with closing(provider.fleet()) as fleet:
        (refused,) = fleet.launch([order(1)])
        assert refused.capacity
        assert "no room for w1" in refused.reason
        assert fleet.launch([order(1)]) == (refused,)
        assert fleet.machines() == ()
