"""Laws of the number of updates hold against simulated arrivals, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory import updates
from common.spot.theory.errors import ParameterError

PAPER = np.full(64, 125.0)  # (64,) records per second; K = 20, b = 256
RUNS = 20_000

rates = st.lists(st.floats(0.1, 1000), min_size=1, max_size=20).map(np.array)
sizes = st.integers(1, 300)


def simulated_updates(t_s: float, shape: int, rng: np.random.Generator) -> np.ndarray:
    """(RUNS,) J_t of 16 streams, 5 per s, gamma gaps of this shape (c_A^2 = 1/shape), K=4, b=8."""
    # each `shape`-th event of a Poisson process of rate 5 * shape ends a gamma gap of mean 1/5
    records = rng.poisson(5 * shape * t_s, (RUNS, 16)) // shape
    return np.asarray((records // 8).sum(axis=1) // 4)


def simulated_runtimes(shape: int, rng: np.random.Generator) -> np.ndarray:
    """(2000,) time of the 50th update of the same 16 streams, from empty batches on."""
    batches = 30  # per stream; 200 are needed of 480
    gaps = rng.gamma(8 * shape, 1 / (5 * shape), (2000, 16, batches))
    times = np.sort(gaps.cumsum(axis=2).reshape(2000, -1), axis=1)
    return np.asarray(times[:, 199])


def test_the_papers_job_takes_6400_s() -> None:
    assert updates.expected_runtime_s(10_000, PAPER, 20, 256) == pytest.approx(6400)
    assert updates.updates_after(6400, PAPER, 20, 256).mean == pytest.approx(10_000)
    assert updates.batch_rate_per_s(PAPER, 256) == pytest.approx(31.25)


def test_rounds_that_wait_for_their_group_stay_within_the_variance_of_equation_1() -> None:
    """Poisson batches, K of them a group, on 8 workers whose gradients take exponential times."""
    rng = np.random.default_rng(1)
    group_s = rng.gamma(4, 0.1, 50_000)  # K = 4 batches at 10 per second
    ends, end, begin = [], 0.0, 0.0
    for gap, gradients in zip(group_s, rng.exponential(0.05, (50_000, 4)).sum(1), strict=True):
        begin += gap
        end = max(begin, end) + gradients  # all on one worker: the worst case
        ends.append(end)
    intervals = np.diff(ends)
    rates_per_s = np.full(8, 10.0)  # b = 8: 10 batches per second
    bound = updates.update_interval_variance_s2(rates_per_s, 4, 8, 0.05**2)
    assert intervals.var() < bound
    rate = updates.update_rate_per_s(rates_per_s, 4, 8)
    assert 1 / intervals.mean() == pytest.approx(rate, rel=0.02)


def test_the_papers_law_is_sqrt_of_b_times_wider_than_that_of_renewal_streams() -> None:
    poisson_batches = updates.updates_after(6400, PAPER, 20, 256)
    renewal = updates.updates_after_renewal(6400, PAPER, 20, 256)
    assert poisson_batches.mean == renewal.mean
    assert poisson_batches.std == pytest.approx(22.36, abs=0.01)
    assert renewal.std == pytest.approx(1.398, abs=0.001)
    assert poisson_batches.variance == pytest.approx(256 * renewal.variance)


@given(rates, sizes, st.floats(0, 1e5))
def test_both_laws_agree_where_a_batch_is_one_record(
    rates_per_s: np.ndarray, group_size: int, t_s: float
) -> None:
    poisson_batches = updates.updates_after(t_s, rates_per_s, group_size, 1)
    renewal = updates.updates_after_renewal(t_s, rates_per_s, group_size, 1)
    assert poisson_batches.variance == pytest.approx(renewal.variance)


def test_poisson_batches_make_updates_as_theorem_1_says() -> None:
    t_s, rate = 400.0, 10.0
    simulated = np.random.default_rng(2).poisson(rate * t_s, RUNS) // 4
    law = updates.updates_after(t_s, np.array([rate]), 4, 1)
    assert simulated.mean() + 3 / 8 == pytest.approx(law.mean, abs=5 * law.std / RUNS**0.5)
    assert simulated.var() == pytest.approx(law.variance, rel=5 * (2 / RUNS) ** 0.5)


@pytest.mark.parametrize("shape", [1, 4])
def test_renewal_streams_make_updates_as_their_law_says(shape: int) -> None:
    t_s, rates_per_s = 5000.0, np.full(16, 5.0)
    simulated = simulated_updates(t_s, shape, np.random.default_rng(3))
    law = updates.updates_after_renewal(t_s, rates_per_s, 4, 8, 1 / shape)
    partial = (16 * (8 - 1) / 2 / 8 + 3 / 2) / 4  # of batches and of the group, in updates
    late = 16 * (1 - 1 / shape) / 2 / 32  # a whole gap, not part of one, is before the first record
    full = law.mean - partial - late
    assert simulated.mean() == pytest.approx(full, abs=5 * law.std / RUNS**0.5)
    not_growing = (16 * (8**2 - 1) / 12 / 8**2 + (4**2 - 1) / 12) / 4**2
    expected = law.variance + not_growing
    assert simulated.var() == pytest.approx(expected, rel=5 * (2 / RUNS) ** 0.5)


@pytest.mark.parametrize("shape", [1, 4])
def test_renewal_streams_take_the_time_that_their_law_says_and_that_of_partial_batches(
    shape: int,
) -> None:
    rates_per_s = np.full(16, 5.0)
    simulated = simulated_runtimes(shape, np.random.default_rng(4))
    law = updates.runtime_of_renewal(50, rates_per_s, 4, 8, 1 / shape)
    late_s = 15 * (1 - 1 / shape) / 2 / 80  # a whole gap, not part of one, is before the first
    mean = law.mean + updates.partial_batches_s(rates_per_s, 8) + late_s
    assert simulated.mean() == pytest.approx(mean, abs=5 * simulated.std() / 2000**0.5)
    partial_variance = 15 * (8**2 - 1) / 12 / rates_per_s.sum() ** 2
    expected = law.variance + partial_variance
    assert simulated.var() == pytest.approx(expected, rel=5 * (2 / 2000) ** 0.5)


def test_partial_batches_of_the_papers_job_take_a_second() -> None:
    assert updates.partial_batches_s(PAPER, 256) == pytest.approx(1.0, abs=0.01)
    assert updates.partial_batches_s(np.array([5.0, 0.0]), 256) == 0


def test_streams_may_vary_each_in_its_own_way() -> None:
    steady_and_poisson = np.array([0.0, 1.0])
    law = updates.updates_after_renewal(100, np.array([3.0, 5.0]), 2, 2, steady_and_poisson)
    assert law.variance == pytest.approx(100 * 5 / 4**2)


@given(rates, sizes, sizes, st.integers(1, 10**6), st.floats(0, 1))
def test_runtime_and_updates_are_each_others_inverse_in_mean_and_in_deviation(
    rates_per_s: np.ndarray,
    group_size: int,
    batch_size: int,
    count: int,
    gradient_variance_s2: float,
) -> None:
    job = (rates_per_s, group_size, batch_size)
    t_s = updates.expected_runtime_s(count, *job)
    number = updates.updates_after(t_s, *job, gradient_variance_s2)
    assert number.mean == pytest.approx(count)
    interval_s2 = updates.update_interval_variance_s2(*job, gradient_variance_s2)
    rate = updates.update_rate_per_s(*job)
    assert number.std == pytest.approx((count * interval_s2) ** 0.5 * rate)
    number, time = (
        updates.updates_after_renewal(t_s, *job),
        updates.runtime_of_renewal(count, *job),
    )
    assert number.std == pytest.approx(time.std * updates.update_rate_per_s(*job))


@pytest.mark.parametrize(
    ("parameter", "bad"),
    [
        ("rates_per_s", (np.array([1.0, -1.0]), 20, 256)),
        ("rates_per_s", (np.array([1.0, np.nan]), 20, 256)),
        ("rates_per_s", (np.zeros(3), 20, 256)),
        ("rates_per_s", (np.array([]), 20, 256)),
        ("group_size", (PAPER, 0, 256)),
        ("batch_size", (PAPER, 20, 0)),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_by_the_parameters_name(
    parameter: str, bad: tuple[np.ndarray, int, int]
) -> None:
    for refuse in (updates.updates_after, updates.updates_after_renewal):
        with pytest.raises(ParameterError) as refused:
            refuse(1.0, *bad)
        assert refused.value.parameter == parameter


def test_variances_below_0_are_refused() -> None:
    with pytest.raises(ParameterError, match="gradient_variance_s2"):
        updates.updates_after(1.0, PAPER, 20, 256, -1.0)
    with pytest.raises(ParameterError, match="squared_variation"):
        updates.updates_after_renewal(1.0, PAPER, 20, 256, np.full(64, -1.0))
