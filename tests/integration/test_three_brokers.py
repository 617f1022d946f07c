"""Three brokers: reads from the nearest replica, and an election that loses a job's decisions.

A stream's reader fetches from the replica in its own rack while that replica is available.

In an unclean election, the leader of the job's own topics continues alone while the other broker
that has them is down, and then dies. The elected broker lacks the records that were acknowledged
in that time. The job is held, the loss is reported, and the job is resumed. All other topics have
three replicas and lose nothing.

    1 (controller)  ███████████████████████████████████████
    2 (leader)      ███████████████████ killed     ████████
    3 (follower)    █████ killed           ████████████████
    acknowledged          ▒▒▒▒▒▒▒▒▒▒▒▒▒ by 2 alone: lost
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic as KafkaTopic

from common.config.settings import Settings
from common.core.spans import Assigned, Partition
from common.embedded.apache_kafka import ApacheKafka
from common.kafka.names import control_topic, updates_topic
from common.kafka.opening import kafka_settings
from common.kafka.port import Fetched, NewTopic
from common.kafka.stream import KafkaStreamLog
from tests.integration.cluster import Cluster, await_condition
from tests.integration.test_lost_records import (
    CHECKPOINTS,
    GRADIENT_S,
    PRODUCED,
    assert_each_record_counts_once,
    resume_until_trained,
    train_some,
)
from tests.kafka_nodes import FurtherBroker
from tests.servers import kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.redis_servers"]
pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.nightly]

JOB = "unclean"
OWN = (control_topic(JOB), updates_topic(JOB))
PROPERTIES = """\
default.replication.factor=3
offsets.topic.replication.factor=3
replica.selector.class=org.apache.kafka.common.replica.RackAwareReplicaSelector
broker.rack=rack-{}
"""
RECORDS = 3 * PRODUCED


class Brokers(NamedTuple):
    """A cluster of three brokers."""

    # The controller. It never fails.
    first: ApacheKafka
    leader: ApacheKafka  # leader of the job's own topics
    follower: ApacheKafka
    admin: AdminClient

    def stands(self, topic: str) -> tuple[int, list[int]]:
        """Return the broker that leads a topic, and the brokers with all acknowledged records."""
        found = self.admin.list_topics(topic, timeout=5.0).topics[topic].partitions[0]
        return found.leader, sorted(found.isrs)

    def await_leader_status(self, leader: int, has_all: list[int]) -> None:
        """Wait until a broker leads the job's own topics, and these brokers are in sync."""

        def leads_in_sync() -> bool:
            try:
                return all(self.stands(topic) == (leader, has_all) for topic in OWN)
            # No controller answers for a moment.
            except KafkaException:
                return False

        await_condition(leads_in_sync, f"broker {leader} leads, and {has_all} have all")


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    jars, folder = kafka_jars(), tmp_path_factory.mktemp("brokers")

    with ApacheKafka(jars, folder / "1", properties=PROPERTIES.format(1)) as first:

        def broker(node: int) -> ApacheKafka:
            return FurtherBroker(jars, folder / str(node), first, node, PROPERTIES.format(node))

        with broker(2) as leader, broker(3) as follower:
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


class Fetches:
    """The broker that serves a client's fetches of a topic, by the client's own statistics."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self.broker = -1

    def __call__(self, statistics: str) -> None:
        """Record the broker from which the first partition is fetched."""
        topics = json.loads(statistics)["topics"]
        if self._topic in topics and "0" in topics[self._topic]["partitions"]:
            self.broker = topics[self._topic]["partitions"]["0"]["broker"]


def test_stream_is_read_from_replica_in_the_rack_of_the_worker(
    brokers: Brokers,
) -> None:
    topic, leader, follower = "racks", brokers.leader.node, brokers.follower.node
    made = brokers.admin.create_topics(
        [KafkaTopic(topic, 1, replica_assignment=[[leader, follower]])]
    )
    made[topic].result(30.0)
    fetches, near = Fetches(topic), f"rack-{follower}"
    watched = {"statistics.interval.ms": 100, "stats_cb": fetches}
    settings = replace(
        kafka_settings(
            Settings(kafka=brokers.first.settings.bootstrap, kafka_client_rack=near), "w1"
        ),
        properties=watched,  # type: ignore[arg-type]  # as the client takes them
    )
    place, seen, written = Partition(topic, 0), list[bytes | None](), list[bytes]()
    with (
        closing(KafkaStreamLog(settings)) as log,
        closing(log.writer()) as writer,
        closing(log.stream("racks", [topic], "w1")) as reader,
    ):

        def read(*, until_from: int) -> bool:
            written.append(b"%d" % len(written))
            writer.append(topic, written[-1])
            for event in reader.poll(100, 0.1):
                if isinstance(event, Assigned):
                    reader.place({place: 0})
                elif isinstance(event, Fetched):
                    seen.extend(event.values)
            return fetches.broker == until_from and len(seen) > 0

        await_condition(lambda: read(until_from=follower), "the reader fetches from the follower")
        brokers.follower.kill()
        await_condition(lambda: read(until_from=leader), "the reader fetches from the leader again")
        brokers.follower.restart()
        assert writer.flush(30.0)
        await_condition(lambda: read(until_from=follower) and seen == written[: len(seen)], "both")
        await_condition(
            lambda: brokers.stands(topic)[1] == [leader, follower],
            "the topic has its first leader and replicas again",
        )


@pytest.mark.timeout(420)
def test_job_resumes_after_unclean_election_lost_records_of_its_topics(
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
    # An unavailable broker is no reason to hold the job.
    assert not cluster.record().held
    brokers.leader.kill()
    brokers.follower.restart()
    brokers.await_leader_status(follower, [follower])
    brokers.leader.restart()

    await_condition(lambda: cluster.wanted() == "paused", "the job is held")
    assert cluster.record().held
    assert "lost" in cluster.record().reason
    cluster.produce(PRODUCED)
    resume_until_trained(cluster, RECORDS)
    assert_each_record_counts_once(cluster, RECORDS)
    assert cluster.ended() == []
