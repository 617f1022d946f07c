"""Processes continue after the broker rejects their producers' sequence numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.kafka.settings import EmbeddedControl
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from common.config.settings import Settings
    from tests.integration.servers import Make

pytest_plugins = ["tests.servers", "tests.redis_servers", "tests.integration.servers"]

PRODUCE = 0  # API key of Kafka's protocol
OUT_OF_ORDER = 45
RECORDS = 6000
TIMES = 6


@pytest.fixture
def settings(embedded: Settings) -> Settings:
    return embedded


def test_job_continues_after_broker_rejects_sequence_numbers(
    make: Make, settings: Settings
) -> None:
    cluster = make(name="broken-sequences", records=RECORDS, seconds=0.02)
    names = ("c1", "w1", "w2")
    for name in names:
        cluster.start("coordinator" if name == "c1" else "worker", name)
    cluster.produce(RECORDS)
    broker = EmbeddedControl(settings.embedded_kafka)
    # The fault hits the next process that writes, the leader or a worker.
    for _ in range(TIMES):
        version = cluster.version()
        await_condition(lambda v=version: cluster.version() >= v + 5, "five more updates")  # type: ignore[misc]
        broker.refuse(PRODUCE, OUT_OF_ORDER)
    await_condition(cluster.drained, "everything is settled")
    assert any("sequence desynchronization" in cluster.said(name) for name in names)
    assert np.flatnonzero(cluster.weights() != -1.0).tolist() == []
    audit = cluster.audit()
    assert (audit.flaws, audit.trained, audit.unsettled) == ((), RECORDS, 0)
    assert cluster.ended() == []
