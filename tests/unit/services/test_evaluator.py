"""An evaluator's part in one job, in memory: versions, test data and reports."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.config.settings import Settings
from common.core.messages import (
    GENESIS,
    AuditRecord,
    Batch,
    Drifted,
    Evaluated,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.scores import WINDOWED
from common.core.spans import Partition, Span, address_of
from common.data.codecs import codec_of
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.memory import MemoryLog
from common.kafka.names import updates_topic
from common.kafka.port import NewTopic
from common.kafka.read import read_decoded
from common.learning.checkpoint import Kind, packed, unnamed
from common.learning.evaluate import evaluate
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, task_of
from common.redis.memory import MemoryBoard, MemoryRedis
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from common.wire import messages as wire
from services.evaluator.evaluation_runner import EvaluationPace, EvaluatorProcess
from services.evaluator.loop import JobEvaluator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.messages import Vector
    from common.data.fields import Columns
    from common.jobs.store import JobRecord

NAME = "signs"
PATIENCE_S = 120.0
JOB = f"""
name: {NAME}
streams: [left, right]
records: {{codec: tensor, fields: {{features: {{dtype: float32, shape: [2]}}, label: {{dtype: int64}}}}}}
task: {{name: logistic-regression, classes: 2}}
batch_size: 8
group_size: 2
optimizer: {{name: sgd, learning_rate: 0.1}}
evaluation: {{every_updates: 2, stream: held-out, records: 60}}
"""  # noqa: E501 -- one line of a job file


def records(seed: int, count: int, *, upside_down: bool = False) -> Columns:
    """Return points in the plane, labelled by the sign of their first number or its opposite."""
    features = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    label = (features[:, 0] > 0).astype(np.int64)
    return {"features": features, "label": 1 - label if upside_down else label}


class World:
    """A job, its log, and the records and offers of its leader."""

    def __init__(self, job: str = JOB) -> None:
        self.log = MemoryLog()
        for stream in ("left", "right"):
            self.log.create_topics([NewTopic(stream)])
        self.spec = parse_job(job)
        self.job_store = JobOperations(self.log)
        self.record = self.job_store.submit(self.spec)
        self.redis = MemoryRedis()
        self.board = MemoryBoard(self.redis, NAME)
        self.metrics = ProcessMetrics("evaluator")
        self.model = FlatModel(build_model(task_of(self.spec, ()), 0))
        self.running = list[Evaluation]()
        self._ends = Counter[str]()
        self._writer = self.log.writer()
        self.epoch = self.write(Lead(-1, GENESIS, "c1", 0))

    def model_of(self, slope: float) -> bytes:
        """Return the weights as a leader offers them."""
        model = self.model
        kind = Kind("sgd", model.parameter_count, model.buffer_count, model.layout)
        return packed(kind, self.weights(slope), {})

    def weights(self, slope: float) -> Vector:
        """Return weights that predict the first number's sign; steeper means more certain."""
        return np.array([-slope, 0.0, slope, 0.0, 0.0, 0.0], np.float32)

    def put(self, topic: str, columns: Columns) -> Span:
        """Write records."""
        return self.put_values(topic, *codec_of(self.spec.records).encode(columns))

    def put_values(self, topic: str, *values: bytes) -> Span:
        """Write raw records."""
        start = self._ends[topic]
        for value in values:
            self._writer.append(topic, value)
            self._ends[topic] += 1
        assert self._writer.flush(1.0)
        return Span(topic, 0, start, self._ends[topic])

    def hold_out(self) -> Columns:
        """Write the test set."""
        self.log.create_topics([NewTopic("held-out")])
        self.put("held-out", records(1, 70))
        return {name: column[:60] for name, column in records(1, 70).items()}

    def write(self, record: AuditRecord) -> int:
        """Write a record into the updates topic and return its offset."""
        self._writer.append(updates_topic(NAME), wire.encode_audit(record))
        assert self._writer.flush(1.0)
        return self.log.bounds(Partition(updates_topic(NAME), 0)).end - 1

    def update(self, version: int, *spans: Span) -> None:
        """Write an update of these records, or of some that do not exist."""
        address = address_of(spans or (Span("gone", 0, version, version + 1),))
        size = sum(span.end - span.start for span in address)
        batch = Batch(version, WorkerId("w1"), address, size)
        self.write(UpdateApplied(self.epoch, version, (batch,), size, 0.5))

    def offer(self, version: int, slope: float = 1.0) -> None:
        """Offer a version."""
        self.board.offer_model(ModelId(self.epoch, version), self.model_of(slope))

    def start(self) -> Evaluation:
        """Start an evaluator with this world's metrics."""
        started = Evaluation(self)
        self.running.append(started)
        return started

    def end(self) -> None:
        """End all evaluators."""
        for started in self.running:
            started.end()
        self.running.clear()

    def evals(self) -> list[Evaluated]:
        """Return all results."""
        return [each for each in self.all_records() if isinstance(each, Evaluated)]

    def drifts(self) -> list[Drifted]:
        """Return all drifts."""
        return [each for each in self.all_records() if isinstance(each, Drifted)]

    def all_records(self) -> list[AuditRecord | None]:
        """Return all records of the updates topic."""
        return [each for _, each in read_decoded(self.log, updates_topic(NAME), wire.decode_audit)]

    def expected_metrics(self, columns: Columns, slope: float) -> dict[str, object]:
        """Compute the metrics without an evaluator."""
        task = task_of(self.spec, ())
        found = evaluate(task, self.model, self.weights(slope), columns, 7)
        return {name: pytest.approx(mean, rel=1e-5) for name, mean in found.items()}

    def count(self, outcome: str) -> float | None:
        """Return the number of versions with this outcome, from the metrics."""
        labels = {"job_name": NAME, "outcome": outcome}
        return self.metrics.registry.get_sample_value("doll_evaluations_total", labels)


class Evaluation:
    """An evaluator's process with one job."""

    def __init__(self, world: World) -> None:
        self._record: JobRecord | None = world.job_store.get(NAME)
        logger, pace = (
            event_logger("evaluator"),
            EvaluationPace(look_s=0.01, together_s=0.05, sample=100),
        )
        board = partial(MemoryBoard, world.redis)
        process = EvaluatorProcess(Settings(), world.log, board, world.metrics, logger, pace)
        supervision = ProcessMetrics("evaluator")
        self._supervisor = Supervisor(supervision, Watchdogs(), logger, threads=1)
        self.running = self._supervisor.begin(
            NAME, partial(JobEvaluator, process, lambda: self._record)
        )

    def follow(self, record: JobRecord | None) -> None:
        """Report the job's newest record."""
        self._record = record
        self.running.wake()

    def await_end(self) -> None:
        """Wait until nothing is left to do."""
        assert self.running.ended.wait(PATIENCE_S)

    def end(self) -> None:
        """Stop it as the process does."""
        assert self._supervisor.close(PATIENCE_S)


def until(condition: Callable[[], object], what: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


def logged_by(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return the warnings with their reasons."""
    return [
        (each.getMessage(), str(fields_of(each).get("reason", "")))
        for each in caplog.records
        if each.name == "evaluator" and each.levelname == "WARNING"
    ]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.end()


def test_version_is_evaluated_on_test_set_and_next_records_once_it_counts(
    world: World,
) -> None:
    held_out = world.hold_out()
    world.start()
    world.offer(2, slope=3.0)
    world.update(1)
    # The leader offered version 2 before its update is in the topic.
    assert world.evals() == []
    world.update(2)
    left, right = records(2, 40), records(3, 30)
    world.update(3, world.put("left", left), world.put("right", right))
    until(lambda: any(each.prequential for each in world.evals()), "the version is evaluated")
    evaluated = world.evals()
    assert {each.model for each in evaluated} == {ModelId(world.epoch, 2)}
    (test,) = [each for each in evaluated if each.test]
    assert (test.records, test.test) == (60, world.expected_metrics(held_out, 3.0))
    (after,) = [each.prequential for each in evaluated if each.prequential]
    assert after == {
        "left": world.expected_metrics(left, 3.0),
        "right": world.expected_metrics(right, 3.0),
    }
    assert world.count("done") == 1
    sample = world.metrics.registry.get_sample_value
    labels = {"job_name": NAME, "metric": "accuracy"}
    assert sample("doll_test_metric", labels) == test.test["accuracy"] == 1.0
    assert sample("doll_evaluated_version", {"job_name": NAME}) == 2


def test_windowed_metrics_use_the_samples_of_the_last_minute(world: World) -> None:
    first, second = records(2, 40), records(3, 30, upside_down=True)
    both = {name: np.concatenate([first[name], second[name]]) for name in first}
    world.start()
    world.update(1)
    for version, seen in ((2, first), (4, second)):
        world.offer(version)
        world.update(version)
        world.update(version + 1, world.put("left", seen))
        until(
            lambda: world.evals() and world.evals()[-1].model.version == version,  # noqa: B023 -- called here
            "the version is evaluated",
        )
    before, after = [each.prequential["left"] for each in world.evals()]
    assert before == world.expected_metrics(first, 1.0)
    assert after["accuracy"] == 0.0
    assert {name: after[name] for name in WINDOWED} == {
        name: world.expected_metrics(both, 1.0)[name] for name in WINDOWED
    }


def test_version_with_known_next_update_is_reported_in_one_record(world: World) -> None:
    world.hold_out()
    span = world.put("left", records(2, 40))
    for version in (1, 2):
        world.update(version)
    world.update(3, span)
    world.offer(2)
    world.start()
    until(world.evals, "the version is evaluated")
    world.end()
    (evaluated,) = world.evals()
    assert evaluated.records == 60
    assert evaluated.prequential.keys() == {"left"}


def test_undecodable_and_expired_records_are_left_out(world: World) -> None:
    good = records(2, 20)
    first = world.put("left", good)
    odd = world.put_values("left", b"torn", b"", b"{")
    old = world.put("right", records(3, 10))
    world.log.expire(Partition("right", 0), old.end)
    world.update(1)
    world.update(2)
    world.update(3, first._replace(end=odd.end), old)
    world.offer(2, slope=5.0)
    world.start()
    until(world.evals, "the version is evaluated")
    world.end()
    (evaluated,) = world.evals()
    assert evaluated.prequential == {"left": world.expected_metrics(good, 5.0)}


def test_version_that_a_new_leader_reverted_is_not_evaluated(world: World) -> None:
    world.hold_out()
    for version in (1, 2):
        world.update(version)
    first_leader = world.epoch
    world.epoch = world.write(Lead(world.epoch, ModelId(world.epoch, 1), "c2", 3))
    world.board.offer_model(ModelId(first_leader, 2), world.model_of(1.0))
    world.start()
    until(lambda: world.count("skipped") == 1, "the version is skipped")
    world.update(2)
    world.offer(2)
    until(world.evals, "the version of the other leader is evaluated")
    assert {each.model for each in world.evals()} == {ModelId(world.epoch, 2)}


def test_evaluator_evaluates_only_the_newest_of_several_offered_versions(world: World) -> None:
    world.hold_out()
    world.start()
    world.update(1)
    world.update(2)
    world.offer(2)
    until(lambda: world.count("done") == 1, "the first version is evaluated")
    for version in range(3, 11):
        world.update(version)
    world.offer(10)
    until(lambda: world.count("skipped") == 3, "4, 6 and 8 are counted")
    assert world.count("done") == 2


def test_restarted_evaluator_does_not_report_a_version_again(world: World) -> None:
    world.hold_out()
    span = world.put("left", records(2, 40))
    for version in (1, 2):
        world.update(version)
    world.update(3, span)
    world.offer(2)
    world.start()
    until(world.evals, "the version is evaluated")
    world.end()
    world.start()
    world.update(4)
    world.offer(4)
    until(lambda: len(world.evals()) == 2, "the next version is evaluated")
    assert [each.model.version for each in world.evals()] == [2, 4]


def test_first_version_of_a_new_leader_is_not_evaluated_again(world: World) -> None:
    world.hold_out()
    world.update(1)
    world.update(2)
    world.offer(2)
    world.start()
    until(world.evals, "the version is evaluated")
    world.epoch = world.write(Lead(world.epoch, ModelId(world.epoch, 2), "c2", 4))
    world.offer(2)
    for version in (3, 4):
        world.update(version)
    world.offer(4)
    until(lambda: len(world.evals()) == 2, "the next version is evaluated")
    assert [each.model.version for each in world.evals()] == [2, 4]


def test_evaluator_ends_after_the_last_version_of_a_stopped_job(world: World) -> None:
    world.hold_out()
    evaluator = world.start()
    world.board.hold_lease("c1", 600.0)
    for version in (1, 2, 3):
        world.update(version)
    evaluator.follow(world.job_store.patch(NAME, "3 updates applied", wanted="stopped"))
    # A live leader may still offer a version.
    assert not evaluator.running.ended.wait(0.5)
    world.offer(3)
    world.board.release_lease("c1")
    evaluator.await_end()
    assert [each.model.version for each in world.evals()] == [3]


def test_last_version_of_an_ended_job_is_evaluated_once(world: World) -> None:
    world.hold_out()
    world.update(1)
    world.offer(1)
    world.job_store.patch(NAME, "enough", wanted="stopped")
    for _ in range(2):
        world.start().await_end()
        assert [each.model.version for each in world.evals()] == [1]


def test_missing_test_set_does_not_prevent_evaluation_on_the_streams(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    for version in range(1, 6):
        world.update(version, world.put("left", records(version, 20)))
        if version in (2, 4):
            world.offer(version)
            until(lambda v=version: world.count("done") == v / 2, "the version is done")  # type: ignore[misc]
    until(lambda: len(world.evals()) == 2, "both versions are evaluated")
    assert [(each.records, each.test) for each in world.evals()] == [(0, {}), (0, {})]
    assert logged_by(caplog) == [("test_set_missing", "there is no topic held-out")]
    world.hold_out()
    world.update(6)
    world.offer(6)
    until(lambda: len(world.evals()) == 3, "the third version is evaluated")
    assert world.evals()[-1].records == 60


def test_unreadable_test_set_is_reported_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.log.create_topics([NewTopic("held-out")])
    strange = records(1, 10)
    strange["label"][3] = 7
    world.put("held-out", strange)
    world.start()
    for version in range(1, 6):
        world.update(version, world.put("left", records(version, 20)))
        if version in (2, 4):
            world.offer(version)
            until(lambda v=version: world.count("done") == v / 2, "the version is done")  # type: ignore[misc]
    until(lambda: len(world.evals()) == 2, "both versions are evaluated")
    ((event, reason),) = logged_by(caplog)
    assert event == "evaluation_failed"
    assert "label: a number is outside 0..1" in reason


def test_offered_weights_of_another_model_are_reported_and_skipped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    world.update(1)
    world.update(2)
    other = packed(Kind("sgd", 6, 0, unnamed(6, 0)), world.weights(1.0), {})
    world.board.offer_model(ModelId(world.epoch, 2), other)
    until(lambda: world.count("skipped") == 1, "the version is skipped")
    said = (
        "at place 1 it has the parameter without a name (6,) float32, but the task's model"
        " has the parameter 'weight' (2, 2) float32"
    )
    assert any(said in reason for _, reason in logged_by(caplog))


def test_drift_is_reported_only_for_the_stream_whose_labels_change(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # versions    2  4  6  8  10   12  14
    # left        as learned       labels reversed
    # right       as learned       as learned
    world.start()
    for version in range(1, 16):
        left = records(version, 100, upside_down=version > 11)
        spans = world.put("left", left), world.put("right", records(100 + version, 100))
        world.update(version, *spans)
        if version % 2 == 1 and version > 1:
            world.offer(version - 1)
            many = version // 2
            until(lambda n=many: len(world.evals()) == n, "the version is evaluated")  # type: ignore[misc]
    (drift,) = world.drifts()
    assert (drift.stream, drift.model) == ("left", ModelId(world.epoch, 12))
    assert drift.before < 0.2 < drift.after
    assert "stream_drifted" in caplog.text
    drifts = world.metrics.registry.get_sample_value
    count = [
        drifts("doll_drifts_total", {"job_name": NAME, "stream": s}) for s in world.spec.streams
    ]
    assert count == [1, 0]


def test_evaluator_waits_for_unavailable_redis_and_kafka(world: World) -> None:
    world.hold_out()
    world.start()
    world.update(1)
    world.update(2)
    world.redis.kill()
    world.redis.restart()
    world.offer(2)
    until(world.evals, "the version is evaluated after Redis was unavailable")
    world.update(3)
    world.update(4)
    world.log.go_away()
    world.offer(4)
    world.log.come_back()
    until(lambda: len(world.evals()) == 2, "the version is evaluated after Kafka was unavailable")


def test_updates_lost_with_a_recreated_topic_are_forgotten(world: World) -> None:
    # updates   0: Lead  1: J=1  2: J=2   recreated       0: Lead(70)  1: J=1  2: J=2  3: J=3
    world.hold_out()
    world.start()
    world.update(1)
    world.update(2)
    world.offer(2)
    until(
        lambda: ModelId(world.epoch, 2) in {each.model for each in world.evals()},
        "the version is evaluated",
    )

    world.log.recreate(updates_topic(NAME))
    world.epoch = 70
    world.write(Lead(-1, GENESIS, "c2", epoch=70))
    for version in (1, 2, 3):
        world.update(version)
    world.offer(2)
    until(
        lambda: ModelId(70, 2) in {each.model for each in world.evals()},
        "the new version is evaluated",
    )


def test_evaluator_leaves_a_deleted_job(world: World) -> None:
    evaluator = world.start()
    until(lambda: world.count("done") is not None, "the evaluator has started")
    evaluator.follow(None)
    evaluator.await_end()
    # The job's metrics are gone.
    assert world.count("done") is None
