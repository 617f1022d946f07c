"""Sparse vectors as bytes, exact to the bit: only +0.0, the bit pattern 0, is left out.

A vector is sent as blocks of one width, without blocks of zeros. The width is derived from the
vector, because the rows of an embedding that no record touched are zero as a whole. The positions
are encoded as gaps of one, two or four bytes each, or as one bit per block, whichever is shortest.
The header is followed by the positions, padded to 4 bytes, and the values.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from common.core.vectors import SparseVector, dense, numbers_in
from common.errors import WireError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector

# Size, width of a block, number of blocks, bytes of a gap (0: one bit per block).
_HEAD = struct.Struct("<QIII")
# Maximum number of blocks in the vector, so that a gap fits into 4 bytes.
_MOST_BLOCKS = 2**32
# Number of indices that usually suffice to see if there is a common width.
_SEVERAL = 256


def smallest(vector: Vector | SparseVector) -> Vector | SparseVector:
    """Return the vector in its shortest form: dense, or the blocks that are not zero.

    Args:
        vector: (P + B,) float32, contiguous. Values are copied.
    """
    [size] = vector.shape
    numbers = numbers_in(vector).ravel()
    nonzero = numbers.view(np.uint32) != 0
    count = int(np.count_nonzero(nonzero))
    # Not even one bit per number would be shorter.
    if 32 * count >= 31 * size:
        return dense(vector)
    found = np.flatnonzero(nonzero)
    indices = vector.indices[found] if isinstance(vector, SparseVector) else found
    width = _common_width(indices, size)
    blocks = indices if width == 1 else indices[::width] // width
    positions = _padded(_gap_bytes(blocks, size // width), len(blocks), size // width)
    if _HEAD.size + positions + 4 * count >= 4 * size:
        return dense(vector)
    return SparseVector(size, blocks, numbers[found].reshape(-1, width))


def encode_sparse(vector: SparseVector) -> bytes:
    """Encode a sparse vector."""
    count, width = vector.values.shape
    every = vector.size // width
    gap_bytes = _gap_bytes(vector.blocks, every)
    if gap_bytes:
        positions = _gaps(vector.blocks).astype(f"<u{gap_bytes}").tobytes()
    else:
        marked = np.zeros(every, bool)
        marked[vector.blocks] = True
        positions = np.packbits(marked, bitorder="little").tobytes()
    positions += bytes(-len(positions) % 4)
    values = np.ascontiguousarray(vector.values, dtype="<f4").data
    return b"".join((_HEAD.pack(vector.size, width, count, gap_bytes), positions, values))


def encoded_bytes(vector: Vector | SparseVector) -> int:
    """Return the number of bytes of an encoded vector."""
    if not isinstance(vector, SparseVector):
        return vector.nbytes
    every = vector.size // vector.values.shape[1]
    gap_bytes = _gap_bytes(vector.blocks, every)
    return _HEAD.size + _padded(gap_bytes, len(vector.blocks), every) + vector.values.nbytes


def decode_sparse(data: memoryview) -> SparseVector:
    """Decode a sparse vector. Its values are a read-only view of the data.

    Raises:
        WireError: If the bytes are not a valid sparse vector.
    """
    if len(data) < _HEAD.size:
        raise WireError(f"sparse vector: {len(data)} bytes, expected at least {_HEAD.size}")
    size, width, count, gap_bytes = _HEAD.unpack_from(data)
    every = size // width if width else 0
    if not every or every > _MOST_BLOCKS or size % width or count > every:
        raise WireError(f"sparse vector: {count} blocks of {width} in a vector of {size}")
    if gap_bytes not in (0, 1, 2, 4):
        raise WireError(
            f"sparse vector: gaps of {gap_bytes} bytes, expected 1, 2, 4, or 0 for bits"
        )
    start = _HEAD.size + _padded(gap_bytes, count, every)
    expected = start + 4 * width * count
    if len(data) != expected:
        raise WireError(
            f"sparse vector: {len(data)} bytes for {count} blocks of {width}, expected {expected}"
        )
    blocks = _positions(data[_HEAD.size : start], count, gap_bytes)
    if len(blocks) != count or (count and blocks[-1] >= every):
        raise WireError(f"sparse vector: blocks are not {count} below {every}")
    return SparseVector(size, blocks, np.frombuffer(data[start:], "<f4").reshape(count, width))


def _gaps(blocks: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Return the number of blocks left out before each one."""
    return np.diff(blocks, prepend=-1) - 1


def _gap_bytes(blocks: npt.NDArray[np.integer[Any]], every: int) -> int:
    """Return the number of bytes of a gap, or 0 if bits are shorter."""
    longest = int(_gaps(blocks).max(initial=0))
    gap_bytes = 1 if longest < 1 << 8 else 2 if longest < 1 << 16 else 4
    return gap_bytes if gap_bytes * len(blocks) <= -(-every // 8) else 0


def _padded(gap_bytes: int, count: int, every: int) -> int:
    """Return the number of bytes of the positions."""
    return -(-(gap_bytes * count if gap_bytes else -(-every // 8)) // 4) * 4


def _positions(data: memoryview, count: int, gap_bytes: int) -> npt.NDArray[np.int64]:
    if gap_bytes:
        gaps = np.frombuffer(data, f"<u{gap_bytes}", count)
        return np.cumsum(gaps, dtype=np.int64) + np.arange(count)
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))


def _common_width(indices: npt.NDArray[np.integer[Any]], size: int) -> int:
    """Return the largest width whose blocks are each entirely among the indices or not at all.

    The width divides every position at which the indices begin or end a run.
    """
    width = size
    for some in (indices[:_SEVERAL], indices):
        jumps = np.flatnonzero(np.diff(some) != 1)
        bounds = np.concatenate((some[:1], some[jumps + 1], some[jumps] + 1, indices[-1:] + 1))
        width = int(np.gcd.reduce(bounds % width, initial=width))
        if width == 1:
            break
    return width
