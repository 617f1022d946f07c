"""The provisioner on processes and servers orders each machine once, whichever replica leads.

Tests in tests/unit/spot/provisioning, tests/unit/spot/policies and tests/system check spares, bids
and bills without processes, on every change.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.core.spans import Partition
from common.embedded.services import start_machine
from common.errors import UnknownTopicError
from common.kafka.names import plans_topic
from common.redis.boards import open_boards
from common.spot.connect import open_fleet
from common.spot.fleets.local.fleet import LocalMarket, ProcessFleet
from common.spot.fleets.local.table import Table
from common.spot.machines import Offer
from common.spot.market.market_file import Market
from common.spot.plans import decode_plan
from common.spot.provisioning import policy_runner
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.telemetry.logging import event_logger
from common.telemetry.metrics.registry import ProcessMetrics
from load.paper.live import bill_usd, plans_of
from services.provisioner.__main__ import openers
from services.provisioner.loop import JobProvisioner, ProvisionerProcess
from tests.changes import once_changed
from tests.counting_policy import Counting
from tests.integration.cluster import Cluster, await_condition
from tests.memory_fleet import MemoryPrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.config.settings import Settings
    from services.provisioner.loop import Openers

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

MARKET = """
fleet: process
on_demand: {usd_per_hour: 3600.0}
spot:
  - {name: spot, usd_per_hour: 360.0, availability: 0.9, cycle_s: 60}
process: {availability: 1.0}
"""
OPTIONS = "provisioning: {workers: 2, policy: adaptive, review_s: 1}"
HOLDS = "provisioning: {workers: 2}\non_preemption: hold"
ONCE = once_changed(
    *("common/spot/fleets/local/", "common/spot/policies/bid", "common/spot/provisioning/"),
    *("services/provisioner/", "tests/integration/test_provisioner.py"),
)


@pytest.fixture
def cluster(
    likest_to_production: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """A job that needs machines, with a coordinator and without a provisioner."""
    market = tmp_path / "market.yaml"
    market.write_text(MARKET)
    settings = likest_to_production.model_copy(
        update={
            "market": str(market),
            "fleet_directory": str(tmp_path / "machines"),
            "owner_pid": os.getpid(),
        }
    )
    made = Cluster(
        settings,
        tmp_path,
        f"rented-{len(request.node.name)}",
        records=1000,
        options=getattr(request, "param", OPTIONS),
    )
    made.start("coordinator", "c1", owner_pid=0)
    yield made
    made.close()


def ledger_of(cluster: Cluster) -> FleetLedger:
    """Return the fleet ledger, read from the plans topic."""
    ledger, place = FleetLedger(), Partition(plans_topic(cluster.job), 0)
    try:
        bounds = cluster.log.bounds(place)
    except UnknownTopicError:  # no provisioner has led it yet
        return ledger
    with closing(cluster.log.tail(place, bounds.start)) as tail:
        while tail.position() < bounds.end:
            for record in tail.read(1000, 0.5):
                ledger.feed(record.offset, decode_plan(record.value or b""))
    return ledger


def machines_of(cluster: Cluster) -> list[tuple[int, str]]:
    """Return launch and state of all machines, from the provider."""
    settings = cluster.settings
    fleet = open_fleet(settings, Market.load(Path(settings.market)), cluster.job)
    try:
        return [(machine.launch, machine.state) for machine in fleet.machines()]
    finally:
        fleet.close()


def test_frozen_provisioner_is_replaced_and_no_machine_is_launched_twice(
    cluster: Cluster,
) -> None:
    # time   ────────────────────────────────────────────────────────────▶
    # p1     takes charge, launches 1 and 2  ▒▒▒▒ frozen ▒▒▒▒  steps down
    # p2                                       takes charge ──────────────── settles
    # w0, w1             ██████████████████████████████████████████ released
    cluster.start("provisioner", "p1")
    await_condition(
        lambda: len(ledger_of(cluster).running) == 2,
        "two machines run",
    )
    first_term = ledger_of(cluster).term
    cluster.freeze("p1")
    cluster.start("provisioner", "p2")
    cluster.produce(1000)
    await_condition(
        lambda: ledger_of(cluster).term > first_term, "another provisioner is in charge"
    )
    assert machines_of(cluster) == [(1, "running"), (2, "running")]
    cluster.thaw("p1")
    await_condition(
        lambda: " leadership_lost " in cluster.said("p1"), "the first provisioner steps down"
    )
    await_condition(cluster.drained, "everything is settled")
    before_end = ledger_of(cluster)
    cluster.want("stopped")
    await_condition(lambda: ledger_of(cluster).settled is not None, "the machines are released")

    ledger = ledger_of(cluster)
    assert ledger.launches == before_end.launches == 2
    assert machines_of(cluster) == [(1, "ended"), (2, "ended")]
    assert [rented.cause for rented in ledger.machines.values()] == ["released", "released"]
    assert ledger.settled is not None
    spent = sum(
        (rented.ended_s or 0.0) - (rented.started_s or 0.0) for rented in ledger.machines.values()
    )
    assert ledger.settled.spent_usd == pytest.approx(0.1 * spent)  # $360 per hour each
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()


def test_machines_outlive_a_killed_provisioner_and_its_successor_finds_them(
    cluster: Cluster,
) -> None:
    cluster.start("provisioner", "p1")
    await_condition(
        lambda: len(ledger_of(cluster).running) == 2,
        "two machines run",
    )
    cluster.kill("p1")
    assert machines_of(cluster) == [(1, "running"), (2, "running")]
    cluster.start("provisioner", "p2")
    cluster.produce(1000)
    await_condition(cluster.drained, "everything is settled")
    cluster.want("stopped")
    await_condition(lambda: ledger_of(cluster).settled is not None, "the machines are released")

    assert ledger_of(cluster).launches == 2
    assert machines_of(cluster) == [(1, "ended"), (2, "ended")]


@contextmanager
def provisioner_of(
    cluster: Cluster, opened: Callable[[Market, str], Openers] | None = None
) -> Iterator[None]:
    """Run one replica's part in the job in a thread, by default with a real fleet."""
    settings = cluster.settings
    boards, metrics = open_boards(settings), ProcessMetrics("provisioner")
    market = Market.load(Path(settings.market))
    replica = ProvisionerProcess(
        *("p1", market, cluster.log, boards.board, opened or partial(openers, settings)),
        *(metrics, event_logger("p1")),
    )
    over, woken, faults = threading.Event(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            part = JobProvisioner(replica, cluster.record, woken.set)
            while not over.is_set() and part.turn() is not None:
                woken.wait(0.05)
                woken.clear()
            part.close()
        except BaseException as error:  # noqa: BLE001 -- raised again below
            faults.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        boards.close()
    if faults:
        raise faults[0]


def slots_of(cluster: Cluster) -> dict[int | None, int]:
    """Return the launch of each slot's running machine. A spare machine has the key None."""
    return {machine.slot: machine.launch for machine in ledger_of(cluster).running}


@ONCE
@pytest.mark.parametrize("cluster", [HOLDS], indirect=True, ids=["hold"])
def test_spare_continues_the_stream_of_a_killed_machine(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # m1  slot 0  ████████████████████████████████
    # m2  slot 1  ████████ killed
    # m3            spare   slot 1 ███████████████
    # m4                      ordered in its place
    policy = Counting(({Offer("spot"): 3},))
    monkeypatch.setattr(policy_runner, "policy_of", lambda *_, **__: policy)
    with provisioner_of(cluster):
        await_condition(lambda: slots_of(cluster).keys() == {0, 1, None}, "two slots and a spare")
        first = slots_of(cluster)
        logs = Path(cluster.settings.fleet_directory) / cluster.job

        def reads(slot: int) -> bool:
            log = logs / f"{cluster.job}-m{first[slot]}.log"
            return log.exists() and " reading_from " in log.read_text()

        await_condition(lambda: reads(0) and reads(1), "both have partitions")
        cluster.produce(500)
        await_condition(cluster.drained, "both slots read their streams")
        before = ledger_of(cluster).machines[first[1]]
        table = Table(cluster.job, Path(cluster.settings.fleet_directory))
        os.killpg(table.find()[before.machine].pid, signal.SIGKILL)
        cluster.produce(500)
        await_condition(cluster.drained, "the spare continues the stream")
        ledger = ledger_of(cluster)
        taken = next(machine for machine in ledger.running if machine.slot == 1)
        assert (taken.launch, taken.member) == (first[None], before.member)
        assert before.member == f"{cluster.job}-w1"
        assert ledger.machines[first[1]].cause == "failed"
        await_condition(lambda: ledger_of(cluster).launches == 4, "another spare is ordered")
        cluster.want("stopped")
        await_condition(lambda: ledger_of(cluster).settled is not None, "machines are released")
    batches = [batch for update in cluster.audit().updates for batch in update.batches]
    assert {batch.worker for batch in batches} == {f"{cluster.job}-w{slot}" for slot in (0, 1)}
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()


BID_HOUR_S = 12.0
HOURS = (
    f"{{per: hour, price: hour_start, hour_s: {BID_HOUR_S}, preempted: {{hour_refunded: true}}}}"
)
BID_MARKET = f"""
fleet: process
on_demand: {{usd_per_hour: 3600.0}}
spot:
  - {{name: cheap, usd_per_hour: 360.0, billing: {HOURS}}}
  - {{name: dear, usd_per_hour: 720.0, billing: {HOURS}}}
process: {{availability: 1.0}}
"""
BIDS = "provisioning: {workers: 2, policy: bidbrain, bidbrain: {lambda_s: 0.1, start_s: 0.1}}"


class UnderBids:
    """Machines are lost when the price exceeds their bid, and for no other reason."""

    def __init__(self, prices: MemoryPrices) -> None:
        self._prices = prices

    def next_down_s(
        self,
        pool: str,
        slot: int,
        at_s: float,
        born_s: float,
        bid_usd_per_hour: float | None = None,
    ) -> float:
        """Return `at_s` if the price exceeds the bid, else infinity."""
        del slot, born_s
        dear = bid_usd_per_hour is not None and self._prices.look()[Offer(pool)] > bid_usd_per_hour
        return at_s if dear else float("inf")


@ONCE
@pytest.mark.parametrize("cluster", [BIDS], indirect=True, ids=["bids"])
def test_machines_under_bids_are_evicted_renewed_hourly_and_billed_to_the_cent(
    cluster: Cluster,
) -> None:
    # cheap  $.1 ████████ evicted at $.9 ░░░░░░░░ $.05 ███████ until the job is over
    # dear   $.2                  ████████████████ released before its next hour
    Path(cluster.settings.market).write_text(BID_MARKET)
    prices = MemoryPrices({"on-demand": 3600.0, "cheap": 360.0, "dear": 720.0})
    directory = Path(cluster.settings.fleet_directory)

    def opened(market: Market, job: str) -> Openers:
        started = partial(start_machine, job, cluster.settings, directory / job)
        market_of = LocalMarket(market, UnderBids(prices), prices)
        fleet = partial(ProcessFleet, market_of, job, directory, started, 10.0, time.time)
        return fleet, lambda: prices

    def running() -> set[str]:
        return {machine.pool for machine in ledger_of(cluster).running}

    cluster.produce(500)
    with provisioner_of(cluster, opened):
        await_condition(lambda: ledger_of(cluster).launches >= 2, "the backlog gets two machines")
        await_condition(lambda: running() == {"cheap"}, "both machines are of the cheaper pool")
        prices.set("cheap", 3240.0)
        await_condition(lambda: running() == {"dear"}, "the price has evicted them")
        cluster.produce(500)
        prices.set("cheap", 180.0)
        await_condition(
            lambda: running() == {"cheap"}, "the machines of the dear pool are not renewed"
        )
        await_condition(cluster.drained, "everything is settled")
        cluster.want("stopped")
        await_condition(lambda: ledger_of(cluster).settled is not None, "machines are released")

    records = plans_of(cluster.log, cluster.job)
    ledger = ledger_of(cluster)
    ends = {(machine.pool, machine.cause) for machine in ledger.machines.values()}
    assert {("cheap", "preempted"), ("dear", "released")} <= ends
    asked = {machine.asked for machine in ledger.machines.values()}
    assert all(180.0 < (offer.bid_usd_per_hour or 0.0) < 3240.0 for offer in asked)
    settled = ledger.settled
    assert settled is not None
    assert settled.spent_usd == pytest.approx(bill_usd(records, BID_HOUR_S), abs=0.005)
    assert settled.spent_usd > 0
    assert [state for _, state in machines_of(cluster)] == ["ended"] * ledger.launches
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()
