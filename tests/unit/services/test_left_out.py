"""A worker that the leader leaves out logs the reason once and publishes it repeatedly."""

from __future__ import annotations

import numpy as np
import pytest

from common.core.liveness import WORKER
from common.core.messages import LeaderStatus, ModelId, WorkerId
from common.core.snapshots import Snapshot
from common.errors import UserError
from common.learning.checkpoint import Kind, TensorSlice, packed
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.snapshot_file import SnapshotFile, to_bytes
from common.telemetry.logging import event_logger
from services.worker.effects.board import AGAIN_S, WorkerBoard
from tests.fakes.clock import ManualClock

W = WorkerId("w2")
LAYOUT = (TensorSlice(("one",), (3,)), TensorSlice(("two",), (3,)))
WHY = "another model"
STATUS = LeaderStatus(5, 0, {}, 0, 0, 1, {}, left_out={W: WHY})
DIFFERENCE = (
    "another model; first difference: at place 1 it has the parameter 'two' (3,) float32, but"
    " the task's model has the parameter 'one' (3,) float32"
)


def hot(optimizer: str = "sgd") -> bytes:
    """Return a leader's hot snapshot, with the layers in the other order."""
    kind = Kind(optimizer, 6, 0, LAYOUT[::-1])
    trainer = packed(kind, np.zeros(6, np.float32), {})
    return to_bytes(SnapshotFile(Snapshot(5, ModelId(5, 1), 0, 0, {}), trainer))


def forged(header: bytes) -> bytes:
    """Return a hot snapshot whose weights begin with this header."""
    trainer = len(header).to_bytes(8, "little") + header
    return to_bytes(SnapshotFile(Snapshot(5, ModelId(5, 1), 0, 0, {}), trainer))


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (hot(), DIFFERENCE),
        (b"", WHY),
        (b"garbage", WHY),
        (hot()[:90], WHY),
        (forged(b'{"\xff": {}}'), WHY),
        (forged(b'{"a":' * 5000), WHY),
        (forged(b'{"__metadata__": {"trainer": 5}}'), WHY),
        (forged(b'{"__metadata__": {"trainer": "%b"}}' % (rb"{\"a\":" * 5000)), WHY),
    ],
)
def test_excluded_worker_logs_the_first_difference_once(
    snapshot: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    # status   not left out    left out    at once again    AGAIN_S later    no more    left out
    # logged                   yes         no               no                          yes
    clock, redis = ManualClock(), MemoryRedis()
    board = MemoryBoard(redis, "job")
    if snapshot:
        board.put_snapshot(5, snapshot, "c1")
    subject = WorkerBoard(W, board, LAYOUT, "", event_logger("test"), clock)
    subject.leader_status()
    board.put_leader_status(LeaderStatus(5, 0, {}, 0, 0, 1, {}))
    subject.leader_status()
    assert board.unable() == {}
    board.put_leader_status(STATUS)
    for wait_s in (0.0, 0.0, AGAIN_S):
        clock.advance(wait_s)
        subject.leader_status()
        assert board.unable() == {WORKER + W: said}
    assert len(caplog.records) == 1
    board.put_leader_status(LeaderStatus(5, 0, {}, 0, 0, 2, {}))
    subject.leader_status()
    board.put_leader_status(STATUS)
    subject.leader_status()
    assert len(caplog.records) == 2


def test_worker_whose_frozen_tensors_are_not_the_jobs_starts_again() -> None:
    board = MemoryBoard(MemoryRedis(), "job")
    trainer = packed(Kind("sgd", 6, 0, LAYOUT, "of the job"), np.zeros(6, np.float32), {})
    snapshot = SnapshotFile(Snapshot(5, ModelId(5, 1), 0, 0, {}), trainer)
    board.put_snapshot(5, to_bytes(snapshot), "c1")
    board.put_leader_status(STATUS)
    WorkerBoard(W, board, LAYOUT, "of the job", event_logger("test")).leader_status()
    with pytest.raises(UserError, match="starts again with the stored ones"):
        WorkerBoard(W, board, LAYOUT, "another", event_logger("test")).leader_status()
