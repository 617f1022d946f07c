"""What is sampled of an update is of the update, each record once, of every stream enough."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.core.messages import Batch, Skipped, WorkerId
from common.core.spans import Partition, Span
from services.evaluator.sampling import MOST_PIECES, sample

PLACES = [Partition(stream, index) for stream in ("clicks", "orders") for index in range(3)]


@st.composite
def updates(draw: st.DrawFn) -> list[Batch]:
    """Batches whose spans tile their partitions; some of their records do not decode."""
    ends = dict[Partition, int]()
    batches = list[Batch]()
    for offset in range(draw(st.integers(1, 20))):
        places = draw(st.sets(st.sampled_from(PLACES), min_size=1, max_size=3))
        spans, skipped = list[Span](), list[Skipped]()
        for place in sorted(places):
            start = ends.get(place, draw(st.integers(0, 5)))
            ends[place] = end = start + draw(st.integers(1, 20))
            spans.append(Span(*place, start, end))
            bad = {start + each for each in draw(st.sets(st.integers(0, 19), max_size=5))}
            skipped += [Skipped(*place, each, "torn") for each in sorted(bad) if each < end]
        room = sum(span.end - span.start for span in spans) - len(skipped)
        batches.append(Batch(offset, WorkerId("w"), tuple(spans), room, tuple(skipped)))
    return batches


def records_of(batches: list[Batch]) -> dict[str, set[tuple[str, int, int]]]:
    """By stream, every record of the update that decodes."""
    found: dict[str, set[tuple[str, int, int]]] = {}
    for batch in batches:
        skipped = {(each.topic, each.partition, each.offset) for each in batch.skipped}
        for span in batch.address:
            whole = {(*span.place, offset) for offset in range(span.start, span.end)}
            found.setdefault(span.topic, set()).update(whole - skipped)
    return found


@given(updates(), st.integers(1, 200))
def test_each_record_is_of_the_update_and_decodes_and_comes_once(
    batches: list[Batch], most: int
) -> None:
    there = records_of(batches)
    chosen = sample(batches, most)
    assert chosen.keys() == {stream for stream, records in there.items() if records}
    for stream, pieces in chosen.items():
        sampled = [
            (*span.place, offset)
            for span, skipped in pieces
            for offset in range(span.start, span.end)
            if offset not in skipped
        ]
        assert len(sampled) == len(set(sampled))
        assert set(sampled) <= there[stream]
        assert 1 <= len(sampled) <= most
        assert len(pieces) <= MOST_PIECES
        if len({span for span, _ in pieces}) < MOST_PIECES:
            assert len(sampled) == min(most, len(there[stream]))


def test_the_sample_is_spread_over_the_batches_in_proportion() -> None:
    batches = [
        Batch(0, WorkerId("w1"), (Span("clicks", 0, 0, 60),), 60),
        Batch(1, WorkerId("w2"), (Span("clicks", 1, 0, 30),), 30),
        Batch(2, WorkerId("w3"), (Span("clicks", 2, 0, 10),), 10),
    ]
    pieces = sample(batches, 10)["clicks"]
    assert [piece.span.end - piece.span.start for piece in pieces] == [6, 3, 1]
    assert [piece.span.partition for piece in pieces] == [0, 1, 2]


def test_of_many_batches_some_are_asked_for_from_the_first_to_the_last() -> None:
    batches = [
        Batch(at, WorkerId("w"), (Span("clicks", 0, 10 * at, 10 * at + 10),), 10)
        for at in range(100)
    ]
    pieces = sample(batches, 160)["clicks"]
    assert len(pieces) == MOST_PIECES
    gaps = [after.span.start - before.span.start for before, after in pairwise(pieces)]
    assert set(gaps) <= {60, 70}
    assert pieces[-1].span.start >= 900
