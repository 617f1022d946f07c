"""What a coordinator does about its decisions when the outside is not there, or has changed."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest

from common.core import commands as do
from common.errors import UserError
from common.job import parse_job
from common.job_task import trainer_of
from common.jobs import JobBook
from common.metrics.coordinator import CoordinatorMetrics
from common.telemetry import EventLogger
from common.testing.board import MemoryBoard, MemoryRedis
from common.testing.log import MemoryLog
from services.coordinator.effects import Effects
from services.coordinator.snapshots import SnapshotStore
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0
NAME = "digits"


class Bench:
    """A job, and the hands of its coordinator."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.spec = parse_job(JOB)
        for stream in self.spec.streams:
            self.log.create_topic(stream, 1)
        self.book = JobBook(self.log)
        record = self.book.submit(self.spec)
        board = MemoryBoard(MemoryRedis(), NAME)
        logger = EventLogger(logging.getLogger("test"))
        self.faults = list[BaseException]()
        fail = self.faults.append
        self.effects = Effects(
            record,
            trainer_of(self.spec, ()),
            self.log,
            board,
            SnapshotStore(
                record, board, None, logger=logger, metrics=CoordinatorMetrics(), fail=fail
            ),
            JobBook(self.log),
            name="c1",
            lease_ttl_s=1.0,
            logger=logger,
            fail=fail,
        )

    def carry_out(self, command: do.CoordinatorCommand) -> None:
        """Do it; nothing comes of it at once."""
        assert list(self.effects.do(command)) == []


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.effects.close()
    assert bench.faults == []


def test_a_job_is_held_although_kafka_is_away_at_that_moment(bench: Bench) -> None:
    bench.log.go_away()
    bench.carry_out(do.Hold("a checkpoint of another model"))
    bench.log.come_back()
    assert bench.book.get(NAME).wanted == "running"

    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while bench.book.get(NAME).wanted == "running":
        assert time.monotonic() < deadline, "nobody was ever told"
        bench.effects.poll()
        pause.wait(0.01)
    held = bench.book.get(NAME)
    assert (held.wanted, held.reason) == ("paused", "a checkpoint of another model")


def test_a_job_that_is_done_is_stopped_with_the_reason(bench: Bench) -> None:
    bench.carry_out(do.Finish("4 updates applied"))
    record = bench.book.get(NAME)
    assert (record.wanted, record.reason) == ("stopped", "4 updates applied")


def test_a_job_that_was_changed_meanwhile_is_not_stopped_for_what_it_was(bench: Bench) -> None:
    bench.book.change(NAME, {"deadline_s": 9000.0}, "no hurry")
    bench.carry_out(do.Finish("its deadline has come", 0))
    assert bench.book.get(NAME).wanted == "running"
    bench.carry_out(do.Finish("its deadline has come", 1))
    assert bench.book.get(NAME).wanted == "stopped"


@pytest.mark.parametrize("command", [do.Hold("diverged"), do.Finish("4 updates applied")])
def test_a_deleted_job_stays_deleted_whatever_becomes_of_it(
    bench: Bench, command: do.CoordinatorCommand
) -> None:
    bench.book.want(NAME, "stopped", "enough")
    bench.book.delete(NAME)
    bench.carry_out(command)
    assert bench.book.read() == {}


@pytest.mark.parametrize("command", [do.Hold("diverged"), do.Finish("4 updates applied")])
def test_a_job_that_took_the_name_of_a_deleted_one_is_left_alone(
    bench: Bench, command: do.CoordinatorCommand
) -> None:
    bench.book.want(NAME, "stopped", "enough")
    bench.book.delete(NAME)
    bench.book.submit(bench.spec)
    bench.carry_out(command)
    assert bench.book.get(NAME).reason == "submitted"


def test_a_rate_reaches_the_trainer(bench: Bench) -> None:
    bench.carry_out(do.SetLearningRate(0.25))
    with pytest.raises(UserError, match=r"learning_rate -1\.0 is not above zero"):
        bench.carry_out(do.SetLearningRate(-1.0))
