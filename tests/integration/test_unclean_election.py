"""An unclean election of three brokers takes a job's last decisions: held, told, and gone on with.

The leader of the job's own topics goes on alone while the other broker that has them is away, and
dies. Who is elected then lacks what was acknowledged meanwhile. All other topics have three
replicas, and lose nothing.

    1 (controller)  ███████████████████████████████████████
    2 (leader)      ███████████████████ killed     ████████
    3 (follower)    █████ killed           ████████████████
    acknowledged          ▒▒▒▒▒▒▒▒▒▒▒▒▒ by 2 alone: lost
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic as KafkaTopic

from common.config.settings import Settings
from common.embedded.apache_kafka import ApacheKafka
from common.ports.servers import NewTopic
from common.topics.names import control_topic, updates_topic
from tests.integration.cluster import Cluster, await_condition
from tests.integration.test_lost_records import (
    CHECKPOINTS,
    GRADIENT_S,
    PRODUCED,
    assert_each_record_counts_once,
    goes_on_as_its_reason_says,
    train_some,
)
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.redis_servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.nightly]

JOB = "unclean"
OWN = (control_topic(JOB), updates_topic(JOB))
PROPERTIES = "default.replication.factor=3\noffsets.topic.replication.factor=3\n"
RECORDS = 3 * PRODUCED


class Brokers(NamedTuple):
    """One cluster of three."""

    first: ApacheKafka  # with the controller: nothing ever happens to it
    leader: ApacheKafka  # of the job's own topics
    follower: ApacheKafka
    admin: AdminClient

    def stands(self, topic: str) -> tuple[int, list[int]]:
        """Which broker leads a topic, and which have all that it acknowledges."""
        found = self.admin.list_topics(topic, timeout=5.0).topics[topic].partitions[0]
        return found.leader, sorted(found.isrs)

    def await_leader_status(self, leader: int, has_all: list[int]) -> None:
        """Wait until the job's own topics are led by a broker, and had in whole by some."""

        def so() -> bool:
            try:
                return all(self.stands(topic) == (leader, has_all) for topic in OWN)
            except KafkaException:  # nobody can tell for a moment
                return False

        await_condition(so, f"broker {leader} leads, and {has_all} have all")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    jars = kafka_jars()
    with ApacheKafka(jars, tmp_path / "1", properties=PROPERTIES) as first:
        seats = [first.seat(node) for node in (2, 3)]
        with (
            ApacheKafka(jars, tmp_path / "2", properties=PROPERTIES, seat=seats[0]) as leader,
            ApacheKafka(jars, tmp_path / "3", properties=PROPERTIES, seat=seats[1]) as follower,
        ):
            admin = AdminClient({"bootstrap.servers": first.settings.bootstrap, "log_level": 2})
            yield Brokers(first, leader, follower, admin)


@pytest.fixture
def cluster(brokers: Brokers, system_redis: EmbeddedRedis, tmp_path: Path) -> Iterator[Cluster]:
    replicas = [[brokers.leader.node, brokers.follower.node]]
    settings = NewTopic("", kept_forever=True).settings | {"unclean.leader.election.enable": "true"}
    own = [KafkaTopic(topic, 1, replica_assignment=replicas, config=settings) for topic in OWN]
    for creation in brokers.admin.create_topics(own).values():
        creation.result(30.0)
    everything = Settings(
        kafka=brokers.first.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=system_redis.url,
        blobs=f"file://{tmp_path}/blobs",
    )
    with closing(
        Cluster(everything, tmp_path, JOB, RECORDS, CHECKPOINTS, seconds=GRADIENT_S)
    ) as made:
        yield made


@pytest.mark.timeout(420)
def test_a_job_whose_own_topics_were_led_by_a_broker_that_lacked_records_resumes_after_the_loss(
    brokers: Brokers, cluster: Cluster
) -> None:
    leader, follower = brokers.leader.node, brokers.follower.node
    for name in ("c1", "c2"):
        cluster.start("coordinator", name)
    for name in ("w1", "w2"):
        cluster.start("worker", name)
    brokers.await_leader_status(leader, [leader, follower])
    train_some(cluster)
    brokers.follower.kill()
    brokers.await_leader_status(leader, [leader])
    train_some(cluster)
    assert not cluster.record().held  # because a broker is unavailable
    brokers.leader.kill()
    brokers.follower.restart()
    brokers.await_leader_status(follower, [follower])
    brokers.leader.restart()

    await_condition(lambda: cluster.wanted() == "paused", "the job is held")
    assert cluster.record().held
    assert "lost" in cluster.record().reason
    cluster.produce(PRODUCED)
    goes_on_as_its_reason_says(cluster, RECORDS)
    assert_each_record_counts_once(cluster, RECORDS)
    assert cluster.ended() == []
