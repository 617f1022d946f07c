"""Forged records in `doll.*` are survived, or the job is held.

The table in docs/howto/security.md lists the effect of each forgery. The cases here need real
processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from confluent_kafka import Producer

from common.core.messages import GENESIS, BatchReady, Lead, WorkerId
from common.core.spans import Partition, Span
from common.kafka.names import JOBS, control_topic, updates_topic
from common.wire import messages as wire
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.config.settings import Settings
    from tests.integration.cluster import Cluster
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

RECORDS = 900
GARBAGE = (b"", b"no record", b'{"type":"lead"}', b"\x00" * 1000, None)


@pytest.fixture
def settings(embedded: Settings) -> Settings:
    return embedded


class Insider:
    """Somebody who may write to the topics of a job.

    Args:
        cluster: Cluster with the job.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap(), "log_level": 2})

    def write(self, topic: str, *values: bytes | None) -> None:
        """Append to a topic's first partition, with the job's name as the key."""
        for value in values:
            self._producer.produce(topic, value, self._cluster.job, partition=0)
        assert self._producer.flush(30.0) == 0

    def claim(self, records: int) -> Partition:
        """Claim the next records of a stream, even if they do not exist."""
        leader_status = self._cluster.leader_status()
        assert leader_status is not None
        place = min(leader_status.claimed)
        known, start = leader_status.known.get(place), leader_status.claimed[place]
        before = -1 if known is None else known.epoch
        claimed = BatchReady(
            WorkerId("insider"), (Span(*place, start, start + records, 0, before),), 8
        )
        self.write(control_topic(self._cluster.job), wire.encode_claim(claimed))
        return place

    def lead(self) -> None:
        """Roll back all updates."""
        leader_status = self._cluster.leader_status()
        assert leader_status is not None
        lead = Lead(leader_status.epoch, GENESIS, "insider", leader_status.epoch + 1)
        self.write(updates_topic(self._cluster.job), wire.encode_audit(lead))


def test_forged_records_are_survived_or_hold_the_job(make: Make) -> None:
    # forged   garbage     claim by no worker   Lead that rolls back all   claim of absent records
    # job      continues   continues            trains all again           is held
    cluster = make(name="insiders", records=RECORDS)
    insider = Insider(cluster)
    cluster.start("coordinator", "c1")
    cluster.start("worker", "w1")
    cluster.produce(300)
    for topic in (control_topic(cluster.job), updates_topic(cluster.job)):
        insider.write(topic, *GARBAGE)
    insider.write(JOBS, b"no job")
    await_condition(cluster.drained, "invalid records change nothing")

    cluster.kill("w1")
    cluster.produce(300)
    insider.claim(8)
    cluster.start("worker", "w2")
    await_condition(cluster.drained, "batches that no worker has in memory are read from Kafka")
    assert cluster.audit().trained == 600

    taken_back = cluster.version()
    insider.lead()
    cluster.produce(300)
    await_condition(lambda: cluster.audit().taken_back == taken_back, "all updates are taken back")
    await_condition(lambda: cluster.audit().trained == RECORDS, "all records are trained again")
    await_condition(cluster.drained, "everything is settled")
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    assert cluster.audit().flaws == ()

    place = insider.claim(1000)
    await_condition(lambda: cluster.wanted() == "paused", "the job is held")
    assert str(place) in cluster.record().reason
    assert cluster.ended() == []
