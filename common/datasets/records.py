"""What a data set is here: named arrays of equal length, one row per record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

Array: TypeAlias = npt.NDArray[Any]
Records: TypeAlias = dict[str, Array]  # field name -> (n, ...) array, n the same for all


def count(records: Mapping[str, Array]) -> int:
    """How many records there are."""
    return len(next(iter(records.values())))


def take(records: Mapping[str, Array], rows: npt.NDArray[np.int64]) -> Records:
    """The records of these rows, in this order."""
    return {name: array[rows] for name, array in records.items()}


def checked(records: Records, source: str) -> Records:
    """Return the records if they are some, of one length.

    Raises:
        UserError: If there is no field or no record, or if lengths differ.
    """
    lengths = {name: len(array) if array.ndim else 0 for name, array in records.items()}
    if not lengths or 0 in lengths.values():
        raise UserError(f"{source}: holds no records (fields and lengths: {lengths})")
    if len(set(lengths.values())) > 1:
        raise UserError(f"{source}: fields must have one length, found {lengths}")
    return records
