"""Laws of the number of updates agree with simulated arrivals and with each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from common.spot.theory.work import partial_batches_s
from load.paper import updates_law as updates

PAPER = np.full(64, 125.0)  # (64,) records/s; K = 20, b = 256
RUNS = 20_000

rates = st.lists(st.floats(0.1, 1000), min_size=1, max_size=20).map(np.array)
sizes = st.integers(1, 300)


def simulated_updates(t_s: float, rng: np.random.Generator) -> np.ndarray:
    """(RUNS,) J_t of 16 Poisson streams, 5 per s, K=4, b=8."""
    records = rng.poisson(5 * t_s, (RUNS, 16))
    return np.asarray((records // 8).sum(axis=1) // 4)


def simulated_runtimes(rng: np.random.Generator) -> np.ndarray:
    """(2000,) time of the 50th update of the same 16 streams, from empty batches on."""
    # Batches per stream. 200 of the 480 are needed.
    batches = 30
    gaps = rng.gamma(8, 1 / 5, (2000, 16, batches))
    times = np.sort(gaps.cumsum(axis=2).reshape(2000, -1), axis=1)
    return np.asarray(times[:, 199])


def test_paper_job_takes_6400_s_for_10000_updates() -> None:
    assert updates.runtime_of_renewal(10_000, PAPER, 20, 256).mean == pytest.approx(6400)
    assert updates.updates_after(6400, PAPER, 20, 256).mean == pytest.approx(10_000)


def test_paper_law_is_sqrt_of_b_times_wider_than_the_renewal_law() -> None:
    poisson_batches = updates.updates_after(6400, PAPER, 20, 256)
    renewal = updates.updates_after_renewal(6400, PAPER, 20, 256)
    assert poisson_batches.mean == renewal.mean
    assert poisson_batches.std == pytest.approx(22.36, abs=0.01)
    assert renewal.std == pytest.approx(1.398, abs=0.001)
    assert poisson_batches.variance == pytest.approx(256 * renewal.variance)


@given(rates, sizes, st.floats(0, 1e5))
def test_both_update_laws_agree_for_a_batch_size_of_1(
    rates_per_s: np.ndarray, group_size: int, t_s: float
) -> None:
    poisson_batches = updates.updates_after(t_s, rates_per_s, group_size, 1)
    renewal = updates.updates_after_renewal(t_s, rates_per_s, group_size, 1)
    assert poisson_batches.variance == pytest.approx(renewal.variance)


def test_simulated_poisson_batches_follow_theorem_1() -> None:
    t_s, rate = 400.0, 10.0
    simulated = np.random.default_rng(2).poisson(rate * t_s, RUNS) // 4
    law = updates.updates_after(t_s, np.array([rate]), 4, 1)
    assert simulated.mean() + 3 / 8 == pytest.approx(law.mean, abs=5 * law.std / RUNS**0.5)
    assert simulated.var() == pytest.approx(law.variance, rel=5 * (2 / RUNS) ** 0.5)


def test_simulated_renewal_streams_follow_their_update_law() -> None:
    t_s, rates_per_s = 5000.0, np.full(16, 5.0)
    simulated = simulated_updates(t_s, np.random.default_rng(3))
    law = updates.updates_after_renewal(t_s, rates_per_s, 4, 8)
    # Partial batches and partial groups, converted to updates.
    partial = (16 * (8 - 1) / 2 / 8 + 3 / 2) / 4
    assert simulated.mean() == pytest.approx(law.mean - partial, abs=5 * law.std / RUNS**0.5)
    not_growing = (16 * (8**2 - 1) / 12 / 8**2 + (4**2 - 1) / 12) / 4**2
    expected = law.variance + not_growing
    assert simulated.var() == pytest.approx(expected, rel=5 * (2 / RUNS) ** 0.5)


def test_simulated_runtimes_follow_the_renewal_law_and_partial_batches() -> None:
    rates_per_s = np.full(16, 5.0)
    simulated = simulated_runtimes(np.random.default_rng(4))
    law = updates.runtime_of_renewal(50, rates_per_s, 4, 8)
    mean = law.mean + partial_batches_s(rates_per_s, 8)
    assert simulated.mean() == pytest.approx(mean, abs=5 * simulated.std() / 2000**0.5)
    partial_variance = 15 * (8**2 - 1) / 12 / rates_per_s.sum() ** 2
    expected = law.variance + partial_variance
    assert simulated.var() == pytest.approx(expected, rel=5 * (2 / 2000) ** 0.5)


def test_partial_batches_of_the_paper_job_take_one_second() -> None:
    assert partial_batches_s(PAPER, 256) == pytest.approx(1.0, abs=0.01)
    assert partial_batches_s(np.array([5.0, 0.0]), 256) == 0


@given(rates, sizes, sizes, st.integers(1, 10**6))
def test_runtime_and_update_laws_are_inverse_in_mean_and_deviation(
    rates_per_s: np.ndarray, group_size: int, batch_size: int, count: int
) -> None:
    job = (rates_per_s, group_size, batch_size)
    time = updates.runtime_of_renewal(count, *job)
    number = updates.updates_after_renewal(time.mean, *job)
    assert number.mean == pytest.approx(count)
    assert number.std == pytest.approx(time.std * updates.update_rate_per_s(*job))


def test_sampled_batches_agree_with_single_records() -> None:
    k, b, runs = 3, 4, 4000
    rates = np.array([2.0, 0.7, 1.3])
    times_s = np.array([10.0, 30.0])
    rng = np.random.default_rng(8)
    drawn = updates.sample_batches_at(rates, b, times_s, runs, rng) // k
    assert drawn.shape == (2, runs)
    assert (drawn[1] >= drawn[0]).all()
    slow = np.zeros((2, runs), np.int64)
    for run in range(runs):
        gaps = rng.exponential(1 / rates[:, np.newaxis], (3, 150)).cumsum(axis=1)
        for index, time_s in enumerate(times_s.tolist()):
            slow[index, run] = ((gaps <= time_s).sum(axis=1) // b).sum() // k
    for mine, theirs in zip(drawn, slow, strict=True):
        counts = [np.bincount(one, minlength=12) for one in (mine, theirs)]
        seen = counts[0] + counts[1] >= 20
        table = np.array([one[seen] for one in counts])
        assert stats.chi2_contingency(table).pvalue > 0.001
