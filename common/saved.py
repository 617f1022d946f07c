"""A snapshot as bytes, hot in Redis and checkpointed in object storage: protocol and numbers.

| part                  | what                                                                    |
| --------------------- | ----------------------------------------------------------------------- |
| protocol.msgpack      | `core.snapshots.Snapshot`: positions, waiting batches, strikes          |
| trainer.safetensors   | `learning.trainer.Trainer.snapshot()`: weights and optimizer state      |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from common.core.snapshots import Snapshot
from common.errors import CorruptError, WireError
from common.wire import frame, unframe

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROTOCOL, _TRAINER = "protocol.msgpack", "trainer.safetensors"


class Saved(NamedTuple):
    """Both parts of a snapshot."""

    snapshot: Snapshot
    trainer: bytes


def to_parts(saved: Saved) -> dict[str, bytes]:
    """Write the parts of a checkpoint."""
    return {_PROTOCOL: msgspec.msgpack.encode(saved.snapshot), _TRAINER: saved.trainer}


def from_parts(parts: Mapping[str, bytes]) -> Saved:
    """Read the parts of a checkpoint.

    Raises:
        CorruptError: If one is missing or does not parse.
    """
    missing = {_PROTOCOL, _TRAINER} - parts.keys()
    if missing:
        raise CorruptError(f"a snapshot without {', '.join(sorted(missing))}")
    return Saved(_snapshot(parts[_PROTOCOL]), parts[_TRAINER])


def to_bytes(saved: Saved) -> bytes:
    """Write a hot snapshot, in one piece."""
    return frame(msgspec.msgpack.encode(saved.snapshot), saved.trainer)


def from_bytes(data: bytes) -> Saved:
    """Read a hot snapshot.

    Raises:
        CorruptError: If it is not whole.
    """
    try:
        protocol, trainer = unframe(data)
    except WireError as error:
        raise CorruptError(f"a hot snapshot is torn: {error}") from error
    return Saved(_snapshot(protocol), bytes(trainer))


def _snapshot(data: bytes | memoryview) -> Snapshot:
    try:
        return msgspec.msgpack.decode(data, type=Snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"a snapshot's protocol part does not parse: {error}") from error
