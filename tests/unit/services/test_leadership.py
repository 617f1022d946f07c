"""What a leader listens to, and which of it wakes the job's actor."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, cast

from common.core import events
from common.core.messages import ModelId
from common.core.snapshots import Snapshot
from common.core.spans import Partition
from common.jobs.spec import parse_job
from common.jobs.store import JobStore
from common.ports.servers import NewTopic
from common.telemetry.logging import event_logger
from common.telemetry.tracing import NoTracer
from common.testing.board import MemoryRedis
from common.testing.log import MemoryLog
from common.topics.names import control_topic
from services.coordinator.leadership import Leadership
from services.coordinator.metrics_observer import MetricsObserver
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import MemoryReplica

if TYPE_CHECKING:
    from services.coordinator.snapshots import SnapshotStore

NAME = "digits"


def test_records_wake_nobody_while_they_can_wait_and_are_read_with_what_does() -> None:
    # control topic      0: woken        1: not        read: both        2: woken
    log, woken = MemoryLog(), list[int]()
    log.create_topics([NewTopic("clinic-a")])
    record = JobStore(log).submit(parse_job(JOB))
    with closing(MemoryReplica(log, MemoryRedis())) as replica:
        leadership = Leadership(
            replica.replica,
            record,
            cast("SnapshotStore", None),  # nothing is found, and nothing restored
            MetricsObserver(record.spec, replica.metrics.follow(NAME, lambda: None), NoTracer()),
            event_logger("test"),
            lambda: woken.append(position()),
        )
        control = Partition(control_topic(NAME), 0)

        def position() -> int:
            return log.bounds(control).end

        def append() -> None:
            log.writer().append(control.topic, b"garbage")

        leadership.begin(1, Snapshot(1, ModelId(1, 0), 0, 0, {}), 4)
        woken.clear()
        append()
        leadership.prompt = False
        append()
        read = [each for each in leadership.news() if isinstance(each, events.ControlRead)]
        assert [offset for each in read for offset, _ in each.records] == [0, 1]
        leadership.prompt = True
        append()
        assert woken == [1, 3]
        leadership.end()
