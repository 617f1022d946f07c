"""The format of a model's data is recognized by its first bytes, or by more bytes if necessary."""

from __future__ import annotations

import pytest

from common.core.messages import AttemptId, ModelId
from common.core.snapshots import Snapshot
from common.jobs.models import heads_on_board
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.snapshot_file import SnapshotFile, to_bytes

WEIGHTS = b"w" * 5000
# Values that make the protocol's part of a snapshot longer than a first read of 400 bytes.
LONG = tuple(range(1000))


def snapshot(epoch: int, returned: tuple[int, ...] = ()) -> Snapshot:
    return Snapshot(epoch, ModelId(epoch, 4), 9, 0, {}, returned=returned)


@pytest.mark.parametrize("head_bytes", [1, 400, 5000])
@pytest.mark.parametrize("returned", [(), LONG])
def test_hot_snapshot_head_is_read_from_its_first_bytes(
    head_bytes: int, returned: tuple[int, ...]
) -> None:
    board = MemoryBoard(MemoryRedis(), "digits")
    for epoch in (3, 5):
        board.put_snapshot(epoch, to_bytes(SnapshotFile(snapshot(epoch, returned), WEIGHTS)), "c1")

    found = heads_on_board(board, pytest.fail, head_bytes)

    assert [(each.snapshot, each.has_weights) for each in found] == [
        (snapshot(5, returned), True),
        (snapshot(3, returned), True),
    ]


@pytest.mark.parametrize("more_bytes", [-8, 0, 8])
def test_snapshot_of_a_member_has_weights_only_if_it_stored_them(more_bytes: int) -> None:
    board = MemoryBoard(MemoryRedis(), "digits")
    held = Snapshot(3, ModelId(3, 4), 9, 0, {}, attempt=AttemptId(3, 1, 4))
    alone = to_bytes(SnapshotFile(held, b""))
    board.put_snapshot(3, alone, "c1")

    def known() -> bool:
        [found] = heads_on_board(board, pytest.fail, len(alone) + more_bytes)
        return found.has_weights

    assert not known()
    board.put_whole_snapshot(3, to_bytes(SnapshotFile(held, WEIGHTS)))
    assert known()


def test_torn_hot_snapshot_is_reported_and_skipped() -> None:
    board, skipped = MemoryBoard(MemoryRedis(), "digits"), list[str]()
    board.put_snapshot(3, to_bytes(SnapshotFile(snapshot(3), WEIGHTS)), "c1")
    board.put_snapshot(5, to_bytes(SnapshotFile(snapshot(5), WEIGHTS))[:40], "c1")

    [found] = heads_on_board(board, skipped.append)

    assert found.snapshot == snapshot(3)
    [reason] = skipped
    assert reason.startswith("a hot snapshot is skipped: ")
