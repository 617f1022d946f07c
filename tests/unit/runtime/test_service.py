"""A service process: its end, and the order of closing its jobs and their servers."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.config.program import EXIT_USAGE
from common.core.spans import Partition
from common.errors import UserError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.store import JobRecord
from common.kafka.memory import MemoryLog
from common.kafka.names import JOBS
from common.kafka.port import NewTopic
from common.kafka.table import NUMBER
from common.runtime import jobs, service
from common.runtime.jobs import OpenedKafka, follow_jobs
from common.runtime.service import ServiceProcess, run
from common.telemetry.metrics.registry import ProcessMetrics
from tests.unit.jobs.test_spec import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.runtime.jobs import MakePart
    from common.runtime.supervisor import PreviousFault

pytestmark = pytest.mark.usefixtures("process_logging", "handlers")
PATIENCE_S = 120.0
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
# A program that sends itself a signal. Its argument is the signal's number.
DIES = """
import os, resource, sys, threading
from common.runtime.service import run

def other_work():
    begun.set()
    threading.Event().wait()

def work(process):
    threading.Thread(target=other_work, daemon=True).start()
    begun.wait()
    os.kill(os.getpid(), int(sys.argv[1]))

begun = threading.Event()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would be left in the working directory
run("worker", "w1", work)
"""


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore signal handlers and garbage collection after the test."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DOLL_")]:
        monkeypatch.delenv(name)


def refuse(_process: ServiceProcess) -> None:
    raise UserError("DOLL_MARKET: must name a file")


def fail(_process: ServiceProcess) -> None:
    raise ValueError("a fault")


def test_terminated_process_exits_with_ok() -> None:
    def work(process: ServiceProcess) -> None:
        assert (process.service, process.name) == ("worker", "w1")
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.stopping.wait(PATIENCE_S)

    assert run("worker", "w1", work) == service.EXIT_OK


@pytest.mark.parametrize("fault", FAULTS)
def test_service_that_dies_of_a_fault_logs_the_stacks_of_all_threads(
    fault: signal.Signals,
) -> None:
    died = subprocess.run(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-c", DIES, str(fault.value)],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )

    assert died.returncode == -fault
    assert "Fatal Python error: " in died.stderr
    assert "in other_work\n" in died.stderr
    assert "in work\n" in died.stderr


def test_work_may_return_its_exit_code() -> None:
    assert run("admin", "a1", lambda _: 7) == 7


def test_garbage_collection_excludes_imported_modules() -> None:
    gc.disable()  # our processes start so
    try:
        kept = run("worker", "w1", lambda _: gc.get_freeze_count() if gc.isenabled() else 0)
        assert kept > len(sys.modules)
    finally:
        gc.enable()


def test_invalid_settings_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("provisioner", "p1", refuse) == EXIT_USAGE
    assert capsys.readouterr().err == "provisioner: DOLL_MARKET: must name a file\n"
    monkeypatch.setenv("DOLL_THREADS", "many")
    assert run("provisioner", "p1", fail) == EXIT_USAGE
    output = 'provisioner: DOLL_THREADS: must be a whole number, got "many"\n'
    assert capsys.readouterr().err == output


def test_exception_in_work_is_logged_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("worker", "w1", fail, called="worker") == service.EXIT_FAILED
    output = capsys.readouterr().err
    assert " error worker_failed service=worker worker=w1\n" in output
    assert "in fail\n" in output
    assert "ValueError: a fault" in output


def test_service_waits_during_a_kafka_outage(capsys: pytest.CaptureFixture[str]) -> None:
    def work(process: ServiceProcess) -> None:
        away = process._replace(settings=process.settings.model_copy(update={"kafka": GONE}))
        await_end = process.stopping.wait

        # Requests the end at the third call.
        def wait(timeout: float | None = None) -> bool:
            waits.append(timeout)
            if len(waits) == 3:
                process.stopping.set()
            return await_end(0.0)

        process.stopping.wait = wait  # type: ignore[method-assign]  # time is an argument
        follow_jobs(away, ProcessMetrics("evaluator"), no_actors, lambda _record, _new: True)

    waits = list[float | None]()
    assert run("evaluator", "e1", work) == service.EXIT_OK
    assert waits == [jobs.JOBS_S] * 3
    assert capsys.readouterr().err.count("kafka_unavailable") == 1


GONE = "embedded:/nonexistent/kafka.sock"


def no_actors(_opened: OpenedKafka) -> MakePart:
    raise AssertionError("nothing is open")


def no_part(
    _wanted: Callable[[], JobRecord | None], _wake: Callable[[], None], _fault: PreviousFault | None
) -> Recorded:
    raise AssertionError("no job begins")


class Recorded:
    """An actor that records its turns and its end."""

    def __init__(self, what: str, recorded: list[str], at_turn: Callable[[], None]) -> None:
        self._what, self._recorded, self._at_turn = what, recorded, at_turn

    def turn(self) -> float | None:
        """Record the turn."""
        self._recorded.append(f"turn of {self._what}")
        self._at_turn()
        return inf

    def close(self) -> None:
        """Record the call."""
        self._recorded.append(f"{self._what} closed")


class RecordedLog(MemoryLog):
    """Records when it is closed."""

    def __init__(self, recorded: list[str]) -> None:
        super().__init__()
        self._recorded = recorded

    def close(self) -> None:
        """Record the call."""
        self._recorded.append("Kafka closed")


def test_jobs_are_closed_before_their_shared_servers() -> None:
    # digits begins ─▶ has its turn ─▶ process stops ─▶ closes the job, shared servers, and Kafka
    recorded = list[str]()
    log = RecordedLog(recorded)
    log.create_topics([NewTopic("clinic-a", 1), NewTopic("clinic-b", 1)])
    JobOperations(log).submit(parse_job(TEXT))

    def work(process: ServiceProcess) -> None:
        def parts(opened: OpenedKafka) -> MakePart:
            opened.closing.callback(lambda: recorded.append("shared closed"))
            return make

        def make(
            wanted: Callable[[], JobRecord | None],
            _wake: Callable[[], None],
            _fault: PreviousFault | None,
        ) -> Recorded:
            record = wanted()
            assert record is not None
            return Recorded(record.spec.name, recorded, process.stopping.set)

        follow_jobs(
            *(process, ProcessMetrics("evaluator"), parts, lambda _record, new: new),
            open_log=lambda *_: log,
        )

    assert run("evaluator", "e1", work) == service.EXIT_OK
    assert recorded == ["turn of digits", "digits closed", "shared closed", "Kafka closed"]


def test_side_actors_have_their_own_threads() -> None:
    # Main actors occupy all their threads. The side actor of digits still has its turn, which stops
    # the process.
    log, recorded, released = MemoryLog(), list[str](), threading.Event()
    log.create_topics([NewTopic("clinic-a", 1), NewTopic("clinic-b", 1)])
    for name in ("a", "b", "c", "d", "e", "f", "g", "h", "digits"):
        JobOperations(log).submit(parse_job(TEXT.replace("name: digits", f"name: {name}", 1)))

    def work(process: ServiceProcess) -> None:
        def actors(at_turn: Callable[[], None]) -> MakePart:
            return lambda _wanted, _wake, _fault: Recorded("it", recorded, at_turn)

        def done() -> None:
            process.stopping.set()
            released.set()

        follow_jobs(
            *(process, ProcessMetrics("evaluator"), lambda _opened: actors(hang)),
            lambda _record, new: new,
            open_log=lambda *_: log,
            beside=(
                lambda _opened: actors(done),
                lambda record, new: new and record.spec.name == "digits",
            ),
        )

    def hang() -> None:
        assert released.wait(jobs.END_S)

    assert run("evaluator", "e1", work) == service.EXIT_OK
    assert released.is_set()


def test_side_actors_share_one_thread() -> None:
    log, threads = MemoryLog(), list[int]()
    log.create_topics([NewTopic("clinic-a", 1), NewTopic("clinic-b", 1)])
    for name in "abcd":
        JobOperations(log).submit(parse_job(TEXT.replace("name: digits", f"name: {name}", 1)))

    def work(process: ServiceProcess) -> None:
        def at_turn() -> None:
            threads.append(threading.get_ident())
            if len(threads) == 4:
                process.stopping.set()

        def parts(_opened: OpenedKafka) -> MakePart:
            return lambda _wanted, _wake, _fault: Recorded("it", [], at_turn)

        follow_jobs(
            *(process, ProcessMetrics("evaluator"), lambda _opened: no_part),
            lambda _record, _new: False,
            open_log=lambda *_: log,
            beside=(parts, lambda _record, new: new),
        )

    assert run("evaluator", "e1", work) == service.EXIT_OK
    assert (len(threads), len(set(threads))) == (4, 1)


@pytest.mark.parametrize("repairs", [True, False])
def test_lost_record_is_repaired_only_by_a_process_that_may_write(*, repairs: bool) -> None:
    log = MemoryLog(lambda: 0.0)  # an old time for all records
    log.create_topics([NewTopic("clinic-a", 1), NewTopic("clinic-b", 1)])
    JobOperations(log).submit(parse_job(TEXT))
    with closing(log.writer()) as writer:
        writer.append(JOBS, b"{}", key=b"digits", headers=[(NUMBER, b"1")])
    looks = list[JobRecord]()

    def work(process: ServiceProcess) -> None:
        def begins(record: JobRecord, _new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
            looks.append(record)
            if len(looks) > 1:
                process.stopping.set()
            return False

        follow_jobs(
            *(process, ProcessMetrics("evaluator"), lambda _opened: no_part, begins),
            open_log=lambda *_: log,
            repairs=repairs,
        )

    assert run("evaluator", "e1", work) == service.EXIT_OK
    records = log.stored(Partition(JOBS, 0)).records
    assert len(records) == 2 + repairs
