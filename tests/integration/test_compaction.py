"""Compaction deletes records after their batch was claimed: that batch expires.

record    0 1 2 3 4 5 6 7   8 ... 15   16 17 18 19   20 ...   16 to 19 have the keys of 0 to 3
claimed   by a worker that died
left              4 5 6 7   8 ... 15   16 17 18 19   20 ...
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin._resource import ResourceType

from common.config.settings import Settings
from common.core.messages import BatchReady, WorkerId
from common.core.spans import Partition, Span, address_of
from common.data.codecs import codec_of
from common.kafka.names import control_topic
from common.wire import messages as wire
from tests.contract.log_fixtures import everything
from tests.integration.cluster import Cluster, await_condition
from tests.servers import configure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

PATIENCE_S = 240.0
CLAIMED, OVERWRITTEN, NEW = 16, 4, 40  # records of the first partition


def produce(cluster: Cluster, place: Partition, keys: Mapping[int, str]) -> None:
    """Write records of these ids under these keys."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap(), "log_level": 2})
    values = codec_of(cluster.spec.records).encode({"id": np.array(list(keys))})
    for value, key in zip(values, keys.values(), strict=True):
        producer.produce(place.topic, value, key, place.index)
    assert producer.flush(PATIENCE_S) == 0


def test_claimed_batch_that_compaction_shortened_expires(
    apache_kafka: ApacheKafka, likest_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    settings = Settings(
        kafka=apache_kafka.settings.bootstrap,
        kafka_group_protocol="consumer",
        redis=likest_redis.url,
    )
    total = CLAIMED + NEW
    with closing(Cluster(settings, tmp_path, "compacted", total)) as cluster:
        place = Partition(cluster.streams[0], 0)
        eager = {"log.cleaner.backoff.ms": "100"}
        configure(cluster.bootstrap(), "1", eager, ResourceType.BROKER)
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.001"}
        configure(cluster.bootstrap(), place.topic, {**compacted, "segment.ms": "50"})
        produce(cluster, place, {number: f"key-{number}" for number in range(CLAIMED)})
        writer = cluster.log.writer()
        for start in range(0, CLAIMED, 8):
            address = address_of([Span(*place, start, start + 8)])
            claim = BatchReady(WorkerId("dead"), address, samples=8)
            writer.append(control_topic(cluster.job), wire.encode_claim(claim))
        assert writer.flush(PATIENCE_S)
        writer.close()
        # The first new records have the keys of the first claimed records.
        new = {CLAIMED + number: f"key-{number}" for number in range(OVERWRITTEN)}
        produce(cluster, place, new)

        rest = iter(range(CLAIMED + OVERWRITTEN, total))

        def first_are_gone() -> bool:
            """Kafka compacts closed segments. A record closes a segment whose time is over."""
            if (number := next(rest, None)) is not None:
                produce(cluster, place, {number: f"key-{number}"})
            return everything(cluster.log, place)[0].offset >= OVERWRITTEN

        await_condition(first_are_gone, "Kafka has compacted the topic", PATIENCE_S)
        produce(cluster, place, {number: f"key-{number}" for number in rest})

        cluster.start("coordinator", "c1")
        cluster.start("worker", "w1")
        await_condition(cluster.drained, "the job continues and drains", PATIENCE_S)
        audit = cluster.audit()
        assert not audit.flaws
        assert [record.reason for record in audit.quarantined] == ["expired"]
        assert [record.batch.offset for record in audit.quarantined] == [0]
        expected = -np.ones(total, np.float32)
        expected[:8] = 0
        np.testing.assert_array_equal(cluster.weights(), expected)
        assert cluster.ended() == []
