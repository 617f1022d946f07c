"""The only member of a group, with log and board in memory; the test is its leader."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
import torch
from msgspec import UNSET

from common.core.messages import (
    GENESIS,
    Assignment,
    AttemptId,
    Batch,
    Copy,
    GradientReady,
    GroupOrders,
    Member,
    Membership,
    ModelId,
    Reduce,
    Reduced,
    StateReport,
    TriggerId,
    TriggerStream,
    UpdateTrigger,
    WorkerId,
)
from common.core.spans import Span
from common.data.codecs import make_codec
from common.data.fields import Field
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import GIVEN_AWAY
from common.learning.tasks import build_model
from common.learning.trainer import Trainer
from common.redis.memory import MemoryBoard, MemoryBoards, MemoryRedis
from common.storage.memory import MemoryBlobs
from common.storage.store import CheckpointStore
from common.telemetry.logging import event_logger
from common.telemetry.metrics.serving import Watchdog
from common.telemetry.metrics.worker import WorkerMetrics
from common.telemetry.outages import Outage
from common.testing.counting import CountingTask
from services.worker.compute import OrderComputer, Shell
from services.worker.group import GroupAccess, GroupLoop
from services.worker.held_weights import HeldWhole
from services.worker.rows import BatchCache
from services.worker.traces import BatchTraces
from tests.fakes.group import MemoryNetwork
from tests.fakes.tracing import MemoryTracer
from tests.unit.services.replicas import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.core.messages import Reply

_Reply = TypeVar("_Reply", bound="Reply")

W = WorkerId("w1")
REPLICA = "c1-4711"
# Smallest size at which a gradient's memory is released.
WEIGHTS = GIVEN_AWAY
RECORDS = 6


class _Watched(HeldWhole):
    """Records the gradients that are added before the members enter an update."""

    def __init__(self) -> None:
        super().__init__(
            Trainer(np.zeros(WEIGHTS, np.float32), WEIGHTS, OptimizerSettings("sgd", 1.0), "sum")
        )
        self.added = list[list[int]]()

    def add_own(self, vector: torch.Tensor, samples: int) -> None:
        super().add_own(vector, samples)
        self.added.append(vector.nonzero().flatten().tolist())


class _Leader:
    """Posts triggers to one member, and receives its replies."""

    def __init__(self, loop: GroupLoop, redis: MemoryRedis) -> None:
        self._loop = loop
        self._board, self._boards = MemoryBoard(redis, "job"), MemoryBoards(redis)
        self._number = 0

    def post(self, group: GroupOrders, *batches: Batch) -> None:
        self._number += 1
        orders = tuple(Assignment(W, (batch,)) for batch in batches)
        model = ModelId(3, group.made.version)
        trigger = TriggerId(3, self._number)
        self._board.post_trigger(
            UpdateTrigger(trigger, model, orders, reply_to=REPLICA, group=group)
        )

    def await_reply(self, kind: type[_Reply]) -> _Reply:
        """Return the next reply of a kind, while the member takes turns."""
        found = list[_Reply]()

        def arrived() -> bool:
            self._loop.turn()
            replies = [reply for _, reply in self._boards.replies(REPLICA).pop(10, 0.0)]
            found.extend(reply for reply in replies if isinstance(reply, kind))
            return bool(found)

        until(arrived, f"a {kind.__name__}")
        return found[-1]


class _InParts(CountingTask):
    """Runs out of memory if a pass has more than one record."""

    def losses(self, outputs: torch.Tensor, records: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return one loss per record.

        Raises:
            MemoryError: If there are several records.
        """
        if len(outputs) > 1:
            raise MemoryError
        return super().losses(outputs, records)


@contextmanager
def member(held: HeldWhole, task: CountingTask | None = None) -> Iterator[_Leader]:
    log, redis = MemoryLog(), MemoryRedis(lambda: 0.0)
    log.create_topics([NewTopic("s")])
    codec, writer = make_codec("tensor", [Field("id", "int64")]), log.writer()
    for value in codec.encode({"id": np.arange(RECORDS)}):
        writer.append("s", value)
    assert writer.flush(1.0)
    topic_id = log.describe(["s"])["s"].topic_id
    task, metrics = task or CountingTask(WEIGHTS), WorkerMetrics(("s",))
    logger, watchdog = event_logger("test"), Watchdog()
    loop = GroupLoop(
        W,
        OrderComputer(
            W,
            GradientComputer(task, build_model(task, 0), torch.device("cpu")),
            codec=codec,
            cache=BatchCache(1 << 20),
            log=log,
            logger=logger,
            measures=metrics,
            watchdog=watchdog,
            topic_id=lambda _: topic_id,
        ),
        Shell(
            board=MemoryBoard(redis, "job"),
            logger=logger,
            measures=metrics,
            traces=BatchTraces(MemoryTracer(), "job", W, lambda: 4e9),
            watchdog=watchdog,
            wait=lambda _: None,
            round_began=lambda _epoch, _unsettled: None,
            stream=TriggerStream,
            outage=Outage(logger, "redis"),
        ),
        GroupAccess(MemoryNetwork().groups(), CheckpointStore(MemoryBlobs(), "job")),
        lambda: held,
    )
    with closing(loop):
        yield _Leader(loop, redis)


def batch(number: int) -> Batch:
    """Return a batch of two records, from this offset on."""
    return Batch(number, WorkerId("somebody"), (Span("s", 0, number, number + 2),), 2)


@pytest.mark.parametrize(("task", "cut"), [(CountingTask, UNSET), (_InParts, True)])
def test_member_reports_that_it_computed_a_gradient_in_parts(
    task: type[CountingTask], cut: object
) -> None:
    with member(_Watched(), task(WEIGHTS)) as leader:
        leader.post(GroupOrders(GENESIS, Membership(0)))
        me = Member(W, leader.await_reply(StateReport).life)
        alone = Membership(1, (me,))
        leader.post(GroupOrders(GENESIS, alone, copies=(Copy(me),)))
        leader.await_reply(StateReport)
        leader.post(GroupOrders(GENESIS, alone, origin=me.life), batch(0))
        assert leader.await_reply(GradientReady).cut is cut


def test_gradient_is_added_at_once_unless_a_result_is_pending() -> None:
    # records    0, 1    2, 3    4, 5
    # gradient   ██        ██      ██
    # added        █                 █
    # pending         ██████           █
    # applied               ▲           ▲
    held = _Watched()
    with member(held) as leader:
        leader.post(GroupOrders(GENESIS, Membership(0)))
        me = Member(W, leader.await_reply(StateReport).life)
        alone = Membership(1, (me,))
        leader.post(GroupOrders(GENESIS, alone, copies=(Copy(me),)))
        assert leader.await_reply(StateReport).made == GENESIS

        def orders(made: ModelId, reduced: tuple[int, ...] = ()) -> GroupOrders:
            version = made.version
            by = AttemptId(3, 1, version) if version else None
            attempt = AttemptId(3, 1, version + 1)
            reduce = Reduce(attempt, ((reduced,),), 2) if reduced else None
            return GroupOrders(made, alone, by, origin=me.life, reduce=reduce)

        leader.post(orders(GENESIS), batch(0))
        leader.await_reply(GradientReady)
        until(lambda: held.added == [[0, 1]], "the first gradient is added before members enter")
        leader.post(orders(GENESIS, (0,)))
        leader.await_reply(Reduced)
        leader.post(orders(GENESIS), batch(2))
        leader.await_reply(GradientReady)
        first = ModelId(3, 1)
        leader.post(orders(first), batch(4))
        leader.await_reply(GradientReady)
        until(lambda: len(held.added) > 1, "the gradient of the next version is added")
        assert held.added == [[0, 1], [4, 5]]
        leader.post(orders(first, (4,)))
        leader.await_reply(Reduced)
        leader.post(orders(ModelId(3, 2)))
        until(lambda: not held.is_pending, "the update is applied")
        weights = held.weights.numpy()
    assert weights[:RECORDS].tolist() == [-1, -1, 0, 0, -1, -1]
    assert not weights[RECORDS:].any()
