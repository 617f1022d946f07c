"""Weights and optimizer state as safetensors: bytes that hold numbers and nothing that can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from common.errors import CorruptError
from common.learning.parameters import training_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from common.core.messages import Vector


def pack(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Write tensors and what is to be known about them.

    The same tensors give the same bytes as long as the metadata are one entry: the library writes
    several in any order.
    """
    return safetensors.numpy.save(dict(tensors), dict(metadata))


def unpack(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Read back what `pack` wrote; the arrays own their memory.

    Raises:
        CorruptError: If the bytes are not whole.
    """
    try:
        tensors = {name: np.array(value) for name, value in safetensors.numpy.load(data).items()}
        length = int.from_bytes(data[:8], "little")  # the library does not give the metadata back
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
    except (safetensors.SafetensorError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise CorruptError(f"{len(data)} bytes do not hold tensors: {error}") from error
    return tensors, header.get("__metadata__", {})


def named_weights(module: nn.Module, vector: Vector) -> dict[str, Vector]:
    """Cut a flat vector into the entries of the module's `state_dict`, as views.

    Args:
        module: The network that the vector belongs to; its own numbers are not looked at.
        vector: (P + B,) float32 parameters, then buffers.

    Raises:
        CorruptError: If the length is not this module's.
    """
    parameters, buffers = training_state(module)
    tensors = (*parameters.values(), *buffers.values())
    count = sum(tensor.numel() for tensor in tensors)
    if count != len(vector):
        raise CorruptError(f"a vector of {len(vector)} does not fit a model of {count} numbers")
    pieces, start = {}, 0
    for tensor in tensors:
        pieces[id(tensor)] = vector[start : start + tensor.numel()].reshape(tensor.shape)
        start += tensor.numel()
    # By identity, because tied weights have one place in the vector and several names.
    saved = module.state_dict(keep_vars=True).items()
    return {name: pieces[id(tensor)] for name, tensor in saved if id(tensor) in pieces}


def save_weights(module: nn.Module, vector: Vector) -> bytes:
    """Write weights by name: `module.load_state_dict(safetensors.torch.load(...))` takes them.

    Raises:
        CorruptError: If the vector's length is not this module's.
    """
    return pack(named_weights(module, vector), {"format": "pt"})
