"""A worker's choice of a job, its reports, and its reaction to a job that fails here."""

from __future__ import annotations

import json
from io import StringIO
from typing import TYPE_CHECKING

import msgspec
import pytest

from common.config.settings import Settings
from common.core.job_placement import JobDemand, WorkerPlacement
from common.errors import OutsideError, UnavailableError, UserError
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.jobs.spec import TaskSpec
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoards, MemoryRedis
from common.telemetry.logging import event_logger, set_up_logging
from common.telemetry.metrics.registry import ProcessMetrics
from services.worker import selection
from services.worker.channel import failure_of
from services.worker.selection import JobSelector, SelectingWorker
from tests.fakes.clock import ManualClock
from tests.unit.cli.test_job import JOB

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from common.jobs.store import JobRecord
    from common.redis.port import Roster


class Bench:
    """A worker among jobs and other workers, with a manual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "JOBS_S", 0.0)
        self.clock = ManualClock(1000.0)
        self.log = MemoryLog()
        self.log.create_topics([NewTopic("clinic-a")])
        self.job_store = JobOperations(self.log)
        self.redis = MemoryRedis(self.clock)
        self.roster = MemoryBoards(self.redis).roster()
        self.metrics = ProcessMetrics("worker")
        self.said = StringIO()
        set_up_logging(Settings(log_format="json"), self.said)
        self.numbers = dict[str, int]()

    def submit(self, *names: str, **changes: object) -> None:
        """Submit jobs that run."""
        for name in names:
            spec = parse_job(JOB.replace("name: digits", f"name: {name}", 1))
            self.job_store.submit(spec.model_copy(update=changes))

    def worker(self, name: str = "w0", only: str = "", roster: Roster | None = None) -> JobSelector:
        """Return a worker that has just started."""
        return JobSelector(
            SelectingWorker(name, only, ("image-classifier",)),
            JobOperations(self.log),
            roster or MemoryBoards(self.redis).roster(),
            self.metrics,
            event_logger("worker"),
            lambda: 0.5,
            self.clock,
        )

    def demand(self, job: str, backlog: int, **more: object) -> None:
        """Publish a leader's demand."""
        self.numbers[job] = self.numbers.get(job, 0) + 1
        fields = {
            "job": job,
            "number": self.numbers[job],
            "backlog": backlog,
            "worker_records_per_s": 100.0,
            "most_workers": 8,
            "task": "image-classifier",
            **more,
        }
        self.roster.put([msgspec.convert(fields, JobDemand)])

    def turns(self, worker: JobSelector, seconds: int = 5, **backlogs: int) -> None:
        """Let a worker poll for some seconds, while leaders publish."""
        for _ in range(seconds):
            for job, backlog in backlogs.items():
                self.demand(job, backlog)
            worker.turn()
            self.clock.advance(selection.LOOK_S)

    def placement(self, worker: str = "w0") -> WorkerPlacement:
        """Return the worker's published placement."""
        return next(
            it
            for it in self.roster.read()
            if isinstance(it, WorkerPlacement) and it.worker == worker
        )

    def events(self, name: str) -> list[dict[str, object]]:
        """Return the log lines with this event."""
        lines = [json.loads(line) for line in self.said.getvalue().splitlines()]
        return [line for line in lines if line["event"] == name]


@pytest.fixture
def bench(process_logging: None, monkeypatch: pytest.MonkeyPatch) -> Bench:  # noqa: ARG001
    return Bench(monkeypatch)


def named(record: JobRecord | None) -> str:
    return record.spec.name if record is not None else ""


# --- start ---------------------------------------------------------------------------------------


def test_worker_joins_a_new_job_that_has_no_leader_yet(
    bench: Bench,
) -> None:
    worker = bench.worker()
    worker.turn()
    assert worker.selected() is None
    bench.submit("digits")
    worker.turn()

    assert named(worker.selected()) == "digits"
    assert bench.placement().job == "digits"


def test_workers_that_start_together_spread_over_jobs_without_leader(bench: Bench) -> None:
    bench.submit("a", "b", "c")
    workers = [bench.worker(f"w{number}") for number in range(6)]
    for worker in workers:
        worker.turn()

    assert sorted(named(worker.selected()) for worker in workers) == list("aabbcc")


def test_starting_worker_joins_the_job_that_needs_it(bench: Bench) -> None:
    bench.submit("a", "b", "c")
    for job, backlog in {"a": 0, "b": 9000, "c": 0}.items():
        bench.demand(job, backlog)
    workers = [bench.worker(f"w{number}") for number in range(2)]
    for worker in workers:
        worker.turn()

    assert [named(worker.selected()) for worker in workers] == ["b", "b"]


@pytest.mark.parametrize("wanted", ["stopped", "paused"])
def test_worker_does_not_join_a_stopped_or_paused_job(bench: Bench, wanted: str) -> None:
    bench.submit("digits")
    bench.job_store.patch("digits", "enough", wanted="stopped" if wanted == "stopped" else "paused")
    worker = bench.worker()
    worker.turn()

    assert worker.selected() is None


# --- choice of a job -----------------------------------------------------------------------------


def test_worker_leaves_a_drained_job_for_one_with_work(bench: Bench) -> None:
    # second   0              1                 2
    # w0       at a           says "goes b"     at b
    bench.submit("a", "b")
    worker = bench.worker()
    bench.turns(worker, 1, a=9000)
    assert named(worker.selected()) == "a"
    job = worker.selected()
    assert job is not None
    bench.turns(worker, 1, a=0, b=9000)
    assert (bench.placement().job, bench.placement().goes) == ("a", "b")
    assert worker.still(job) == job
    bench.turns(worker, 1, a=0, b=9000)

    assert worker.still(job) is None
    assert named(worker.selected()) == "b"
    assert (bench.placement().job, bench.placement().goes) == ("b", "")
    assert [line["before"] for line in bench.events("job_selected")] == ["", "a"]


def test_worker_limited_to_one_job_stays_and_is_published_as_pinned(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker(only="a")
    bench.turns(worker, 5, a=0, b=9000)

    assert named(worker.selected()) == "a"
    assert bench.placement().pinned
    bench.job_store.patch("a", "a rest", wanted="paused")
    bench.turns(worker, 5, a=0, b=9000)
    assert named(worker.selected()) == "a"


def test_worker_whose_partitions_wait_for_its_return_stays(bench: Bench) -> None:
    bench.submit("a", on_preemption="hold")
    worker = bench.worker()
    worker.turn()
    bench.submit("b")
    bench.turns(worker, 5, a=0, b=9000)

    assert named(worker.selected()) == "a"
    assert bench.placement().pinned


def test_worker_with_needed_weights_stays_while_its_job_runs(
    bench: Bench,
) -> None:
    bench.submit("a")
    worker = bench.worker()
    worker.turn()
    worker.pinned_by(lambda: True)
    bench.submit("b")
    bench.turns(worker, 5, a=0, b=9000)
    assert (named(worker.selected()), bench.placement().pinned) == ("a", True)

    bench.job_store.patch("a", "a rest", wanted="paused")
    bench.turns(worker, 5, a=0, b=9000)
    assert named(worker.selected()) == "b"


def test_workers_stay_while_redis_is_unavailable_or_empty(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker()
    bench.turns(worker, 3, a=9000, b=0)
    bench.redis.kill()
    bench.turns(worker, 10)
    assert named(worker.selected()) == "a"
    bench.redis.restart()
    # The leader of b returns first.
    bench.turns(worker, 3, b=9000)
    assert named(worker.selected()) == "a"
    assert [line["event"] for line in bench.events("redis_unavailable")] == ["redis_unavailable"]


def test_worker_continues_while_kafka_is_unavailable(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker()
    bench.turns(worker, 1)
    bench.log.go_away()
    bench.turns(worker, 3)

    assert named(worker.selected()) == "a"


class Refusing:
    """Redis whose user lacks rights."""

    def put(self, records: Sequence[JobDemand | WorkerPlacement]) -> None:
        """Refuse."""
        raise OutsideError(f"Redis denies 'HSET' of {len(records)} records")

    def read(self) -> list[JobDemand | WorkerPlacement]:
        """Refuse."""
        raise OutsideError("Redis denies 'HGETALL'")

    def remove(self, jobs: Collection[str] = (), workers: Collection[str] = ()) -> None:
        """Refuse."""
        raise OutsideError(f"Redis denies 'HDEL' of {jobs} {workers}")


def test_worker_raises_at_once_if_redis_refuses(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker(roster=Refusing())

    with pytest.raises(OutsideError, match="HSET"):
        worker.turn()


# --- the worker's job ----------------------------------------------------------------------------


def test_worker_sees_changes_of_its_job(bench: Bench) -> None:
    bench.submit("digits")
    worker = bench.worker()
    worker.turn()
    job = worker.selected()
    assert job is not None
    bench.job_store.patch("digits", "", changed={"batch_size": 7, "group_size": 3})
    worker.turn()
    changed = worker.still(job)

    assert changed is not None
    assert (changed.spec.batch_size, changed.spec.waiting_bound) == (7, 6)


@pytest.mark.parametrize("why", ["stopped", "deleted", "another"])
def test_worker_leaves_a_stopped_deleted_or_replaced_job(bench: Bench, why: str) -> None:
    bench.submit("digits")
    worker = bench.worker(only="digits")
    worker.turn()
    job = worker.selected()
    assert job is not None
    bench.job_store.patch("digits", "enough", wanted="stopped")
    if why != "stopped":
        bench.job_store.delete("digits")
    if why == "another":
        bench.submit("digits")
    worker.turn()

    assert worker.still(job) is None


def test_closing_worker_removes_its_placement(bench: Bench) -> None:
    bench.submit("digits")
    worker = bench.worker()
    worker.turn()
    worker.close()

    assert [it for it in bench.roster.read() if isinstance(it, WorkerPlacement)] == []


def test_abandoned_roster_records_are_removed_by_a_live_worker(bench: Bench) -> None:
    bench.roster.put([JobDemand("gone"), WorkerPlacement("dead")])
    worker = bench.worker()
    bench.turns(worker, 59)
    assert len(bench.roster.read()) == 3
    bench.turns(worker, 3)

    assert [it for it in bench.roster.read() if isinstance(it, JobDemand)] == []
    assert bench.placement().worker == "w0"


# --- a job that fails here -----------------------------------------------------------------------


def failed(worker: JobSelector, error: BaseException) -> None:
    """Raise an error, and report it for the job."""
    job = worker.selected()
    assert job is not None
    try:
        raise error  # noqa: TRY301 -- so that it has a traceback
    except BaseException as raised:  # noqa: BLE001 -- as it is met
        worker.failed(job.spec.name, failure_of(raised))


def test_failed_job_is_avoided_for_a_while(bench: Bench) -> None:
    bench.submit("bad", "good")
    worker = bench.worker()
    bench.turns(worker, 1, bad=90_000, good=1)
    assert named(worker.selected()) == "bad"
    failed(worker, UserError("job file: task.entrypoint is not on the allow-list"))
    assert worker.selected() is None
    bench.turns(worker, 1, bad=90_000, good=1)

    assert named(worker.selected()) == "good"
    assert bench.placement().avoided == ("bad",)
    bench.turns(worker, 8, bad=90_000, good=1)
    # The job may be tried again.
    assert bench.placement().avoided == ()
    assert named(worker.selected()) == "bad"


def test_job_with_unavailable_task_is_avoided_and_reported_once(bench: Bench) -> None:
    bench.submit("alien", task=TaskSpec(entrypoint="alien.tasks:Task"))
    worker = bench.worker()
    bench.turns(worker, 3)

    assert worker.selected() is None
    [line] = bench.events("job_left_to_others")
    assert line["reason"] == "its task alien.tasks:Task is not in this worker's DOLL_TASKS"
    bench.submit("digits")
    bench.turns(worker, 1)
    assert named(worker.selected()) == "digits"


def test_pause_doubles_with_each_failure_until_a_healthy_minute(
    bench: Bench,
) -> None:
    bench.submit("bad")
    worker = bench.worker(only="bad")
    pauses = []
    for _ in range(9):
        worker.turn()
        failed(worker, ValueError("no such column"))
        began = bench.clock()
        while worker.selected() is None:
            bench.clock.advance(1.0)
            worker.turn()
        pauses.append(bench.clock() - began)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    bench.turns(worker, 61)
    failed(worker, ValueError("no such column"))
    bench.turns(worker, 6)

    assert named(worker.selected()) == "bad"


def test_job_failure_is_logged_once_with_traceback_and_counted_each_time(bench: Bench) -> None:
    bench.submit("bad")
    worker = bench.worker(only="bad")
    for _ in range(3):
        while worker.selected() is None:
            bench.clock.advance(10.0)
            worker.turn()
        failed(worker, ValueError("no such column"))
    lines = bench.events("job_failed")

    assert [line["reason"] for line in lines] == ["ValueError: no such column"]
    assert "test_worker_selection.py" in str(lines[0]["traceback"])
    assert b'doll_job_faults_total{job_name="bad",kind="fault"} 3.0' in bench.metrics.exposed()


def test_unavailable_server_is_retried_soon_and_not_counted_as_job_failure(bench: Bench) -> None:
    bench.submit("digits")
    worker = bench.worker(only="digits")
    for _ in range(9):
        bench.turns(worker, 2)
        failed(worker, UnavailableError("Kafka is unavailable"))
    bench.turns(worker, 2)

    assert named(worker.selected()) == "digits"
    assert bench.events("job_failed") == []
    assert len(bench.events("job_waits")) == 1


def test_worker_leaves_a_purged_job_for_the_next_one_of_its_name(bench: Bench) -> None:
    bench.submit("digits")
    by_hand, machine = bench.worker("w0", "digits"), bench.worker("w1", "digits.I2")
    bench.turns(by_hand)
    bench.turns(machine)
    first = by_hand.selected()
    assert first is not None
    assert machine.selected() is None, "its own job does not exist yet"
    bench.job_store.patch("digits", "enough", wanted="stopped")
    bench.job_store.free("digits")
    bench.submit("digits")
    bench.turns(by_hand)
    bench.turns(machine)
    assert by_hand.still(first) is None
    for worker in (by_hand, machine):
        second = worker.selected()
        assert second is not None
        assert second.id == "digits.I2"
