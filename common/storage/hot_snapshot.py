"""A hot snapshot's bytes, for those who want its weights and leave the protocol to coordinators.

`snapshot_file` says what is in it.
"""

from __future__ import annotations

import msgspec

from common.core.messages import ModelId  # noqa: TC001 -- msgspec reads it when run
from common.errors import CorruptError, FutureFormatError, WireError, decoded
from common.wire.messages import frame, unframe

FORMAT = 1  # of the protocol's part: the latest that this program knows
NO_PROTOCOL = "a snapshot's protocol part does not parse"
TORN = "a hot snapshot is torn"


class SnapshotProtocol(msgspec.Struct):
    """The protocol's part."""

    format: int
    snapshot: msgspec.Raw = msgspec.Raw()  # a later format need not have one
    seal: bytes = b""  # of a hot one: made with a key that Kafka alone has


class _Named(msgspec.Struct):
    made: ModelId


PROTOCOL = msgspec.msgpack.Decoder(SnapshotProtocol)
_NAMED = msgspec.msgpack.Decoder(_Named)


def decode_protocol(data: bytes | memoryview, title: str) -> SnapshotProtocol:
    """Read a protocol's part, but not what is in it.

    Raises:
        CorruptError: If it is none.
        FutureFormatError: If a newer program wrote it.
    """
    protocol = decoded(PROTOCOL.decode, data, NO_PROTOCOL, CorruptError)
    if protocol.format > FORMAT:
        raise FutureFormatError(
            f"{title} has format {protocol.format}, expected at most {FORMAT}: a newer program"
            " wrote it, so run that"
        )
    return protocol


def with_weights(hot: bytes, made: ModelId, weights: bytes) -> bytes | None:
    """Return a hot snapshot with these weights and without a seal; None if it is of another model.

    Raises:
        CorruptError: If it is torn.
        FutureFormatError: If a newer program wrote it.
    """
    protocol = decode_protocol(decoded(unframe, hot, TORN, CorruptError)[0], "a hot snapshot")
    if decoded(_NAMED.decode, protocol.snapshot, TORN, CorruptError).made != made:
        return None
    protocol.seal = b""
    return frame(msgspec.msgpack.encode(protocol), weights)


def first_weights(data: bytes) -> bytes:
    """Return those of a hot snapshot's weights that are in its first bytes; empty if none are."""
    try:
        return bytes(unframe(data)[1])
    except WireError:
        return b""
