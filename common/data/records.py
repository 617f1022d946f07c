"""What a data set is here (named arrays of equal length, one row per record), and its stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from common.data.warp import warp
from common.errors import UserError

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


def batches(
    records: Records,
    size: int,
    rng: np.random.Generator,
    *,
    passes: int | None = None,
    shuffled: bool = True,
    warped: bool = False,
) -> Iterator[Records]:
    """Give the records in batches; each pass gives every record once.

    Args:
        records: The data set.
        size: Records per batch; the last one of each pass may have fewer.
        rng: Order and warps; the same seed gives the same stream.
        passes: How often to go through the set; None is for ever.
        shuffled: A new random order for each pass, else the order of the set.
        warped: Warp the field `image` of each record anew, so that none comes twice.
    """
    n = count(records)
    for _ in itertools.count() if passes is None else range(passes):
        order = rng.permutation(n) if shuffled else np.arange(n)
        for start in range(0, n, size):
            batch = take(records, order[start : start + size])
            if warped:
                batch["image"] = warp(batch["image"], rng)
            yield batch
