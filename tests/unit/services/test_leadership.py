"""Inputs of a leader, and those that wake the job's actor."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from msgspec.structs import replace

from common.core import commands as do
from common.core import events
from common.core.messages import Failed, Gradient, ModelId, Reply, WorkerId
from common.core.snapshots import Snapshot
from common.core.spans import Partition
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoards, MemoryRedis
from common.telemetry.logging import event_logger
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.outages import Outage
from common.telemetry.tracing import NoTracer
from services.coordinator.effects.lease import Lease
from services.coordinator.inbox import SMALL_BYTES, CoordinatorInbox
from services.coordinator.leadership import Leadership
from services.coordinator.metrics_observer import MetricsObserver
from services.coordinator.replica import JobContext
from services.coordinator.replies import ReplyReader, SoundReplies
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import MemoryReplica

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.coordinator.effects.snapshots import SnapshotStore

NAME = "digits"


GRADIENT = Gradient(
    WorkerId("w"), ModelId(1, 0), (5,), 2, 1.0, {}, 0.1, vector=np.ones(4, np.float32)
)


class Bench:
    """A leadership, and the control topic's ends at which it woke the job's actor."""

    def __init__(self) -> None:
        self.log, self.redis, self.woken = MemoryLog(), MemoryRedis(), list[int]()
        self.log.create_topics([NewTopic("clinic-a")])
        record = JobOperations(self.log).submit(parse_job(JOB))
        self._control = Partition(control_topic(NAME), 0)
        self.replica = MemoryReplica(self.log, self.redis)
        # A separate reader that reads on demand of a test.
        self.reader = ReplyReader(MemoryBoards(self.redis).replies("own"), event_logger("test"))
        metrics = CoordinatorMetrics()
        log = event_logger("test")
        wake = lambda: self.woken.append(self.log.bounds(self._control).end)  # noqa: E731
        self.inbox = CoordinatorInbox(wake, Outage(log, "redis"))
        replica = dataclasses.replace(self.replica.replica, replies=self.reader)
        job = JobContext(
            replica,
            record,
            replica.boards.board(record.id),
            self.inbox,
            MetricsObserver(record.spec, metrics, NoTracer()),
            log,
            self.inbox.outage,
            members=True,
        )
        # The test restores no snapshot.
        self.leadership = Leadership(job, Lease(job, 1.0), cast("SnapshotStore", None))
        self.leadership.begin(do.Begin(1, Snapshot(1, ModelId(1, 0), 0, 0, {})))
        self.inbox.sound = SoundReplies(4, metrics, log)
        self.woken.clear()

    def append(self) -> None:
        """Append a record to the control topic."""
        self.log.writer().append(self._control.topic, b"garbage")

    def send(self, reply: Reply) -> None:
        """Send a reply, and wait until it is received."""
        MemoryBoards(self.redis).board(NAME).push_reply(reply, "own")
        self.reader.turn()

    def close(self) -> None:
        """Stop everything."""
        self.leadership.end()
        self.replica.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with closing(Bench()) as bench:
        yield bench


def test_records_wake_the_actor_only_if_it_awaits_no_gradients(bench: Bench) -> None:
    # control topic      0: woken        1: not        read: both        2: woken
    inbox = bench.inbox
    bench.append()
    assert not inbox.await_gradients(2)
    bench.append()
    read = [each for each in inbox.read() if isinstance(each, events.ControlRead)]
    assert [offset for each in read for offset, _ in each.records] == [0, 1]
    assert inbox.await_gradients(0), "a record came and the actor was not woken"
    bench.append()
    assert bench.woken == [1, 3]


def test_gradients_wake_the_actor_only_when_all_awaited_ones_are_there(bench: Bench) -> None:
    bench.inbox.await_gradients(2)
    bench.send(GRADIENT)
    assert bench.woken == []
    bench.send(replace(GRADIENT, batches=(6,)))
    assert len(bench.woken) == 1
    [read] = bench.inbox.read()
    assert isinstance(read, events.RepliesRead)
    assert len(read.replies) == 2


def test_inbox_detects_gradients_that_arrived_while_more_were_awaited(bench: Bench) -> None:
    # A gradient arrives while two are awaited. Then a turn that has not read it awaits only one.
    bench.inbox.await_gradients(2)
    bench.send(GRADIENT)
    assert bench.inbox.await_gradients(1)
    assert bench.woken == []


@pytest.mark.parametrize(
    "reply",
    [
        Failed(WorkerId("w"), ModelId(1, 0), (5,), "raised"),
        replace(GRADIENT, vector=np.ones(SMALL_BYTES // 4 + 1, np.float32)),
    ],
)
def test_failure_or_large_gradient_wakes_the_actor_at_once(bench: Bench, reply: Reply) -> None:
    bench.inbox.await_gradients(2)
    bench.send(reply)
    assert len(bench.woken) == 1
