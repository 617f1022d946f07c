"""Each batch has the rows of its own records, in the order of its address."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.core.batching import Batcher, DecodedRun, RowSlice
from common.core.spans import Partition, Span
from common.data.fields import Columns
from services.worker.rows import BatchCache

ADDRESS = (Span("s", 0, 0, 2),)
A, B = Partition("s", 0), Partition("s", 1)


def rows(*values: int) -> dict[str, np.ndarray]:
    return {"x": np.array(values), "y": np.array(values) * 10}


def joined(slices: Sequence[RowSlice]) -> Columns:
    cache = BatchCache(1 << 20)
    cache.put(ADDRESS, slices)
    found = cache.get(ADDRESS)
    assert found is not None
    return found


def run(partition: Partition, start: int, values: Sequence[int]) -> DecodedRun:
    offsets = range(start, start + len(values))
    return DecodedRun(partition, offsets, (), 0.0, 0.0, rows=rows(*values))


def placed(batch_size: int) -> Batcher:
    batcher = Batcher(batch_size)
    for partition in (A, B):
        batcher.place(partition, 0)
    return batcher


def test_batch_has_its_rows_in_the_order_of_its_address() -> None:
    batcher = placed(4)
    assert batcher.add(run(B, 0, [20]), 0.0) == ()
    assert batcher.add(run(A, 0, [10, 11]), 0.0) == ()
    (first,) = batcher.add(run(A, 2, [12, 13, 14]), 0.0)
    assert joined(first.rows)["x"].tolist() == [10, 11, 12, 20]
    assert joined(first.rows)["y"].tolist() == [100, 110, 120, 200]
    (second,) = batcher.add(run(A, 5, [15, 16]), 0.0)
    assert joined(second.rows)["x"].tolist() == [13, 14, 15, 16]


def test_rows_of_a_dropped_partition_are_in_no_batch() -> None:
    batcher = placed(3)
    batcher.add(run(A, 0, [1]), 0.0)
    batcher.add(run(B, 0, [2]), 0.0)
    batcher.place(A, 5)
    (cut,) = batcher.add(run(A, 5, [3, 4]), 0.0)
    assert joined(cut.rows)["x"].tolist() == [3, 4, 2]


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 7))
def test_runs_of_any_size_give_the_same_rows(sizes: list[int], batch_size: int) -> None:
    batcher, start, taken = placed(batch_size), 0, list[int]()
    for size in sizes:
        for cut in batcher.add(run(A, start, range(start, start + size)), 0.0):
            taken += joined(cut.rows)["x"].tolist()
        start += size
    assert taken == list(range(start // batch_size * batch_size))


def test_batch_beyond_the_cache_budget_keeps_only_its_address() -> None:
    first, second = (Span("s", 0, 0, 2),), (Span("s", 0, 2, 4),)
    cache = BatchCache(budget_bytes=rows(1, 2)["x"].nbytes * 2)
    cache.put(first, [RowSlice(rows(1, 2), 0, 2)])
    cache.put(second, [RowSlice(rows(3, 4), 0, 2)])
    assert cache.get(first) is not None
    assert cache.get(second) is None

    cache.forget([first, second])
    cache.put(second, [RowSlice(rows(3, 4), 0, 2)])
    assert cache.get(first) is None
    assert cache.get(second) is not None
