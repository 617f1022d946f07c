"""Blocks of updates: few, of equal length, the same as means over the versions that count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.jobs.progress import Row
from services.admin.live.loss_curve import LossCurve

CAPACITY = 8


def row(version: int, loss: float, samples: int, at_s: float | None) -> Row:
    metrics = {"accuracy": loss / 2} if version % 3 else {}
    measured = dict.fromkeys(metrics, samples)
    made = (version, 0, at_s, samples, 1, loss, None, 0, "")
    return Row(*made, metrics, measured, "synchronous", 0, version)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=12))
def test_points_are_means_over_runs_of_the_versions_that_count(
    steps: list[tuple[int, int]],
) -> None:
    course, rows = LossCurve(CAPACITY), list[Row]()
    for made, back in steps:
        for _ in range(made):
            version = len(rows) + 1
            rows.append(row(version, version * 7 % 13 / 3, version % 5 + 1, float(version)))
            course.append(rows[-1])
        taken_to = max(0, len(rows) - back)
        del rows[taken_to:]
        course.take_back(taken_to, rows[course.first_of(taken_to) - 1 :])
    points, length = course.points(), course.length
    runs = [rows[first : first + length] for first in range(0, len(rows), length)]
    assert len(runs) <= CAPACITY
    assert points.version == tuple(run[-1].version for run in runs)
    assert points.update_at_s == tuple(run[-1].at_s for run in runs)
    means = [sum(r.loss * r.samples for r in run) / sum(r.samples for r in run) for run in runs]
    assert points.loss == pytest.approx(tuple(means))
    for index, run in enumerate(runs):
        having = [each for each in run if each.metrics]
        if having:
            total = sum(each.metrics["accuracy"] * each.samples for each in having)
            mean = total / sum(each.samples for each in having)
            assert points.metrics["accuracy"][index] == pytest.approx(mean)
        elif "accuracy" in points.metrics:
            assert points.metrics["accuracy"][index] is None


def test_a_rate_is_that_of_the_ten_seconds_before() -> None:
    course = LossCurve()
    for version in range(1, 101):
        course.append(row(version, 1.0, 1, version * 0.5))
    course.append(row(101, 1.0, 1, 150.0))  # a pause of 100 s
    rates = course.points().updates_per_s
    assert rates[:100] == pytest.approx((2.0,) * 100)
    assert rates[100] == pytest.approx(0.01)


def test_an_update_without_a_time_stands_where_the_one_before_it_does() -> None:
    course = LossCurve()
    course.append(row(1, 1.0, 1, 5.0))
    course.append(row(2, 1.0, 1, None))
    assert course.points().update_at_s == (5.0, 5.0)
    assert course.points().updates_per_s == (0.0, 0.0)
