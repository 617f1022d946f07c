"""What counts as growing faster than its cause."""

from __future__ import annotations

import pytest

from load.scale import Cost

SIZES = (1, 10, 100)


def grown(cost: Cost, *values: float) -> list[float]:
    return cost.per_unit(SIZES, values)


def test_what_is_added_to_is_judged_by_what_each_unit_adds() -> None:
    assert grown(Cost("s", 1, noise=0.1), 5.0, 14.0, 104.0) == pytest.approx([1.0, 1.0])
    assert grown(Cost("s", 1, noise=0.1), 5.0, 14.0, 302.0) == pytest.approx([1.0, 3.0])


def test_what_must_not_depend_on_the_size_is_judged_itself() -> None:
    assert grown(Cost("s", 1, noise=0.1, adds=False), 5.0, 6.0, 7.5) == [5.0, 6.0, 7.5]


def test_differences_below_the_noise_are_none() -> None:
    assert grown(Cost("s", 1, noise=9.0), 5.0, 5.0, 5.1) == pytest.approx([1.0, 9 / 99])
    assert grown(Cost("s", 1, noise=9.0, adds=False), 0.1, 0.0, 3.0) == [9.0, 9.0, 9.0]
