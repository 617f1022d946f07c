"""Hot snapshots as a worker reads them from Redis."""

from __future__ import annotations

import msgspec
import pytest

from common.core.messages import ModelId
from common.errors import CorruptError
from common.storage.hot_snapshot import FORMAT, SnapshotProtocol, with_weights
from common.wire.messages import frame

MADE = ModelId(3, 7)


def hot_snapshot(made: ModelId = MADE, format_: int = FORMAT) -> bytes:
    snapshot = msgspec.Raw(msgspec.msgpack.encode({"made": made}))
    protocol = SnapshotProtocol(format_, snapshot, b"seal")
    return frame(msgspec.msgpack.encode(protocol), b"old")


def test_weights_replace_those_of_a_snapshot_of_the_same_version() -> None:
    whole = with_weights(hot_snapshot(), MADE, b"new")
    assert whole is not None
    assert whole.endswith(b"new")
    assert with_weights(hot_snapshot(ModelId(3, 8)), MADE, b"new") is None


@pytest.mark.parametrize(
    "data",
    [b"", b"\x01", frame(b"\xc1", b""), frame(b"\x91" * 9, b""), hot_snapshot(format_=FORMAT + 1)],
    ids=["empty", "short", "garbage", "nested", "later format"],
)
def test_snapshot_that_cannot_be_used_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"a hot snapshot is incomplete|does not parse"):
        with_weights(data, MADE, b"new")
