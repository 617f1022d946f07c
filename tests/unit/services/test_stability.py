"""Both sides of Proposition 1, on the paper's job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.needs import necessary_load, sufficient_load

PAPER = 64 * 125.0  # records a second
sizes = st.integers(1, 500)


def test_job_of_the_paper_is_stable_with_gradients_below_32_ms() -> None:
    assert sufficient_load(PAPER, 256, 0.032) == pytest.approx(1)
    assert sufficient_load(PAPER, 256, 0.016) == pytest.approx(0.5)


def test_necessary_load_is_one_if_gradients_take_as_long_as_a_group_interval() -> None:
    # K = 20 batches in 0.64 s on 64 workers: one gradient each; on 10 workers: two each
    assert necessary_load(PAPER, 64, 20, 256, 0.64) == pytest.approx(1)
    assert necessary_load(PAPER, 10, 20, 256, 0.32) == pytest.approx(1)


@given(st.floats(0.01, 1e6), sizes, sizes, sizes, st.floats(0, 10))
def test_necessary_load_is_at_most_the_sufficient_load(
    arrivals_per_s: float, workers: int, group_size: int, batch_size: int, gradient_s: float
) -> None:
    worst = sufficient_load(arrivals_per_s, batch_size, gradient_s)
    best = necessary_load(arrivals_per_s, workers, group_size, batch_size, gradient_s)
    assert best <= worst * (1 + 1e-12)
