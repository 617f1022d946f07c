"""Measures how long records of a live run's streams lie unread."""

from __future__ import annotations

from common.core.spans import Partition
from load.paper.live import Unread

A, B = Partition("s", 0), Partition("s", 1)


def looked(*looks: tuple[float, bool, int, int]) -> dict[Partition, float]:
    """Return the longest unread time after observations of (time, worker alive, read, end)."""
    unread = Unread()
    for now_s, ready, read, end in looks:
        unread.look(now_s, ready=ready, read={A: read}, ends={A: end})
    return unread.longest_s


def test_unread_time_of_a_partition_starts_at_its_last_batch() -> None:
    assert looked((0, True, 0, 9), (3, True, 4, 9), (5, True, 4, 9), (8, True, 9, 9)) == {A: 3}
    assert looked((0, True, 4, 9), (7, True, 4, 12), (8, True, 12, 12), (99, True, 12, 15)) == {
        A: 7
    }


def test_unread_time_excludes_time_without_a_worker() -> None:
    assert looked((0, False, 0, 9), (60, True, 0, 9), (62, True, 0, 9)) == {A: 2}
    assert looked((0, True, 0, 9), (1, False, 0, 9), (50, True, 0, 9), (54, True, 0, 9)) == {A: 4}
    assert looked((0, False, 0, 9), (60, False, 0, 9)) == {}


def test_unread_time_is_zero_without_waiting_records() -> None:
    assert looked((0, True, 9, 9), (60, True, 9, 9)) == {}
    assert looked((0, True, 9, 9), (60, True, 9, 10), (61, True, 9, 10)) == {A: 1}


def test_unread_time_is_measured_for_each_partition() -> None:
    unread = Unread()
    for now_s in range(20):
        unread.look(now_s, ready=True, read={A: now_s}, ends={A: 100, B: 100})
    assert unread.longest_s == {A: 1, B: 19}
