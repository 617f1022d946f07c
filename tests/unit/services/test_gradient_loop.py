"""Execution of a worker's orders, with log and board in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET

from common.core.batching import RowSlice
from common.core.messages import (
    MOST_TRACEBACK,
    Assignment,
    Batch,
    Failed,
    FailedReason,
    Gradient,
    ModelId,
    Reply,
    Skipped,
    TriggerId,
    TriggerStream,
    UpdateTrigger,
    WorkerId,
    WorkerLeaving,
)
from common.core.spans import Address, Partition, Span
from common.core.vectors import SparseVector, add_to, dense
from common.data.codecs import Codec, make_codec
from common.data.fields import Field
from common.kafka.memory import EPOCH, MemoryLog
from common.kafka.port import NewTopic
from common.learning.gradients import GradientComputer, GradientSum
from common.learning.tasks import build_model
from common.redis.memory import MemoryBoard, MemoryBoards, MemoryRedis
from common.telemetry.logging import event_logger, fields_of
from common.telemetry.metrics.serving import Watchdog
from common.telemetry.metrics.worker import WorkerMetrics
from common.telemetry.outages import Outage
from common.telemetry.tracing import trace_of
from common.testing.counting import CountingTask
from common.wire.vectors import encode_sparse
from services.worker.compute import OrderComputer, Shell
from services.worker.gradients import GradientLoop
from services.worker.rows import BatchCache
from services.worker.traces import BatchTraces
from tests.fakes.tracing import MemoryTracer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

W = WorkerId("w1")
MODEL = ModelId(3, 7)
REPLICA = "c1-4711"
RECORDS = 10
DIGEST = "0123456789abcdef"  # digest of its model's layout
WALL_S = 4e9  # later than any time of a test
IDS = tuple(range(RECORDS))


@dataclass
class World:
    """A gradient loop and its environment."""

    log: MemoryLog
    board: MemoryBoard
    boards: MemoryBoards
    cache: BatchCache
    loop: GradientLoop
    codec: Codec
    metrics: WorkerMetrics
    tracer: MemoryTracer
    # Names of trigger streams, as in the leader's status; the last one is in use.
    stream: list[str]

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the job's sample of this name."""
        return self.metrics.registry.get_sample_value(name, labels)

    def replies(self, timeout_s: float = 0.0) -> list[Reply]:
        """Return the replies to the leader."""
        return [reply for _, reply in self.boards.replies(REPLICA).pop(10, timeout_s)]

    def order(
        self,
        *batches: Batch,
        number: int = 1,
        weights: bytes | None = None,
        squared: bool = False,
    ) -> Reply:
        """Post an order, carry it out, and return the reply."""
        order = Assignment(W, batches, squared=squared)
        self.board.post_trigger(
            UpdateTrigger(TriggerId(3, number), MODEL, (order,), weights, REPLICA)
        )
        self.loop.turn()
        [reply] = self.replies(1.0)
        return reply


def make_world(
    poison: int = -1,
    computer: type[GradientComputer] = GradientComputer,
    task: CountingTask | None = None,
) -> World:
    log = MemoryLog()
    log.create_topics([NewTopic("s")])
    codec = make_codec("tensor", [Field("id", "int64")])
    writer = log.writer()
    for number, value in enumerate(codec.encode({"id": np.array(IDS)})):
        writer.append("s", b"garbage" if number == 4 else value)
    assert writer.flush(1.0)
    redis = MemoryRedis(lambda: 0.0)
    board, boards = MemoryBoard(redis, "job"), MemoryBoards(redis)
    task = task or CountingTask(RECORDS, poison)
    cache = BatchCache(1 << 20)
    metrics, tracer, stream = WorkerMetrics(("s",)), MemoryTracer(), [""]
    # Topic ids are listed by generation.
    topic_ids = {0: log.describe(["s"])["s"].topic_id}
    logger, watchdog = event_logger("test"), Watchdog()
    loop = GradientLoop(
        W,
        OrderComputer(
            W,
            computer(task, build_model(task, 0), torch.device("cpu")),
            codec=codec,
            cache=cache,
            log=log,
            logger=logger,
            measures=metrics,
            watchdog=watchdog,
            topic_id=lambda span: topic_ids.get(span.generation, ""),
        ),
        Shell(
            board=board,
            logger=logger,
            measures=metrics,
            traces=BatchTraces(tracer, "job", W, lambda: WALL_S),
            watchdog=watchdog,
            wait=lambda _: None,
            round_began=lambda _epoch, _unsettled: None,
            stream=lambda: TriggerStream(stream[-1]),
            outage=Outage(logger, "redis"),
        ),
        digest=DIGEST,
    )
    return World(log, board, boards, cache, loop, codec, metrics, tracer, stream)


@pytest.fixture
def world() -> World:
    return make_world()


def batch(start: int, end: int, samples: int | None = None, offset: int = 0) -> Batch:
    address: Address = (Span("s", 0, start, end),)
    skipped = (Skipped("s", 0, 4, "bad"),) if start <= 4 < end else ()
    samples = end - start - len(skipped) if samples is None else samples
    return Batch(offset, WorkerId("somebody"), address, samples, skipped)


def publish(world: World) -> None:
    world.board.put_model(MODEL, bytes(4 * RECORDS))


def used(reply: Reply) -> list[int]:
    assert isinstance(reply, Gradient)
    whole = np.zeros(RECORDS, np.float32)
    add_to(whole, reply.vector)
    return np.flatnonzero(whole).tolist()


def failure(reply: Reply) -> tuple[str, tuple[int, ...]]:
    assert isinstance(reply, Failed)
    return reply.reason, reply.batches


def test_uncached_batch_is_read_back_without_its_skipped_records(world: World) -> None:
    publish(world)
    reply = world.order(batch(2, 7))
    assert used(reply) == [2, 3, 5, 6]
    assert isinstance(reply, Gradient)
    assert (reply.model, reply.batches, reply.samples) == (MODEL, (0,), 4)


def test_topic_is_described_once_for_all_spans_of_a_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.log.add_partitions("s", 3)
    writer = world.log.writer()
    for index in (1, 2):
        writer.append("s", world.codec.encode({"id": np.array([index + 5])})[0], partition=index)
    assert writer.flush(1.0)
    asked = list[object]()
    describe = world.log.describe

    def describing(topics: set[str]) -> object:
        asked.append(topics)
        return describe(topics)

    monkeypatch.setattr(world.log, "describe", describing)
    spans = tuple(Span("s", index, 0, 1) for index in range(3))
    publish(world)
    assert used(world.order(Batch(0, WorkerId("somebody"), spans, 3))) == [0, 6, 7]
    assert asked == [{"s"}]


def changed(since: ModelId, to: int, numbers: SparseVector, data: bytes = b"") -> UpdateTrigger:
    """Return a trigger with the changed weights and without orders."""
    changes = data or encode_sparse(numbers)
    model = ModelId(since.epoch, to)
    return UpdateTrigger(TriggerId(3, to + 1), model, (), since=since, changes=changes)


def test_changed_weights_in_a_trigger_are_applied_to_the_previous_version(world: World) -> None:
    publish(world)
    assert used(world.order(batch(0, 2))) == [0, 1]
    world.cache.put(batch(0, 2).address, [RowSlice({"id": np.array([8, 9])}, 0, 2)])
    some = SparseVector(RECORDS, np.array([1, 7]), np.array([[5], [6]], np.float32))
    world.board.post_trigger(changed(MODEL, 8, some))
    world.loop.turn()
    others = some._replace(values=np.array([[7], [8]], np.float32))
    world.board.post_trigger(changed(ModelId(3, 8), 9, others))
    world.loop.turn()
    order = (Assignment(W, (batch(0, 2),)),)
    world.board.post_trigger(
        UpdateTrigger(TriggerId(3, 11), ModelId(3, 9), order, reply_to=REPLICA)
    )
    # Redis has no model of version 9, so the worker must use the changes.
    world.loop.turn()
    [reply] = world.replies(1.0)
    assert used(reply) == [8, 9]
    assert world.sample("doll_worker_stage_seconds_count", stage="fetch") == 3


@pytest.mark.parametrize("damage", ["another model", "nonsense", "another length"])
def test_changes_that_do_not_fit_are_dropped_and_the_full_model_is_fetched(
    world: World, damage: str
) -> None:
    publish(world)
    assert used(world.order(batch(0, 2))) == [0, 1]
    some = SparseVector(RECORDS, np.array([1]), np.array([[5]], np.float32))
    trigger = {
        "another model": changed(ModelId(3, 8), 9, some),
        "nonsense": changed(MODEL, 9, some, b"nonsense"),
        "another length": changed(MODEL, 9, some._replace(size=RECORDS + 1)),
    }[damage]
    model = trigger.model
    world.board.post_trigger(
        msgspec.structs.replace(trigger, orders=(Assignment(W, (batch(0, 2),)),), reply_to=REPLICA)
    )
    world.loop.turn()
    [reply] = world.replies(1.0)
    assert failure(reply) == ("model_missing", (0,))
    world.board.put_model(model, bytes(4 * RECORDS))
    world.board.post_trigger(
        UpdateTrigger(TriggerId(3, 99), model, (Assignment(W, (batch(0, 2),)),), reply_to=REPLICA)
    )
    world.loop.turn()
    [reply] = world.replies(1.0)
    assert used(reply) == [0, 1]


def test_missing_model_is_fetched_even_if_another_worker_got_the_order(
    world: World,
) -> None:
    assert failure(world.order(batch(0, 2))) == ("model_missing", (0,))
    publish(world)
    other = (Assignment(WorkerId("w2"), (batch(0, 2),)),)
    world.board.post_trigger(UpdateTrigger(TriggerId(3, 2), MODEL, other, reply_to=REPLICA))
    world.loop.turn()
    some = SparseVector(RECORDS, np.array([1]), np.array([[5]], np.float32))
    order = (Assignment(W, (batch(0, 2),)),)
    world.board.post_trigger(
        msgspec.structs.replace(changed(MODEL, 8, some), orders=order, reply_to=REPLICA)
    )
    # Redis has no model of version 8, so the worker must have fetched the one before.
    world.loop.turn()
    [reply] = world.replies(1.0)
    assert used(reply) == [0, 1]


def test_order_for_another_model_is_ignored(world: World) -> None:
    # The first order is for an earlier process of this name. Its model was the leader's; this
    # worker's is not.
    publish(world)
    order = (Assignment(W, (batch(0, 2),)),)
    for number, digest in ((1, "f" * 16), (2, DIGEST)):
        world.board.post_trigger(
            UpdateTrigger(TriggerId(3, number), MODEL, order, reply_to=REPLICA, digest=digest)
        )
        world.loop.turn()
        assert len(world.replies(0.0)) == number - 1


def test_cached_batch_is_not_read_again(world: World) -> None:
    publish(world)
    world.cache.put(batch(0, 2).address, [RowSlice({"id": np.array([8, 9])}, 0, 2)])
    assert used(world.order(batch(0, 2))) == [8, 9]


def test_batches_of_an_order_make_one_gradient_message(world: World) -> None:
    publish(world)
    reply = world.order(batch(0, 2, offset=5), batch(7, 9, offset=6))
    assert used(reply) == [0, 1, 7, 8]
    assert isinstance(reply, Gradient)
    assert reply.batches == (5, 6)


def test_gradient_contains_its_squared_norm_if_the_order_requests_it(world: World) -> None:
    publish(world)
    plain, squared = world.order(batch(0, 2)), world.order(batch(0, 3), number=2, squared=True)
    assert isinstance(plain, Gradient)
    assert isinstance(squared, Gradient)
    # Each record adds 1 to a counter of its own.
    assert (plain.square, squared.square) == (UNSET, 3.0)


def test_model_inside_the_trigger_is_used(world: World) -> None:
    assert used(world.order(batch(0, 1), weights=bytes(4 * RECORDS))) == [0]


def test_missing_or_torn_model_is_reported_as_missing(world: World) -> None:
    assert failure(world.order(batch(0, 2))) == ("model_missing", (0,))
    world.board.put_model(MODEL, bytes(12))
    assert failure(world.order(batch(0, 2), number=2)) == ("model_missing", (0,))
    publish(world)
    assert used(world.order(batch(0, 2), number=3)) == [0, 1]


def test_batch_deleted_by_retention_is_expired_and_others_are_not_blamed(world: World) -> None:
    publish(world)
    world.log.expire(Partition("s", 0), 3)
    assert failure(world.order(batch(5, 7, offset=1), batch(2, 4, offset=2))) == ("expired", (2,))


def test_records_of_a_deleted_topic_are_unreadable(world: World) -> None:
    publish(world)
    world.log.delete_topics(["s"])
    assert failure(world.order(batch(0, 2))) == ("unreadable", (0,))


@pytest.mark.parametrize("recreated", [False, True])
def test_other_records_at_the_claimed_offsets_make_the_batch_expired(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    recreated: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    # claimed    s[0]@1:3 of leader epoch 0
    # log        0 1 2 ...   now all of leader epoch 1, or of another topic, with leader epoch 0
    address = (Span("s", 0, 1, 3, known=3, epoch=EPOCH),)
    claimed = msgspec.structs.replace(batch(1, 3), address=address)
    # The worker has the records, but no model.
    assert failure(world.order(claimed)) == ("model_missing", (0,))
    if recreated:
        world.log.recreate("s")
        writer = world.log.writer()
        for value in world.codec.encode({"id": np.array(IDS)}):
            writer.append("s", value)
        assert writer.flush(1.0)
    else:
        monkeypatch.setattr("common.kafka.memory.EPOCH", EPOCH + 1)

    assert failure(world.order(claimed, number=2)) == ("expired", (0,))


def test_batch_with_missing_records_is_expired(world: World) -> None:
    publish(world)
    world.log.punch(Partition("s", 0), 6)
    reply = world.order(batch(0, 2, offset=1), batch(5, 8, offset=2))
    assert isinstance(reply, Failed)
    assert (reply.reason, reply.batches) == ("expired", (2,))
    assert reply.detail == "s[0]@5:8 contains 2 records now, but contained 3 when it was claimed"
    assert failure(world.order(batch(0, 2, samples=1), number=2)) == ("expired", (0,))


def test_batch_that_decodes_only_for_its_claimant_is_reported_as_raised(world: World) -> None:
    publish(world)
    writer = world.log.writer()
    writer.append("s", b"of another version")
    assert writer.flush(1.0)
    assert failure(world.order(batch(9, 11))) == ("raised", (0,))


def test_batch_on_which_the_task_raises_is_named_alone() -> None:
    world = make_world(poison=7)
    publish(world)
    assert failure(world.order(batch(0, 2, offset=1), batch(7, 8, offset=2))) == ("raised", (2,))


def test_task_error_is_sent_with_its_traceback_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = make_world(poison=7)
    publish(world)
    tracebacks = set[str]()
    for number in range(1, 4):
        reply = world.order(batch(7, 8, offset=number), number=number)
        assert isinstance(reply, Failed)
        assert reply.detail.startswith("ValueError: record 7 is poison (counting.py, line ")
        assert reply.detail.endswith(", in forward)")
        assert reply.traceback.endswith("ValueError: record 7 is poison\n")
        assert len(reply.traceback) <= MOST_TRACEBACK
        tracebacks.add(reply.traceback)
    [line] = [fields_of(record) for record in caplog.records]
    assert tracebacks == {line["traceback"]}
    assert world.sample("doll_gradients_failed_total", reason="raised") == 3


class MeanTask(CountingTask):
    """Returns one loss instead of one per sample."""

    def losses(self, outputs: torch.Tensor, _records: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a single number."""
        return outputs.mean()


def test_task_without_per_sample_losses_is_blamed_instead_of_the_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = make_world(task=MeanTask(RECORDS))
    publish(world)
    for number in range(1, 4):
        reply = world.order(batch(0, 2, offset=1), batch(7, 9, offset=2), number=number)
        assert failure(reply) == ("task", (1, 2))
        assert isinstance(reply, Failed)
        assert reply.detail.startswith("losses has shape (): one value per sample is needed, (2,)")
    assert caplog.messages == ["no_gradient"]


class SmallMachine(CountingTask):
    """Runs out of memory if a pass has more than `most` records."""

    most = 1

    def losses(self, outputs: torch.Tensor, records: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return one loss per record.

        Raises:
            OutOfMemoryError: If there are too many records.
        """
        if len(outputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().losses(outputs, records)


def test_batch_that_exceeds_the_memory_is_computed_in_parts_and_counted() -> None:
    world = make_world(task=SmallMachine(RECORDS))
    publish(world)
    reply = world.order(batch(0, 4, offset=1))
    assert isinstance(reply, Gradient)
    assert dense(reply.vector)[:5].tolist() == [1, 1, 1, 1, 0]
    assert world.sample("doll_gradients_cut_total") == 2
    assert reply.cut is True
    reply = world.order(batch(0, 1, offset=2), number=2)
    assert isinstance(reply, Gradient)
    assert reply.cut is UNSET


def test_record_that_exceeds_the_memory_is_reported_without_blame() -> None:
    task = SmallMachine(RECORDS)
    task.most = 0
    world = make_world(task=task)
    publish(world)
    reply = world.order(batch(0, 2, offset=1), batch(7, 9, offset=2))
    assert failure(reply) == ("memory", (1, 2))
    assert isinstance(reply, Failed)
    assert reply.detail.startswith("one record does not fit (requested 20.00 MiB, free ")


@pytest.mark.parametrize("part", ["decode", "get_model", "load"])
def test_lack_of_memory_outside_the_gradient_is_reported_without_blame(
    world: World, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(world)
    lacking = [True]
    owner = {"decode": world.codec, "get_model": world.board, "load": GradientComputer}[part]
    works = getattr(owner, part)

    def allocate(*given: object) -> object:
        if lacking[0]:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"
            )
        return works(*given)

    monkeypatch.setattr(owner, part, allocate)
    reply = world.order(batch(0, 2, offset=1), batch(7, 9, offset=2))
    assert failure(reply) == ("memory", (1, 2))
    assert isinstance(reply, Failed)
    expected = "memory does not suffice for the records and the model (requested 4.00 KiB, free "
    assert reply.detail.startswith(expected)
    # The next order may fit.
    lacking[0] = False
    assert used(world.order(batch(0, 2), number=2)) == [0, 1]


def test_batch_with_non_finite_loss_is_named(world: World) -> None:
    weights = np.zeros(RECORDS, np.float32)
    weights[9] = np.inf
    reply = world.order(batch(0, 2, offset=1), batch(9, 10, offset=2), weights=weights.tobytes())
    assert failure(reply) == ("not_finite", (2,))


def test_loop_continues_in_the_trigger_stream_that_the_leader_names(world: World) -> None:
    publish(world)
    forged = UpdateTrigger(TriggerId(2**60, 1), ModelId(2**60, 1), ())
    assert world.board.post_trigger(forged)
    world.loop.turn()
    order = Assignment(W, (batch(0, 1, offset=1),))
    trigger = UpdateTrigger(TriggerId(3, 1), MODEL, (order,), None, REPLICA)
    assert not world.board.post_trigger(trigger)
    assert world.board.post_trigger(trigger, "other")
    world.stream.append("other")
    world.loop.turn()
    [gradient] = world.replies(1.0)
    assert used(gradient) == [0]


def test_leaving_loop_returns_orders_that_it_did_not_begin(world: World) -> None:
    orders = (Assignment(W, (batch(0, 1, offset=1),)), Assignment(W, (batch(1, 2, offset=2),)))
    publish(world)
    world.board.post_trigger(UpdateTrigger(TriggerId(3, 1), MODEL, orders, None, REPLICA))
    world.loop.turn()
    world.loop.leave()
    world.loop.turn()
    gradient, worker_leaving = world.replies(1.0)
    assert used(gradient) == [0]
    assert worker_leaving == WorkerLeaving(W, MODEL)


def test_loop_that_never_had_a_leader_leaves_silently(world: World) -> None:
    world.loop.leave()
    assert world.replies() == []


def test_orders_are_counted_by_outcome(world: World) -> None:
    publish(world)
    world.cache.put(batch(7, 8).address, [RowSlice({"id": np.array([7])}, 0, 1)])
    # The first batch is not cached, so the worker reads it back.
    world.order(batch(0, 2, offset=1), batch(7, 8, offset=2), number=1)
    world.log.expire(Partition("s", 0), 3)
    world.order(batch(0, 2), number=2)
    world.log.delete_topics(["s"])
    world.order(batch(3, 5), number=3)

    failed = {
        reason: world.sample("doll_gradients_failed_total", reason=reason)
        for reason in get_args(FailedReason)
    }
    assert failed == dict.fromkeys(get_args(FailedReason), 0) | {"unreadable": 1, "expired": 1}
    assert world.sample("doll_batches_read_back_total") == 1
    for stage in ("fetch", "gradient", "push"):
        assert world.sample("doll_worker_stage_seconds_count", stage=stage) == 1, stage


def test_batch_trace_contains_the_gradient_or_the_failure(world: World) -> None:
    publish(world)
    world.order(batch(0, 2, offset=1), batch(7, 8, offset=2), number=1)
    world.log.expire(Partition("s", 0), 1)
    world.order(batch(0, 2), number=2)

    spans = world.tracer.named("batch.gradient")
    first, second = (trace_of("job", batch(*place).address) for place in ((0, 2), (7, 8)))
    assert [span.trace for span in spans] == [first, second, first]
    assert [span.error.partition(":")[0] for span in spans] == ["", "", "expired"]
    assert {(span.attributes["version"], span.attributes["worker"]) for span in spans} == {(7, W)}
    assert all(0 < span.start_s < span.end_s == WALL_S for span in spans)


class AskedAgain(GradientComputer):
    """Takes long enough for its order to be posted once more."""

    post: Callable[[], object] = staticmethod(lambda: None)

    def compute(
        self, batches: Sequence[Mapping[str, npt.NDArray[Any]]], local_rate: float = 0.0
    ) -> GradientSum:
        """Compute, and report a second as its duration."""
        self.post()
        return replace(super().compute(batches, local_rate), seconds=1.0)


def test_batch_requested_again_during_computation_is_computed_once() -> None:
    world = make_world(computer=AskedAgain)
    publish(world)
    order = Assignment(W, (batch(0, 1, offset=1),))
    numbers = iter(range(2, 9))
    AskedAgain.post = staticmethod(
        lambda: world.board.post_trigger(
            UpdateTrigger(TriggerId(3, next(numbers)), MODEL, (order,), None, REPLICA)
        )
    )
    world.board.post_trigger(UpdateTrigger(TriggerId(3, 1), MODEL, (order,), None, REPLICA))
    for _ in range(3):
        world.loop.turn()

    assert [used(reply) for reply in world.replies()] == [[0]]


def test_traffic_is_counted_and_each_message_reports_the_previous_total(
    world: World,
) -> None:
    publish(world)
    first = world.order(batch(0, 2), number=1)
    # The worker has these weights already.
    again = world.order(batch(2, 4), number=2)
    inside = world.order(batch(4, 6), number=3, weights=bytes(4 * RECORDS))

    replies = [each for each in (first, again, inside) if isinstance(each, Gradient)]
    counts = [reply.traffic for reply in replies if reply.traffic]
    size = 4 * RECORDS
    sent = [
        len(encode_sparse(reply.vector))
        for reply in replies
        if isinstance(reply.vector, SparseVector)
    ]
    assert [count.total for count in counts] == [size, size + sent[0], 2 * size + sum(sent[:2])]
    assert len({count.life for count in counts}) == 1
    assert world.sample("doll_worker_moved_bytes_total", direction="sent") == sum(sent)
    assert world.sample("doll_worker_moved_bytes_total", direction="received") == 2 * size


def test_sparse_gradient_counts_only_the_bytes_sent() -> None:
    world = make_world()
    publish(world)
    reply = world.order(batch(0, 1))
    assert isinstance(reply, Gradient)
    assert isinstance(reply.vector, SparseVector)
    sent = len(encode_sparse(reply.vector))
    assert sent < 4 * RECORDS
    assert world.sample("doll_worker_moved_bytes_total", direction="sent") == sent
