"""Only gradients that fit the model and are finite reach a leader, dense or sparse."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from common.core.messages import Failed, Gradient, ModelId, Reply, Vector, WorkerId
from common.core.vectors import SparseVector
from common.redis.memory import MemoryBoards, MemoryRedis
from common.telemetry.logging import event_logger
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from services.coordinator.replies import ReplyReader, SoundReplies

GRADIENT = Gradient(WorkerId("w"), ModelId(3, 7), (5,), 2, 1.0, {}, 0.1)


def sparse(size: int, number: float) -> SparseVector:
    return SparseVector(size, np.array([1]), np.array([[number]], np.float32))


@pytest.mark.parametrize(
    ("vector", "kind"),
    [
        (np.ones(4, np.float32), Gradient),
        (sparse(4, 2.0), Gradient),
        (np.ones(5, np.float32), type(None)),
        (sparse(5, 2.0), type(None)),
        (None, type(None)),
        (np.array([1, 2, np.nan, 3], np.float32), Failed),
        (sparse(4, np.inf), Failed),
    ],
)
def test_gradient_is_accepted_if_it_fits_the_model_and_is_finite(
    vector: Vector | SparseVector | None, kind: type[object]
) -> None:
    metrics = CoordinatorMetrics()
    sound = SoundReplies(4, metrics, event_logger("test"))
    found = sound(msgspec.structs.replace(GRADIENT, vector=vector))
    assert type(found) is kind
    if isinstance(found, Failed):
        assert found.reason == "not_finite"


def test_replies_of_one_read_reach_their_leader_together() -> None:
    boards, received = MemoryBoards(MemoryRedis()), list[list[Reply]]()
    reader = ReplyReader(boards.replies("c1"), event_logger("test"))
    reader.follow("digits", 3, received.append)
    for epoch, worker in ((3, "a"), (2, "late"), (3, "b")):
        boards.board("digits").push_reply(
            Failed(WorkerId(worker), ModelId(epoch, 7), (5,), "raised"), "c1"
        )
    boards.board("other").push_reply(Failed(WorkerId("c"), ModelId(3, 7), (5,), "raised"), "c1")
    reader.turn()
    assert [[reply.worker for reply in each] for each in received] == [["a", "b"]]
