"""Samples in bounded memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.core.thinned_samples import Thinned


@given(st.integers(0, 500), st.sampled_from([2, 4, 10]))
def test_first_newest_and_evenly_spaced_samples_are_kept(count: int, capacity: int) -> None:
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


@given(st.integers(0, 500), st.integers(0, 500), st.sampled_from([2, 4, 10]))
def test_first_newest_and_evenly_spaced_samples_are_kept_after_a_rollback(
    until: int, back_to: int, capacity: int
) -> None:
    # 0 1 2 ... until    take back what is above `back_to`    back_to + 1 ... until + 100
    thinned = Thinned[int](capacity)
    for number in range(until):
        thinned.add(number)
    thinned.take_back(lambda number: number <= back_to)
    assert all(number <= back_to for number in thinned.samples())
    for number in range(min(until, back_to + 1), until + 100):
        thinned.add(number)
    samples = thinned.samples()
    assert (samples[0], samples[-1]) == (0, until + 99)
    assert samples == sorted(set(samples))
    assert capacity // 2 <= len(samples) <= capacity + 1
