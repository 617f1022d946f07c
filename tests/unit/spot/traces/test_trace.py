"""A trace is complete and in order, or its error names the row. Readers agree with a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.spot.traces.trace import Trace, TraceCursor, trace_from_rows, usual_gap_s


def trace(times_s: list[float], values: list[float], end_s: float) -> Trace:
    return Trace(np.array(times_s, np.float64), np.array(values, np.float64), end_s)


# 0     10      30   40 s
# | 5    | 1     | 3  | 5 ...
THREE = trace([0, 10, 30], [5, 1, 3], 40)


def test_value_holds_until_the_next_and_the_trace_repeats() -> None:
    times = np.array([0, 9.9, 10, 29.9, 30, 39.9, 40, 50, 95])
    assert THREE.value_at(times).tolist() == [5, 5, 1, 1, 3, 3, 5, 1, 1]
    assert float(THREE.value_at(10.0)) == 1


def test_mean_and_share_weight_values_by_their_duration() -> None:
    assert THREE.mean() == pytest.approx((5 * 10 + 1 * 20 + 3 * 10) / 40)
    assert THREE.share(THREE.values > 2) == pytest.approx(0.5)


def test_faster_trace_has_the_same_values_sooner() -> None:
    fast = THREE.faster(20)
    assert fast.end_s == 2
    times = np.linspace(0, 3, 31) + 1e-9
    assert fast.value_at(times).tolist() == THREE.value_at(times * 20).tolist()
    assert fast.mean() == pytest.approx(THREE.mean())


@pytest.mark.parametrize(
    ("times_s", "values", "end_s", "found"),
    [
        ([0], [1], 10, "at least 2 rows, got 1"),
        ([0, 20, 10], [1, 1, 1], 30, r"row 3 \(10 s\) is 10 s before the previous row; sort"),
        ([0, math.nan], [1, 1], 30, "row 2 .* must have a finite time"),
        ([0, 10], [1, math.nan], 30, r"row 2 \(10 s\) must be a number of at least 0"),
        ([0, 10], [-1, 1], 30, "row 1 .* must be a number of at least 0"),
        ([5, 10], [1, 1], 30, "must begin at 0 s, got 5 s"),
        ([0, 10], [1, 1], 9, "ends at 9 s, before its last row"),
        ([0, 10], [1, 1], math.inf, "ends at inf s"),
    ],
)
def test_invalid_trace_is_rejected_with_its_row(
    times_s: list[float], values: list[float], end_s: float, found: str
) -> None:
    with pytest.raises(UserError, match=found):
        trace(times_s, values, end_s)


def test_hole_in_a_sampled_trace_is_rejected_and_a_late_row_is_not() -> None:
    late = trace_from_rows([0, 10, 24, 30], [1, 2, 3, 4], [2, 3, 4, 5], "f.csv", gap_s=10)
    assert late.end_s == 40
    with pytest.raises(UserError, match=r"f\.csv: row 3 \(10 s\) is followed by a gap"):
        trace_from_rows([0, 10, 30, 40], [1, 2, 3, 4], [2, 3, 4, 5], "f.csv", gap_s=10)


def test_last_row_of_a_time_counts_and_times_start_at_zero() -> None:
    made = trace_from_rows([100, 110, 110, 130], [1, 2, 3, 4], [1, 2, 3, 4], "f.csv")
    assert made.times_s.tolist() == [0, 10, 30]
    assert made.values.tolist() == [1, 3, 4]
    # In a list of events, the last row is the end of the trace.
    assert made.end_s == 30
    longer = trace_from_rows([100, 110], [1, 2], [1, 2], "f.csv", end_s=150)
    assert longer.end_s == 50


def test_rows_out_of_order_are_reported_by_their_number_in_the_file() -> None:
    with pytest.raises(UserError, match=r"f\.csv: row 9 \(-5 s\) is 15 s before"):
        trace_from_rows([0, 10, -5], [1, 1, 1], [7, 8, 9], "f.csv")
    with pytest.raises(UserError, match=r"f\.csv: row 8 must have a finite time"):
        trace_from_rows([0, math.inf, -5], [1, 1, 1], [7, 8, 9], "f.csv")


def test_usual_gap_s_is_none_for_events() -> None:
    assert usual_gap_s([*range(0, 100, 5), 110, 115]) == 5
    assert usual_gap_s([0, 3, 10, 11, 30]) is None
    assert usual_gap_s([0, 10, 10, 20]) is None
    assert usual_gap_s([7]) is None


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    gaps = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    values = draw(st.lists(st.integers(0, 2), min_size=len(gaps) + 1, max_size=len(gaps) + 1))
    times = np.concatenate(([0], np.cumsum(gaps))).astype(np.float64)
    return Trace(times, np.array(values, np.float64), float(times[-1]) + draw(st.integers(0, 5)))


# Quarters of seconds are exact in floating point, so that rounding makes no difference.
quarters = st.integers(0, 800).map(lambda count: count / 4)


@given(traces(), st.lists(quarters, min_size=1, max_size=5), st.lists(quarters, max_size=12))
def test_cursor_returns_the_value_at_each_time(
    recorded: Trace, starts_s: list[float], moments_s: list[float]
) -> None:
    starts = np.array(starts_s)
    cursor = TraceCursor(recorded, starts)
    for now_s in moments_s:  # backwards too
        np.testing.assert_array_equal(cursor.at(now_s), recorded.value_at(starts + now_s))


@given(traces(), quarters, quarters)
def test_next_change_is_later_and_no_value_changes_before_it(
    recorded: Trace, start_s: float, now_s: float
) -> None:
    cursor = TraceCursor(recorded, np.array([start_s]))
    (value,) = cursor.at(now_s)
    (next_s,) = cursor.next_change_s(now_s)
    assert next_s > now_s
    until_s = min(next_s, now_s + 2 * recorded.end_s)
    between = np.arange(now_s, until_s, 0.25)
    assert (recorded.value_at(start_s + between) == value).all()
    if math.isinf(next_s):
        assert recorded.share(recorded.values == value) == 1
    else:
        assert float(recorded.value_at(start_s + next_s)) != value


def test_next_change_advances_despite_rounding() -> None:
    fast = trace([0, 0.1, 0.3], [0, 1, 2], 0.7).faster(3)
    cursor = TraceCursor(fast, np.array([0.1 + 1e-3, 0.2 / 3]))
    now_s, seen = 0.0, [cursor.at(0.0)]
    for _ in range(300):
        following_s = float(cursor.next_change_s(now_s).min())
        assert following_s > now_s
        now_s = following_s
        assert (cursor.at(now_s) != seen[-1]).any()
        seen.append(cursor.at(now_s))
    # Each of two readers sees three changes in each 0.7 / 3 s.
    assert now_s == pytest.approx(50 * 0.7 / 3, rel=0.03)
