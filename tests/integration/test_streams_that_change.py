"""Streams on real Kafka change under a job: they grow, lose records, are recreated."""

from __future__ import annotations

from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from common.core.spans import Partition
from common.data.codecs import codec_of
from common.embedded.apache_kafka import ApacheKafka
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.redis.board import open_board
from tests.integration.cluster import Cluster, await_condition
from tests.integration.looking import progress_of
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.config.settings import Settings

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis]
NOW_S = 1000.0


class Growing:
    """A job of the counting model whose streams get more partitions.

    Args:
        settings: Settings of the servers.
        folder: Folder for logs.
        protocol: Protocol of the consumer group. With `classic`, each member notices by itself.
    """

    def __init__(
        self, settings: Settings, folder: Path, protocol: Literal["classic", "consumer"]
    ) -> None:
        self.settings = settings.model_copy(update={"kafka_group_protocol": protocol})
        self.cluster = Cluster(self.settings, folder, f"growing-{protocol}", 600)
        self._added = list[Partition]()

    def grow(self, stream: str, ids: range) -> None:
        """Give a stream four partitions instead of two, and write records to the new ones."""
        admin = AdminClient({"bootstrap.servers": self.settings.kafka})
        admin.create_partitions([NewPartitions(stream, 4)])[stream].result(30.0)
        self._added += [Partition(stream, index) for index in (2, 3)]
        # The producer of this log requests the current number of partitions.
        log = open_log(self.settings)
        writer = log.writer()
        values = codec_of(self.cluster.spec.records).encode({"id": np.array(ids)})
        for number, value in enumerate(values):
            writer.append(stream, value, partition=2 + number % 2)
        assert writer.flush(30.0)
        writer.close()
        log.close()

    def has_added(self) -> bool:
        """Return True if all records of the new partitions are claimed, by the leader's status."""
        leader_status = self.cluster.leader_status()
        return leader_status is not None and all(
            leader_status.claimed.get(place) == self.cluster.log.bounds(place).end
            for place in self._added
        )


@pytest.fixture(params=["classic", "consumer"])
def growing(request: pytest.FixtureRequest, real: Settings, tmp_path: Path) -> Iterator[Growing]:
    made = Growing(real, tmp_path, request.param)
    yield made
    made.cluster.close()


def test_added_partitions_are_trained_and_reported(growing: Growing) -> None:
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
    await_condition(growing.has_added, "partitions added while the job runs are claimed")
    await_condition(cluster.drained, "everything is settled")

    cluster.kill("w1")
    cluster.kill("c1")
    growing.grow(cluster.streams[1], range(400, 600))
    cluster.start("coordinator", "c2")
    cluster.start("worker", "w2")
    await_condition(growing.has_added, "partitions added while nothing ran are claimed")
    await_condition(cluster.drained, "everything is settled")

    audit = cluster.audit()
    assert audit.flaws == ()
    assert (audit.trained, audit.unsettled) == (600, 0)
    assert len(audit.settled) == 8
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    board = partial(open_board, growing.settings)
    view = progress_of(cluster.record(), cluster.log, board, NOW_S)
    assert view.lag == 0
    assert [state.partitions for state in view.streams()] == [4, 4]


# --- streams whose logs change -------------------------------------------------------------------


class Changing:
    """A job of the counting model on a Kafka that loses acknowledged records."""

    def __init__(self, kafka: ApacheKafka, settings: Settings, folder: Path) -> None:
        self.kafka = kafka
        self.settings = settings
        self.cluster = Cluster(settings, folder, f"changing-{token_hex(3)}", 800)
        self.cluster.start("coordinator", "c1")
        self.cluster.start("worker", "w1")

    def recreate(self, stream: str) -> None:
        """Delete and recreate a stream's topic."""
        admin = AdminClient({"bootstrap.servers": self.settings.kafka})
        admin.delete_topics([stream])[stream].result(30.0)
        log = open_log(self.settings)

        def is_gone() -> bool:
            return stream not in log.describe([stream])

        await_condition(is_gone, "the topic is deleted")
        log.create_topics([NewTopic(stream, 2)])
        log.close()

    def is_held(self) -> bool:
        """Return True if the job is held, according to the jobs topic."""
        return self.cluster.record().held

    def await_drained(self, trained: int) -> None:
        """Wait until the model has this number of records, and nothing is left to do."""
        cluster = self.cluster

        def is_drained() -> bool:
            audit = cluster.audit()
            leader_status = cluster.leader_status()
            return (
                audit.trained >= trained
                and not audit.unsettled
                and leader_status is not None
                and leader_status.waiting == 0
            )

        await_condition(is_drained, f"{trained} records are trained: {cluster.audit().trained}")


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """Yield a Kafka of few topics. The shared one recovers hundreds of topics at each restart."""
    with ApacheKafka(kafka_jars(), tmp_path_factory.mktemp("losing")) as kafka:
        yield kafka


@pytest.fixture
def changing(losing: ApacheKafka, real: Settings, tmp_path: Path) -> Iterator[Changing]:
    settings = real.model_copy(update={"kafka": losing.settings.bootstrap})
    made = Changing(losing, settings, tmp_path)
    yield made
    made.cluster.close()


@pytest.mark.parametrize(
    ("workers", "records"),
    [
        ("there", 600),
        ("away", 80),
        # tests/contract/test_log_loss.py tests these cases and the number of records separately.
        pytest.param("there", 80, marks=pytest.mark.nightly),
        pytest.param("away", 600, marks=pytest.mark.nightly),
    ],
)
def test_recreated_topic_holds_the_job_and_is_read_from_its_beginning(
    changing: Changing, workers: str, records: int
) -> None:
    # a, b   400 records ── a is recreated with 40 or 300 ── held ── resumed ── all trained
    cluster = changing.cluster
    cluster.produce(400)
    await_condition(cluster.drained, "the first records are settled")
    if workers == "away":
        cluster.kill("w1")
    changing.recreate(cluster.streams[0])
    cluster.produce_to(cluster.streams[0], range(400, 400 + records // 2))
    await_condition(changing.is_held, "the job is held", 10.0)
    reason = cluster.record().reason
    assert f"the topic {cluster.streams[0]} was deleted and recreated" in reason
    assert f"doll job resume {cluster.job} --from earliest" in reason

    cluster.resume_after_loss(read_from="earliest")
    if workers == "away":
        cluster.start("worker", "w2")
    changing.await_drained(400 + records // 2)

    audit = cluster.audit()
    assert audit.flaws == ()
    assert (audit.trained, audit.lost_records, audit.unsettled) == (400 + records // 2, 200, 0)
    weights = cluster.weights()[: 400 + records // 2]
    assert np.flatnonzero(weights != -1.0).tolist() == []
    assert not changing.is_held()


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_cut_stream_holds_the_job_and_is_read_on_from_the_cut(
    changing: Changing,
    again: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    # a[0]   100 records ── cut at 80, and perhaps written on to 180 ── held ── resumed ── trained
    cluster = changing.cluster
    # Records that are written together are lost together.
    for _ in range(2):
        cluster.produce(200)
    await_condition(cluster.drained, "the first records are settled")
    stream = cluster.streams[0]
    changing.kafka.kill()
    end = changing.kafka.cut(stream, 0, 80)
    changing.kafka.restart()
    if again:
        cluster.produce_to(stream, range(400, 600), partition=0)
    await_condition(changing.is_held, "the job is held", 30.0)
    reason = cluster.record().reason
    assert (
        f"{stream}[0] lost records that Kafka had acknowledged: it was read up to offset 100"
        in reason
    )
    assert f"doll job resume {cluster.job} --after-loss" in reason
    if not again:
        cluster.produce_to(stream, range(400, 600), partition=0)

    cluster.resume_after_loss()
    changing.await_drained(600)

    audit = cluster.audit()
    assert audit.flaws == ()
    assert (audit.trained, audit.lost_records, audit.unsettled) == (600, 100 - end, 0)
    assert np.flatnonzero(cluster.weights()[:600] != -1.0).tolist() == []
    assert not changing.is_held()
