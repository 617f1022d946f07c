"""A worker that is notified of its machine's end leaves cleanly, and the job continues."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.config.settings import Settings
from common.embedded.services import EmbeddedService
from tests.integration.cluster import Cluster, await_condition
from tests.metadata_server import MetadataServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.kafka import EmbeddedKafka
    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.servers", "tests.redis_servers"]

AT_S = 1_800_000_000.0


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


@pytest.fixture
def cluster(
    embedded_kafka: EmbeddedKafka, embedded_redis: EmbeddedRedis, tmp_path: Path
) -> Iterator[Cluster]:
    settings = Settings(
        kafka=f"embedded:{embedded_kafka.control.path}",
        redis=embedded_redis.url,
        blobs=f"file://{tmp_path}/blobs",
    )
    made = Cluster(settings, tmp_path, "notice", records=2000)
    yield made
    made.close()


@pytest.fixture
def spot_worker(
    cluster: Cluster, metadata: MetadataServer, tmp_path: Path
) -> Iterator[EmbeddedService]:
    """Worker `w1`, on a machine that a test can give notice."""
    update = {"notices": "ec2", "metadata_endpoint": metadata.endpoint, "log_format": "json"}
    settings = cluster.settings.model_copy(update=update)
    worker = EmbeddedService("worker", "w1", settings, tmp_path, ("--job", cluster.job), forks=True)
    yield worker
    worker.kill()


def test_worker_leaves_on_notice_and_another_continues(
    cluster: Cluster, metadata: MetadataServer, spot_worker: EmbeddedService
) -> None:
    # time     ──────────────────────────────────────────▶
    # notice                  ◆
    # w1       ███████████████▒ leaves       ▒ started again, does not join
    # w2                         █████████████████████████
    cluster.start("coordinator", "c1")
    cluster.produce(1000)
    await_condition(lambda: cluster.version() >= 3, "three updates")
    metadata.interrupt(AT_S)
    await_condition(lambda: spot_worker.exit_code is not None, "the worker has ended")
    assert spot_worker.exit_code == 0
    assert events(cluster.said("w1"))[-1] == "worker_left"

    cluster.start("worker", "w2")
    spot_worker.restart()
    cluster.produce(1000)
    await_condition(cluster.drained, "everything is settled")
    await_condition(lambda: spot_worker.exit_code is not None, "the worker has ended again")
    assert spot_worker.exit_code == 0
    logged = events(cluster.said("w1"))
    assert "worker_joins" not in logged[logged.index("worker_left") :]
    assert (logged.count("notice_received"), logged.count("worker_joins")) == (2, 1)

    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), 2000, 0)


def events(log: str) -> list[str]:
    """Return the names of the events in a log of JSON lines, in order."""
    return [json.loads(line)["event"] for line in log.splitlines()]
