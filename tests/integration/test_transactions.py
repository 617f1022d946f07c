"""Transactional producers: committed records are trained once, aborted ones never.

offset    0 ... 24   25      26 ... 35   36     37 ...
record    committed  marker  aborted     marker open: nobody reads on until it is committed
"""

from __future__ import annotations

from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient

from common.config.settings import Settings
from common.core.spans import Partition
from common.data.codecs import codec_of
from common.jobs.operations import JobOperations
from common.jobs.store import encode_entry
from common.kafka.names import JOBS, control_topic, group_name, updates_topic
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

PATIENCE_S = 240.0
# Time from a drained job to the commit of its last offsets.
COMMITTED_WITHIN_S = 10.0
_numbers = count()
COMMITTED, ABORTED, OPEN = range(100), range(100, 140), range(140, 200)


@pytest.fixture
def cluster(
    apache_kafka: ApacheKafka, likest_redis: EmbeddedRedis, tmp_path: Path
) -> Iterator[Cluster]:
    settings = Settings(
        kafka=apache_kafka.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=likest_redis.url,
    )
    with closing(Cluster(settings, tmp_path, f"transactions-{next(_numbers)}", 200)) as made:
        yield made


def transactional(cluster: Cluster) -> Producer:
    properties = {
        "bootstrap.servers": cluster.bootstrap(),
        "transactional.id": "writes-streams",
        "log_level": 2,
    }
    producer = Producer(properties)
    producer.init_transactions(PATIENCE_S)
    return producer


def begin(cluster: Cluster, producer: Producer, ids: range) -> None:
    """Begin a transaction with these records in all partitions. They are in the log on return."""
    producer.begin_transaction()
    values = codec_of(cluster.spec.records).encode({"id": np.array(ids)})
    for number, value in enumerate(values):
        stream, partition = cluster.streams[number % 4 // 2], number % 2
        producer.produce(stream, value, partition=partition)
    assert producer.flush(PATIENCE_S) == 0


def test_job_on_transactional_streams_drains(cluster: Cluster) -> None:
    producer = transactional(cluster)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    begin(cluster, producer, COMMITTED)
    producer.commit_transaction(PATIENCE_S)
    await_condition(cluster.drained, "committed records are settled", PATIENCE_S)

    begin(cluster, producer, ABORTED)
    producer.abort_transaction(PATIENCE_S)
    await_condition(cluster.drained, "aborted records are claimed", PATIENCE_S)

    begin(cluster, producer, OPEN)
    await_condition(
        cluster.drained, "all records below an open transaction are settled", PATIENCE_S
    )
    before = cluster.audit()
    assert before.trained == len(COMMITTED)
    assert not before.flaws
    producer.commit_transaction(PATIENCE_S)
    await_condition(
        lambda: cluster.audit().trained == len(COMMITTED) + len(OPEN),
        "the committed records are trained",
        PATIENCE_S,
    )
    await_condition(cluster.drained, "all is settled", PATIENCE_S)
    assert not cluster.audit().flaws
    expected = -np.ones(200, np.float32)
    expected[ABORTED.start : ABORTED.stop] = 0
    np.testing.assert_array_equal(cluster.weights(), expected)
    assert cluster.ended() == []


def test_committed_offsets_of_a_drained_job_are_the_last_stable_offsets(cluster: Cluster) -> None:
    """Commits of offsets wait for no record, no full batch and no checkpoint.

    offset    0 ... 24   25      26 ... 35  36       37 ...
    record    committed  marker  aborted    marker   open
    stable    .......................................here
    """
    producer = transactional(cluster)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    begin(cluster, producer, COMMITTED)
    producer.commit_transaction(PATIENCE_S)
    begin(cluster, producer, ABORTED)
    producer.abort_transaction(PATIENCE_S)
    await_condition(cluster.drained, "all is settled", PATIENCE_S)
    await_commits(cluster)

    begin(cluster, producer, OPEN)
    await_commits(cluster)
    producer.commit_transaction(PATIENCE_S)
    await_condition(lambda: cluster.audit().trained == len(COMMITTED) + len(OPEN), "trained")
    await_condition(cluster.drained, "all is settled", PATIENCE_S)
    await_commits(cluster)
    cluster.start("worker", "w2")
    cluster.stop("w1")
    cluster.produce(100)
    await_condition(cluster.drained, "its successor drains the job", PATIENCE_S)
    await_commits(cluster)


def await_commits(cluster: Cluster) -> None:
    """Wait until the consumer group's offsets equal the last stable ones of all partitions."""
    places = {place for stream in cluster.streams for place in cluster.log.partitions(stream)}
    group = ConsumerGroupTopicPartitions(group_name(cluster.job))
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap(), "log_level": 2})

    def commits() -> dict[Partition, int]:
        [answer] = admin.list_consumer_group_offsets([group]).values()
        found = answer.result(PATIENCE_S).topic_partitions
        return {Partition(each.topic, each.partition): each.offset for each in found}

    await_condition(
        lambda: commits() == cluster.log.ends(places), "all is committed", COMMITTED_WITHIN_S
    )


def test_transactions_in_our_own_topics_do_not_delay_readers(cluster: Cluster) -> None:
    """Transactions as an exactly-once mirror writes them: first a committed one, then an open one.

    jobs             │ marker            │ open │ aborted
    control, updates        │ marker
    coordinator             c1 │ c2
    """
    producer = transactional(cluster)
    record = cluster.record()
    producer.begin_transaction()
    producer.produce(JOBS, encode_entry(record), key=record.spec.name.encode(), partition=0)
    producer.commit_transaction(PATIENCE_S)
    with closing(JobOperations(cluster.log)) as job_store:
        assert job_store.get(cluster.job) == record
        assert (
            job_store.patch(cluster.job, "while a mirror writes", wanted="paused").wanted
            == "paused"
        )
        assert job_store.patch(cluster.job, "go on", wanted="running").wanted == "running"
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(100)
    await_condition(cluster.drained, "the job is led, and drains", PATIENCE_S)
    producer.begin_transaction()
    for topic in (control_topic(cluster.job), updates_topic(cluster.job)):
        producer.produce(topic, b"says nothing", partition=0)
    producer.commit_transaction(PATIENCE_S)
    assert not cluster.audit().flaws
    cluster.kill("c1")
    cluster.start("coordinator", "c2")
    cluster.produce(100)
    await_condition(cluster.drained, "its successor reads to the ends", PATIENCE_S)
    assert cluster.audit().trained == 200
    assert not cluster.audit().flaws

    producer.begin_transaction()
    producer.produce(JOBS, encode_entry(record), key=record.spec.name.encode(), partition=0)
    assert producer.flush(PATIENCE_S) == 0
    with closing(JobOperations(cluster.log)) as job_store:
        assert job_store.get(cluster.job).wanted == "running"
    producer.abort_transaction(PATIENCE_S)
    with closing(JobOperations(cluster.log)) as job_store:
        assert job_store.get(cluster.job).wanted == "running"
    assert cluster.ended() == []
