"""Rows in order of arrival, then by batch: nothing lost, nothing mixed up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import Partition, Span
from services.worker.rows import ArrivedRows, BatchCache

A, B = Partition("s", 0), Partition("s", 1)


def rows(*values: int) -> dict[str, np.ndarray]:
    return {"x": np.array(values), "y": np.array(values) * 10}


def test_a_batch_takes_the_oldest_rows_of_each_span_in_the_order_of_its_address() -> None:
    arrived = ArrivedRows()
    arrived.add(B, rows(20, 21))
    arrived.add(A, rows(10))
    arrived.add(A, rows(11, 12))

    taken = arrived.take((Span("s", 0, 0, 2), Span("s", 1, 0, 1)), (2, 1))

    assert taken["x"].tolist() == [10, 11, 20]
    assert taken["y"].tolist() == [100, 110, 200]
    assert arrived.take((Span("s", 0, 2, 3),), (1,))["x"].tolist() == [12]


def test_dropped_rows_are_gone_and_others_stay() -> None:
    arrived = ArrivedRows()
    arrived.add(A, rows(1))
    arrived.add(B, rows(2))
    arrived.drop(A)
    arrived.add(A, rows(3))
    assert arrived.take((Span("s", 0, 5, 6), Span("s", 1, 0, 1)), (1, 1))["x"].tolist() == [3, 2]


@given(st.lists(st.integers(1, 5), max_size=12), st.lists(st.integers(1, 7), max_size=12))
def test_any_runs_cut_at_any_places_give_the_same_rows(runs: list[int], cuts: list[int]) -> None:
    total = sum(runs)
    arrived, start = ArrivedRows(), 0
    for size in runs:
        arrived.add(A, rows(*range(start, start + size)))
        start += size
    taken = list[int]()
    for cut in cuts:
        if len(taken) + cut <= total:
            taken += arrived.take((Span("s", 0, len(taken), len(taken) + cut),), (cut,))[
                "x"
            ].tolist()
    assert taken == list(range(len(taken)))


def test_past_its_budget_a_batch_keeps_only_its_address() -> None:
    first, second = (Span("s", 0, 0, 2),), (Span("s", 0, 2, 4),)
    cache = BatchCache(budget_bytes=rows(1, 2)["x"].nbytes * 2)
    cache.put(first, rows(1, 2))
    cache.put(second, rows(3, 4))
    assert cache.get(first) is not None
    assert cache.get(second) is None

    cache.forget([first, second])
    cache.put(second, rows(3, 4))
    assert cache.get(first) is None
    assert cache.get(second) is not None
