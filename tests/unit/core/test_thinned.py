"""Samples in bounded memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.core.thinned import Thinned


@given(st.integers(0, 500), st.sampled_from([2, 4, 10]))
def test_kept_are_the_first_the_newest_and_equal_steps_between(count: int, capacity: int) -> None:
    thinned = Thinned[int](capacity)
    for number in range(count):
        thinned.add(number)
    samples = thinned.samples()
    assert len(samples) <= capacity + 1
    assert len(samples) >= min(count, capacity // 2)
    if count:
        assert (samples[0], samples[-1]) == (0, count - 1)
    steps = {after - before for before, after in pairwise(samples[:-1])}
    assert len(steps) <= 1
