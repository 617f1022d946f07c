"""The end of a worker's work on a job leaves nothing behind, and another job can follow."""

from __future__ import annotations

import threading
from itertools import chain, repeat
from threading import Event, Semaphore
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.config.settings import Settings
from common.core.liveness import Heartbeat
from common.core.messages import (
    Assignment,
    Batch,
    LeaderStatus,
    ModelId,
    TriggerId,
    UpdateTrigger,
    WorkerId,
)
from common.core.spans import Assigned, Partition, Span
from common.errors import (
    DeliveryError,
    OutsideError,
    TaskMissingError,
    UnavailableError,
    UnknownTopicError,
    UserError,
)
from common.jobs.spec import InitSpec, TaskSpec, job_from_json
from common.jobs.store import JobRecord
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic, group_name
from common.kafka.port import Bounds, NewTopic
from common.learning.devices import device_of
from common.learning.errors import GpuLostError
from common.learning.gradients import GradientComputer
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdog, Watchdogs
from doll.yaml_file import as_json
from services.worker.loop import JobWorker, Observers
from tests.fakes.tracing import MemoryTracer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.data.fields import Field
    from common.jobs.spec import JobSpec
    from common.kafka.memory import MemorySpanReader
    from services.worker.group import GroupAccess

NAME, STREAM = "digits", "clinic-a"
PLACES = (Partition(STREAM, 0), Partition(STREAM, 1))
ENTRYPOINT = "common.testing.counting:CountingTask"
LOSES_GPU = "tests.unit.services.bad_tasks:LosesGpu"


def job(**task: object) -> JobSpec:
    """Return the job, with these options of its task."""
    return job_from_json(
        as_json(
            {
                "name": NAME,
                "streams": [STREAM],
                "records": {"codec": "tensor", "fields": {"id": {"dtype": "int64"}}},
                "task": {"entrypoint": ENTRYPOINT, **(task or {"records": 10})},
                "batch_size": 2,
                "group_size": 1,
                "waiting_batches": 6,
                "optimizer": {"name": "sgd", "learning_rate": 1.0},
            }
        )
    )


SETTINGS = Settings(tasks=(ENTRYPOINT,), leave_s=5.0)


class FailingLog(MemoryLog):
    """Kafka with one failing part."""

    refuses_spans = False
    # A topic that is deleted as soon as its end is requested.
    deletes = ""

    def bounds(self, partition: Partition) -> Bounds:
        """Delete the topic first if it is the one in `deletes`."""
        if partition.topic == self.deletes:
            self.delete_topics([partition.topic])
        return super().bounds(partition)

    def spans(self) -> MemorySpanReader:
        """Make a reader, or fail.

        Raises:
            OutsideError: If it refuses.
        """
        if self.refuses_spans:
            raise OutsideError("no reader of spans for you")
        return super().spans()


class FailingBoard(MemoryBoard):
    """Redis that refuses the gradient thread."""

    def triggers(self, after: TriggerId, timeout_s: float, stream: str = "") -> list[UpdateTrigger]:
        """Fail.

        Raises:
            OutsideError: Always.
        """
        raise OutsideError(f"no triggers in {stream!r} after {after} within {timeout_s}")


def _no_group(_: JobSpec) -> GroupAccess:
    """Fail, because these jobs need no other workers."""
    raise AssertionError("the coordinator holds the weights")


class Bench:
    """A process with a job, and what remains of it afterwards."""

    def __init__(self) -> None:
        self.log = FailingLog()
        self.log.create_topics([NewTopic(STREAM, len(PLACES))])
        self.log.create_topics([NewTopic(control_topic(NAME))])
        self.redis = MemoryRedis(lambda: 0.0)
        self.board = MemoryBoard(self.redis, NAME)
        self.metrics, self.watchdogs = ProcessMetrics("worker"), Watchdogs()
        self.observers = Observers(self.metrics, MemoryTracer(), self.watchdogs, Watchdog())

    def worker(self, spec: JobSpec | None = None, settings: Settings = SETTINGS) -> JobWorker:
        """Return a worker for the job."""
        record = JobRecord(spec or job(), "running", {}, "submitted", 0.0)
        logger = event_logger("worker")
        return JobWorker(
            *(WorkerId("w1"), record, settings, self.log, self.board, self.observers, logger),
            access=_no_group,
        )

    def produce(self) -> None:
        """Append records, and a leader status that lets them be read."""
        writer = self.log.writer()
        for place in PLACES:
            for number in range(6):
                writer.append(STREAM, number.to_bytes(8, "little"), partition=place.index)
        assert writer.flush(1.0)
        start = dict.fromkeys(PLACES, 0)
        self.board.put_leader_status(LeaderStatus(0, 0, start, 0, 0, 1, start))

    def run(self, count: int = 1_000_000) -> None:
        """Work until an error, or for this many turns."""
        spec = job()
        looks = chain(repeat(spec, count), repeat(None))
        self.worker(spec).run(lambda: next(looks))

    def is_clean(self) -> bool:
        """Return True if no thread, group member or metric is left."""
        other = self.log.stream(group_name(NAME), [STREAM], "other")
        events = other.poll(1, 1.0)
        other.close()
        threads = [thread.name for thread in threading.enumerate()]
        registry = self.metrics.registry
        value = registry.get_sample_value("doll_worker_reading", {"job_name": NAME})
        is_all_there = events == (Assigned(PLACES),)
        return is_all_there and "gradients" not in threads and value is None


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_leaving_worker_leaves_no_threads_members_or_metrics(bench: Bench) -> None:
    bench.produce()
    bench.run(count=20)
    assert bench.is_clean()


def test_worker_reports_its_device_when_it_joins_in_heartbeats_and_metrics(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench.produce()
    seen, cpu = list[tuple[Heartbeat, float | None]](), device_of(torch.device("cpu"))
    value = bench.metrics.registry.get_sample_value

    def look() -> JobSpec | None:
        for beat in bench.board.heartbeats().values():
            labels = {"job_name": NAME, "kind": "total"}
            seen.append((beat, value("doll_worker_device_memory_bytes", labels)))
        return None if seen else spec

    spec = job()
    bench.worker(spec).run(look)
    assert [(beat.device, total) for beat, total in seen] == [(cpu, cpu.memory_bytes)]
    [joins] = [r for r in caplog.records if r.getMessage() == "worker_joins"]
    fields = fields_of(joins)
    assert (fields["device"], fields["kind"]) == (cpu.name, "cpu")
    assert fields["memory_mib"] == cpu.memory_bytes >> 20


def test_worker_sends_a_heartbeat_before_it_reads_an_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch that kills each process of a worker's name at once would otherwise never be suspected.
    read, beat, triggers = Event(), MemoryBoard.beat, MemoryBoard.triggers
    read_before = list[bool]()

    def beat_late(board: MemoryBoard, *arguments: Any) -> None:  # noqa: ANN401 -- as MemoryBoard's
        read_before.append(read.wait(0 if read_before else 0.2))
        beat(board, *arguments)

    def read_triggers(board: MemoryBoard, *arguments: Any) -> list[UpdateTrigger]:  # noqa: ANN401 -- as above
        read.set()
        return triggers(board, *arguments)

    monkeypatch.setattr(MemoryBoard, "beat", beat_late)
    monkeypatch.setattr(MemoryBoard, "triggers", read_triggers)
    spec = job()
    bench.worker(spec).run(lambda: None if read.is_set() else spec)
    assert not read_before[0]


def test_worker_that_loses_its_gpu_does_not_say_that_it_leaves(bench: Bench) -> None:
    # To the leader, an orderly end would clear the batch that may have broken the GPU.
    bench.produce()
    model, batch = ModelId(0, 0), Batch(7, WorkerId("w1"), (Span(STREAM, 0, 0, 2),), 2)
    bench.board.put_model(model, bytes(4 * 10))
    order = Assignment(WorkerId("w1"), (batch,))
    bench.board.post_trigger(UpdateTrigger(TriggerId(0, 1), model, (order,), None, "c1"))
    task = TaskSpec.model_validate({"entrypoint": LOSES_GPU, "records": 10})
    spec = job().model_copy(update={"task": task})
    with pytest.raises(GpuLostError) as caught:
        bench.worker(spec, SETTINGS.model_copy(update={"tasks": (LOSES_GPU,)})).run(lambda: spec)
    assert caught.value.batches == (7,)
    assert bench.redis.replies == {}
    assert bench.is_clean()


def test_worker_that_requires_a_gpu_does_not_compute_on_the_cpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="requires a GPU"):
        bench.worker(settings=SETTINGS.model_copy(update={"gpus": "0"}))
    assert bench.is_clean()


def test_worker_that_cannot_be_built_does_not_join(bench: Bench) -> None:
    bench.log.refuses_spans = True
    with pytest.raises(OutsideError, match="no reader of spans"):
        bench.worker()
    assert bench.is_clean()


@pytest.mark.parametrize(
    ("spec", "settings", "error"),
    [
        (job(), Settings(), TaskMissingError),
        (job(colour=3), SETTINGS, UserError),
        (job(records=-1), SETTINGS, UserError),
        (job(records=10**15), SETTINGS, UserError),
    ],
)
def test_worker_with_missing_or_invalid_task_raises_before_it_joins(
    bench: Bench, spec: JobSpec, settings: Settings, error: type[UserError]
) -> None:
    with pytest.raises(error):
        bench.worker(spec, settings)
    assert bench.is_clean()


def test_worker_waits_until_the_weights_of_init_are_stored(bench: Bench, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"blobs": f"file://{tmp_path}"})
    init = InitSpec.model_validate({"from": "a", "sha256": "0" * 64})
    spec = job().model_copy(update={"init": init})
    with pytest.raises(UnavailableError, match="no coordinator has stored the weights"):
        bench.worker(spec, settings)
    assert bench.is_clean()
    CheckpointStore(open_blobs(settings), NAME).put_init(b"")
    looks = iter((spec, None))
    bench.worker(spec, settings).run(lambda: next(looks))


def test_worker_without_a_compiler_refuses_a_job_that_needs_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"compile: torch needs a C\+\+ compiler"):
        bench.worker(job().model_copy(update={"compile": True}))
    assert bench.is_clean()


def test_worker_compiles_the_module_before_it_joins_and_is_healthy_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.loop.COMPILE_LOOK_S", 0.001)
    beats = Semaphore(0)
    monkeypatch.setattr(bench.observers.watchdog, "beat", beats.release)
    compiled, reports = [], dict[str, str]()

    def compile_module(_: GradientComputer, fields: Sequence[Field], *sizes: int) -> None:
        # The report of the first beat has ended when the second one comes.
        assert all(beats.acquire(timeout=30.0) for _ in range(2))
        compiled.append(([field.name for field in fields], sizes, bench.is_clean()))
        reports.update(bench.board.unable())

    monkeypatch.setattr(GradientComputer, "compile", compile_module)
    spec = job().model_copy(update={"compile": True})
    looks = iter((spec, None))
    bench.worker(spec).run(lambda: next(looks))
    assert compiled == [(["id"], (2, 1), True)]
    assert list(reports) == ["worker w1"]


def _no_memory(*_: object, **__: object) -> None:
    raise MemoryError("Unable to allocate 3.20 GiB")


def test_worker_without_memory_for_the_model_says_so_before_it_joins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.learning.gradients.FlatModel", _no_memory)
    with pytest.raises(UserError, match=r"for the job's model \(requested 3.20 GiB, free \d"):
        bench.worker()
    assert bench.is_clean()


@pytest.mark.parametrize(
    "place", ["common.data.codecs.TensorCodec.decode", "common.redis.memory.MemoryBoard.triggers"]
)
def test_worker_without_memory_for_records_or_weights_ends_and_says_so(
    bench: Bench, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.produce()
    monkeypatch.setattr(place, _no_memory)
    with pytest.raises(UserError, match=r"records and weights \(requested 3.20 GiB, free \d"):
        bench.run()
    assert bench.is_clean()


def test_worker_follows_a_changed_response_to_a_lack_of_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[object]()
    recorder = property(fset=lambda _, oom: found.append(oom))
    monkeypatch.setattr(GradientComputer, "oom", recorder, raising=False)
    spec = job()
    changed = spec.model_copy(update={"oom": "hold"})
    looks = iter([spec, changed, None])
    bench.worker(spec).run(lambda: next(looks))
    assert found == [None, "hold"]


def test_failed_gradient_thread_ends_the_worker_without_leftovers(bench: Bench) -> None:
    bench.board = FailingBoard(MemoryRedis(lambda: 0.0), NAME)
    with pytest.raises(OutsideError, match="no triggers"):
        bench.run()
    assert bench.is_clean()


def test_deleted_control_topic_ends_the_worker_without_leftovers(bench: Bench) -> None:
    bench.produce()
    bench.log.delete_topics([control_topic(NAME)])
    with pytest.raises((UnknownTopicError, DeliveryError)):
        bench.run()
    assert bench.is_clean()


def test_control_topic_deleted_before_a_claim_is_found_ends_the_worker(
    bench: Bench,
) -> None:
    # claim   sent, and Kafka has it without an offset, so the worker requests the topic's end
    bench.produce()
    bench.log.reports_no_offsets = True
    bench.log.deletes = control_topic(NAME)
    with pytest.raises(UnknownTopicError, match=control_topic(NAME)):
        bench.run()
    assert bench.is_clean()


def test_rejected_claim_ends_the_worker_without_leftovers(bench: Bench) -> None:
    bench.produce()
    bench.log.configure(control_topic(NAME), {"max.message.bytes": "1"})
    with pytest.raises(DeliveryError):
        bench.run()
    assert bench.is_clean()


def test_worker_that_cannot_read_the_jobs_ends_without_leftovers(bench: Bench) -> None:
    def look() -> JobSpec | None:
        raise OutsideError("no jobs topic")

    with pytest.raises(OutsideError, match="no jobs topic"):
        bench.worker().run(look)
    assert bench.is_clean()


def test_process_works_on_the_job_again_once_the_error_is_fixed(bench: Bench) -> None:
    bench.produce()
    bench.log.refuses_spans = True
    with pytest.raises(OutsideError):
        bench.worker()
    bench.log.refuses_spans = False
    bench.run(count=50)
    # Batches of two, from twelve records.
    assert claims(bench.log) == 6
    assert bench.is_clean()


def claims(log: MemoryLog) -> int:
    return log.bounds(Partition(control_topic(NAME), 0)).end


def test_worker_continues_after_its_stream_was_truncated(bench: Bench) -> None:
    bench.produce()
    ahead = dict.fromkeys(PLACES, 99)
    bench.board.put_leader_status(LeaderStatus(0, 1, ahead, 0, 0, 1, ahead))
    bench.run(count=20)
    assert bench.is_clean()
