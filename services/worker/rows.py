"""A cache of decoded records by batch.

Correctness never depends on it. The stream thread puts and forgets batches, the gradient thread
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from common.core.spans import Address
from common.data.fields import Columns, concatenate

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.batching import RowSlice


class BatchCache:
    """Announced batches whose records are in memory.

    Args:
        budget_bytes: Limit of the cache. A batch that exceeds it is not kept, and is read back from
            Kafka when it is needed. Older batches stay, because they are used first.
        empty: Makes an array of a shape and a dtype, in memory that the device reads quickly.
    """

    def __init__(
        self,
        budget_bytes: int,
        empty: Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]] = np.empty,
    ) -> None:
        self._empty = empty
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._batches = dict[Address, Columns]()

    def put(self, address: Address, slices: Iterable[RowSlice]) -> None:
        """Keep a batch's rows, joined in the order of its address, if they fit."""
        parts = [
            {name: column[start:stop] for name, column in cast("Columns", rows).items()}
            for rows, start, stop in slices
        ]
        size = sum(column.nbytes for part in parts for column in part.values())
        if self._bytes + size <= self._budget_bytes and address not in self._batches:
            self._bytes += size
            self._batches[address] = concatenate(parts, self._empty)

    def get(self, address: Address) -> Columns | None:
        """Return a batch's rows; None if they are not in memory."""
        return self._batches.get(address)

    def forget(self, addresses: Iterable[Address]) -> None:
        """Drop batches."""
        for address in addresses:
            rows = self._batches.pop(address, None)
            if rows is not None:
                self._bytes -= sum(column.nbytes for column in rows.values())
