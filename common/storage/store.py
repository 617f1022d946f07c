"""Checkpoints in object storage: which are there, which are kept, which is the best.

    <job>/checkpoints/<epoch>-<version>/<part>         written first
    <job>/checkpoints/<epoch>-<version>/manifest.json  written last: size and checksum of each part
    <job>/checkpoints/latest                           a hint for tools, moved when all is there
    <job>/checkpoints/best                             likewise: the lowest loss
    <job>/states/<epoch>-<version>.safetensors         what workers hold: the trainer's part alone
    <job>/origin/<sha256>.safetensors                  what it began with, if that was another's

A checkpoint is named by the leader that wrote it and the version that it holds; later leaders rank
above higher versions (docs/explain/checkpoints.md). It is finished when it has its manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from common.core.messages import ModelId, drawn_at_s
from common.errors import CorruptError, FutureFormatError, UnavailableError, decoded
from common.learning.checkpoint import whole_of

if TYPE_CHECKING:
    from common.storage.port import Blobs

MANIFEST = "manifest.json"
_NO_MANIFEST = f"{MANIFEST} does not parse"
FORMAT = 1  # the latest that this program knows
_FOLDER = re.compile(r"([0-9]{20})-([0-9]{12})")
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_LATEST, _BEST = "latest", "best"
# Time for which a checkpoint that a Lead took back stays. A person notices a mistake by then.
TAKEN_BACK_S = 86_400.0
_MOVES = 10  # attempts to move a hint; only a few leaders ever write at once


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint; its parts stay where they are until they are read."""

    name: ModelId  # the leader that wrote it, the version that it holds
    manifest: Manifest
    folder: str
    blobs: Blobs

    def read(self, part: str) -> bytes:
        """Read a part and verify it.

        Raises:
            CorruptError: If it is missing or not what was written.
            UnavailableError: If storage is unavailable.
        """
        expected = self.manifest.parts.get(part)
        if expected is None:
            raise CorruptError(f"{MANIFEST} does not list {part}")
        data = self.blobs.get(self.folder + part)
        if data is None:
            raise CorruptError(f"{part} is missing, expected {expected.bytes} bytes")
        found = describe(data)
        if found != expected:
            raise CorruptError(f"{part} has {found}, expected {expected}")
        return data


class CheckpointStore:
    """The checkpoints of one job. Every call may raise `UnavailableError`."""

    def __init__(self, blobs: Blobs, job: str) -> None:
        self._blobs = blobs
        self._root = f"{job}/checkpoints/"
        self._origin = f"{job}/origin/"
        self._states = f"{job}/states/"

    @property
    def where(self) -> str:
        """Address of the job's checkpoints for people, without secrets."""
        return f"{self._blobs.where} ({self._root})"

    def save(
        self,
        name: ModelId,
        parts: Mapping[str, bytes | memoryview],
        created_s: float,
        *,
        samples: int = 0,
        loss: float | None = None,
    ) -> None:
        """Write a checkpoint; does nothing where it is finished already, for it never changes.

        Raises:
            ValueError: If it is the genesis, which the specification makes, or a part's name is
                none.
        """
        if name.epoch < 0:
            raise ValueError(f"{name} was made by nobody: it is never stored")
        for part in parts:
            if not is_part(part):
                raise ValueError(f"{part!r} is no name for a part of a checkpoint")
        folder = self.folder(name)
        if self._blobs.get(folder + MANIFEST) is None:
            for part, data in parts.items():
                self._blobs.put(folder + part, data)
            listed = {part: describe(data) for part, data in parts.items()}
            manifest = Manifest(FORMAT, *name, created_s, listed, samples, loss)
            self._blobs.put(folder + MANIFEST, msgspec.json.encode(manifest))
        self._move_latest(name)

    def verify(self, name: ModelId) -> None:
        """Read a finished checkpoint back as somebody would who looks for it.

        Raises:
            CorruptError: If the list lacks it or one of its parts, or a part is not what was
                written.
        """
        folder, listed = self.folder(name), set(self._blobs.names(self._root))
        checkpoint = self.open(name)
        for part in (MANIFEST, *checkpoint.manifest.parts):
            if folder + part not in listed:
                raise CorruptError(f"{self.where} does not list {part} of {format_model_id(name)}")
        for part in checkpoint.manifest.parts:
            checkpoint.read(part)

    def finished(self) -> list[ModelId]:
        """Every checkpoint that has a manifest, later leaders and higher versions first."""
        return self._folders(self._blobs.names(self._root), MANIFEST)

    def open(self, name: ModelId) -> Checkpoint:
        """Read a checkpoint's manifest.

        Raises:
            CorruptError: If it is missing or does not parse.
            FutureFormatError: If a newer program wrote it.
        """
        folder = self.folder(name)
        data = self._blobs.get(folder + MANIFEST)
        if data is None:
            raise CorruptError(f"{MANIFEST} is missing")
        return Checkpoint(name, decode_manifest(data, name), folder, self._blobs)

    def latest(self) -> ModelId | None:
        """Where the hint points: finished when it was set, but perhaps not the newest by now."""
        return _hinted(self._blobs.get(self._root + _LATEST))

    def hint(self) -> tuple[ModelId | None, str]:
        """Return where `latest` points, and what is wrong with it if it does not parse."""
        data = self._blobs.get(self._root + _LATEST)
        name = _hinted(data)
        wrong = "" if data is None or name else f"`latest` does not parse: {data[:40]!r}"
        return name, wrong

    def best(self) -> ModelId | None:
        """Where the hint to the lowest loss points, likewise."""
        return _hinted(self._blobs.get(self._root + _BEST))

    def keep(
        self,
        count: int,
        newest: ModelId | None,
        begun: ModelId | None = None,
        now_s: float = 0.0,
    ) -> tuple[Checkpoint, ...]:
        """Delete all but the newest `count` and the one of lowest loss; return these, newest first.

        Checkpoints that are known to be taken back do not count and are deleted after
        `TAKEN_BACK_S`. Remains of unfinished ones are deleted if they are below the oldest of the
        newest: above it somebody may be writing. What a newer program wrote stays, and what cannot
        be read now. A manifest is deleted first, so that a deletion cut short leaves no checkpoint.

        Nothing is deleted unless the list begins with what was just read back, and agrees with what
        reads say: any other list may be stale, cut off, or of another store.

        Args:
            count: At least 1.
            newest: The checkpoint that the caller just read back; None if there is none.
            begun: The first snapshot of the leader that asks, also if it is no checkpoint. It
                shows which ones this leader took back.
            now_s: The time, in seconds since 1970.

        Raises:
            ValueError: If none would be kept.
        """
        if count < 1:
            raise ValueError(f"keep {count} checkpoints: at least one is needed to start again")
        hint = self._blobs.get_tagged(self._root + _BEST)  # before looking: who looked last wins
        names = self._blobs.names(self._root)
        finished = self._folders(names, MANIFEST)
        whole, foreign = self._opened(finished)
        witnesses = [each.name for each in whole] + ([] if begun is None else [begun])
        counting = [each for each in whole if not taken_back(each.name, witnesses)]
        best, readable = lowest_loss(counting), {each.name for each in whole}
        kept = counting[:count]
        if best is not None and best not in kept:
            kept.append(best)
        if not counting or counting[0].name != newest:
            return tuple(kept)
        hinted = _hinted(None if hint is None else hint[0])
        gone = hinted not in self._folders(names)
        if best is not None and best.name != hinted and (gone or hinted in readable):
            tag = None if hint is None else hint[1]
            self._blobs.replace(self._root + _BEST, folder_of(best.name).encode(), tag)
        spared = {each.name for each in kept} | foreign | (set(finished) - readable)
        spared |= {hinted} - readable if hinted is not None else set()
        void = readable - {each.name for each in counting}
        spared |= {name for name in void if not _long_taken_back(name, witnesses, now_s)}
        oldest = counting[count - 1].name if len(counting) >= count else counting[-1].name
        remains = [n for n in self._folders(names) if n not in finished and n < oldest]
        if any(self._blobs.get(self.folder(name) + MANIFEST) is not None for name in remains):
            return tuple(kept)  # the list is not complete
        for name in (*void, *readable, *remains):
            below = len(counting) >= count and name < oldest
            if name not in spared and (name in void or below):
                self._delete(name)
        return tuple(kept)

    def put_origin(self, data: bytes) -> str:
        """Keep what the job begins with; returns the checksum by which it is found again."""
        sha256 = describe(data).sha256
        self._blobs.put(f"{self._origin}{sha256}.safetensors", data)
        return sha256

    def origin(self, sha256: str) -> bytes:
        """Read what the job begins with.

        Raises:
            CorruptError: If it is missing or not what was written.
        """
        name = f"{self._origin}{sha256}.safetensors"
        data = self._blobs.get(name)
        if data is None:
            raise CorruptError(f"{name} is missing")
        found = describe(data)
        if found.sha256 != sha256:
            raise CorruptError(f"{name} has {found}, expected {sha256[:16]}")
        return data

    def put_state(self, made: ModelId, data: bytes) -> None:
        """Keep all that a worker holds: weights and optimizer state of a version.

        Args:
            made: The version, as its audit record names it.
            data: As `Trainer.snapshot` writes it.
        """
        self._blobs.put(self._state(made), data)

    def put_slices(self, made: ModelId, numbers: Collection[int], data: bytes) -> None:
        """Keep slices of a version, as `SlicedTrainer.snapshot` writes them with their weights."""
        self._blobs.put(self._state(made, f".{'-'.join(map(str, numbers))}"), data)

    def state(self, made: ModelId) -> bytes:
        """Read weights and optimizer state of a version, as `Trainer.snapshot` writes them.

        One process has stored them all, or owners have stored their slices.

        Raises:
            CorruptError: If they are not whole.
        """
        data = self._blobs.get(self._state(made))
        if data is not None:
            return data
        names = self._blobs.names(f"{self._states}{made.epoch}-{made.version}.")
        return whole_of(data for name in sorted(names) if (data := self._blobs.get(name)))

    def keep_states(
        self, kept: Collection[ModelId], begun: ModelId | None = None, now_s: float = 0.0
    ) -> None:
        """Delete states of versions below these, by the same rules as `keep` deletes checkpoints.

        Args:
            kept: Versions that workers may copy. If the list lacks one, nothing is deleted.
            begun: As for `keep`.
            now_s: As for `keep`.
        """
        names = {name: self._made(name) for name in self._blobs.names(self._states)}
        if not kept or not set(kept) <= set(names.values()):
            return
        oldest = min(made.version for made in kept)
        witnesses = self.finished() + ([] if begun is None else [begun])
        for name, made in names.items():
            if made is None or made.version >= oldest:
                continue
            if not taken_back(made, witnesses) or _long_taken_back(made, witnesses, now_s):
                self._blobs.delete(name)

    def _made(self, name: str) -> ModelId | None:
        """Return of which version a state is; None if the name is not one of ours."""
        epoch, _, version = name.removeprefix(self._states).partition(".")[0].rpartition("-")
        ours = version.isdigit() and epoch.removeprefix("-").isdigit()
        return ModelId(int(epoch), int(version)) if ours else None

    def _state(self, made: ModelId, slices: str = "") -> str:
        return f"{self._states}{made.epoch}-{made.version}{slices}.safetensors"

    def folder(self, name: ModelId) -> str:
        """Where a checkpoint is, from the storage's root on."""
        return f"{self._root}{folder_of(name)}/"

    def _folders(self, names: Iterable[str], holding: str = "") -> list[ModelId]:
        """Checkpoints of which anything is there, or one file, best first."""
        split = (name.removeprefix(self._root).partition("/") for name in names)
        folders = {folder for folder, _, file in split if holding in ("", file)}
        return sorted(filter(None, map(named_by, folders)), reverse=True)

    def _opened(self, names: Iterable[ModelId]) -> tuple[list[Checkpoint], set[ModelId]]:
        """Those whose manifest can be read, and those of a newer program."""
        whole, foreign = list[Checkpoint](), set[ModelId]()
        for name in names:
            try:
                whole.append(self.open(name))
            except FutureFormatError:
                foreign.add(name)
            except CorruptError:
                continue
        return whole, foreign

    def _delete(self, name: ModelId) -> None:
        folder = self.folder(name)
        self._blobs.delete(folder + MANIFEST)
        for remains in self._blobs.names(folder):
            self._blobs.delete(remains)

    def _move_latest(self, name: ModelId) -> None:
        """Point the hint here, unless it points at a better one; others only move it on."""
        latest = self._root + _LATEST
        for _ in range(_MOVES):
            found = self._blobs.get_tagged(latest)
            current = _hinted(None if found is None else found[0])
            if current is not None and current >= name:
                return
            if self._blobs.replace(
                latest, folder_of(name).encode(), None if found is None else found[1]
            ):
                return
        raise UnavailableError(
            f"{self.where} does not keep what was written to {latest}", "storage"
        )


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


def taken_back(name: ModelId, witnesses: Iterable[ModelId]) -> bool:
    """Whether snapshots of later leaders prove that a checkpoint holds updates that count no more.

    A leader adds to the version that it started from. So where it made a snapshot of a version,
    whatever an earlier leader has above that version was taken back, for ever. The reverse does not
    hold: of a leader that left no snapshot, only the audit knows.

    Args:
        name: The checkpoint.
        witnesses: Snapshots by the epoch of their writer and the version that they hold.
    """
    return any(name.epoch < other.epoch and other.version < name.version for other in witnesses)


def _long_taken_back(name: ModelId, witnesses: Iterable[ModelId], now_s: float) -> bool:
    """True if the first leader known to have gone back below a version began `TAKEN_BACK_S` ago."""
    epochs = [each.epoch for each in witnesses if taken_back(name, [each])]
    return bool(epochs) and now_s >= drawn_at_s(min(epochs)) + TAKEN_BACK_S


def lowest_loss(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The best one; of several the first, None where none has made an update."""
    losses = [(each.manifest.loss, each) for each in checkpoints]
    rated = [(loss, each) for loss, each in losses if loss is not None]
    return min(rated, key=lambda pair: pair[0])[1] if rated else None


def _hinted(data: bytes | None) -> ModelId | None:
    return None if data is None else named_by(data.decode("ascii", "replace"))
