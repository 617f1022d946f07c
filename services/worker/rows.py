"""The records that a worker has decoded, by the batch they are in.

What is kept is a cache keyed by address; correctness never depends on it. The stream thread puts
and forgets, the gradient thread gets.
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
    """Announced batches that are still in memory.

    Args:
        budget_bytes: Past it a batch keeps only its address, and is read back when it is needed.
            The newest give way: batches are used in order of age.
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
        """A batch's rows, or None where they are not in memory."""
        return self._batches.get(address)

    def forget(self, addresses: Iterable[Address]) -> None:
        """Let go of batches."""
        for address in addresses:
            rows = self._batches.pop(address, None)
            if rows is not None:
                self._bytes -= sum(column.nbytes for column in rows.values())
