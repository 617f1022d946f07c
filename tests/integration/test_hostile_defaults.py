"""A cluster's defaults (compaction, small sizes) do not apply to our topics.

updates     as we made it │ retention.ms=10^8      │ as we made it
job         drains        │ held; says what to run │ resumed, drains
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.config.settings import Settings
from common.core.spans import Partition
from common.embedded.apache_kafka import ApacheKafka
from common.kafka.names import JOBS, control_topic, dead_letter_topic, differences, updates_topic
from common.kafka.opening import open_log
from common.kafka.port import NewTopic
from common.kafka.table import table_topic
from tests.contract.log_fixtures import everything
from tests.integration.cluster import Cluster, await_condition
from tests.servers import configure, kafka_jars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.redis import EmbeddedRedis

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

PATIENCE_S = 240.0
HOSTILE = """\
log.cleanup.policy=compact
log.retention.bytes=1000000
log.retention.ms=1000
message.max.bytes=2000
"""
NAME = "hostile"
STREAMS = (f"{NAME}-a", f"{NAME}-b")
RECORDS = 400


@pytest.fixture
def settings(likest_redis: EmbeddedRedis, tmp_path: Path) -> Iterator[Settings]:
    with ApacheKafka(kafka_jars(), tmp_path / "kafka", properties=HOSTILE) as kafka:
        yield Settings(
            kafka=kafka.settings.bootstrap,
            kafka_group_protocol="consumer",
            redis=likest_redis.url,
        )


def test_job_runs_on_hostile_cluster_defaults_and_is_held_if_records_would_be_lost(
    settings: Settings, tmp_path: Path
) -> None:
    # The owner of the streams sets their retention.
    with closing(open_log(settings)) as log:
        log.create_topics([NewTopic(stream, 2, kept_forever=True) for stream in STREAMS])
        log.create_topics([NewTopic(dead_letter_topic(STREAMS[1]))])  # but not its dead letters
    with closing(Cluster(settings, tmp_path, NAME, RECORDS)) as cluster:
        assert cluster.streams == STREAMS
        own = [
            NewTopic(each, kept_forever=True) for each in (control_topic(NAME), updates_topic(NAME))
        ]
        ours = [
            *own,
            table_topic(JOBS),
            NewTopic(dead_letter_topic(STREAMS[0]), kept_forever=True),
        ]
        found = cluster.log.settings([topic.name for topic in ours])
        assert found.keys() == {topic.name for topic in ours}
        assert differences(ours, found) == ()

        cluster.start("coordinator", "c1")
        cluster.start("worker", "w1")
        cluster.produce(RECORDS // 2, garbage_every=10)
        await_condition(cluster.drained, "all is settled", PATIENCE_S)
        audit = cluster.audit()
        assert not audit.flaws
        assert (audit.trained, audit.skipped) == (RECORDS // 2, RECORDS // 20)

        def count_dead_letters() -> int:
            places = [Partition(dead_letter_topic(stream), 0) for stream in STREAMS]
            return sum(len(everything(cluster.log, place)) for place in places)

        await_condition(
            lambda: count_dead_letters() == RECORDS // 20,
            "all bad records have dead letters",
            PATIENCE_S,
        )

        configure(cluster.bootstrap(), updates_topic(NAME), {"retention.ms": "100000000"})
        cluster.kill("c1")
        cluster.start("coordinator", "c2")
        await_condition(lambda: cluster.record().held, "the job is held", PATIENCE_S)
        assert cluster.record().reason == (
            f"Kafka would lose records of the job: {updates_topic(NAME)} has"
            " retention.ms=100000000, not -1; correct the settings: kafka-configs.sh"
            " --bootstrap-server $DOLL_KAFKA --alter --entity-type topics"
            f" --entity-name {updates_topic(NAME)}"
            f" --add-config retention.ms=-1; then run `doll job resume {NAME}`"
        )
        configure(cluster.bootstrap(), updates_topic(NAME), {"retention.ms": "-1"})
        cluster.want("running")
        cluster.produce(RECORDS // 2)
        await_condition(cluster.drained, "the job is drained again", PATIENCE_S)
        assert cluster.audit().trained == RECORDS
        assert not cluster.audit().flaws
        assert cluster.ended() == []
