"""Addresses: one order, one span per partition, nothing empty."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import Partition, Span, address_of
from tests.unit.core.examples import P, Q, span

if TYPE_CHECKING:
    from random import Random

partitions = st.builds(Partition, st.sampled_from(["s", "t"]), st.integers(0, 3))
tiles = st.dictionaries(  # partition -> (start, length)
    partitions, st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6
)


@given(tiles, st.randoms(use_true_random=False))
def test_address_does_not_depend_on_the_order_of_its_spans(
    tiles: dict[Partition, tuple[int, int]],
    random: Random,
) -> None:
    spans = [span(place, start, start + length) for place, (start, length) in tiles.items()]
    shuffled = list(spans)
    random.shuffle(shuffled)
    assert address_of(shuffled) == address_of(spans) == tuple(sorted(spans))
    assert [each.place for each in address_of(spans)] == sorted(tiles)


def test_partitions_of_a_topic_sort_by_number() -> None:
    two, ten = Span("s", 2, 0, 1), Span("s", 10, 0, 1)
    assert address_of([ten, two]) == (two, ten)


def test_address_needs_at_least_one_span() -> None:
    with pytest.raises(ValueError, match="at least one span"):
        address_of([])


@pytest.mark.parametrize(("start", "end"), [(0, 0), (5, 5), (5, 4), (-1, 3), (-3, -1)])
def test_empty_or_backwards_span_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"s\[0\]@.* is empty or ends before its start"):
        address_of([span(Q, 0, 1), span(P, start, end)])


@pytest.mark.parametrize("other", [(3, 5), (0, 3), (1, 2)])
def test_two_spans_of_one_partition_are_refused(other: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="has two spans of one partition"):
        address_of([span(P, 0, 3), span(Q, 0, 3), span(P, *other)])


def test_same_partition_number_in_two_topics_is_two_partitions() -> None:
    here, there = Span("s", 0, 0, 3), Span("t", 0, 0, 3)
    assert address_of([there, here]) == (here, there)


def test_span_names_its_place() -> None:
    assert span(Q, 3, 7).place == Q
    assert str(span(Q, 3, 7)) == "s[1]@3:7"
    assert str(Q) == "s[1]"
