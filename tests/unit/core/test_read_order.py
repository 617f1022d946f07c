"""Partitions are read in turn: in short runs, by their lag, and none is forgotten."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import Partition
from common.core.weighted_turns import PartitionRecords, RunsInTurn, behind_s

PLACES = [Partition("s", index) for index in range(5)]
A, B, C = PLACES[:3]


def order(pieces: list[PartitionRecords]) -> list[Partition]:
    return [piece.partition for piece in pieces for _ in range(piece.records)]


def test_backlogs_are_read_in_turns_weighted_by_lag() -> None:
    # A is 9,000 records behind and B 3,000: about three runs of A for each run of B.
    here = {A: 9_000, B: 3_000}
    given_out = order(RunsInTurn().plan(here, here, 12_000, 32))
    for start in range(0, 9_000, 1_000):
        assert 200 <= Counter(given_out[start : start + 1_000])[B] <= 330
    assert max(len(list(run)) for place, run in groupby(given_out) if place == B) == 32


def test_slow_partition_beside_a_large_backlog_gets_its_minimum_share() -> None:
    given_out = order(RunsInTurn().plan({A: 20_000, B: 64}, {}, 640, 32))
    assert given_out.index(B) <= 320
    assert Counter(given_out)[B] >= 32


def test_single_partition_is_read_in_one_piece() -> None:
    assert RunsInTurn().plan({A: 500, B: 0}, {B: 9}, 2_000, 32) == [PartitionRecords(A, 500)]


def test_partition_that_runs_dry_but_lags_is_waited_for() -> None:
    pieces = RunsInTurn().plan({A: 1_000, B: 40}, {A: 1_000, B: 1_000}, 2_000, 32)
    assert sum(piece.records for piece in pieces if piece.partition == B) == 40
    assert sum(piece.records for piece in pieces if piece.partition == A) <= 64


def test_next_request_ends_a_run_that_did_not_fit() -> None:
    turns, here = RunsInTurn(), {A: 1_000, B: 1_000}
    first = turns.plan(here, here, 20, 32)
    second = turns.plan(here, here, 44, 32)
    assert [piece.records for piece in first] == [20]
    assert second[0] == PartitionRecords(first[0].partition, 12)
    assert second[1].partition != first[0].partition


def test_rest_of_a_run_of_a_removed_partition_is_dropped() -> None:
    turns = RunsInTurn()
    [begun] = turns.plan({A: 100, B: 100}, {}, 20, 32)
    others = {place: 100 for place in (A, B, C) if place != begun.partition}
    assert turns.plan(others, {}, 32, 32)[0].records == 32


@given(
    polls=st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 300), min_size=1),
            st.integers(0, 200),
        ),
        max_size=30,
    ),
    lags=st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 10_000)),
    run=st.integers(1, 64),
)
def test_planned_runs_fit_the_room_and_use_available_records(
    polls: list[tuple[dict[Partition, int], int]], lags: dict[Partition, int], run: int
) -> None:
    turns = RunsInTurn()
    for here, room in polls:
        pieces = turns.plan(here, lags, room, run)
        found = sum(piece.records for piece in pieces)
        if all(lags.get(place, 0) <= count for place, count in here.items()):
            assert found == min(room, sum(here.values()))
        assert min(room, sum(here.values()), 1) <= found <= room
        assert all(piece.records >= 1 for piece in pieces)
        left = Counter(here)
        for piece in pieces:
            others = any(count for place, count in left.items() if place != piece.partition)
            assert piece.records <= run or not others
            left[piece.partition] -= piece.records
            assert left[piece.partition] >= 0


@given(
    weights=st.lists(st.integers(1, 10**6), min_size=2, max_size=8),
    run=st.integers(1, 64),
    room=st.integers(100, 2_000),
)
def test_no_partition_with_records_waits_long(weights: list[int], run: int, room: int) -> None:
    # Each of the n partitions gets at least a fifth of an even share, so one turn in 5 n. Each of
    # the others may be owed up to four turns, which it takes first.
    places = [Partition("s", index) for index in range(len(weights))]
    turns, lags = RunsInTurn(), dict(zip(places, weights, strict=True))
    seen, records = set[Partition](), 0
    while records < 20 * run * len(places):
        pieces = turns.plan(dict.fromkeys(places, 10**6), lags, room, run)
        seen.update(piece.partition for piece in pieces)
        records += room
    assert seen == set(places)


def test_partition_with_backlog_and_older_records_is_behind() -> None:
    newest_s = {A: 1_000.0, B: 4_000.0, C: 5_000.0}
    assert behind_s(newest_s, {A: 7, B: 7, C: 0}) == {A: 3_500.0, B: 0.0}
    assert behind_s({A: 1_000.0}, {A: 7}) == {}


@given(
    newest_s=st.dictionaries(st.sampled_from(PLACES), st.integers(0, 3), min_size=2),
    backlog=st.dictionaries(st.sampled_from(PLACES), st.integers(0, 1)),
)
def test_behind_s_is_measured_from_the_median_of_the_others(
    newest_s: dict[Partition, float], backlog: dict[Partition, int]
) -> None:
    behind = behind_s(newest_s, backlog)
    assert behind.keys() == {each for each in newest_s if backlog.get(each)}
    for partition, found_s in behind.items():
        others = [at for each, at in newest_s.items() if each != partition]
        assert found_s == max(median(others) - newest_s[partition], 0)
