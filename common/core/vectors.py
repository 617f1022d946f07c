"""Sparse vectors of blocks, and operations with dense ones."""

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
        """Shape of the dense vector."""
        return (self.size,)

    @property
    def indices(self) -> npt.NDArray[np.integer[Any]]:
        """(n * width,) positions of the numbers in the vector, ascending."""
        width = self.values.shape[1]
        if width == 1:
            return self.blocks
        return np.ravel(self.blocks[:, None] * width + np.arange(width))


def numbers_in(vector: Vector | SparseVector) -> Vector:
    """Return all numbers of a vector that may differ from zero."""
    return vector.values if isinstance(vector, SparseVector) else vector


def dense(vector: Vector | SparseVector) -> Vector:
    """Return a vector as (size,) float32."""
    if not isinstance(vector, SparseVector):
        return vector
    whole = np.zeros(vector.size, np.float32)
    write_to(whole, vector)
    return whole


def squared_norm(vector: Vector | SparseVector, count: int) -> float:
    """Return the squared norm of the first `count` numbers, which is finite if they are."""
    if isinstance(vector, SparseVector):
        numbers = vector.values.ravel()[vector.indices < count]
    else:
        numbers = vector[:count]
    return float(np.einsum("i,i->", numbers, numbers, dtype=np.float64))


def add_to(total: Vector, vector: Vector | SparseVector) -> None:
    """Add a vector in place, with the same bits as a sum of dense vectors.

    A sparse vector leaves out +0.0. Adding +0.0 changes nothing but -0.0, and a total that began at
    +0.0 is never -0.0.

    Args:
        total: (size,) float32
        vector: A vector of the same size.
    """
    if isinstance(vector, SparseVector):
        total.reshape(-1, vector.values.shape[1])[vector.blocks] += vector.values
    else:
        total += vector


def write_to(whole: Vector, vector: SparseVector) -> None:
    """Write a sparse vector's numbers to their positions. All others stay as they are.

    Args:
        whole: (size,) float32
        vector: A vector of the same size.
    """
    whole.reshape(-1, vector.values.shape[1])[vector.blocks] = vector.values
