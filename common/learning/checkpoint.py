"""Weights and optimizer state as safetensors: bytes that hold numbers and nothing that can run.

Needs no torch: a layout says which numbers of a flat vector are which tensors of a model, so that
the admin service gives out models without the library that trains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from msgspec import Meta

from common.errors import CorruptError

if TYPE_CHECKING:
    from common.core.messages import Vector


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a model, a piece of its flat vector."""

    names: tuple[str, ...]  # in the model's `state_dict`: tied weights have several
    shape: tuple[Annotated[int, Meta(ge=0)], ...]


Layout: TypeAlias = tuple[Piece, ...]  # in the vector's order: parameters, then buffers


_LENGTH = 8  # bytes that say how long the header is


class _Head(msgspec.Struct):
    """What the metadata of a trainer's snapshot say of its layout."""

    layout: Layout = ()  # older snapshots have none


_HEAD = msgspec.json.Decoder(_Head)
_TENSORS = msgspec.json.Decoder(dict[str, dict[str, Any]])


def pack(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Write tensors and what is to be known about them: the same always as the same bytes.

    The library writes several entries of the metadata in any order, so that these are put in one.
    """
    data = safetensors.numpy.save(dict(tensors), dict(metadata))
    if len(metadata) < 2:
        return data
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = msgspec.json.decode(data[_LENGTH:start])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # as the library does: tensors are aligned
    return b"".join((len(text).to_bytes(_LENGTH, "little"), text, memoryview(data)[start:]))


def unpack(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Read back what `pack` wrote; the arrays own their memory.

    Raises:
        CorruptError: If the bytes are not whole.
    """
    try:
        tensors = {name: np.array(value) for name, value in safetensors.numpy.load(data).items()}
        # The library does not give the metadata back.
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        header = _TENSORS.decode(data[_LENGTH:end])
    except (safetensors.SafetensorError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise CorruptError(f"{len(data)} bytes do not hold tensors: {error}") from error
    return tensors, header.get("__metadata__", {})


def weights_in(snapshot: bytes) -> tuple[Vector, Layout]:
    """Read the weights of a trainer's snapshot, and their layout.

    Returns:
        (P + B,) float32, and an empty layout where an older program wrote the snapshot.

    Raises:
        CorruptError: If it is not whole, or holds no weights.
    """
    tensors, metadata = unpack(snapshot)
    weights = tensors.get("weights")
    if weights is None or weights.dtype != np.float32 or weights.ndim != 1:
        raise CorruptError("a snapshot without weights")
    try:
        head = _HEAD.decode(metadata.get("trainer", "{}"))
    except msgspec.DecodeError as error:
        raise CorruptError(f"a snapshot's layout does not parse: {error}") from error
    return weights, head.layout


def named_weights(layout: Layout, vector: Vector) -> dict[str, Vector]:
    """Cut a flat vector into the entries of the model's `state_dict`, as views.

    Args:
        layout: Of the model that the vector belongs to.
        vector: (P + B,) float32 parameters, then buffers.

    Raises:
        CorruptError: If the length is not this model's.
    """
    sizes = [math.prod(piece.shape) for piece in layout]
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
    """Write weights by name: `module.load_state_dict(safetensors.torch.load(...))` takes them.

    Args:
        layout: Which of them are which tensors.
        vector: (P + B,) float32 parameters, then buffers.
        about: What the file says of itself.

    Raises:
        CorruptError: If the vector's length is not this model's.
    """
    return pack(named_weights(layout, vector), {"format": "pt", **about})
