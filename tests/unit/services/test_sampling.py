"""Samples of an update: its own records, each once, enough of every stream."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import Partition, Span
from services.evaluator.sampling import MOST_PIECES, sample

PLACES = [Partition("clicks", index) for index in range(3)]


@st.composite
def spans_of_an_update(draw: st.DrawFn) -> list[Span]:
    """Draw spans that tile their partitions."""
    ends, spans = dict[Partition, int](), list[Span]()
    for _ in range(draw(st.integers(1, 30))):
        place = draw(st.sampled_from(PLACES))
        start = ends.get(place, draw(st.integers(0, 5)))
        ends[place] = end = start + draw(st.integers(1, 20))
        spans.append(Span(*place, start, end))
    return spans


def offsets_of(spans: list[Span]) -> list[tuple[int, int]]:
    """Return every record with its partition."""
    return [(span.partition, at) for span in spans for at in range(span.start, span.end)]


@given(spans_of_an_update(), st.integers(1, 200))
def test_sample_contains_records_of_the_update_at_most_once(spans: list[Span], most: int) -> None:
    there, chosen = offsets_of(spans), sample(spans, most)
    sampled = offsets_of(chosen)
    assert len(sampled) == len(set(sampled))
    assert set(sampled) <= set(there)
    assert 1 <= len(sampled) <= most
    assert len(chosen) <= MOST_PIECES
    if len(chosen) < MOST_PIECES and len(spans) < MOST_PIECES:
        assert len(sampled) == min(most, len(there))


def test_sample_is_proportional_to_the_size_of_batches() -> None:
    spans = [Span("clicks", 0, 0, 60), Span("clicks", 1, 0, 30), Span("clicks", 2, 0, 10)]
    chosen = sample(spans, 10)
    assert [span.end - span.start for span in chosen] == [6, 3, 1]
    assert [span.partition for span in chosen] == [0, 1, 2]


def test_sample_of_many_batches_covers_them_from_first_to_last() -> None:
    spans = [Span("clicks", 0, 10 * at, 10 * at + 10) for at in range(100)]
    chosen = sample(spans, 160)
    assert len(chosen) == MOST_PIECES
    gaps = [after.start - before.start for before, after in pairwise(chosen)]
    assert set(gaps) <= {60, 70}
    assert chosen[-1].start >= 900
