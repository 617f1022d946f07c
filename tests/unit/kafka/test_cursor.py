"""The cursor accepts records that continue its partition, and none of an earlier placement."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.core.spans import Partition
from common.kafka.cursor import Cursor, RunContinuation

PARTITION = Partition("stream", 0)
LOGS = st.sets(st.integers(0, 60), min_size=1).map(sorted)  # offsets that hold a record


def test_continuing_records_are_all_accepted() -> None:
    cursor = Cursor(PARTITION, 5)
    assert cursor.take([5, 6, 7]) == RunContinuation(0, 3, again=False)
    assert cursor.position == 8


def test_records_below_the_position_are_skipped() -> None:
    cursor = Cursor(PARTITION, 5)
    assert cursor.take([3, 4, 5, 6]) == RunContinuation(2, 4, again=False)
    assert cursor.take([1, 2]) == RunContinuation(2, 2, again=False)
    assert cursor.position == 7


def test_first_hole_is_believed_after_a_second_fetch() -> None:
    cursor = Cursor(PARTITION, 5)
    assert cursor.take([5, 9, 10]) == RunContinuation(0, 1, again=True)
    assert cursor.position == 6
    assert cursor.take([9, 10]) == RunContinuation(0, 2, again=False)
    # The log is known to have holes by now.
    assert cursor.take([12]) == RunContinuation(0, 1, again=False)
    assert cursor.position == 13


def test_hole_that_a_second_fetch_fills_is_ignored() -> None:
    cursor = Cursor(PARTITION, 5)
    assert cursor.take([9, 10]) == RunContinuation(0, 0, again=True)
    assert cursor.take([5, 6, 7]) == RunContinuation(0, 3, again=False)
    assert cursor.position == 8


def test_end_above_the_last_record_is_believed_after_a_second_fetch() -> None:
    cursor = Cursor(PARTITION, 5)
    assert not cursor.reach(5)
    assert cursor.reach(7)
    assert cursor.position == 5
    assert not cursor.reach(7)  # a second fetch reached it, too
    # The log is known to have holes by now.
    assert not cursor.reach(9)
    assert cursor.position == 9
    # The fetch began at a lower offset.
    assert not cursor.reach(6)
    assert cursor.position == 9


def test_run_that_goes_backwards_is_cut_there() -> None:
    cursor = Cursor(PARTITION, 5)
    assert cursor.take([5, 6, 2, 3]) == RunContinuation(0, 2, again=True)
    assert cursor.position == 7


@given(log=LOGS, position=st.integers(0, 70), chunk=st.integers(1, 9))
def test_every_record_from_the_position_is_accepted_once(
    log: list[int], position: int, chunk: int
) -> None:
    """A fetch begins at the position after each `again`, as readers do it."""
    cursor, taken, fetches = Cursor(PARTITION, position), [], 0
    while fetched := [offset for offset in log if offset >= cursor.position][:chunk]:
        first, last, _ = cursor.take(fetched)
        taken += fetched[first:last]
        fetches += 1
        assert fetches <= len(log) + 1, "one more than the records, for the first hole"
    assert taken == [offset for offset in log if offset >= position]


@given(
    stale=st.integers(0, 60),
    position=st.integers(0, 60),
    count=st.integers(1, 20),
)
def test_stale_records_never_make_a_hole(stale: int, position: int, count: int) -> None:
    """Leftovers of an earlier placement precede the requested records; the log has no holes."""
    cursor, taken = Cursor(PARTITION, position), []
    left_over = list(range(stale, stale + count))
    for fetched in (left_over, list(range(position, 100))):
        first, last, _ = cursor.take(fetched)
        taken += fetched[first:last]
    assert taken == list(range(position, 100))
