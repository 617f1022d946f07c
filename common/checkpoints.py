"""Checkpoints in object storage: torn or altered ones are found out and passed over.

    <job>/checkpoints/<epoch>-<version>/<part>         written first
    <job>/checkpoints/<epoch>-<version>/manifest.json  written last: size and checksum of each part
    <job>/checkpoints/latest                           a hint for tools, moved when all is there

A checkpoint is named by the leader that wrote it and the version that it holds; later leaders rank
above higher versions (docs/protocol.md). Numbers have leading zeros, so that names sort as they
rank.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from common.core.messages import ModelId
from common.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.ports import Blobs

FORMAT = 1  # of the manifest; a reader refuses a later one than it knows
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"([0-9]{20})-([0-9]{12})")
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All parts of a checkpoint, each as it was written."""

    name: ModelId  # the leader that wrote it, the version that it holds
    created_s: float
    parts: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not taken, and why."""

    name: ModelId
    reason: str


class _Part(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    epoch: int
    version: int
    created_s: float
    parts: dict[str, _Part]


class CheckpointStore:
    """The checkpoints of one job. Every call may raise `UnavailableError`."""

    def __init__(self, blobs: Blobs, job: str) -> None:
        self._blobs = blobs
        self._root = f"{job}/checkpoints/"

    def save(
        self, name: ModelId, parts: Mapping[str, bytes | memoryview], created_s: float
    ) -> None:
        """Write a checkpoint; does nothing where it is complete already, for it never changes.

        Raises:
            ValueError: If it is the genesis, which the specification makes, or a part's name is
                none.
        """
        if name.epoch < 0:
            raise ValueError(f"{name} was made by nobody: it is never stored")
        for part in parts:
            if not _is_part(part):
                raise ValueError(f"{part!r} is no name for a part of a checkpoint")
        folder = self._folder(name)
        if self._blobs.get(folder + _MANIFEST) is None:
            for part, data in parts.items():
                self._blobs.put(folder + part, data)
            listed = {part: _described(data) for part, data in parts.items()}
            manifest = _Manifest(FORMAT, name.epoch, name.version, created_s, listed)
            self._blobs.put(folder + _MANIFEST, msgspec.json.encode(manifest))
        self._move_latest(name)

    def load(self, name: ModelId) -> Checkpoint:
        """Read a checkpoint and verify every part of it.

        Raises:
            CorruptError: If it is torn, or a part is not what was written.
        """
        manifest = self._manifest(name)
        parts = {}
        for part, expected in manifest.parts.items():
            data = self._blobs.get(self._folder(name) + part)
            if data is None:
                raise CorruptError(f"{part} is missing, expected {expected.bytes} bytes")
            found = _described(data)
            if found != expected:
                raise CorruptError(f"{part} has {_told(found)}, expected {_told(expected)}")
            parts[part] = data
        return Checkpoint(name, manifest.created_s, parts)

    def candidates(self) -> list[ModelId]:
        """Every checkpoint of which anything is there, the best first."""
        names = self._blobs.names(self._root)
        folders = {name.removeprefix(self._root).split("/")[0] for name in names}
        return sorted(filter(None, map(_parsed, folders)), reverse=True)

    def best(
        self, allowed: Callable[[ModelId], bool] = lambda _: True
    ) -> tuple[Checkpoint | None, tuple[PassedOver, ...]]:
        """Load the best one that is whole, and tell which better ones were passed over.

        Args:
            allowed: False for one that a later leader took back; it is not even read.
        """
        passed_over = []
        for name in self.candidates():
            if not allowed(name):
                passed_over.append(PassedOver(name, "taken back by a later leader"))
                continue
            try:
                return self.load(name), tuple(passed_over)
            except CorruptError as error:
                passed_over.append(PassedOver(name, str(error)))
        return None, tuple(passed_over)

    def latest(self) -> ModelId | None:
        """Where the hint points: whole when it was set, but perhaps not the best by now."""
        found = self._blobs.get(self._root + "latest")
        return None if found is None else _parsed(found.decode("ascii", "replace"))

    def keep(self, count: int) -> None:
        """Delete all but the best `count` that are complete.

        Remains below those go too; above them somebody may be writing. A manifest goes first, so
        that what is left of a deletion that was interrupted is no checkpoint.

        Raises:
            ValueError: If none would be kept.
        """
        if count < 1:
            raise ValueError(f"keep {count} checkpoints: at least one is needed to start again")
        complete = [
            name for name in self.candidates() if self._blobs.get(self._folder(name) + _MANIFEST)
        ]
        if len(complete) < count:
            return
        oldest_kept = complete[count - 1]
        for name in self.candidates():
            if name < oldest_kept:
                folder = self._folder(name)
                self._blobs.delete(folder + _MANIFEST)
                for remains in self._blobs.names(folder):
                    self._blobs.delete(remains)

    def _folder(self, name: ModelId) -> str:
        return f"{self._root}{_named(name)}/"

    def _manifest(self, name: ModelId) -> _Manifest:
        data = self._blobs.get(self._folder(name) + _MANIFEST)
        if data is None:
            raise CorruptError(f"{_MANIFEST} is missing: it was never finished")
        try:
            manifest = msgspec.json.decode(data, type=_Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(f"{_MANIFEST} does not parse: {error}") from error
        if manifest.format != FORMAT:
            raise CorruptError(f"{_MANIFEST} has format {manifest.format}, expected {FORMAT}")
        if (manifest.epoch, manifest.version) != name:
            found = _named(ModelId(manifest.epoch, manifest.version))
            raise CorruptError(f"{_MANIFEST} is that of {found}, expected {_named(name)}")
        strange = [part for part in manifest.parts if not _is_part(part)]
        if strange:
            raise CorruptError(f"{_MANIFEST} lists {strange[0]!r}, expected names of parts")
        return manifest

    def _move_latest(self, name: ModelId) -> None:
        """Point the hint here, unless it points at a better one; others only move it on."""
        latest = self._root + "latest"
        while True:
            found = self._blobs.get_tagged(latest)
            current = None if found is None else _parsed(found[0].decode("ascii", "replace"))
            if current is not None and current >= name:
                return
            if self._blobs.replace(
                latest, _named(name).encode(), None if found is None else found[1]
            ):
                return


def _named(name: ModelId) -> str:
    return f"{name.epoch:020}-{name.version:012}"


def _is_part(name: str) -> bool:
    return name != _MANIFEST and _PART.fullmatch(name) is not None


def _parsed(folder: str) -> ModelId | None:
    match = _FOLDER.fullmatch(folder)
    return ModelId(int(match[1]), int(match[2])) if match else None


def _described(data: bytes | memoryview) -> _Part:
    return _Part(memoryview(data).nbytes, hashlib.sha256(data).hexdigest())


def _told(part: _Part) -> str:
    return f"{part.bytes} bytes of sha256 {part.sha256[:16]}"
