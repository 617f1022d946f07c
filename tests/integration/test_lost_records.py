"""Real Kafka loses acknowledged records of a job's own topics: held, reported, then resumed.

The last records of the control topic, of the updates topic, and of both are lost, one after the
other. Another job on the same cluster with the same coordinators is not affected.

job       ███████ held ██████████ held ██████████ held █████████
control   ───────✂─────────────────────────────────✂───────────
updates   ────────────────────────✂─────────────────✂──────────
innocent  ██████████████████████████████████████████████████████
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.core.spans import Partition
from common.kafka.names import control_topic, updates_topic
from tests.integration.cluster import Cluster, await_condition, served

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from common.config.settings import Settings
    from common.embedded.apache_kafka import ApacheKafka

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.nightly]

CHECKPOINTS = "checkpoint: {every_updates: 5, keep: 20}"
# Seconds per batch. Many batches are in flight when the broker dies.
GRADIENT_S = 0.05
# Records of one call. There are two calls before each loss, and one after it.
PRODUCED = 500
# The test waits for this number of updates. The records make at least 15, so batches are still in
# flight then.
UPDATES = 10
WAY_ON = re.compile(r"`doll job resume ([^`]*)`")


@pytest.fixture
def cluster(real: Settings, tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(real, tmp_path, "losing", 4500, CHECKPOINTS, seconds=GRADIENT_S)) as made:
        yield made


@pytest.fixture
def innocent(real: Settings, tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(real, tmp_path, "beside-losing", 600)) as made:
        yield made


def train_some(cluster: Cluster) -> None:
    """Produce records, and wait for some updates."""
    begun = cluster.version()
    cluster.produce(PRODUCED)
    await_condition(lambda: cluster.version() >= begun + UPDATES, f"{UPDATES} updates")


def resume_until_trained(cluster: Cluster, records: int) -> None:
    """Run the command that a held job's reason names, repeatedly, until all records are trained."""

    def trained() -> bool:
        record = cluster.record()
        if record.held:
            resume(cluster, record.reason)
            return False
        return cluster.drained() and cluster.audit().trained == records

    await_condition(trained, "the remaining and the new records are trained")


def resume(cluster: Cluster, reason: str) -> None:
    """Run the command that a reason names."""
    said = WAY_ON.search(reason)
    assert said is not None, reason
    options = [word for word in said[1].split() if word.startswith("--")]
    assert "--after-loss" in options
    with served(cluster.settings, cluster.folder) as settings:
        subprocess.run(  # noqa: S603 -- our own command line
            [sys.executable, "-m", "services.cli", "job", "resume", cluster.job, *options],
            env={**os.environ, **settings.environ()},
            # The command fails if the job is not held any more.
            check=False,
            capture_output=True,
        )


def assert_each_record_counts_once(cluster: Cluster, records: int) -> None:
    await_condition(cluster.drained, f"all of {cluster.job} is settled")
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), records, 0)
    right = np.where(np.arange(cluster.records) < records, -1.0, 0.0)
    np.testing.assert_array_equal(cluster.weights(), right)


@pytest.mark.timeout(600)
def test_job_whose_topics_lost_their_tails_is_held_and_resumes_after_the_loss(
    cluster: Cluster, innocent: Cluster, apache_kafka: ApacheKafka
) -> None:
    control = Partition(control_topic(cluster.job), 0)
    updates = Partition(updates_topic(cluster.job), 0)
    for name in ("c1", "c2"):
        cluster.start("coordinator", name)
    for name in ("w1", "w2"):
        cluster.start("worker", name)
    innocent.start("worker", "w3")

    def lose_tails(places: Collection[Partition]) -> None:
        train_some(cluster)
        kept = cluster.log.ends(places)
        train_some(cluster)
        apache_kafka.kill()
        for place in places:
            assert apache_kafka.cut(*place, kept[place]) <= kept[place]
        apache_kafka.restart()

    for number, places in enumerate(([control], [updates], [control, updates]), 1):
        lose_tails(places)
        await_condition(lambda: cluster.record().held, "the job is held")
        assert "lost" in cluster.record().reason

        innocent.produce(100)
        assert_each_record_counts_once(innocent, 100 * number)
        assert innocent.wanted() == "running"

        cluster.produce(PRODUCED)
        resume_until_trained(cluster, 3 * PRODUCED * number)
        assert_each_record_counts_once(cluster, 3 * PRODUCED * number)
    assert cluster.ended() == innocent.ended() == []
