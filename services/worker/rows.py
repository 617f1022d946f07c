"""A cache of decoded records by batch.

Correctness never depends on it. The stream thread puts and forgets batches, the gradient thread
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from common.core.spans import Address
from common.data.fields import Columns, concatenate

if TYPE_CHECKING:
    from common.core.batching import RowSlice


def joined(slices: Iterable[RowSlice]) -> Columns:
    """Return the rows of a batch, joined in the order of its address."""
    return concatenate(
        [
            {name: column[start:stop] for name, column in cast("Columns", rows).items()}
            for rows, start, stop in slices
        ]
    )


class BatchCache:
    """Announced batches whose records are in memory.

    Args:
        budget_bytes: Limit of the cache. A batch that exceeds it is not kept, and is read back from
            Kafka when it is needed. Older batches stay, because they are used first.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._batches = dict[Address, Columns]()

    def put(self, address: Address, rows: Columns) -> None:
        """Keep a batch, if it fits."""
        size = sum(column.nbytes for column in rows.values())
        if self._bytes + size <= self._budget_bytes and address not in self._batches:
            self._bytes += size
            self._batches[address] = rows

    def get(self, address: Address) -> Columns | None:
        """Return a batch's rows; None if they are not in memory."""
        return self._batches.get(address)

    def forget(self, addresses: Iterable[Address]) -> None:
        """Drop batches."""
        for address in addresses:
            rows = self._batches.pop(address, None)
            if rows is not None:
                self._bytes -= sum(column.nbytes for column in rows.values())
