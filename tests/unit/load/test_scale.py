"""The benchmark of scale finds costs that grow faster than the number of their causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from load.harness.stack import NotMeasuredError
from load.scale import Cost, Series, measured

if TYPE_CHECKING:
    from collections.abc import Mapping

SIZES = (1, 10, 100)


def grown(cost: Cost, *values: float) -> list[float]:
    return cost.per_unit(SIZES, values)


def test_added_cost_is_judged_by_its_growth_per_unit() -> None:
    assert grown(Cost("s", 1, noise=0.1), 5.0, 14.0, 104.0) == pytest.approx([1.0, 1.0])
    assert grown(Cost("s", 1, noise=0.1), 5.0, 14.0, 302.0) == pytest.approx([1.0, 3.0])


def test_constant_cost_is_judged_by_its_value() -> None:
    assert grown(Cost("s", 1, noise=0.1, adds=False), 5.0, 6.0, 7.5) == [5.0, 6.0, 7.5]


def test_differences_below_the_noise_do_not_count() -> None:
    assert grown(Cost("s", 1, noise=9.0), 5.0, 5.0, 5.1) == pytest.approx([1.0, 9 / 99])
    assert grown(Cost("s", 1, noise=9.0, adds=False), 0.1, 0.0, 3.0) == [9.0, 9.0, 9.0]


def test_measurements_before_a_failing_size_are_kept() -> None:
    asked = list[int]()

    def measure(_kafka: str, size: int) -> Mapping[str, float]:
        asked.append(size)
        if size == 10:
            raise NotMeasuredError("worker-7 did not start")
        return {"s": float(size)}

    series = Series("worker", SIZES, SIZES, measure, ())

    assert measured(series, SIZES, "none") == ({1: {"s": 1.0}}, "10: worker-7 did not start")
    assert asked == [1, 10]
