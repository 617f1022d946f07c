"""Proposition 1: capacity of machines, and how many keep up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.spot.theory.capacity import machines_for_stability, update_capacity_per_s
from common.spot.theory.work import Work

WORK = Work(np.full(64, 125.0), 20, 256, 10_000, 6720.0)  # 1.5625 updates a second


def test_update_capacity_depends_on_gradients_per_machine() -> None:
    machines = np.array([0.0, 0.5, 1.0, 6.0, 20 / 3, 7.0, 19.0, 20.0, 50.0])
    rounds = [math.inf, 40, 20, 4, 3, 3, 2, 1, 1]
    got = update_capacity_per_s(machines, 20, 0.03, 0.1)
    assert got == pytest.approx([1 / (count * 0.03 + 0.1) for count in rounds])


@pytest.mark.parametrize("gradient_s", [0.01, 0.03, 0.1, 0.3, 0.49])
def test_proposition_1_gives_the_fewest_machines_that_keep_up(gradient_s: float) -> None:
    needed = machines_for_stability(WORK, gradient_s)
    assert needed is not None
    capacity = update_capacity_per_s(np.array([needed - 1.0, needed]), 20, gradient_s)
    assert capacity[0] < 1.25 * WORK.updates_per_s <= capacity[1]


def test_machines_for_stability_is_none_if_gradients_are_too_slow() -> None:
    assert machines_for_stability(WORK, 1.0) is None
