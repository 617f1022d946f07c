"""How times of updates become pauses."""

from __future__ import annotations

import pytest

from load.faults.report import CarriedOut, by_kind, longest_pause_s, next_after
from load.faults.schedule import Fault

#        updates   0    1    2         4    5
TIMES = [0.0, 1.0, 2.0, 4.0, 5.0]


@pytest.mark.parametrize(("at", "found"), [(-1.0, 0.0), (0.0, 1.0), (2.5, 4.0), (5.0, None)])
def test_the_next_update_is_the_first_that_comes_later(at: float, found: float | None) -> None:
    assert next_after(TIMES, at) == found


def test_the_longest_pause_is_between_two_updates_that_follow_each_other() -> None:
    assert longest_pause_s(TIMES) == 2.0


def test_a_pause_counts_for_an_interval_if_any_part_of_it_lies_there() -> None:
    assert longest_pause_s(TIMES, 3.9, 4.5) == 2.0
    assert longest_pause_s(TIMES, 4.0, 4.5) == 1.0


def test_where_there_are_no_two_updates_there_is_no_pause() -> None:
    assert longest_pause_s(TIMES[:1]) == 0.0
    assert longest_pause_s(TIMES, 6.0, 7.0) == 0.0


def test_times_are_described_by_the_kind_of_their_fault() -> None:
    fault = Fault(0.0, "worker killed", "worker", 0, 1.0)
    carried_out = CarriedOut(fault, 0.0, 1.0)
    times_s = [(carried_out, float(number)) for number in range(100, -1, -1)]
    assert by_kind(times_s) == {
        "worker killed": {"times": 101, "median_s": 50.0, "p95_s": 95.0, "max_s": 100.0}
    }
    assert by_kind(times_s[:1]) == {
        "worker killed": {"times": 1, "median_s": 100.0, "p95_s": 100.0, "max_s": 100.0}
    }
