"""Two binary formats of image sets: IDX (MNIST) and the binary form of CIFAR-10."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from common.datasets.records import checked
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.datasets.records import Records

_IDX_UBYTE = 0x08  # the only element type that image sets use
_CIFAR10_SHAPE = (3, 32, 32)


def idx_array(data: bytes, source: str) -> npt.NDArray[np.uint8]:
    """Parse one IDX file of unsigned bytes: magic, a size per dimension, then the elements.

    Raises:
        UserError: If it is something else, or shorter or longer than its header says.
    """
    if len(data) < 4 or data[:3] != bytes((0, 0, _IDX_UBYTE)):
        raise UserError(f"{source}: is not IDX of unsigned bytes; begins with {data[:4].hex()!r}")
    dimensions = data[3]
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise UserError(f"{source}: ends inside its header of {start} bytes")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if math.prod(shape) != len(data) - start:
        raise UserError(f"{source}: shape {shape} does not fit the {len(data) - start} bytes there")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def idx_records(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], source: str
) -> Records:
    """Put images (n, h, w) and labels (n,) together.

    Raises:
        UserError: If the arrays are not such.
    """
    if images.ndim != 3 or labels.ndim != 1:
        raise UserError(
            f"{source}: images must be (n, h, w) and labels (n,),"
            f" found {images.shape} and {labels.shape}"
        )
    return checked({"image": images[:, np.newaxis], "label": labels.astype(np.int64)}, source)


def cifar10_records(data: bytes, source: str) -> Records:
    """Parse the binary form of CIFAR-10: a label byte, then red, green and blue planes.

    Raises:
        UserError: If the length is not a multiple of a record's, or a label is above 9.
    """
    record_bytes = 1 + math.prod(_CIFAR10_SHAPE)
    if len(data) % record_bytes:
        raise UserError(f"{source}: {len(data)} bytes are not records of {record_bytes} bytes")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record_bytes)
    labels = rows[:, 0].astype(np.int64)
    if len(labels) and labels.max() > 9:
        raise UserError(f"{source}: labels must be 0 to 9, found {labels.max()}")
    return checked({"image": rows[:, 1:].reshape(-1, *_CIFAR10_SHAPE), "label": labels}, source)
