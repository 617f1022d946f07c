"""A slot works for one job after another, and what the end of a job's process leads to."""

from __future__ import annotations

import threading
from io import StringIO
from typing import TYPE_CHECKING

import msgspec
import pytest

from common.config.settings import Settings
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.store import decode_entry
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoards, MemoryRedis
from common.runtime.service import ServiceProcess
from common.telemetry.logging import event_logger, set_up_logging
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from services.worker import selection, slots
from services.worker.channel import BeginJob, Failure
from services.worker.selection import JobSelector, SelectingWorker
from services.worker.slots import Slot
from tests.fakes.clock import ManualClock
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.jobs.store import JobRecord
    from common.telemetry.logging import EventLogger


class Bench:
    """A slot with imitated processes, each of which ends as soon as it was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "JOBS_S", 0.0)
        monkeypatch.setattr(slots, "JobProcess", self._start)
        self.clock = ManualClock(1000.0)
        monkeypatch.setattr(slots, "monotonic", self.clock)
        log = MemoryLog()
        log.create_topics([NewTopic("clinic-a")])
        self.job_store = JobOperations(log)
        self.boards = MemoryBoards(MemoryRedis(self.clock))
        self.metrics = ProcessMetrics("worker")
        self.said = StringIO()
        set_up_logging(Settings(log_format="json"), self.said)
        logger = event_logger("worker")
        self.selector = JobSelector(
            SelectingWorker("w0", "", ("image-classifier",)),
            *(JobOperations(log), self.boards.roster(), self.metrics, logger, lambda: 0.5),
            self.clock,
        )
        self.stopping = Turning(self)
        process = ServiceProcess("worker", "w0", Settings(), self.stopping, Watchdogs(), logger)
        self.losses = 0
        self.slot = Slot("w0", "GPU-1", self.selector, log, self.boards, process, self._lose)
        self.started = list[BeginJob]()
        # Ends of the next processes. The worker is stopped during the last one.
        self.ends = list[Failure | None]()
        # Number of turns of a process.
        self.turns = 2
        # Called during each turn of a process.
        self.during: Callable[[], object] = bool

    def submit(self, *names: str) -> None:
        """Submit jobs, and let the selector choose one."""
        for name in names:
            self.job_store.submit(parse_job(JOB.replace("name: digits", f"name: {name}", 1)))

    def run(self, *ends: Failure | None) -> None:
        """Run the slot until processes have ended in these ways."""
        self.ends += ends
        self.selector.turn()
        self.slot.run()

    def record(self) -> JobRecord:
        """Return the job's record."""
        return self.job_store.read()["digits"]

    def reason(self) -> str:
        """Return why the worker reports that it cannot work for the job."""
        return self.boards.board("digits").unable().get("worker w0", "")

    def _lose(self) -> None:
        self.losses += 1

    def _start(self, begin: BeginJob, _: EventLogger) -> Ended:
        self.started.append(begin)
        return Ended(self)


class Turning(threading.Event):
    """An event whose waits let a second pass on the manual clock, and the selector choose."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    def wait(self, timeout: float | None = None) -> bool:
        """Let a second pass."""
        del timeout
        self._bench.clock.advance(1.0)
        self._bench.selector.turn()
        return self.is_set()


class Ended:
    """A process that ends after a turn."""

    pinned = False

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._turns = 0
        self.left = False

    def turn(self, _: float) -> bool:
        """Return False at the last call, or once the process was asked to leave."""
        bench = self._bench
        if len(bench.ends) == 1:
            bench.stopping.set()
        bench.during()
        self._turns += 1
        return self._turns < bench.turns and not self.left

    def change(self, record: str) -> None:
        """Check that the record is one of the job."""
        assert decode_entry(b"digits", record.encode())

    def leave(self, _: float) -> None:
        """Leave the job."""
        self.left = True

    def end(self) -> Failure | None:
        """Return the next end."""
        bench = self._bench
        return bench.ends.pop(0)


@pytest.fixture
def bench(process_logging: None, monkeypatch: pytest.MonkeyPatch) -> Bench:  # noqa: ARG001
    return Bench(monkeypatch)


def lost(*batches: int) -> Failure:
    """Return the failure of a process that lost its GPU during these batches."""
    return Failure("CUDA error", reported=True, lost=batches)


DIED = Failure("the worker's process for this job died of SIGSEGV", reported=True, died=True)


def test_process_gets_the_record_the_name_and_the_gpu(bench: Bench) -> None:
    bench.submit("digits")
    bench.run(None)

    [begin] = bench.started
    record = bench.selector.selected()
    assert record is not None
    assert decode_entry(b"digits", begin.record.encode()) == record
    assert (begin.job, begin.member, begin.gpu) == ("digits", "w0", "GPU-1")


def test_process_that_leaves_without_an_order_counts_as_dead(bench: Bench) -> None:
    bench.submit("digits")
    bench.run(None, None)

    assert len(bench.started) == 2
    assert bench.clock() == 1001.0
    assert "left without an order" in bench.reason()


def test_job_whose_process_dies_is_tried_again_after_growing_pauses(bench: Bench) -> None:
    # start   1000   1001     1003         1007
    # pause        1      2        4
    bench.submit("digits")
    bench.run(DIED, DIED, DIED, None)

    assert len(bench.started) == 4
    assert bench.clock() == 1007.0
    assert "SIGSEGV" in bench.reason()


def test_failure_that_passes_is_not_reported_to_people(bench: Bench) -> None:
    bench.submit("digits")
    bench.run(Failure("Kafka is unavailable", passes=True), None)

    assert len(bench.started) == 2
    assert not bench.reason()


def test_process_leaves_a_job_that_was_stopped(bench: Bench) -> None:
    bench.submit("digits")

    def stop() -> None:
        bench.job_store.patch("digits", "enough", wanted="stopped")
        bench.selector.turn()

    bench.during = stop
    bench.run(DIED)

    assert len(bench.started) == 1
    # The worker asked for this end, however it came about.
    assert not bench.reason()


def test_resumed_job_gets_a_new_process_which_imports_the_corrected_task(bench: Bench) -> None:
    # job       running   held   resumed
    # process   first            leaves    second
    bench.submit("digits")
    moves = iter(
        (
            lambda: bench.job_store.hold(bench.record(), "losses has shape ()"),
            lambda: bench.job_store.patch("digits", "fixed", wanted="running"),
        )
    )

    def move() -> None:
        next(moves, bool)()
        bench.selector.turn()

    bench.during, bench.turns = move, 5
    bench.run(None, None)

    assert len(bench.started) == 2


def test_gpu_that_fails_twice_on_different_batches_is_given_up(bench: Bench) -> None:
    bench.submit("digits")
    bench.run(lost(7, 8), lost(9), None)

    assert len(bench.started) == 2
    assert bench.losses == 2
    assert "GPU-1 failed twice" in bench.slot.gave_up


def test_batch_that_makes_a_gpu_fail_again_does_not_end_the_gpu(bench: Bench) -> None:
    bench.submit("digits")
    bench.run(lost(7, 8), lost(8), None)

    assert len(bench.started) == 3
    assert not bench.slot.gave_up


def test_faults_of_kernels_do_not_end_the_gpu(bench: Bench) -> None:
    bench.submit("digits")
    wrong_index = Failure("CUDA error: device-side assert triggered", reported=True, lost=(7,))
    bench.run(wrong_index, msgspec.structs.replace(wrong_index, lost=(9,)), None)

    assert len(bench.started) == 3
    assert bench.losses == 2
    assert not bench.slot.gave_up


def test_gpu_that_fails_again_much_later_is_not_given_up(bench: Bench) -> None:
    bench.submit("digits")
    bench.during = lambda: bench.clock.advance(slots.AGAIN_LOST_S)
    bench.run(lost(7), lost(9), None)

    assert len(bench.started) == 3
    assert not bench.slot.gave_up
