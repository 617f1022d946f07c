"""All metrics of a coordinator, by a complete small job in memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.core.messages import (
    BatchReady,
    Failed,
    Gradient,
    MetricSum,
    ModelId,
    Skipped,
    TriggerId,
    WorkerId,
)
from common.core.spans import Span
from common.jobs.build import trainer_of
from common.jobs.job_file import parse_job
from common.jobs.operations import JobOperations
from common.kafka.memory import MemoryLog
from common.kafka.names import control_topic
from common.kafka.port import NewTopic
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.telemetry.metrics.__main__ import sections
from common.wire import messages as wire
from services.coordinator import streams
from tests.fakes.tracing import MemoryTracer
from tests.unit.cli.test_job import JOB
from tests.unit.services.replicas import PATIENCE_S, MemoryReplica, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core.messages import Assignment, Reply, UpdateTrigger

NAME, STREAM = "digits", "clinic-a"
W1 = WorkerId("w1")
OWN = {metric.name for metric in sections()["Coordinators"]}
# Reported only if members hold the weights.
OF_GROUPS = {"doll_group_members", "doll_group_left_out_workers"}


class Bench:
    """A leader of a job with K = 1, and a worker under the test's control."""

    def __init__(self) -> None:
        self.log, redis = MemoryLog(), MemoryRedis()
        self.log.create_topics([NewTopic(STREAM)])
        self.board = MemoryBoard(redis, NAME)
        self.tracer = MemoryTracer()
        spec = JobOperations(self.log).submit(parse_job(JOB)).spec
        self._writer = self.log.writer()
        self._last_trigger = TriggerId(-1, 0)
        self._replica_name = ""
        self.board.beat(W1, "alive", PATIENCE_S, trainer_of(spec, ())().digest)
        self.replica = MemoryReplica(self.log, redis, blobs=MemoryBlobs(), tracer=self.tracer)
        self.metrics = self.replica.metrics
        self.replica.look()

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the sample of `doll_<name>`."""
        return self.metrics.registry.get_sample_value(f"doll_{name}", {"job_name": NAME, **labels})

    def await_sample(self, value: float, name: str, **labels: str) -> None:
        """Wait until the sample has this value."""
        until(lambda: self.sample(name, **labels) == value, f"{name} is {value}")

    def produce(self, records: int) -> None:
        """Let records arrive."""
        for _ in range(records):
            self._writer.append(STREAM, b"...", partition=0)
        assert self._writer.flush(1.0)

    def claim(self, start: int, end: int, *skipped: int) -> None:
        """Claim these records, without those that do not decode."""
        claim = BatchReady(
            W1,
            (Span(STREAM, 0, start, end),),
            end - start - len(skipped),
            tuple(Skipped(STREAM, 0, offset, "too short") for offset in skipped),
            time.time() - 2.0,
            time.time() - 1.0,
        )
        self._writer.append(control_topic(NAME), wire.encode_claim(claim), partition=0)
        assert self._writer.flush(1.0)

    def trigger(self) -> UpdateTrigger:
        """Wait for the next trigger."""
        (newest, *_) = self.board.triggers(self._last_trigger, PATIENCE_S)
        self._last_trigger, self._replica_name = newest.id, newest.reply_to
        return newest

    def gradient(self, model: ModelId, order: Assignment) -> Gradient:
        """Return a gradient of zeros for an order."""
        weights = self.board.get_model(model)
        assert weights is not None
        samples = sum(batch.samples for batch in order.batches)
        return Gradient(
            W1,
            model,
            tuple(batch.offset for batch in order.batches),
            samples,
            0.5 * samples,
            {"accuracy": MetricSum(1.0 * samples, samples)},
            0.1,
            vector=np.zeros(len(weights) // 4, np.float32),
        )

    def send(self, *replies: Reply) -> None:
        """Send replies to the leader."""
        for reply in replies:
            self.board.push_reply(reply, self._replica_name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(streams, "LOOK_S", 0.0)
    monkeypatch.setattr(streams, "PUBLISH_S", 0.01)
    made = Bench()
    yield made
    made.replica.close()


def test_coordinator_counts_each_record_claim_and_reply_by_outcome(bench: Bench) -> None:
    # claims   [0:2]  [2:5], record 2 does not decode   [0:2] again   [5:7]
    # round      1       2                                 refused      3: expired
    bench.await_sample(0.0, "stream_records_total", stream=STREAM)
    bench.produce(10)
    bench.claim(0, 2)
    bench.claim(2, 5, 2)
    bench.claim(0, 2)
    bench.claim(5, 7)

    first = bench.trigger()
    gradient = bench.gradient(first.model, first.orders[0])
    torn = Gradient(W1, first.model, (0,), 2, 0.0, {}, 0.1, vector=np.zeros(1, np.float32))
    bench.send(torn, gradient)
    second = bench.trigger()
    bench.send(gradient, bench.gradient(second.model, second.orders[0]))
    third = bench.trigger()
    offset = third.orders[0].batches[0].offset
    bench.send(Failed(W1, third.model, (offset,), "expired", "deleted"))
    bench.await_sample(1.0, "batches_quarantined_total", reason="expired")
    # One record, and the address of one batch.
    bench.await_sample(2.0, "dead_letters_total")
    bench.await_sample(0.0, "batches_waiting")
    bench.await_sample(3.0, "stream_lag_records", stream=STREAM)

    assert {
        name: bench.sample(name)
        for name in ("leading", "epoch", "model_version", "workers_live", "loss")
    } == {
        "leading": 1.0,
        "epoch": float(first.model.epoch),
        "model_version": 2.0,
        "workers_live": 1.0,
        "loss": 0.5,
    }
    assert bench.sample("training_metric", metric="accuracy") == 1.0
    assert bench.sample("claims_accepted_total") == 3.0
    assert bench.sample("claims_refused_total") == 1.0
    assert bench.sample("updates_total") == 2.0
    assert bench.sample("update_batches_total") == 2.0
    assert bench.sample("update_records_total") == 4.0
    assert bench.sample("replies_refused_total", kind="gradient") == 1.0
    assert bench.sample("replies_refused_total", kind="malformed") == 1.0
    assert bench.sample("replies_refused_total", kind="failed") == 0.0
    assert bench.sample("gradient_staleness_versions_sum", counted="no") == 1.0
    assert bench.sample("gradient_staleness_versions_count", counted="yes") == 2.0
    assert bench.sample("record_age_seconds_count") == 2.0
    assert bench.sample("record_age_seconds_bucket", le="0.5") == 0.0
    for stage in ("gradients", "apply"):
        assert bench.sample("round_seconds_count", stage=stage) == 2.0
    assert bench.sample("stream_records_total", stream=STREAM) == 10.0
    assert len(bench.tracer.named("batch")) == len(bench.tracer.named("batch.apply")) == 2
    assert len(bench.tracer.named("batch.wait")) == 3


def test_leader_reports_every_metric_of_a_coordinator(
    bench: Bench,
) -> None:
    bench.await_sample(0.0, "stream_records_total", stream=STREAM)
    bench.produce(2)
    bench.claim(0, 2)
    trigger = bench.trigger()
    bench.send(bench.gradient(trigger.model, trigger.orders[0]))
    until(
        lambda: bench.sample("stability_ratio", bound="necessary") is not None, "the sample exists"
    )
    until(lambda: bench.sample("checkpoint_age_seconds") is not None, "the sample exists")
    families = bench.metrics.registry.collect()
    present = {
        family.name + "_total" * (family.type == "counter") for family in families if family.samples
    }
    assert present >= OWN - OF_GROUPS


def test_closed_replica_reports_no_metrics_of_the_job(bench: Bench) -> None:
    bench.await_sample(1.0, "leading")
    bench.replica.close()
    assert NAME not in bench.metrics.exposed().decode()
