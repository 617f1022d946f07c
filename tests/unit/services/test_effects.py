"""What a coordinator does about its decisions when the outside is not there."""

from __future__ import annotations

import logging
import threading
import time

from common.core import commands as do
from common.job import parse_job
from common.job_task import trainer_of
from common.jobs import JobBook
from common.metrics import Metrics
from common.telemetry import EventLogger
from common.testing.board import MemoryBoard, MemoryRedis
from common.testing.log import MemoryLog
from services.coordinator.effects import Effects
from services.coordinator.snapshots import SnapshotStore
from tests.unit.cli.test_job import JOB

PATIENCE_S = 20.0


def test_a_job_is_held_although_kafka_is_away_at_that_moment() -> None:
    log = MemoryLog()
    spec = parse_job(JOB)
    for stream in spec.streams:
        log.create_topic(stream, 1)
    record = JobBook(log).submit(spec)
    board, logger = MemoryBoard(MemoryRedis(), spec.name), EventLogger(logging.getLogger("test"))
    faults = list[BaseException]()
    effects = Effects(
        record,
        trainer_of(spec, ()),
        log,
        board,
        SnapshotStore(record, board, None, logger=logger, metrics=Metrics(), fail=faults.append),
        JobBook(log),
        name="c1",
        lease_ttl_s=1.0,
        logger=logger,
        fail=faults.append,
    )
    log.go_away()
    assert list(effects.do(do.Hold("a checkpoint of another model"))) == []
    log.come_back()
    assert JobBook(log).get(spec.name).wanted == "running"

    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while JobBook(log).get(spec.name).wanted == "running":
        assert time.monotonic() < deadline, "nobody was ever told"
        effects.poll()
        pause.wait(0.01)
    held = JobBook(log).get(spec.name)
    assert (held.wanted, held.reason) == ("paused", "a checkpoint of another model")
    effects.close()
    assert faults == []
