"""A producer dies in a transaction: the job reports that, is not drained, and loses nothing.

offset    0 ... 499   500 ... 509   510 ... 1509   1510     1511
record    committed   open          committed      marker
stable                here
after the abort       never read    trained                 here: drained
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from confluent_kafka import Producer

from common.config.settings import Settings
from common.core.spans import Partition
from common.data.codecs import codec_of
from common.jobs.progress import JobProgress
from common.jobs.watching import HistoryReader, Poller, read_history
from common.redis.board import open_board
from common.telemetry.logging import event_logger
from tests.integration.cluster import Cluster, await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.embedded.apache_kafka import ApacheKafka
    from common.embedded.redis import EmbeddedRedis
    from common.jobs.progress import State

pytest_plugins = ["tests.servers", "tests.redis_servers"]
pytestmark = pytest.mark.kafka

JOB = "open-transaction"
PATIENCE_S = 240.0
REPORTED_WITHIN_S = 15.0
BEFORE, OPEN, BEHIND = range(500), range(500, 510), range(510, 1510)


@pytest.fixture
def cluster(
    apache_kafka: ApacheKafka, likest_redis: EmbeddedRedis, tmp_path: Path
) -> Iterator[Cluster]:
    settings = Settings(kafka=apache_kafka.settings.bootstrap, redis=likest_redis.url)
    with closing(Cluster(settings, tmp_path, JOB, BEHIND.stop)) as made:
        yield made


class Watched:
    """The job as `doll job watch` sees it."""

    def __init__(self, cluster: Cluster) -> None:
        record, log = cluster.record(), cluster.log
        self._history = HistoryReader(record.id, log)
        self._poller = Poller(
            record,
            lambda: log,
            lambda job: open_board(cluster.settings, job),
            event_logger(__name__),
        )
        self.progress = JobProgress(record)

    def state(self) -> State:
        """Poll, and return the job's state."""
        now = time.time()
        read_history(self._history, self.progress, now, 0.0)
        if (look := self._poller.look(now, time.monotonic())) is not None:
            self.progress.look(look)
        return self.progress.state(now)

    def close(self) -> None:
        """Close the connections."""
        self._history.close()
        self._poller.close()


def test_open_transaction_is_reported_and_the_rest_trained_after_its_abort(
    cluster: Cluster,
) -> None:
    stream = cluster.streams[0]
    place = Partition(stream, 0)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce_to(stream, BEFORE, partition=0)
    with closing(Watched(cluster)) as watched:
        await_condition(lambda: watched.state().word == "drained", "the job is drained", PATIENCE_S)

        producer = Producer(
            {"bootstrap.servers": cluster.bootstrap(), "transactional.id": JOB, "log_level": 2}
        )
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        for value in codec_of(cluster.spec.records).encode({"id": np.array(OPEN)}):
            producer.produce(stream, value, partition=0)
        assert producer.flush(PATIENCE_S) == 0
        begun = time.monotonic()
        cluster.produce_to(stream, BEHIND, partition=0)
        sentence = f"an open transaction at {place}@500 holds back 1,010 offsets, for "
        await_condition(
            lambda: (
                (state := watched.state()).word == "degraded" and state.why.startswith(sentence)
            ),
            "the state names the transaction",
            REPORTED_WITHIN_S - (time.monotonic() - begun),
        )
        assert watched.progress.lag == 1_010
        assert cluster.log.ends([place]) == {place: 500}
        assert cluster.log.high_watermarks([place]) == {place: 1_510}
        assert cluster.audit().trained == len(BEFORE)

        producer.abort_transaction(PATIENCE_S)
        await_condition(
            lambda: watched.state().word == "drained",
            "records behind the transaction are settled",
            PATIENCE_S,
        )
        assert watched.progress.lag == 0
        assert cluster.log.ends([place]) == {place: 1_511}
        assert watched.progress.open_transactions_s(time.time())[stream] == 0.0
    found = cluster.audit()
    assert found.trained == len(BEFORE) + len(BEHIND)
    assert not found.flaws
    expected = -np.ones(BEHIND.stop, np.float32)
    expected[OPEN.start : OPEN.stop] = 0
    np.testing.assert_array_equal(cluster.weights(), expected)
    assert cluster.ended() == []
