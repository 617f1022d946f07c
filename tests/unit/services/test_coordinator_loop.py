"""One replica's thread of a job, in memory: what its owner does to the job reaches it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from common.config import Settings
from common.core.messages import WorkerId
from common.job import parse_job
from common.jobs.store import JobBook
from common.metrics.coordinator import CoordinatorMetrics
from common.metrics.serving import Pulse, Pulses
from common.telemetry import event_logger
from common.testing.board import MemoryBoard, MemoryRedis
from common.testing.clock import HandClock
from common.testing.log import MemoryLog
from common.tracing import NoTracer
from services.coordinator.__main__ import JOB_STILL_S
from services.coordinator.loop import JobCoordinator, protocol_settings
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.jobs.store import JobRecord

NAME = "digits"
PATIENCE_S = 20.0


class Replica:
    """A coordinator's thread for one job."""

    def __init__(
        self,
        log: MemoryLog,
        board: MemoryBoard,
        record: JobRecord,
        name: str,
        pulse: Pulse | None = None,
    ) -> None:
        self.board = board
        self.coordinator = JobCoordinator(
            name,
            record,
            Settings(),
            log=log,
            board=self.board,
            checkpoints=None,
            book=JobBook(log),
            metrics=CoordinatorMetrics(),
            tracer=NoTracer(),
            logger=event_logger("test"),
        )
        beat = (pulse or Pulse()).beat
        self.thread = threading.Thread(target=self.coordinator.run, args=(beat,), daemon=True)
        self.thread.start()

    def end(self) -> None:
        """End it, if it has not ended."""
        self.coordinator.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


class Bench:
    """A job that two replicas take part in: the first one leads."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.redis = MemoryRedis()
        self.log.create_topic("clinic-a", 1)
        self.book = JobBook(self.log)
        self.record = self.book.submit(parse_job(JOB))
        self.leader = Replica(self.log, MemoryBoard(self.redis, NAME), self.record, "c1")
        until(lambda: self.leader.board.get_standing() is not None, "somebody leads")
        self.other = Replica(self.log, MemoryBoard(self.redis, NAME), self.record, "c2")

    def both(self) -> tuple[Replica, Replica]:
        """The two replicas."""
        return self.leader, self.other


def until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.005)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for replica in bench.both():
        replica.end()


def test_a_deleted_job_ends_the_threads_of_all_replicas_and_stays_deleted(bench: Bench) -> None:
    bench.book.want(NAME, "stopped", "enough")
    bench.book.delete(NAME)
    for replica in bench.both():
        replica.coordinator.follow(None)
        replica.coordinator.follow(None)  # told until it has ended
    for replica in bench.both():
        until(lambda each=replica: not each.thread.is_alive(), "it has ended")  # type: ignore[misc]
    assert bench.book.read() == {}


def test_a_job_that_took_the_name_of_a_deleted_one_is_another(bench: Bench) -> None:
    later = bench.record._replace(submitted_s=bench.record.submitted_s + 1.0)
    for replica in bench.both():
        replica.coordinator.follow(later)
    for replica in bench.both():
        until(lambda each=replica: not each.thread.is_alive(), "it has ended")  # type: ignore[misc]


def test_an_earlier_deadline_ends_a_running_job(bench: Bench) -> None:
    bench.leader.board.beat(WorkerId("w1"), "alive", 60.0)
    changed = bench.book.change(NAME, {"deadline_s": 1e-3}, "no money left")
    bench.leader.coordinator.follow(changed)
    until(lambda: bench.book.get(NAME).wanted == "stopped", "the deadline has come")
    record = bench.book.get(NAME)
    assert (record.reason, record.revision) == ("its deadline has come", 1)


def test_the_protocol_goes_by_the_specification_of_the_record(bench: Bench) -> None:
    changed = bench.book.change(NAME, {"group_size": 7, "learning_rate": 0.5}, "")
    settings = protocol_settings(changed)
    assert (settings.group_size, settings.bound) == (7, 14)
    assert (settings.revision, settings.learning_rate) == (1, 0.5)
    assert protocol_settings(bench.record).stop_at is None


class StuckBoard(MemoryBoard):
    """A board whose answer about the lease a test holds back."""

    def __init__(self, server: MemoryRedis, job: str) -> None:
        super().__init__(server, job)
        self.asked, self.answer = threading.Event(), threading.Event()

    def hold_lease(self, holder: str, ttl_s: float) -> bool:
        """Wait for the test, then ask."""
        self.asked.set()
        self.answer.wait(PATIENCE_S)
        return super().hold_lease(holder, ttl_s)


def test_a_loop_that_hangs_is_ill_until_it_turns_again() -> None:
    log, clock = MemoryLog(), HandClock()
    log.create_topic("clinic-a", 1)
    board = StuckBoard(MemoryRedis(), NAME)
    pulses = Pulses(clock)
    pulse = pulses.begin("the loop of job digits", JOB_STILL_S)
    replica = Replica(log, board, JobBook(log).submit(parse_job(JOB)), "c1", pulse)
    assert board.asked.wait(PATIENCE_S)
    clock.advance(JOB_STILL_S)
    assert pulses.complaint() == "the loop of job digits has not turned for 300 s"
    board.answer.set()
    until(lambda: not pulses.complaint(), "it turns")
    replica.end()
