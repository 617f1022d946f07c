"""Batches are cut by offsets alone, however polls split the records."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.batching import (
    ADDRESSES_BYTES,
    MAX_SKIPPED,
    REASON_CHARACTERS,
    RECORD_BYTES,
    SKIPPED_BYTES,
    Batcher,
    Cut,
    DecodedRun,
    most_group_size,
    span_bytes,
)
from common.core.messages import Skipped
from common.core.spans import Partition, Span
from tests.unit.core.examples import P, Q, span

BEGIN = {P: 0, Q: 100}


class Read(NamedTuple):
    """A record as it was read."""

    partition: Partition
    offset: int
    good: bool


def skipped(partition: Partition, offset: int) -> Skipped:
    return Skipped(*partition, offset, "does not decode")


def run(partition: Partition, good: range, bad: range = range(0)) -> DecodedRun:
    return DecodedRun(
        partition, good, tuple(skipped(partition, offset) for offset in bad), 0.0, 0.0
    )


def bad_records(cut: Cut) -> int:
    return sum(each.records for each in cut.skipped)


def placed(
    batch_size: int, linger_s: float | None = None, group_size: int = 1, min_batch: int = 1
) -> Batcher:
    batcher = Batcher(batch_size, linger_s, group_size, min_batch)
    for partition, position in BEGIN.items():
        batcher.place(partition, position)
    return batcher


def test_batch_is_cut_after_its_last_sample() -> None:
    # s[0]   0 1 . . 4 5     (2 and 3 hold no record)
    # s[1]             100 101 102
    # b = 3  |---------|-------|--
    batcher = placed(3)
    (first,) = batcher.add(DecodedRun(P, [0, 1, 4, 5], (), 0.0, 0.0), now=0.0)
    (second,) = batcher.add(run(Q, range(100, 103)), now=0.0)

    assert first.address == (span(P, 0, 5),)
    assert (second.address, second.counts) == ((span(P, 5, 6), span(Q, 100, 102)), (1, 2))
    assert (batcher.samples, batcher.position(P), batcher.position(Q)) == (1, 6, 103)


def test_hole_belongs_to_the_span_of_the_next_record() -> None:
    batcher = placed(1)
    cuts = batcher.add(DecodedRun(P, [3, 7], (), 0.0, 0.0), now=0.0)
    assert [cut.address for cut in cuts] == [(span(P, 0, 4),), (span(P, 4, 8),)]


def test_run_that_is_a_complete_batch_is_cut_like_its_parts() -> None:
    whole, parts = placed(2), placed(2)
    for first in (3, 6):
        offsets, epoch, at = [first, first + 1], first // 3, float(first)
        (cut,) = whole.add(DecodedRun(P, offsets, (), at, at + 0.5, epoch), now=0.0)
        assert parts.add(DecodedRun(P, offsets[:1], (), at, at, epoch), now=0.0) == ()
        assert parts.add(DecodedRun(P, offsets[1:], (), at + 0.5, at + 0.5, epoch), now=0.0) == (
            cut,
        )
    assert (cut.address[0].start, cut.address[0].before) == (5, 1)
    assert whole.samples == 0
    assert (whole.position(P), whole.epoch(P)) == (parts.position(P), parts.epoch(P)) == (8, 2)


def test_dropped_partition_leaves_others_open() -> None:
    batcher = placed(4)
    batcher.add(run(P, range(2)), now=0.0)
    batcher.add(run(Q, range(100, 101), bad=range(101, 102)), now=0.0)
    batcher.drop(P)

    assert (batcher.position(P), batcher.has_open(P), batcher.has_open(Q)) == (None, False, True)
    assert batcher.samples == 1
    cut = batcher.close()
    assert cut is not None
    assert (cut.address, cut.counts) == ((span(Q, 100, 102),), (1,))
    assert cut.skipped == (skipped(Q, 101),)


def test_partition_placed_again_drops_its_open_records() -> None:
    batcher = placed(2)
    batcher.add(run(P, range(1)), now=0.0)
    batcher.place(P, 50)

    assert (batcher.samples, batcher.position(P)) == (0, 50)
    (cut,) = batcher.add(run(P, range(50, 52)), now=0.0)
    assert cut.address == (span(P, 50, 52),)


def test_partial_batch_is_due_a_linger_after_its_first_record() -> None:
    batcher = placed(3, linger_s=5.0)
    assert batcher.due() is None
    batcher.add(run(P, range(1)), now=10.0)
    batcher.add(run(P, range(1, 2)), now=12.0)
    assert batcher.due() == 15.0

    # Complete the first batch and open the next.
    batcher.add(run(P, range(2, 4)), now=14.0)
    assert batcher.due() == 19.0
    assert batcher.close() is not None
    assert (batcher.due(), batcher.close()) == (None, None)


def test_partial_batch_without_linger_is_never_due() -> None:
    batcher = placed(2)
    batcher.add(run(P, range(1)), now=10.0)
    assert batcher.due() is None


# --- min_batch -----------------------------------------------------------------------------------


def test_rest_below_min_batch_is_due_once_a_later_record_makes_it_large_enough() -> None:
    batcher = placed(4, linger_s=5.0, min_batch=3)
    batcher.add(run(P, range(2)), now=10.0)
    assert batcher.due() is None
    assert [batcher.waits_for_more(now) for now in (14.9, 15.0)] == [False, True]

    batcher.add(run(Q, range(100, 101)), now=40.0)
    assert (batcher.due(), batcher.waits_for_more(40.0)) == (15.0, False)
    # The group assigned Q to another worker.
    batcher.drop(Q)
    assert (batcher.due(), batcher.waits_for_more(40.0)) == (None, True)


def test_rest_of_bad_records_alone_ignores_min_batch() -> None:
    batcher = placed(4, linger_s=5.0, min_batch=3)
    batcher.add(run(P, range(0), bad=range(2)), now=10.0)
    assert (batcher.due(), batcher.waits_for_more(15.0)) == (15.0, False)


def test_min_batch_has_no_effect_without_linger() -> None:
    batcher = placed(4, min_batch=3)
    batcher.add(run(P, range(1)), now=10.0)
    assert (batcher.due(), batcher.waits_for_more(1e9)) == (None, False)


def test_min_batch_has_no_effect_if_batch_size_is_one() -> None:
    batcher = placed(1, linger_s=5.0, min_batch=2)
    assert [cut.samples for cut in batcher.add(run(P, range(2)), now=0.0)] == [1, 1]
    assert batcher.resize(4) is None
    batcher.add(run(P, range(2, 3)), now=0.0)
    assert batcher.due() is None
    cut = batcher.resize(1)
    assert cut is not None
    assert cut.samples == 1


@pytest.mark.parametrize("chunk", [1, 7, MAX_SKIPPED, 10_000])
def test_thousand_bad_records_close_no_batch_below_min_batch(chunk: int) -> None:
    # A batch of one sample is not closed, however many bad records it has.
    # first batch   [0:1501]      good: 0, 1500      bad: 1 to 1499
    # second batch  [1501:2601]   good: 2000, 2600   bad: all others
    batcher, cuts = placed(5, min_batch=2), list[Cut]()
    good = {0, 1500, 2000}
    for start in range(0, 2600, chunk):
        here = range(start, min(start + chunk, 2600))
        bad = tuple(skipped(P, offset) for offset in here if offset not in good)
        cuts += batcher.add(DecodedRun(P, [o for o in here if o in good], bad, 0.0, 0.0), now=0.0)

    assert [(cut.samples, bad_records(cut)) for cut in cuts] == [(2, 1499)]
    assert cuts[0].address == (span(P, 0, 1501),)
    assert batcher.samples == 1
    (cut,) = batcher.add(run(P, range(2600, 2601)), now=0.0)
    assert (cut.address, cut.samples) == ((span(P, 1501, 2601),), 2)


@pytest.mark.parametrize("chunk", [1, 13, 5000])
def test_kafka_record_size_limit_overrides_min_batch(chunk: int) -> None:
    batcher, cuts = placed(5, min_batch=2), list[Cut]()
    batcher.add(run(Q, range(100, 101)), now=0.0)
    bad = [Skipped(*P, offset, f"{offset} {'x' * 1000}") for offset in range(5000)]  # all different
    for start in range(0, 5000, chunk):
        cuts += batcher.add(DecodedRun(P, (), tuple(bad[start : start + chunk]), 0.0, 0.0), now=0.0)

    assert [cut.samples for cut in cuts[:2]] == [1, 0]
    assert all(len(msgspec.json.encode(cut.skipped)) < SKIPPED_BYTES for cut in cuts)


def test_expired_records_are_skipped_with_open_part_of_their_partition() -> None:
    batcher = placed(4, min_batch=3)
    batcher.add(DecodedRun(P, [0, 1], (), 0.0, 0.0, epoch=2), now=0.0)
    batcher.add(run(Q, range(100, 101)), now=0.0)
    assert batcher.expire(P, 9) == Span(*P, 0, 9, 0, -1, 2, 2)
    assert (batcher.samples, batcher.position(P), batcher.has_open(P)) == (1, 9, False)
    assert batcher.expire(P, 12) == Span(*P, 9, 12, 0, 2, 2, 2)


@pytest.mark.parametrize("again", [run(P, range(2, 5)), run(P, range(5, 6), bad=range(2, 3))])
def test_run_below_the_position_is_refused_and_changes_nothing(again: DecodedRun) -> None:
    batcher = placed(10)
    batcher.add(run(P, range(3)), now=0.0)
    with pytest.raises(ValueError, match=r"s\[0\] gave offset 2 below its position 3"):
        batcher.add(again, now=0.0)
    assert (batcher.samples, batcher.position(P)) == (3, 3)


def test_partition_without_position_is_refused() -> None:
    with pytest.raises(ValueError, match=r"s\[0\] was read before it was placed"):
        Batcher(2).add(run(P, range(1)), now=0.0)


def test_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Batcher(0)


@pytest.mark.parametrize("chunk", [1, 7, MAX_SKIPPED, 2 * MAX_SKIPPED + 500])
def test_thousand_bad_records_close_a_batch(chunk: int) -> None:
    batcher, cuts = placed(3), list[Cut]()
    # Two good records join the first thousand bad ones.
    batcher.add(run(Q, range(100, 102)), now=0.0)
    for start in range(0, 2 * MAX_SKIPPED + 500, chunk):
        end = min(start + chunk, 2 * MAX_SKIPPED + 500)
        cuts += batcher.add(run(P, range(0), bad=range(start, end)), now=0.0)

    assert [bad_records(cut) for cut in cuts] == [MAX_SKIPPED, MAX_SKIPPED]
    assert [cut.samples for cut in cuts] == [2, 0]
    assert cuts[1].address == (span(P, MAX_SKIPPED, 2 * MAX_SKIPPED),)


def test_last_sample_or_thousand_bad_records_close_batch_whichever_is_first() -> None:
    samples_first = placed(2).add(run(P, range(2), bad=range(2, 1500)), now=0.0)
    assert [cut.address for cut in samples_first] == [(span(P, 0, 2),), (span(P, 2, 1002),)]

    (bad_first,) = placed(2).add(run(P, range(1200, 1203), bad=range(1100)), now=0.0)[:1]
    assert (bad_first.address, bad_first.samples) == ((span(P, 0, MAX_SKIPPED),), 0)


def test_bad_records_of_dropped_partition_do_not_count() -> None:
    batcher = placed(3)
    batcher.add(run(P, range(0), bad=range(MAX_SKIPPED - 1)), now=0.0)
    batcher.drop(P)
    assert batcher.add(run(Q, range(0), bad=range(100, 100 + MAX_SKIPPED - 1)), now=0.0) == ()


def test_bad_records_are_grouped_by_partition_and_reason() -> None:
    batcher = placed(2)
    torn = [Skipped(*P, offset, "torn") for offset in (0, 1, 4)]
    batcher.add(DecodedRun(P, (), (*torn, Skipped(*P, 5, "no label")), 0.0, 0.0), now=0.0)
    (cut,) = batcher.add(run(Q, range(101, 103), bad=range(100, 101)), now=0.0)

    assert cut.skipped == (
        Skipped(*P, 0, "torn", (1, 3)),
        Skipped(*P, 5, "no label"),
        skipped(Q, 100),
    )
    assert cut.skipped[0].offsets == (0, 1, 4)


@pytest.mark.parametrize("chunk", [1, 13, 5000])
def test_batch_closes_before_bad_records_exceed_a_kafka_record(chunk: int) -> None:
    batcher, cuts = placed(10**6), list[Cut]()
    bad = [Skipped(*P, offset, f"{offset} {'x' * 1000}") for offset in range(5000)]  # all different
    for start in range(0, 5000, chunk):
        cuts += batcher.add(DecodedRun(P, (), tuple(bad[start : start + chunk]), 0.0, 0.0), now=0.0)

    assert cuts
    assert len({bad_records(cut) for cut in cuts}) == 1
    assert all(len(each.reason) == REASON_CHARACTERS for each in cuts[0].skipped)
    assert len(msgspec.json.encode(cuts[0].skipped)) < SKIPPED_BYTES


@pytest.mark.parametrize("group_size", [1, 20, 1000])
def test_addresses_of_a_group_fit_into_one_record(group_size: int) -> None:
    # One record from each of 12,000 partitions; a single batch could hold all of them.
    topic = "t" * 200
    batcher, cuts = Batcher(10**6, None, group_size), list[Cut]()
    for index in range(12_000):
        place = Partition(topic, index)
        batcher.place(place, 2**62)
        cuts += batcher.add(run(place, range(2**62, 2**62 + 1)), now=0.0)

    longest = max(len(msgspec.json.encode(cut.address)) for cut in cuts)
    assert longest * group_size < ADDRESSES_BYTES
    assert all(cut.samples == cuts[0].samples for cut in cuts)
    left = batcher.close()
    assert left is not None
    assert sum(cut.samples for cut in (*cuts, left)) == 12_000  # nothing is lost


def test_batch_of_one_partition_always_fits() -> None:
    batcher = placed(3, group_size=10**9)
    (first,) = batcher.add(run(P, range(3)), now=0.0)
    assert first.samples == 3
    assert batcher.add(run(P, range(3, 5)), now=0.0) == ()
    (early,) = batcher.add(run(Q, range(100, 101)), now=0.0)  # not both partitions at once
    assert early.address == (span(P, 3, 5),)


def test_largest_group_fits_into_one_record() -> None:
    topics = ("short", "l" * 249)
    assert most_group_size(topics) * (span_bytes("l" * 249) + 200) <= RECORD_BYTES
    assert most_group_size(topics) > 1000


@st.composite
def readings(draw: st.DrawFn) -> list[Read]:
    """Draw records of two partitions in order, with holes and bad records among them."""
    at, reads = dict(BEGIN), list[Read]()
    for _ in range(draw(st.integers(0, 40))):
        partition = draw(st.sampled_from([P, Q]))
        offset = at[partition] + draw(st.sampled_from([0, 0, 0, 1, 5]))
        at[partition] = offset + 1
        reads.append(Read(partition, offset, draw(st.sampled_from([True, True, True, False]))))
    return reads


def chunked(reads: list[Read], breaks: list[bool]) -> list[DecodedRun]:
    """Return the records as runs; a run ends at a break, or if the partition changes."""
    chunks = list[list[Read]]()
    for read, breaks_here in zip(reads, breaks, strict=True):
        if breaks_here or not chunks or chunks[-1][-1].partition != read.partition:
            chunks.append([])
        chunks[-1].append(read)
    return [
        DecodedRun(
            chunk[0].partition,
            [read.offset for read in chunk if read.good],
            tuple(skipped(read.partition, read.offset) for read in chunk if not read.good),
            0.0,
            0.0,
        )
        for chunk in chunks
    ]


def cut_all(
    batch_size: int, runs: list[DecodedRun], group_size: int = 1, min_batch: int = 1
) -> tuple[list[Cut], Cut | None]:
    """Return the full batches, and the partial one that is left."""
    batcher = placed(batch_size, group_size=group_size, min_batch=min_batch)
    return [cut for each in runs for cut in batcher.add(each, now=0.0)], batcher.close()


@given(
    readings(),
    st.integers(1, 5),
    st.sampled_from([1, 10**6]),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, MAX_SKIPPED]),
    st.data(),
)
def test_any_chunking_of_the_same_records_gives_the_same_batches(
    reads: list[Read],
    batch_size: int,
    group_size: int,
    min_batch: int,
    most: int,
    data: st.DataObject,
) -> None:
    size = len(reads)
    breaks = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    sizes = (group_size, min_batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.core.batching.MAX_SKIPPED", most)
        one_by_one = cut_all(batch_size, chunked(reads, [True] * size), *sizes)
        assert cut_all(batch_size, chunked(reads, breaks), *sizes) == one_by_one
        assert cut_all(batch_size, chunked(reads, [False] * size), *sizes) == one_by_one
    if group_size == 1:
        assert all(not 0 < cut.samples < min(min_batch, batch_size) for cut in one_by_one[0])


@given(readings(), st.integers(1, 5))
def test_batches_tile_the_records_and_count_those_that_decode(
    reads: list[Read], batch_size: int
) -> None:
    full, rest = cut_all(batch_size, chunked(reads, [False] * len(reads)))
    assert all(cut.samples == batch_size for cut in full)
    assert rest is None or rest.samples < batch_size

    end = dict(BEGIN)
    for cut in [*full, *([rest] if rest else [])]:
        inside = list[Read]()
        for each, count in zip(cut.address, cut.counts, strict=True):
            assert each.start == end[each.place]  # neither a gap nor an overlap
            end[each.place] = each.end
            here = [
                r for r in reads if r.partition == each.place and each.start <= r.offset < each.end
            ]
            assert count == sum(read.good for read in here)
            inside += here
        assert cut.samples == sum(cut.counts)
        left_out = [(s.topic, s.partition, o) for s in cut.skipped for o in s.offsets]
        assert left_out == [(*r.partition, r.offset) for r in inside if not r.good]
    for partition, begin in BEGIN.items():
        last = max((r.offset + 1 for r in reads if r.partition == partition), default=begin)
        assert end[partition] == last


def test_resize_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        placed(3).resize(0)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), max_size=20), st.integers(1, 6))
def test_every_record_is_in_one_batch_when_batch_size_changes(
    steps: list[tuple[int, int]], first: int
) -> None:
    batcher, position, allowed = placed(first), 0, first
    cuts = list[Cut]()
    for count, batch_size in steps:
        full = batcher.add(run(P, range(position, position + count)), now=0.0)
        assert all(cut.samples == allowed for cut in full)
        position += count
        cut = batcher.resize(batch_size)
        if cut is not None:
            assert batch_size <= cut.samples < allowed
        cuts += (*full, *([cut] if cut is not None else []))
        allowed = batch_size
        assert batcher.samples < allowed
    spans = [part for cut in cuts for part in cut.address]
    ends = [part.end for part in spans]
    assert [part.start for part in spans] == [0, *ends][: len(spans)]
    assert sum(cut.samples for cut in cuts) + batcher.samples == position
