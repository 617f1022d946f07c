"""The records that a worker has decoded: first in order of arrival, then by the batch they are in.

What is kept is a cache keyed by address; correctness never depends on it. The stream thread puts
and forgets, the gradient thread gets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from common.core.spans import Address, Partition
from common.data.fields import Columns, concatenate


class ArrivedRows:
    """Decoded rows that no announced batch holds yet, per partition, oldest first."""

    def __init__(self) -> None:
        self._runs = dict[Partition, deque[Columns]]()

    def add(self, partition: Partition, rows: Columns) -> None:
        """Take in the rows of one run."""
        self._runs.setdefault(partition, deque()).append(rows)

    def drop(self, partition: Partition) -> None:
        """Forget a partition's rows."""
        self._runs.pop(partition, None)

    def take(self, address: Address, counts: Iterable[int]) -> Columns:
        """Take the oldest rows of each span out, joined in the order of the address."""
        parts = list[Columns]()
        for span, count in zip(address, counts, strict=True):
            parts += self._take(span.place, count)
        return concatenate(parts)

    def _take(self, partition: Partition, count: int) -> list[Columns]:
        runs, parts = self._runs.get(partition, deque()), list[Columns]()
        while count > 0:
            rows = runs.popleft()
            size = len(next(iter(rows.values())))
            if size > count:
                runs.appendleft({name: column[count:] for name, column in rows.items()})
                rows = {name: column[:count] for name, column in rows.items()}
            parts.append(rows)
            count -= min(size, count)
        return parts


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
