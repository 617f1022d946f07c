"""The promised probability, compared with a Monte Carlo simulation of chains and arrivals."""

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.policies.chance import (
    Chance,
    deadline_probability,
    plan_with_probability,
    third_moment_of_uptime_s3,
)
from common.spot.policies.policy import Policy, Situation
from common.spot.theory.provisioning import cost_curve, plan
from common.spot.theory.work import PaperMarket, Pool, Work, market

RUNS = 3_000
SETTINGS = [(0.9, 1.05), (0.8, 1.05), (0.8, 1.10)]
PRICES = (0.286, 0.158)


def due(rates: npt.NDArray[np.float64], ratio: float) -> Work:
    work = Work(rates, 20, 256, 10_000, 1.0)
    return dataclasses.replace(work, deadline_s=ratio * work.undisturbed_s)


def equal(ratio: float) -> Work:
    return due(np.full(64, 125.0), ratio)


def uptimes_s(
    rng: np.random.Generator, shape: tuple[int, int], t_s: float, pool: Pool
) -> npt.NDArray[np.float64]:
    """Return the times on of chains that alternate between exponential times on and off.

    The chains are stationary from the start.
    """
    on_s, off_s = pool.availability * pool.cycle_s, (1 - pool.availability) * pool.cycle_s
    up = rng.random(shape) < pool.availability
    clock, total = np.zeros(shape), np.zeros(shape)
    while (clock < t_s).any():
        until = np.minimum(clock + rng.exponential(np.where(up, on_s, off_s)), t_s)
        total += np.where(up, until - clock, 0.0)
        clock, up = until, ~up
    return total


def simulated(work: Work, pool: Pool, seed: int) -> npt.NDArray[np.float64]:
    """Return the share of runs that make all updates by theta, for each number of spot workers."""
    rng = np.random.default_rng(seed)
    order = np.argsort(work.rates_per_s, kind="stable")
    rates, theta = work.rates_per_s[order], work.deadline_s
    on_spot = rng.poisson(rates * uptimes_s(rng, (RUNS, work.workers), theta, pool))
    on_demand = rng.poisson(rates * theta, (RUNS, work.workers))
    spot, fixed = on_spot // work.batch_size, on_demand // work.batch_size
    batches = np.zeros((RUNS, work.workers + 1))
    batches[:, 1:] = np.cumsum(spot - fixed, axis=1)
    batches += fixed.sum(axis=1, keepdims=True)
    return np.asarray((batches // work.group_size >= work.updates).mean(axis=0), np.float64)


@pytest.mark.parametrize(("alpha", "ratio"), SETTINGS)
def test_deadline_probability_holds_in_the_settings_of_the_paper(
    alpha: float, ratio: float
) -> None:
    work, prices = equal(ratio), market(*PRICES, alpha)
    promised = deadline_probability(work, prices.spot, np.arange(64))
    met = simulated(work, prices.spot, seed=4)
    error = np.sqrt(promised * (1 - promised) / RUNS)

    assert (np.abs(met - promised) <= 4.5 * error + 0.003).all()
    for probability in (0.9, 0.95, 0.99):
        spot = plan_with_probability(work, prices, probability).spot
        assert met[spot] >= probability - 4 * math.sqrt(probability * (1 - probability) / RUNS)


def test_deadline_probability_holds_for_different_rates() -> None:
    rates = np.random.default_rng(1).uniform(1, 250, 40)
    pool = Pool("spot", 0.1, 0.7, cycle_s=300.0)
    work = due(rates, 1.1)
    promised = deadline_probability(work, pool, np.argsort(rates, kind="stable"))

    error = np.sqrt(promised * (1 - promised) / RUNS)
    assert (np.abs(simulated(work, pool, seed=5) - promised) <= 4.5 * error + 0.004).all()


def test_plan_that_is_on_time_on_average_misses_43_percent_of_runs() -> None:
    work, prices = equal(1.05), market(*PRICES, 0.9)
    promised = deadline_probability(work, prices.spot, np.arange(64))

    assert plan(work, prices).spot == 30
    assert promised[30] == pytest.approx(0.564, abs=0.0005)
    assert 1 - simulated(work, prices.spot, seed=6)[30] == pytest.approx(0.436, abs=0.036)


@pytest.mark.parametrize(
    ("setting", "spots"),
    [(SETTINGS[0], (27, 26, 24)), (SETTINGS[1], (13, 12, 11)), (SETTINGS[2], (26, 25, 24))],
)
def test_higher_probability_means_fewer_spot_workers_and_higher_cost(
    setting: tuple[float, float], spots: tuple[int, ...]
) -> None:
    alpha, ratio = setting
    work, prices = equal(ratio), market(*PRICES, alpha)
    plans = [plan_with_probability(work, prices, p) for p in (0.9, 0.95, 0.99)]

    assert tuple(best.spot for best in plans) == spots
    costs = [best.expected_cost_usd for best in plans]
    assert plan(work, prices).expected_cost_usd < costs[0] < costs[1] < costs[2]


def test_reason_names_both_probabilities() -> None:
    best = plan_with_probability(equal(1.05), market(*PRICES, 0.9), 0.95)

    assert (best.feasible, best.binding) == (True, "deadline")
    assert "26 of 64" in best.reason
    assert "95.73 %" in best.reason
    assert "30, which are in time on average, would meet it with 56.42 %" in best.reason


@given(st.floats(1, 1.5), st.floats(0.01, 1), st.floats(1, 10_000))
def test_deadline_probability_falls_with_the_number_of_spot_workers(
    ratio: float, alpha: float, cycle_s: float
) -> None:
    pool = Pool("spot", 0.1, alpha, cycle_s)
    chances = deadline_probability(equal(ratio), pool, np.arange(64))

    assert ((chances >= 0) & (chances <= 1)).all()
    above_half = chances[chances > 0.5]
    assert (np.diff(above_half) <= 1e-9).all()


@given(st.floats(0.01, 0.99), st.floats(1, 1_000), st.floats(0, 5_000))
def test_third_moment_of_uptime_equals_the_triple_integral(
    alpha: float, cycle_s: float, t_s: float
) -> None:
    tau = alpha * (1 - alpha) * cycle_s
    nodes, weights = np.polynomial.legendre.leggauss(60)
    # Exp(-u / tau) is negligible beyond.
    end = min(t_s, 60 * tau)
    gaps = end * (nodes + 1) / 2
    integral = float(weights @ ((t_s - gaps) * gaps * np.exp(-gaps / tau))) * end / 2

    reference = 6 * alpha * (1 - alpha) * (1 - 2 * alpha) * integral
    assert third_moment_of_uptime_s3(t_s, alpha, cycle_s) == pytest.approx(reference, rel=1e-6)


def test_third_moment_over_a_short_time_is_that_of_one_state() -> None:
    alpha, t_s = 0.9, 1e-3
    one_toss = alpha * (1 - alpha) * (1 - 2 * alpha) * t_s**3

    assert third_moment_of_uptime_s3(t_s, alpha, 1_000.0) == pytest.approx(one_toss, rel=1e-4)
    assert third_moment_of_uptime_s3(t_s, 1.0, 1_000.0) == 0


def test_deadline_probability_without_updates_left_is_one() -> None:
    done = dataclasses.replace(equal(1.0), updates=0.0, deadline_s=0.0)

    assert (deadline_probability(done, Pool("spot", 0.1, 0.9), np.arange(64)) == 1).all()


def test_deadline_of_theta_0_is_infeasible_with_a_probability() -> None:
    best = plan_with_probability(equal(1.0), market(*PRICES, 0.9), 0.9)

    assert (best.feasible, best.spot, best.binding) == (False, 0, "infeasible")
    assert "even on-demand machines alone" in best.reason


def test_chance_plan_is_limited_by_the_capacity_of_the_pool() -> None:
    prices = market(*PRICES, 0.9)
    few = PaperMarket(prices.on_demand, dataclasses.replace(prices.spot, capacity=10))

    best = plan_with_probability(equal(1.05), few, 0.95)

    assert (best.spot, best.binding) == (10, "capacity")


def test_probability_curve_and_plan_use_the_same_order_of_workers() -> None:
    rates = np.random.default_rng(2).uniform(1, 250, 30)
    work, prices = due(rates, 1.08), market(*PRICES, 0.85)

    best = plan_with_probability(work, prices, 0.95)

    order = cost_curve(work, prices).order
    assert best.spot_workers.tolist() == order[: best.spot].tolist()
    assert deadline_probability(work, prices.spot, order)[best.spot] >= 0.95


def test_chance_policy_decides_once() -> None:
    policy: Policy = Chance(0.95)
    situation = Situation(
        now_s=0.0,
        work=equal(1.05),
        pools=(Pool("on-demand", 0.286), Pool("spot", 0.158, 0.9)),
        gradient_s=0.01,
        up=np.ones(64, np.bool_),
    )

    first = policy.reconsider(situation, None)

    assert np.count_nonzero(first.places == 1) == first.plan.spot == 26
    assert policy.reconsider(dataclasses.replace(situation, now_s=500.0), first) is first
    assert (policy.name, policy.review_s, policy.watches_outages) == ("chance", None, False)
