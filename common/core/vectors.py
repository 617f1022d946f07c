"""A vector of which only some blocks are told, and what it does to a dense one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector


class SparseVector(NamedTuple):
    """Some blocks of a vector, all of one width: those that are not +0.0, or that have changed."""

    size: int  # P + B, a multiple of the width
    blocks: npt.NDArray[np.integer[Any]]  # (n,) strictly ascending numbers of the blocks
    values: Vector  # (n, width) float32

    @property
    def shape(self) -> tuple[int]:
        """Of the vector, were it dense."""
        return (self.size,)

    @property
    def indices(self) -> npt.NDArray[np.integer[Any]]:
        """(n * width,) ascending: where in the vector each of its numbers is."""
        width = self.values.shape[1]
        if width == 1:
            return self.blocks
        return np.ravel(self.blocks[:, None] * width + np.arange(width))


def numbers_in(vector: Vector | SparseVector) -> Vector:
    """All numbers of a vector that may be anything but zero."""
    return vector.values if isinstance(vector, SparseVector) else vector


def dense(vector: Vector | SparseVector) -> Vector:
    """(size,) float32: all numbers of a vector, where they are."""
    if not isinstance(vector, SparseVector):
        return vector
    whole = np.zeros(vector.size, np.float32)
    write_to(whole, vector)
    return whole


def squared_norm(vector: Vector | SparseVector, count: int) -> float:
    """|its first `count` numbers|^2; finite where they are."""
    if isinstance(vector, SparseVector):
        numbers = vector.values.ravel()[vector.indices < count]
    else:
        numbers = vector[:count]
    return float(np.einsum("i,i->", numbers, numbers, dtype=np.float64))


def add_to(total: Vector, vector: Vector | SparseVector) -> None:
    """Add a vector in place, with the bits that the sum of dense ones has.

    A total that began at +0.0 is never -0.0, and to anything else adding +0.0 changes nothing: what
    a sparse vector leaves out.

    Args:
        total: (size,) float32
        vector: Of the same size.
    """
    if isinstance(vector, SparseVector):
        total.reshape(-1, vector.values.shape[1])[vector.blocks] += vector.values
    else:
        total += vector


def write_to(whole: Vector, vector: SparseVector) -> None:
    """Write a sparse vector's numbers in their places; all others stay as they are.

    Args:
        whole: (size,) float32
        vector: Of the same size.
    """
    whole.reshape(-1, vector.values.shape[1])[vector.blocks] = vector.values
