"""Sparse vectors as bytes, exact to the bit: only +0.0, the bit pattern 0, is left out.

What is sent is blocks of one width, which the vector itself shows: rows of an embedding that no
record touched are zero as a whole. Blocks are listed by number, or marked in a bitmap where that is
shorter. After a head come the positions, padded to 4 bytes, then the values.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from common.core.vectors import SparseVector
from common.errors import WireError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector

_HEAD = struct.Struct("<QII")  # size, width of a block, number of blocks
_MOST_BLOCKS = 2**32  # in the vector: they are numbered in 32 bits
_SEVERAL = 64  # run boundaries that mostly show that there is no common width


def smallest(vector: Vector) -> Vector | SparseVector:
    """The vector as what takes the fewest bytes: itself, or its blocks that are not zero.

    Args:
        vector: (P + B,) float32, contiguous; values are copied out of it.
    """
    size = len(vector)
    nonzero = vector.view(np.uint32) != 0
    count = int(np.count_nonzero(nonzero))
    if 32 * count >= 31 * size:  # not even a bit for each number would pay
        return vector
    indices = np.flatnonzero(nonzero)
    width = _common_width(indices, size)
    blocks = indices[::width] // width
    if _HEAD.size + _position_bytes(len(blocks), size // width) + 4 * count >= 4 * size:
        return vector
    return SparseVector(size, blocks, vector.reshape(-1, width)[blocks])


def encode_sparse(vector: SparseVector) -> bytes:
    """Write a sparse vector."""
    count, width = vector.values.shape
    every = vector.size // width
    if _is_listed(count, every):
        positions = vector.blocks.astype("<u4").tobytes()
    else:
        marked = np.zeros(every, bool)
        marked[vector.blocks] = True
        positions = np.packbits(marked, bitorder="little").tobytes()
        positions += bytes(-len(positions) % 4)
    values = np.ascontiguousarray(vector.values, dtype="<f4").data
    return b"".join((_HEAD.pack(vector.size, width, count), positions, values))


def decode_sparse(data: memoryview) -> SparseVector:
    """Read a sparse vector; its values are a read-only view of the data.

    Raises:
        WireError: If it is none.
    """
    if len(data) < _HEAD.size:
        raise WireError(f"sparse vector: {len(data)} bytes, expected at least {_HEAD.size}")
    size, width, count = _HEAD.unpack_from(data)
    every = size // width if width else 0
    if not every or every > _MOST_BLOCKS or size % width or count > every:
        raise WireError(f"sparse vector: {count} blocks of {width} in a vector of {size}")
    start = _HEAD.size + _position_bytes(count, every)
    if len(data) != start + 4 * width * count:
        expected = start + 4 * width * count
        raise WireError(
            f"sparse vector: {len(data)} bytes for {count} blocks of {width}, expected {expected}"
        )
    blocks = _positions(data[_HEAD.size : start], count, every)
    if len(blocks) != count or (count and blocks[-1] >= every):
        raise WireError(f"sparse vector: blocks are not {count} below {every}")
    if not (blocks[1:] > blocks[:-1]).all():
        raise WireError("sparse vector: blocks are out of order")
    return SparseVector(size, blocks, np.frombuffer(data[start:], "<f4").reshape(count, width))


def _positions(data: memoryview, count: int, every: int) -> npt.NDArray[np.integer[Any]]:
    if _is_listed(count, every):
        return np.frombuffer(data, "<u4")
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))


def _is_listed(count: int, every: int) -> bool:
    return count <= -(-every // 32)


def _position_bytes(count: int, every: int) -> int:
    return 4 * min(count, -(-every // 32))


def _common_width(indices: npt.NDArray[np.intp], size: int) -> int:
    """The widest blocks of which each is wholly among the indices, or not at all.

    It divides the position of each change between indices that are there and indices that are not.
    """
    jumps = np.flatnonzero(np.diff(indices) != 1)
    bounds = np.concatenate((indices[:1], indices[jumps + 1], indices[jumps] + 1))
    width = int(np.gcd.reduce(np.append(bounds[:_SEVERAL], (size, *(indices[-1:] + 1)))))
    return width if width == 1 else int(np.gcd.reduce(np.append(bounds % width, width)))
