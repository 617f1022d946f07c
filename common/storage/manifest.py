"""The manifest of a checkpoint: what it must hold, by which a torn or altered one is found out."""

from __future__ import annotations

import hashlib
import re

import msgspec

from common.core.messages import ModelId
from common.errors import CorruptError, FutureFormatError, decoded

MANIFEST = "manifest.json"
_NO_MANIFEST = f"{MANIFEST} does not parse"
FORMAT = 1  # the latest that this program knows
_FOLDER = re.compile(r"([0-9]{20})-([0-9]{12})")
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]*")


class CheckpointPart(msgspec.Struct, frozen=True):
    """One part of a checkpoint, as it was written."""

    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.bytes} bytes of sha256 {self.sha256[:16]}"


class Manifest(msgspec.Struct, frozen=True):
    """All that can be known of a checkpoint without reading it."""

    format: int
    epoch: int
    version: int
    created_s: float  # since 1970
    parts: dict[str, CheckpointPart]
    samples: int = 0  # trained since the job began
    loss: float | None = None  # mean prequential loss of the last updates, None before the first


class _Format(msgspec.Struct):
    """What the manifests of all formats have in common."""

    format: int


_FORMAT = msgspec.json.Decoder(_Format)
_MANIFEST = msgspec.json.Decoder(Manifest)


def describe(data: bytes | memoryview) -> CheckpointPart:
    """What a manifest says of these bytes."""
    return CheckpointPart(memoryview(data).nbytes, hashlib.sha256(data).hexdigest())


def decode_manifest(data: bytes, name: ModelId) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CorruptError: If it does not parse, or is that of another checkpoint.
        FutureFormatError: If a newer program wrote it.
    """
    found = decoded(_FORMAT.decode, data, _NO_MANIFEST, CorruptError).format
    if found > FORMAT:
        raise FutureFormatError(
            f"the checkpoint {format_model_id(name)} has format {found}, expected at most"
            f" {FORMAT}: a newer program wrote it, so run that"
        )
    manifest = decoded(_MANIFEST.decode, data, _NO_MANIFEST, CorruptError)
    if (manifest.epoch, manifest.version) != name:
        other = format_model_id(ModelId(manifest.epoch, manifest.version))
        raise CorruptError(f"{MANIFEST} is that of {other}, expected {format_model_id(name)}")
    strange = [part for part in manifest.parts if not is_part(part)]
    if strange:
        raise CorruptError(f"{MANIFEST} lists {strange[0]!r}, expected names of parts")
    return manifest


def is_part(name: str) -> bool:
    """Whether a part may have this name."""
    return name != MANIFEST and _PART.fullmatch(name) is not None


def folder_of(name: ModelId) -> str:
    """A checkpoint's folder; leading zeros make folders sort as their checkpoints rank."""
    return f"{name.epoch:020}-{name.version:012}"


def named_by(folder: str) -> ModelId | None:
    """Which checkpoint has this folder, None where it is none of ours."""
    match = _FOLDER.fullmatch(folder)
    return ModelId(int(match[1]), int(match[2])) if match else None


def format_model_id(name: ModelId) -> str:
    """A checkpoint's name as people read it."""
    return f"{name.epoch}-{name.version}"
