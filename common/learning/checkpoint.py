"""Weights and optimizer state as safetensors, which contain only numbers and no code.

This module needs no torch: a layout names the tensor that each part of a flat vector belongs to. So
the admin service can serve models without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from msgspec import Meta

from common.errors import CorruptError, decoded

if TYPE_CHECKING:
    from common.core.messages import Vector


class TensorSlice(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a model: a slice of its flat vector."""

    # Names in the model's `state_dict`. Tied weights have several.
    names: tuple[str, ...]
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    dtype: str = "float32"
    is_buffer: bool = False

    def __str__(self) -> str:
        named = "/".join(map(repr, self.names)) or "without a name"
        kind = "buffer" if self.is_buffer else "parameter"
        return f"the {kind} {named} {self.shape} {self.dtype}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


# The tensors in the vector's order: parameters, then buffers.
Layout: TypeAlias = tuple[TensorSlice, ...]


class Kind(msgspec.Struct, frozen=True, omit_defaults=True):
    """Optimizer and model of a snapshot. They must equal those of the trainer that restores it."""

    optimizer: str
    parameters: int  # P
    buffers: int  # B
    layout: Layout
    # SHA-256 of the tensors that no update changes. Empty without any. See `common.learning.base`.
    base: str = ""

    def __post_init__(self) -> None:
        """Check the layout's size.

        Raises:
            ValueError: If the layout has another size.
        """
        for counted, is_buffer in ((self.parameters, False), (self.buffers, True)):
            size = sum(each.size for each in self.layout if each.is_buffer == is_buffer)
            if size != counted:
                raise ValueError(f"the layout has {size} numbers, expected {counted}")

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.parameters:,} parameters, {self.buffers:,} buffers"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the parameter tensors."""
        return tuple(each.size for each in self.layout if not each.is_buffer)

    def misfit(self, own: Kind) -> str:
        """Return why a snapshot of this kind does not fit a trainer's own; empty if it fits."""
        found = ""
        if str(self) != str(own):
            found = f"the snapshot contains {self}, but this job's model has {own}"
        bases = ""
        if self.base != own.base:
            bases = f"its frozen tensors have digest {self.base[:16] or 'none'}, expected "
            bases += own.base[:16] or "none"
        return "; ".join(filter(None, (found, difference(self.layout, own.layout), bases)))


def difference(stored: Layout, own: Layout) -> str:
    """Return the first difference between a stored layout and the task's; empty if equal."""
    for place, (there, here) in enumerate(zip_longest(stored, own), start=1):
        if there != here:
            found = there or "no tensor"
            return f"at place {place} it has {found}, but the task's model has {here or 'none'}"
    return ""


def digest_of(layout: Layout, base: str = "") -> str:
    """Return 16 hexadecimal digits that identify a layout and the digest of a base."""
    return blake2b(msgspec.json.encode(layout) + base.encode(), digest_size=8).hexdigest()


def unnamed(parameters: int, buffers: int) -> Layout:
    """Return the layout of a vector that belongs to no module."""
    return TensorSlice((), (parameters,)), TensorSlice((), (buffers,), is_buffer=True)


class _Header(msgspec.Struct):
    """Header of a safetensors file, without its tensors."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_KIND = msgspec.json.Decoder(Kind)
_HEADER = msgspec.json.Decoder(_Header)
# Number of bytes that contain the header's length.
_LENGTH = 8


def pack(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Write tensors and metadata. The same input always gives the same bytes.

    The library writes metadata in random order, so several entries are sorted here.
    """
    data = safetensors.numpy.save(dict(tensors), dict(metadata))
    if len(metadata) < 2:
        return data
    header, content = _split(data)
    header["__metadata__"] = dict(sorted(metadata.items()))
    return _with_header(header, [content])


def _split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return header and content of a file."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    return msgspec.json.decode(data[_LENGTH:start]), memoryview(data)[start:]


def _with_header(header: Mapping[str, Any], content: Iterable[memoryview]) -> bytes:
    text = msgspec.json.encode(header)
    # The library pads the header, too, to align the tensors.
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(_LENGTH, "little"), text, *content))


def merged(first: bytes, second: bytes) -> bytes:
    """Write the tensors of two files into one, with the metadata of the first.

    The tensors may have types that numpy lacks, such as bfloat16.

    Raises:
        CorruptError: If the bytes are not such files, or a name is in both.
    """
    try:
        (header, own), (other_header, other) = _split(first), _split(second)
        metadata = header.pop("__metadata__", {})
        other_header.pop("__metadata__", None)
        if both := header.keys() & other_header.keys():
            raise CorruptError(f"the tensor {min(both)!r} is in both files")
        parts = list[tuple[int, str, dict[str, Any], memoryview]]()
        for entries, content in ((header, own), (other_header, other)):
            for name, entry in entries.items():
                start, end = entry["data_offsets"]
                width = (end - start) // max(math.prod(entry["shape"]), 1)
                parts.append((width, name, entry, content[start:end]))
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"the bytes do not hold tensors: {error}") from error
    # Wide numbers first, as the library does, so that all are aligned.
    parts.sort(key=lambda part: (-part[0], part[1]))
    combined, at = {"__metadata__": metadata}, 0
    for _, name, entry, content in parts:
        combined[name] = entry | {"data_offsets": [at, at + len(content)]}
        at += len(content)
    return _with_header(combined, [content for *_, content in parts])


def unpack(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Read what `pack` wrote. The arrays own their memory.

    Raises:
        CorruptError: If the bytes are incomplete or damaged.
    """
    try:
        tensors = {name: np.array(value) for name, value in safetensors.numpy.load(data).items()}
        return tensors, metadata_in(data)
    except (safetensors.SafetensorError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise CorruptError(f"{len(data)} bytes do not contain tensors: {error}") from error


def metadata_in(data: bytes) -> dict[str, str]:
    """Read the metadata of a file, or of its first bytes. The library does not return it.

    Raises:
        CorruptError: If the bytes do not contain it.
    """
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    what = f"the first {len(data)} bytes contain no layout"
    return decoded(_HEADER.decode, data[_LENGTH:end], what, CorruptError).metadata


def kind_in(metadata: Mapping[str, str]) -> Kind:
    """Read optimizer and model from the metadata of a trainer's snapshot.

    Raises:
        CorruptError: If the metadata lacks them.
    """
    what = "the snapshot does not name its optimizer and model"
    return decoded(_KIND.decode, metadata.get("trainer", ""), what, CorruptError)


def kind_at(head: bytes) -> Kind:
    """Read optimizer and model from the first bytes of a trainer's snapshot.

    Raises:
        CorruptError: If the bytes do not contain it.
    """
    return kind_in(metadata_in(head))


def weights_in(snapshot: bytes) -> tuple[Vector, Kind]:
    """Read the weights of a trainer's snapshot, and their model.

    Returns:
        (P + B,) float32, and the model.

    Raises:
        CorruptError: If the snapshot is incomplete, or has no weights.
    """
    tensors, metadata = unpack(snapshot)
    kind = kind_in(metadata)
    return checked_weights(tensors.get("weights"), kind), kind


def model_in(snapshot: bytes) -> bytes:
    """Return a trainer's snapshot without the optimizer's state.

    Raises:
        CorruptError: If the snapshot is incomplete, or has no weights.
    """
    tensors, metadata = unpack(snapshot)
    weights = checked_weights(tensors.get("weights"), kind_in(metadata))
    return pack({"weights": weights}, metadata)


def optimizer_kind(name: str, momentum: object) -> str:
    """Return the name that snapshots use: `sgd` with a momentum is `momentum`."""
    return "momentum" if momentum else name


def with_optimizer(snapshot: bytes, optimizer: str) -> tuple[bytes, str]:
    """Adapt a trainer's snapshot to another optimizer; also return the snapshot's own optimizer.

    The optimizer's state is kept only if the optimizer is the same.

    Raises:
        CorruptError: If the snapshot is incomplete, or has no weights.
    """
    tensors, metadata = unpack(snapshot)
    kind = kind_in(metadata)
    weights = checked_weights(tensors.get("weights"), kind)
    if kind.optimizer == optimizer:
        return snapshot, optimizer
    other = msgspec.json.encode(msgspec.structs.replace(kind, optimizer=optimizer)).decode()
    return pack({"weights": weights}, {"trainer": other}), kind.optimizer


def checked_weights(weights: npt.NDArray[Any] | None, kind: Kind) -> Vector:
    """Return the weights of a snapshot.

    Raises:
        CorruptError: If they are missing, or differ from the snapshot's stated size or type.
    """
    length = kind.parameters + kind.buffers
    if weights is None:
        raise CorruptError("a snapshot without weights")
    if weights.shape != (length,) or weights.dtype != np.float32:
        raise CorruptError(f"its weights are {weights.dtype} {weights.shape}, expected ({length},)")
    return weights


def named_weights(layout: Layout, vector: Vector) -> dict[str, Vector]:
    """Cut a flat vector into the entries of the model's `state_dict`, as views.

    Args:
        layout: Layout of the vector.
        vector: (P + B,) float32 parameters, then buffers.

    Raises:
        CorruptError: If the vector's length differs from the layout's.
    """
    sizes = [piece.size for piece in layout]
    if sum(sizes) != len(vector):
        raise CorruptError(
            f"a vector of {len(vector)} does not fit a model of {sum(sizes)} numbers"
        )
    named, start = dict[str, "Vector"](), 0
    for piece, size in zip(layout, sizes, strict=True):
        tensor = vector[start : start + size].reshape(piece.shape)
        named |= dict.fromkeys(piece.names, tensor)
        start += size
    return named


def save_weights(layout: Layout, vector: Vector, about: Mapping[str, str]) -> bytes:
    """Write weights by name, for `module.load_state_dict(safetensors.torch.load(...))`.

    Args:
        layout: Layout of the vector.
        vector: (P + B,) float32 parameters, then buffers.
        about: Metadata for the file.

    Raises:
        CorruptError: If the vector's length differs from the layout's.
    """
    return pack(named_weights(layout, vector), {"format": "pt", **about})


# --- snapshots of trainers, whole or in slices ---------------------------------------------------

SLICES, WEIGHTS = "slices", "weights"
# Prefix of the names of the optimizer's tensors.
STATE = "optimizer."


class SlicesHead(msgspec.Struct, frozen=True):
    """The model and the numbers of some slices."""

    kind: Kind
    count: int  # all slices of the model
    numbers: tuple[int, ...]  # slices in this file


_SLICES_HEAD = msgspec.json.Decoder(SlicesHead)


def slices_head(metadata: Mapping[str, str]) -> SlicesHead:
    """Read the head from the metadata of slices.

    Raises:
        CorruptError: If the metadata lacks it.
    """
    what = "the snapshot does not name the owners of its slices"
    return decoded(_SLICES_HEAD.decode, metadata.get(SLICES, ""), what, CorruptError)


def slice_state(
    tensors: Mapping[str, npt.NDArray[Any]], number: int
) -> dict[str, npt.NDArray[Any]]:
    """Return the optimizer's state of one slice."""
    start = f"{number}."
    found = {n.removeprefix(start): a for n, a in tensors.items() if n.startswith(start)}
    found.pop(WEIGHTS, None)
    return found


def whole_of(parts: Iterable[bytes]) -> bytes:
    """Combine the slices of one version, stored by their owners, into a trainer's snapshot.

    Args:
        parts: Results of `SlicedTrainer.snapshot`, each with its slices' weights.

    Raises:
        CorruptError: If a slice is missing, or the parts differ in their model.
    """
    found, heads = dict[int, tuple["Vector", dict[str, "npt.NDArray[Any]"]]](), list[SlicesHead]()
    for data in parts:
        tensors, metadata = unpack(data)
        heads.append(head := slices_head(metadata))
        for number in head.numbers:
            weights = tensors.get(f"{number}.{WEIGHTS}")
            if weights is None:
                raise CorruptError(f"the snapshot lacks the weights of slice {number}")
            found[number] = weights, slice_state(tensors, number)
    if not heads or len({(head.kind, head.count) for head in heads}) > 1:
        raise CorruptError("the slices belong to no model, or to several")
    kind, count = heads[0].kind, heads[0].count
    if lacking := set(range(count)) - found.keys():
        raise CorruptError(f"slices {sorted(lacking)} are missing")
    weights = np.concatenate([found[number][0] for number in range(count)])
    state = joined([found[number][1] for number in range(count)])
    return packed(kind, weights, state)


def joined(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Join the state of consecutive slices. Slices without parameters have no state."""
    first = next(filter(None, parts), {})
    return {
        name: value if name == "step" else np.concatenate([part[name] for part in parts if part])
        for name, value in first.items()
    }


def packed(kind: Kind, weights: Vector, state: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Write a snapshot, which `unpacked` reads."""
    tensors = {STATE + name: value for name, value in state.items()}
    # A single entry, because `pack` must sort several.
    metadata = {"trainer": msgspec.json.encode(kind).decode()}
    return pack({"weights": weights, **tensors}, metadata)
