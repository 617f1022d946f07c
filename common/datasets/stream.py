"""A data set as a datastream: batches in random order, for ever if wanted, warped if wanted."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from common.datasets.records import count, take
from common.datasets.warp import warp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.datasets.records import Records


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
