"""Streams that change under a job, on a real Kafka: partitions that are added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from common.connections import open_board, open_log
from common.core.spans import Partition
from common.job_task import codec_of
from common.jobs.watching import look_at_jobs
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.config import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis]
NOW_S = 1000.0


class Growing:
    """A job of the counting model whose streams get more partitions.

    Args:
        settings: Of the servers.
        folder: For logs.
        protocol: Of the consumer group: with the classic one each member notices it for itself.
    """

    def __init__(
        self, settings: Settings, folder: Path, protocol: Literal["classic", "consumer"]
    ) -> None:
        self.settings = settings.model_copy(update={"kafka_group_protocol": protocol})
        self.cluster = Cluster(self.settings, folder, f"growing-{protocol}", 600)
        self._added = list[Partition]()

    def grow(self, stream: str, ids: range) -> None:
        """Give a stream four partitions instead of two, and those that are new some records."""
        admin = AdminClient({"bootstrap.servers": self.settings.kafka})
        admin.create_partitions([NewPartitions(stream, 4)])[stream].result(30.0)
        self._added += [Partition(stream, index) for index in (2, 3)]
        log = open_log(self.settings)  # its producer asks which partitions there are
        writer = log.writer()
        values = codec_of(self.cluster.spec).encode({"id": np.array(ids)})
        for number, value in enumerate(values):
            writer.append(stream, value, partition=2 + number % 2)
        assert writer.flush(30.0)
        writer.close()
        log.close()

    def has_added(self) -> bool:
        """Whether the leader says that the job has them, and all of their records are claimed."""
        standing = self.cluster.standing()
        return standing is not None and all(
            standing.claimed.get(place) == self.cluster.log.bounds(place).end
            for place in self._added
        )


@pytest.fixture(params=["classic", "consumer"])
def growing(request: pytest.FixtureRequest, real: Settings, tmp_path: Path) -> Iterator[Growing]:
    made = Growing(real, tmp_path, request.param)
    yield made
    made.cluster.close()


def test_partitions_that_are_added_are_trained_and_told(growing: Growing) -> None:
    # c1, w1   ████████████████████████████ killed
    # a        2 partitions    4
    # b        2 partitions                            4
    # c2, w2                                              ████████████████████
    cluster = growing.cluster
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(200)
    await_condition(cluster.drained, "the first records are settled")

    growing.grow(cluster.streams[0], range(200, 400))
    await_condition(growing.has_added, "what was added while it runs is claimed")
    await_condition(cluster.drained, "everything is settled")

    cluster.kill("w1")
    cluster.kill("c1")
    growing.grow(cluster.streams[1], range(400, 600))
    cluster.start("coordinator", "c2")
    cluster.start("worker", "w2")
    await_condition(growing.has_added, "what was added while nothing ran is claimed")
    await_condition(cluster.drained, "everything is settled")

    audit = cluster.audit()
    assert audit.flaws == ()
    assert (audit.trained, audit.unsettled) == (600, 0)
    assert len(audit.settled) == 8
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    view = look_at_jobs(
        {cluster.job: cluster.record()},
        cluster.log,
        lambda job: open_board(growing.settings, job),
        NOW_S,
    )[cluster.job]
    assert view.lag == 0
    assert [state.partitions for state in view.streams()] == [4, 4]
