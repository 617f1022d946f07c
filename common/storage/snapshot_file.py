"""Format of snapshots, both hot in Redis and as checkpoints in object storage.

| part                  | content                                                                 |
| --------------------- | ----------------------------------------------------------------------- |
| protocol.msgpack      | `core.snapshots.Snapshot`: positions, waiting batches, failure counts   |
| trainer.safetensors   | `learning.trainer.Trainer.snapshot()`: weights and optimizer state      |
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from common.core.messages import ModelId
from common.core.snapshots import Snapshot
from common.errors import CorruptError, UnavailableError, WireError, decoded
from common.storage.hot_snapshot import (
    FORMAT,
    NO_PROTOCOL,
    PROTOCOL,
    TORN,
    SnapshotProtocol,
    decode_protocol,
)
from common.storage.store import format_model_id
from common.wire.messages import frame, unframe

if TYPE_CHECKING:
    from common.storage.store import Checkpoint, CheckpointStore

_PROTOCOL, _TRAINER = "protocol.msgpack", "trainer.safetensors"
# First bytes of a hot snapshot, which contain the protocol part unless that is very long.
HEAD_BYTES = 1 << 14


class SnapshotFile(NamedTuple):
    """Both parts of a snapshot."""

    snapshot: Snapshot
    trainer: bytes

    @property
    def name(self) -> ModelId:
        """Epoch of the leader that wrote the snapshot, and the snapshot's version."""
        return self.snapshot.name


class FoundSnapshot(NamedTuple):
    """A snapshot that was found. Its weights are read on demand.

    Attributes:
        title: Name for people: "the checkpoint 12-400".
        snapshot: State of the protocol.
        trainer: Reads weights and optimizer state. Raises `CorruptError` if they are damaged.
        has_weights: False if only the members of a group have the weights.
    """

    title: str
    snapshot: Snapshot
    trainer: Callable[[], bytes]
    has_weights: bool = True


_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)


def to_parts(saved: SnapshotFile) -> dict[str, bytes]:
    """Encode the parts of a checkpoint, by file name."""
    return {_PROTOCOL: _encode(saved.snapshot), _TRAINER: saved.trainer}


def from_checkpoint(checkpoint: Checkpoint) -> FoundSnapshot:
    """Read a checkpoint without its weights.

    Raises:
        CorruptError: If a part is missing, or the protocol part is damaged.
        FutureFormatError: If a newer program wrote the checkpoint.
        UnavailableError: If storage is unavailable.
    """
    title = f"the checkpoint {format_model_id(checkpoint.name)}"
    if _TRAINER not in checkpoint.manifest.parts:
        raise CorruptError(f"the snapshot has no {_TRAINER}")
    snapshot = _decode(checkpoint.read(_PROTOCOL), title)
    return FoundSnapshot(title, snapshot, partial(checkpoint.read, _TRAINER))


class StoreContent(NamedTuple):
    """The finished checkpoints of a job.

    Attributes:
        readable: Checkpoints that can be read, highest rank first (see `common.storage.store`).
        torn: Reason for each listed checkpoint that cannot be read.
        gone: Reason for the checkpoint that the hint names, if storage does not list it.
        hint: Reason if the hint cannot be read or does not parse; otherwise empty.
    """

    readable: dict[ModelId, FoundSnapshot]
    torn: dict[ModelId, str]
    gone: dict[ModelId, str]
    hint: str

    @property
    def unreadable(self) -> dict[ModelId, str]:
        """Reason for each finished checkpoint that cannot be read."""
        return self.torn | self.gone


def from_store(store: CheckpointStore) -> StoreContent:
    """Read all finished checkpoints without their weights, highest rank first.

    Raises:
        FutureFormatError: If a newer program wrote a checkpoint. Skipping it would undo the updates
            of that program.
        UnavailableError: If storage is unavailable, since it may have a better checkpoint.
    """
    readable = dict[ModelId, FoundSnapshot]()
    torn, gone = dict[ModelId, str](), dict[ModelId, str]()
    away: UnavailableError | None = None
    try:
        # The hint is read before the list. So the list has the checkpoint, even if it was just
        # written.
        hint, wrong = store.hint()
    except UnavailableError as error:
        hint, wrong, away = None, f"`latest` cannot be read: {error}", error
    names = store.finished()
    if away is not None and not names:
        raise away
    for name in sorted({*names, *([] if hint is None else [hint])}, reverse=True):
        try:
            readable[name] = from_checkpoint(store.open(name))
        except CorruptError as error:
            (torn if name in names else gone)[name] = str(error)
    return StoreContent(readable, torn, gone, wrong)


def to_bytes(saved: SnapshotFile, key: str = "") -> bytes:
    """Encode a hot snapshot.

    Args:
        saved: The snapshot.
        key: Optional. Secret of the job that seals the protocol part. If unset, there is no seal.
    """
    return frame(_encode(saved.snapshot, key), saved.trainer)


def is_sealed(data: bytes, key: str) -> bool:
    """True if a hot snapshot was sealed with the job's secret, which only coordinators know.

    Raises:
        CorruptError: If the snapshot is torn.
    """
    framed, _ = decoded(unframe, data, TORN, CorruptError)
    protocol = decoded(PROTOCOL.decode, framed, TORN, CorruptError)
    return hmac.compare_digest(protocol.seal, _seal(protocol, key))


def from_bytes(data: bytes) -> SnapshotFile:
    """Decode a hot snapshot.

    Raises:
        CorruptError: If the snapshot is torn.
        FutureFormatError: If a newer program wrote the snapshot.
    """
    protocol, trainer = decoded(unframe, data, TORN, CorruptError)
    return SnapshotFile(_decode(protocol, "a hot snapshot"), bytes(trainer))


def from_head(data: bytes, most: int = HEAD_BYTES) -> SnapshotFile | None:
    """Decode the first bytes of a hot snapshot, with the part of the weights that they contain.

    Args:
        data: First bytes of the snapshot.
        most: Number of bytes that were requested.

    Returns:
        The snapshot, or None if its protocol part is longer than `data`.

    Raises:
        CorruptError: If the bytes are not those of a snapshot.
        FutureFormatError: If a newer program wrote the snapshot.
    """
    try:
        protocol, trainer = unframe(data)
    except WireError:
        return None
    if not trainer and len(data) >= most:
        return None
    return SnapshotFile(_decode(protocol, "a hot snapshot"), bytes(trainer))


def in_hand(saved: SnapshotFile) -> FoundSnapshot:
    """Return a hot snapshot as a `FoundSnapshot`."""

    def trainer() -> bytes:
        if not saved.trainer:
            raise CorruptError("only the workers have its weights")
        return saved.trainer

    title, has_weights = f"the hot snapshot {format_model_id(saved.name)}", bool(saved.trainer)
    return FoundSnapshot(title, saved.snapshot, trainer, has_weights=has_weights)


def _encode(snapshot: Snapshot, key: str = "") -> bytes:
    protocol = SnapshotProtocol(FORMAT, msgspec.Raw(msgspec.msgpack.encode(snapshot)))
    protocol.seal = _seal(protocol, key) if key else b""
    return msgspec.msgpack.encode(protocol)


def _seal(protocol: SnapshotProtocol, key: str) -> bytes:
    return hmac.digest(key.encode(), b"%d " % protocol.format + bytes(protocol.snapshot), "sha256")


def _decode(data: bytes | memoryview, title: str) -> Snapshot:
    protocol = decode_protocol(data, title)
    return decoded(_SNAPSHOT.decode, protocol.snapshot, NO_PROTOCOL, CorruptError)
