"""Checkpoints in object storage: writing, reading, and deleting old ones.

    <job>/checkpoints/<epoch>-<version>/<part>         written first
    <job>/checkpoints/<epoch>-<version>/manifest.json  written last: size and checksum of each part
    <job>/checkpoints/latest                           hint: name of the newest checkpoint
    <job>/checkpoints/best                             hint: name of the one with the lowest loss
    <job>/states/<epoch>-<version>.safetensors         weights and optimizer state of workers
    <job>/origin/<sha256>.safetensors                  another job's checkpoint that it began with
    <job>/origin/init                                  names the weights that `init` gave the job
    <job>/base/<sha256>.safetensors                    tensors that no update changes
    <job>/base/digest                                  names the job's base, and its checksum

The name of a checkpoint has the epoch of the leader that wrote it and its version. Later leaders
rank above higher versions (docs/explain/checkpoints.md). A checkpoint is finished when it has a
manifest.
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
# Latest format of manifests that this program can read.
FORMAT = 1
_FOLDER = re.compile(r"([0-9]{20})-([0-9]{12})")
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_LATEST, _BEST = "latest", "best"
# A checkpoint is taken back if a later leader starts from a lower version. It is then kept for this
# time, in which a person can notice a mistake.
TAKEN_BACK_S = 86_400.0
# Attempts to change a hint. Only a few leaders ever write at the same time.
_MOVES = 10


class CheckpointPart(msgspec.Struct, frozen=True):
    """Size and checksum of one part of a checkpoint."""

    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.bytes} bytes of sha256 {self.sha256[:16]}"


class Manifest(msgspec.Struct, frozen=True):
    """Description of a checkpoint.

    Attributes:
        format: Format of the manifest.
        epoch: Epoch of the leader that wrote the checkpoint.
        version: J, the number of updates in the weights.
        created_s: Time in seconds since 1970.
        parts: Parts by name.
        samples: Samples trained since the job began.
        loss: Mean prequential loss of the last updates; None before the first update.
    """

    format: int
    epoch: int
    version: int
    created_s: float
    parts: dict[str, CheckpointPart]
    samples: int = 0
    loss: float | None = None


class _Format(msgspec.Struct):
    """Field that the manifests of all formats have."""

    format: int


_FORMAT = msgspec.json.Decoder(_Format)
_MANIFEST = msgspec.json.Decoder(Manifest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint. Its parts are read on demand.

    Attributes:
        name: Epoch of the leader that wrote the checkpoint, and the checkpoint's version.
        manifest: Its manifest.
        folder: Its folder in object storage.
        blobs: Object storage.
    """

    name: ModelId
    manifest: Manifest
    folder: str
    blobs: Blobs

    def read(self, part: str) -> bytes:
        """Read a part and verify its size and checksum.

        Raises:
            CorruptError: If the part is missing or damaged.
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
        self._bases = f"{job}/base/"
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
        """Write a checkpoint, unless it is finished already.

        Raises:
            ValueError: If it is the initial version, which is made from the specification, or if a
                part's name is invalid.
        """
        if name.epoch < 0:
            raise ValueError(f"{name} is version 0, which is never stored")
        for part in parts:
            if not is_part(part):
                raise ValueError(f"{part!r} is not a valid name of a checkpoint's part")
        folder = self.folder(name)
        if self._blobs.get(folder + MANIFEST) is None:
            for part, data in parts.items():
                self._blobs.put(folder + part, data)
            listed = {part: describe(data) for part, data in parts.items()}
            manifest = Manifest(FORMAT, *name, created_s, listed, samples, loss)
            self._blobs.put(folder + MANIFEST, msgspec.json.encode(manifest))
        self._move_latest(name)

    def verify(self, name: ModelId) -> None:
        """Read a finished checkpoint back as a candidate would.

        Raises:
            CorruptError: If the list lacks the checkpoint or a part of it, or a part is damaged.
        """
        folder, listed = self.folder(name), set(self._blobs.names(self._root))
        checkpoint = self.open(name)
        for part in (MANIFEST, *checkpoint.manifest.parts):
            if folder + part not in listed:
                raise CorruptError(f"{self.where} does not list {part} of {format_model_id(name)}")
        for part in checkpoint.manifest.parts:
            checkpoint.read(part)

    def finished(self) -> list[ModelId]:
        """Return all checkpoints with a manifest; later leaders, then higher versions, first."""
        return self._folders(self._blobs.names(self._root), MANIFEST)

    def open(self, name: ModelId) -> Checkpoint:
        """Read the manifest of a checkpoint.

        Raises:
            CorruptError: If the manifest is missing or does not parse.
            FutureFormatError: If a newer program wrote the manifest.
        """
        folder = self.folder(name)
        data = self._blobs.get(folder + MANIFEST)
        if data is None:
            raise CorruptError(f"{MANIFEST} is missing")
        return Checkpoint(name, decode_manifest(data, name), folder, self._blobs)

    def latest(self) -> ModelId | None:
        """Return the checkpoint that `latest` names. A newer one may be finished by now."""
        return _hinted(self._blobs.get(self._root + _LATEST))

    def hint(self) -> tuple[ModelId | None, str]:
        """Return the checkpoint that `latest` names, and an error if it does not parse."""
        data = self._blobs.get(self._root + _LATEST)
        name = _hinted(data)
        wrong = "" if data is None or name else f"`latest` does not parse: {data[:40]!r}"
        return name, wrong

    def best(self) -> ModelId | None:
        """Return the checkpoint that `best` names. A better one may be finished by now."""
        return _hinted(self._blobs.get(self._root + _BEST))

    def keep(
        self,
        count: int,
        newest: ModelId | None,
        begun: ModelId | None = None,
        now_s: float = 0.0,
    ) -> tuple[Checkpoint, ...]:
        """Delete all but the newest `count` checkpoints and the one with the lowest loss.

        Checkpoints that are known to be taken back do not count and are deleted after
        `TAKEN_BACK_S`. The parts of unfinished checkpoints are deleted if they rank below the
        oldest of the newest `count`; above it, another process may be writing. Checkpoints of a
        newer program and checkpoints that cannot be read now stay. The manifest is deleted first,
        so that an interrupted deletion leaves no finished checkpoint.

        Nothing is deleted unless the list begins with `newest` and agrees with the manifests that
        can be read. Any other list may be stale, truncated, or of another store.

        Args:
            count: Number of checkpoints to keep, at least 1.
            newest: Checkpoint that the caller has just read back, if any.
            begun: Optional. First snapshot of the calling leader, even if it is not a checkpoint.
                It shows which checkpoints this leader took back.
            now_s: Time in seconds since 1970.

        Returns:
            The kept checkpoints, newest first; the one with the lowest loss may be the last.

        Raises:
            ValueError: If `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"keep: must be at least 1 checkpoint, got {count}")
        # The hint is read before the list, so that a process with a newer list wins.
        hint = self._blobs.get_tagged(self._root + _BEST)
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
        # A manifest that the list lacks shows that the list is incomplete.
        if any(self._blobs.get(self.folder(name) + MANIFEST) is not None for name in remains):
            return tuple(kept)
        for name in (*void, *readable, *remains):
            below = len(counting) >= count and name < oldest
            if name not in spared and (name in void or below):
                self._delete(name)
        return tuple(kept)

    def put_origin(self, data: bytes) -> str:
        """Store the weights that the job begins with; return their checksum, which names them."""
        sha256 = describe(data).sha256
        self._blobs.put(f"{self._origin}{sha256}.safetensors", data)
        return sha256

    def origin(self, sha256: str) -> bytes:
        """Read the weights that the job begins with.

        Raises:
            CorruptError: If they are missing or damaged.
        """
        return self._checked(f"{self._origin}{sha256}.safetensors", sha256)

    def put_init(self, data: bytes) -> None:
        """Store the weights that `init` gives the job, unless it has some already."""
        self._blobs.replace(f"{self._origin}init", self.put_origin(data).encode(), None)

    def init(self) -> str:
        """Return the checksum of the weights that `init` gave the job; empty if none are stored."""
        return (self._blobs.get(f"{self._origin}init") or b"").decode("ascii", "replace")

    def put_base(self, digest: str, data: bytes) -> str:
        """Store the job's base, unless it has one already; return the digest of the job's base.

        Args:
            digest: Digest of the tensors, see `common.learning.base`.
            data: The tensors as safetensors. Other versions of the library may write other bytes.
        """
        sha256 = describe(data).sha256
        self._blobs.put(f"{self._bases}{sha256}.safetensors", data)
        # The first process wins.
        self._blobs.replace(f"{self._bases}digest", f"{digest} {sha256}".encode(), None)
        return self.base_digest()

    def base_digest(self) -> str:
        """Return the digest of the job's base; empty if none is stored."""
        return self._named_base()[0]

    def base(self, digest: str) -> bytes:
        """Read the job's base.

        Raises:
            CorruptError: If it is missing or damaged, or has another digest.
        """
        found, sha256 = self._named_base()
        if found != digest:
            raise CorruptError(
                f"{self._bases}digest names {found[:16] or 'nothing'}, expected {digest[:16]}: the"
                " tensors that the task froze"
            )
        return self._checked(f"{self._bases}{sha256}.safetensors", sha256)

    def _named_base(self) -> tuple[str, str]:
        """Return digest and checksum of the job's base; empty if none is stored."""
        data = (self._blobs.get(f"{self._bases}digest") or b"").decode("ascii", "replace")
        digest, _, sha256 = data.partition(" ")
        return digest, sha256

    def _checked(self, name: str, sha256: str) -> bytes:
        """Read a blob that never changes.

        Raises:
            CorruptError: If it is missing or damaged.
        """
        data = self._blobs.get(name)
        if data is None:
            raise CorruptError(f"{name} is missing")
        found = describe(data)
        if found.sha256 != sha256:
            raise CorruptError(f"{name} has {found}, expected {sha256[:16]}")
        return data

    def put_state(self, made: ModelId, data: bytes) -> None:
        """Store weights and optimizer state of a version that workers hold.

        Args:
            made: Version as in its audit record.
            data: Bytes from `Trainer.snapshot`.
        """
        self._blobs.put(self._state(made), data)

    def put_slices(self, made: ModelId, numbers: Collection[int], data: bytes) -> None:
        """Store slices of a version, bytes from `SlicedTrainer.snapshot` with the weights."""
        self._blobs.put(self._state(made, f".{'-'.join(map(str, numbers))}"), data)

    def state(self, made: ModelId) -> bytes:
        """Read weights and optimizer state of a version, in the format of `Trainer.snapshot`.

        Either one process has stored them all, or the owners have stored their slices.

        Raises:
            CorruptError: If a slice is missing or damaged.
        """
        data = self._blobs.get(self._state(made))
        if data is not None:
            return data
        names = self._blobs.names(f"{self._states}{made.epoch}-{made.version}.")
        return whole_of(data for name in sorted(names) if (data := self._blobs.get(name)))

    def keep_states(
        self, kept: Collection[ModelId], begun: ModelId | None = None, now_s: float = 0.0
    ) -> None:
        """Delete states of versions below `kept`, by the same rules as `keep`.

        Args:
            kept: Versions that workers may copy. If storage does not list all of them, nothing is
                deleted.
            begun: See `keep`.
            now_s: See `keep`.
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
        """Return the version of a state from its name; None if the name is not one of ours."""
        epoch, _, version = name.removeprefix(self._states).partition(".")[0].rpartition("-")
        ours = version.isdigit() and epoch.removeprefix("-").isdigit()
        return ModelId(int(epoch), int(version)) if ours else None

    def _state(self, made: ModelId, slices: str = "") -> str:
        return f"{self._states}{made.epoch}-{made.version}{slices}.safetensors"

    def folder(self, name: ModelId) -> str:
        """Return the folder of a checkpoint, relative to the root of object storage."""
        return f"{self._root}{folder_of(name)}/"

    def _folders(self, names: Iterable[str], holding: str = "") -> list[ModelId]:
        """Return the checkpoints that have any file, or the file `holding`; highest rank first."""
        split = (name.removeprefix(self._root).partition("/") for name in names)
        folders = {folder for folder, _, file in split if holding in ("", file)}
        return sorted(filter(None, map(named_by, folders)), reverse=True)

    def _opened(self, names: Iterable[ModelId]) -> tuple[list[Checkpoint], set[ModelId]]:
        """Return the checkpoints whose manifest can be read, and the names of newer formats."""
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
        """Set `latest` to a checkpoint unless it names one of the same or a higher rank."""
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
            f"{self.where} does not keep what was written to {latest}; another program may write"
            " to it",
            "storage",
        )


def describe(data: bytes | memoryview) -> CheckpointPart:
    """Return size and checksum of these bytes for a manifest."""
    return CheckpointPart(memoryview(data).nbytes, hashlib.sha256(data).hexdigest())


def decode_manifest(data: bytes, name: ModelId) -> Manifest:
    """Decode the manifest of a checkpoint.

    Raises:
        CorruptError: If the manifest does not parse, or belongs to another checkpoint.
        FutureFormatError: If a newer program wrote the manifest.
    """
    found = decoded(_FORMAT.decode, data, _NO_MANIFEST, CorruptError).format
    if found > FORMAT:
        raise FutureFormatError(
            f"the checkpoint {format_model_id(name)} has format {found}, expected at most"
            f" {FORMAT}; a newer version of DOLL wrote it, so run that version"
        )
    manifest = decoded(_MANIFEST.decode, data, _NO_MANIFEST, CorruptError)
    if (manifest.epoch, manifest.version) != name:
        other = format_model_id(ModelId(manifest.epoch, manifest.version))
        raise CorruptError(f"{MANIFEST} belongs to {other}, expected {format_model_id(name)}")
    strange = [part for part in manifest.parts if not is_part(part)]
    if strange:
        raise CorruptError(f"{MANIFEST} lists {strange[0]!r}, expected names of parts")
    return manifest


def is_part(name: str) -> bool:
    """True if a part may have this name."""
    return name != MANIFEST and _PART.fullmatch(name) is not None


def folder_of(name: ModelId) -> str:
    """Return a checkpoint's folder. Leading zeros make folders sort by the checkpoints' rank."""
    return f"{name.epoch:020}-{name.version:012}"


def named_by(folder: str) -> ModelId | None:
    """Return the checkpoint that has this folder; None if the folder is not one of ours."""
    match = _FOLDER.fullmatch(folder)
    return ModelId(int(match[1]), int(match[2])) if match else None


def format_model_id(name: ModelId) -> str:
    """Return a checkpoint's name for people."""
    return f"{name.epoch}-{name.version}"


def taken_back(name: ModelId, witnesses: Iterable[ModelId]) -> bool:
    """True if snapshots of later leaders prove that a checkpoint has updates that were taken back.

    A leader only adds to the version that it started from. So if it has a snapshot of a version,
    everything that an earlier leader has above that version was taken back for ever. The reverse
    does not hold: if a leader left no snapshot, only the updates topic shows what it took back.

    Args:
        name: Name of the checkpoint.
        witnesses: Names of snapshots: the epoch of their writer and their version.
    """
    return any(name.epoch < other.epoch and other.version < name.version for other in witnesses)


def _long_taken_back(name: ModelId, witnesses: Iterable[ModelId], now_s: float) -> bool:
    """True if the first leader that took a version back began at least `TAKEN_BACK_S` ago."""
    epochs = [each.epoch for each in witnesses if taken_back(name, [each])]
    return bool(epochs) and now_s >= drawn_at_s(min(epochs)) + TAKEN_BACK_S


def lowest_loss(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the first checkpoint with the lowest loss; None if no checkpoint has a loss."""
    losses = [(each.manifest.loss, each) for each in checkpoints]
    rated = [(loss, each) for loss, each in losses if loss is not None]
    return min(rated, key=lambda pair: pair[0])[1] if rated else None


def _hinted(data: bytes | None) -> ModelId | None:
    return None if data is None else named_by(data.decode("ascii", "replace"))
