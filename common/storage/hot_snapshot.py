"""Bytes of a hot snapshot, for code that needs the weights but not the protocol's state.

See `common.storage.snapshot_file` for the format.
"""

from __future__ import annotations

from functools import partial

import msgspec

from common.core.messages import ModelId  # noqa: TC001 -- msgspec reads it when run
from common.errors import CorruptError, FutureFormatError, WireError, decoded
from common.wire.messages import frame, unframe

# Latest format of the protocol's part that this program can read.
FORMAT = 1
NO_PROTOCOL = "a snapshot's protocol part does not parse"
TORN = "a hot snapshot is incomplete"


class SnapshotProtocol(msgspec.Struct):
    """Protocol part of a snapshot.

    Attributes:
        format: Format of the part.
        snapshot: Encoded `Snapshot`. A later format need not have it.
        seal: Seal of a hot snapshot, made with a secret that only Kafka stores.
    """

    format: int
    snapshot: msgspec.Raw = msgspec.Raw()
    seal: bytes = b""


class _Named(msgspec.Struct):
    made: ModelId


PROTOCOL = msgspec.msgpack.Decoder(SnapshotProtocol)
_NAMED = msgspec.msgpack.Decoder(_Named)


def decode_protocol(data: bytes | memoryview, title: str) -> SnapshotProtocol:
    """Decode a protocol part, but not the snapshot in it.

    Raises:
        CorruptError: If the part does not parse.
        FutureFormatError: If a newer program wrote the part.
    """
    protocol = decoded(PROTOCOL.decode, data, NO_PROTOCOL, CorruptError)
    if protocol.format > FORMAT:
        raise FutureFormatError(
            f"{title} has format {protocol.format}, expected at most {FORMAT}; a newer version of"
            " DOLL wrote it, so run that version"
        )
    return protocol


def with_weights(hot: bytes, made: ModelId, weights: bytes) -> bytes | None:
    """Return a hot snapshot with these weights and without a seal.

    Args:
        hot: Hot snapshot.
        made: Version of the weights. A snapshot of another version returns None.
        weights: Weights to put into the snapshot.

    Raises:
        CorruptError: If the snapshot is torn or has a later format. Anybody with access to Redis
            can write such a snapshot, so it must not end a worker.
    """
    header, _ = decoded(unframe, hot, TORN, CorruptError)
    protocol = decoded(partial(decode_protocol, title="a hot snapshot"), header, TORN, CorruptError)
    if decoded(_NAMED.decode, protocol.snapshot, TORN, CorruptError).made != made:
        return None
    protocol.seal = b""
    return frame(msgspec.msgpack.encode(protocol), weights)


def first_weights(data: bytes) -> bytes:
    """Return the weights that are in the first bytes of a hot snapshot; may be empty."""
    try:
        return bytes(unframe(data)[1])
    except WireError:
        return b""
