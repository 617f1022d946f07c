"""A snapshot as bytes, hot in Redis and checkpointed in object storage: protocol and numbers.

| part                  | what                                                                    |
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
HEAD_BYTES = 1 << 14  # of a hot snapshot: its protocol's part is in them, unless that is very long


class SnapshotFile(NamedTuple):
    """Both parts of a snapshot."""

    snapshot: Snapshot
    trainer: bytes

    @property
    def name(self) -> ModelId:
        """The leader that wrote it, the version that it holds."""
        return self.snapshot.name


class FoundSnapshot(NamedTuple):
    """A snapshot that was found; its weights are read when they are wanted."""

    title: str  # for people: "the checkpoint 12-400"
    snapshot: Snapshot
    trainer: Callable[[], bytes]  # raises `CorruptError` where they are not what was written
    has_weights: bool = True  # else they are with the members of a group alone


_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)


def to_parts(saved: SnapshotFile) -> dict[str, bytes]:
    """Write the parts of a checkpoint."""
    return {_PROTOCOL: _encode(saved.snapshot), _TRAINER: saved.trainer}


def from_checkpoint(checkpoint: Checkpoint) -> FoundSnapshot:
    """Read a checkpoint, all but the weights.

    Raises:
        CorruptError: If a part is missing, or the protocol's is not what was written.
        FutureFormatError: If a newer program wrote it.
        UnavailableError: If storage is unavailable.
    """
    title = f"the checkpoint {format_model_id(checkpoint.name)}"
    if _TRAINER not in checkpoint.manifest.parts:
        raise CorruptError(f"a snapshot without {_TRAINER}")
    snapshot = _decode(checkpoint.read(_PROTOCOL), title)
    return FoundSnapshot(title, snapshot, partial(checkpoint.read, _TRAINER))


class StoreContent(NamedTuple):
    """The finished checkpoints of a job."""

    readable: dict[ModelId, FoundSnapshot]  # later leaders and versions first
    torn: dict[ModelId, str]  # listed, and why they cannot be read
    gone: dict[ModelId, str]  # not listed although the hint names it
    hint: str  # what is wrong with the hint, if it does not parse or cannot be read

    @property
    def unreadable(self) -> dict[ModelId, str]:
        """Why those cannot be read that were finished once."""
        return self.torn | self.gone


def from_store(store: CheckpointStore) -> StoreContent:
    """Read every finished checkpoint, all but the weights, later leaders and versions first.

    Raises:
        FutureFormatError: If a newer program wrote one: to go on without it would take back what
            that program trained.
        UnavailableError: If storage is unavailable: a better one might be there.
    """
    readable = dict[ModelId, FoundSnapshot]()
    torn, gone = dict[ModelId, str](), dict[ModelId, str]()
    away: UnavailableError | None = None
    try:
        hint, wrong = store.hint()  # before the list: a new checkpoint is not missed
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
    """Write a hot snapshot, in one piece.

    Args:
        saved: The snapshot.
        key: Secret of the job that seals the protocol's part. Empty: it is not sealed.
    """
    return frame(_encode(saved.snapshot, key), saved.trainer)


def is_sealed(data: bytes, key: str) -> bool:
    """True if whoever wrote a hot snapshot knew the job's secret, so that it is a coordinator's.

    Raises:
        CorruptError: If it is not whole.
    """
    framed, _ = decoded(unframe, data, TORN, CorruptError)
    protocol = decoded(PROTOCOL.decode, framed, TORN, CorruptError)
    return hmac.compare_digest(protocol.seal, _seal(protocol, key))


def from_bytes(data: bytes) -> SnapshotFile:
    """Read a hot snapshot.

    Raises:
        CorruptError: If it is not whole.
        FutureFormatError: If a newer program wrote it.
    """
    protocol, trainer = decoded(unframe, data, TORN, CorruptError)
    return SnapshotFile(_decode(protocol, "a hot snapshot"), bytes(trainer))


def from_head(data: bytes, most: int = HEAD_BYTES) -> SnapshotFile | None:
    """Read a hot snapshot from its first bytes, with those of its weights that are among them.

    Args:
        data: What begins it.
        most: As many bytes of it as were asked for.

    Returns:
        None where its protocol's part takes more of them.

    Raises:
        CorruptError: If they are not a snapshot's.
        FutureFormatError: If a newer program wrote it.
    """
    try:
        protocol, trainer = unframe(data)
    except WireError:
        return None
    if not trainer and len(data) >= most:
        return None
    return SnapshotFile(_decode(protocol, "a hot snapshot"), bytes(trainer))


def in_hand(saved: SnapshotFile) -> FoundSnapshot:
    """A hot snapshot as one that was found."""

    def trainer() -> bytes:
        if not saved.trainer:
            raise CorruptError("its weights are with the workers alone")
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
