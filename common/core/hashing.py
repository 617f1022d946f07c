"""How a record's fields are hashed, the same wherever records are written, read or predicted on.

A text is 1 in the bucket of its field and itself. A number x is sign(x) log(1 + |x|), since it may
be a count of any size, in the bucket of its field alone. Two things may share a bucket; with many
times more buckets than things, few do (Weinberger et al. 2009, here without their signs). The name
and version of all of this is `crc32-1`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def bucket_of(field: str, text: str | None, buckets: int) -> int:
    """The bucket of a text in a field; None: that of the field's numbers."""
    return crc32((field if text is None else f"{field}={text}").encode()) % buckets


def damped(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """What numbers are in their buckets, of the same shape."""
    return (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)
