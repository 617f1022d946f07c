"""Each service, as a process, reports metrics and health, and its numbers match the run."""

from __future__ import annotations

import os
import subprocess
import sys
from http.client import HTTPConnection
from typing import TYPE_CHECKING, NamedTuple

import pytest
from msgspec import UNSET
from prometheus_client.parser import text_string_to_metric_families

from common.embedded.process import free_port
from common.telemetry.metrics.__main__ import sections
from tests.integration.cluster import Cluster, await_condition
from tests.integration.test_provisioner import MARKET, ledger_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from common.config.settings import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

HERE = "127.0.0.1"
RECORDS, GARBAGE_EVERY = 200, 10
OPTIONS = """provisioning: {workers: 2, policy: adaptive, review_s: 1}
            stop: {updates: 100000, deadline_s: 3600}"""


class Scraped(NamedTuple):
    """One process, by its metrics port."""

    port: int

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        connection = HTTPConnection(HERE, self.port, timeout=10.0)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def well(self) -> bool:
        """Return True if the process answers that it is healthy."""
        try:
            return self.ask("/healthz") == (200, "healthy\n")
        except OSError:
            return False

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a metric's values by its labels, sorted by name, without the job's."""
        return {
            tuple(value for label, value in sample.labels.items() if label != "job_name"): (
                sample.value
            )
            for family in text_string_to_metric_families(self.ask("/metrics")[1])
            for sample in family.samples
            if sample.name == name
        }

    def sum(self, name: str) -> float:
        """Return the sum of all values of a metric."""
        return sum(self.values(name).values())

    def checked(self) -> subprocess.CompletedProcess[str]:
        """Run the health check of the process's container."""
        environment = {**os.environ, "DOLL_METRICS_PORT": str(self.port)}
        return subprocess.run(
            [sys.executable, "-m", "common.runtime.healthcheck"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def cluster(
    embedded: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    market = tmp_path / "market.yaml"
    market.write_text(MARKET)
    settings = embedded.model_copy(
        update={
            "market": str(market),
            "fleet_directory": str(tmp_path / "machines"),
            "owner_pid": os.getpid(),
        }
    )
    name = f"measured-{len(request.node.name)}"
    made = Cluster(settings, tmp_path, name, records=1000, options=OPTIONS)
    yield made
    made.close()


@pytest.fixture
def start(cluster: Cluster) -> Callable[..., Scraped]:
    """Start a service with a metrics port of its own, and wait until it is healthy."""

    def started(service: str, name: str, **settings: object) -> Scraped:
        scraped = Scraped(free_port())
        cluster.start(service, name, "", metrics_port=scraped.port, **settings)
        await_condition(scraped.well, f"{name} reports that it is healthy")
        return scraped

    return started


def missing_from(service: str, by: Scraped) -> list[str]:
    """Return declared metrics that a service does not report."""
    lines = by.ask("/metrics")[1].splitlines()
    names = {line.partition("{")[0].partition(" ")[0] for line in lines if line[:1] != "#"}
    return [
        metric.name
        for metric in sections()[service]
        if metric.name + "_count" * (metric.kind == "histogram") not in names
    ]


def test_every_service_reports_all_declared_metrics(
    cluster: Cluster, start: Callable[..., Scraped]
) -> None:
    coordinator = start("coordinator", "c1")
    worker = start("worker", "w1")
    cluster.produce(RECORDS, garbage_every=GARBAGE_EVERY)
    await_condition(cluster.drained, "everything is settled")

    updates = cluster.audit().updates
    # A worker without a GPU has none to lose.
    assert missing_from("Workers", worker) == ["doll_worker_gpu_lost_total"]
    assert worker.sum("doll_records_read_total") == RECORDS
    assert worker.values("doll_records_read_total") == {
        (stream,): RECORDS / 2 for stream in cluster.streams
    }
    assert worker.sum("doll_records_skipped_total") == RECORDS / GARBAGE_EVERY
    assert worker.sum("doll_batches_announced_total") == sum(
        len(update.batches) for update in updates
    )
    said = [update.moved for update in updates if update.moved is not UNSET]
    # An update reports the bytes since the previous report. So the first update has no count, and
    # the last count is not reported yet.
    assert len(said) == len(updates) - 1
    assert 0 < sum(said) < worker.sum("doll_worker_moved_bytes_total")
    assert worker.values("doll_worker_reading") == {(): 1.0}
    assert coordinator.values("doll_update_records_total") == {(): RECORDS}
    assert coordinator.values("doll_model_version") == {(): len(updates)}

    api = free_port()
    admin = start("admin", "a1", api_port=api)
    await_condition(lambda: Scraped(api).ask("/healthz")[0] == 200, "the API answers")
    await_condition(
        lambda: not missing_from("Admin services", admin), "the admin service reports the job, too"
    )
    assert admin.values("doll_api_requests_total")["GET", "/healthz", "200"] >= 1
    # The API's metrics still need a key.
    assert Scraped(api).ask("/metrics")[0] == 401

    provisioner = start("provisioner", "p1")
    await_condition(
        lambda: (
            provisioner.sum("doll_machines_running") == 2
            and not missing_from("Provisioners", provisioner)
        ),
        "two machines run without ports of their own, and all metrics are reported",
    )
    standby = start("provisioner", "p2")
    await_condition(
        lambda: standby.values("doll_provisioning") == {(): 0.0}, "the other provisioner stands by"
    )
    assert standby.values("doll_spent_usd_total") == {}

    prices = provisioner.values("doll_price_usd_per_hour")
    assert prices == {("on-demand",): 3600.0, ("spot",): 360.0}

    def machines_are_those_of_the_ledger() -> bool:
        running = provisioner.values("doll_machines_running")
        ledger = ledger_of(cluster)
        return (
            running.keys() == prices.keys()
            and provisioner.values("doll_cost_usd_per_hour")
            == {(): sum(prices[pool] * machines for pool, machines in running.items())}
            and running
            == {
                (pool,): sum(rented.pool == pool for rented in ledger.running) for (pool,) in prices
            }
        )

    # The policy may move a machine at any moment, even between two requests.
    await_condition(
        machines_are_those_of_the_ledger, "reported machines and costs match the ledger"
    )
    spent = provisioner.values("doll_spent_usd_total")[()]
    per_update = provisioner.values("doll_cost_usd_per_update")[()]
    assert spent > 0
    assert per_update == pytest.approx(spent / cluster.version(), rel=0.2)
    assert 0 < provisioner.values("doll_deadline_left_seconds")[()] < 3600

    # Without these records the utilization ratio has no value.
    cluster.produce(RECORDS)
    # The counting model has no metrics, and the coordinator aggregates.
    others = {"doll_training_metric", "doll_group_members", "doll_group_left_out_workers"}
    await_condition(
        lambda: set(missing_from("Coordinators", coordinator)) == others,
        "the leader reports all other metrics",
    )
    cluster.want("stopped")
    await_condition(lambda: ledger_of(cluster).settled is not None, "the machines are released")


def test_frozen_worker_is_unhealthy_until_it_resumes(
    cluster: Cluster, start: Callable[..., Scraped]
) -> None:
    worker = start("worker", "w1")
    assert worker.checked().returncode == 0
    cluster.freeze("w1")
    found = worker.checked()
    assert (found.returncode, found.stderr) == (
        1,
        f"unhealthy: no answer from {HERE}:{worker.port} within 3 s\n",
    )
    cluster.thaw("w1")
    await_condition(lambda: worker.checked().returncode == 0, "the worker is healthy again")
