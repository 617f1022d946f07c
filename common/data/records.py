"""Data sets: named arrays of equal length, one row per record. Also streams of their batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from common.data.warp import warp
from common.errors import UserError

Array: TypeAlias = npt.NDArray[Any]
# Arrays (n, ...) by field name; n is the same for all.
Records: TypeAlias = dict[str, Array]


def count(records: Mapping[str, Array]) -> int:
    """Return the number of records."""
    return len(next(iter(records.values())))


def take(records: Mapping[str, Array], rows: npt.NDArray[np.int64]) -> Records:
    """Return the records of these rows, in this order."""
    return {name: array[rows] for name, array in records.items()}


def checked(records: Records, source: str) -> Records:
    """Return the records, after checking that there are some and their lengths agree.

    Raises:
        UserError: If there is no field or no record, or if lengths differ.
    """
    lengths = {name: len(array) if array.ndim else 0 for name, array in records.items()}
    if not lengths or 0 in lengths.values():
        raise UserError(f"{source}: contains no records (fields and lengths: {lengths})")
    if len(set(lengths.values())) > 1:
        raise UserError(f"{source}: all fields must have the same length, found {lengths}")
    return records


def batches(
    records: Records,
    size: int,
    rng: np.random.Generator,
    *,
    passes: int | None = None,
    shuffled: bool = True,
    warped: bool = False,
) -> Iterator[Records]:
    """Yield the records in batches. Each pass yields every record once.

    Args:
        records: The data set.
        size: Records per batch. The last batch of a pass may have fewer.
        rng: Source of orders and warps. The same seed yields the same stream.
        passes: Number of passes; None repeats forever.
        shuffled: True for a new random order in each pass, False for the order of the set.
        warped: True to warp the field `image` of each record each time, so that all records differ.
    """
    n = count(records)
    for _ in itertools.count() if passes is None else range(passes):
        order = rng.permutation(n) if shuffled else np.arange(n)
        for start in range(0, n, size):
            batch = take(records, order[start : start + size])
            if warped:
                batch["image"] = warp(batch["image"], rng)
            yield batch
