"""Theorems 4 and 5, compared with brute force over equations 15 to 23 and the paper's search."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.theory import provisioning
from common.spot.theory.errors import ParameterError
from common.spot.theory.provisioning import plan, plan_of
from common.spot.theory.work import PaperMarket, Work, market

# Columns: alpha, theta/theta_0, N_s*, equation 16 over on-demand in per cent.
SETTINGS = [
    (0.9, 1.05, 30, 80.19),
    (0.8, 1.05, 15, 91.20),
    (0.8, 1.10, 29, 82.16),
]
PRICES = (0.286, 0.158)  # pi_o, pi_s


def equal(ratio: float, workers: int = 64, updates: float = 10_000) -> Work:
    work = Work(np.full(workers, 125.0), 20, 256, updates, 1.0)
    return dataclasses.replace(work, deadline_s=ratio * work.undisturbed_s)


def due(rates: list[float], ratio: float) -> Work:
    work = Work(np.array(rates), 20, 256, 10_000, 1.0)
    return dataclasses.replace(work, deadline_s=ratio * work.undisturbed_s)


def equations_21_and_22(work: Work, spot: int, prices: PaperMarket) -> tuple[float, float]:
    """Return runtime and cost with the lowest-rate workers on spot: equations 15 and 16."""
    alpha = prices.spot.availability
    up = np.repeat((alpha, 1.0), (spot, work.workers - spot))
    rate = float(np.sort(work.rates_per_s) @ up)
    if not rate:
        return math.inf, math.inf
    usd_per_s = (work.workers - spot) * prices.on_demand.usd_per_s
    usd_per_s += spot * alpha * prices.spot.usd_per_s
    return work.records / rate, work.records / rate * usd_per_s


def meets_deadline(work: Work, spot: int, prices: PaperMarket) -> bool:
    """Return True if the plan meets the deadline by Lemma 2, equation 23."""
    return equations_21_and_22(work, spot, prices)[0] <= work.deadline_s * (1 + 1e-12)


def walked(work: Work, prices: PaperMarket) -> float:
    """Return the cost that the paper's search finds.

    The search counts N_s up from 0 until the cost rises or Lemma 2 fails.

    The cost has at most one local minimum for a continuous lambda(n), and for discrete rates, too.
    With f the cost per record of N_s workers on spot, c = 1 - alpha and B = pi_o - alpha pi_s > 0,
    one more worker increases f exactly if c lambda_{N_s+1} f > B. After a rise f is larger, and the
    next rate is not smaller, so f rises for ever.
    """
    _, cost = equations_21_and_22(work, 0, prices)
    for spot in range(1, work.workers + 1):
        _, next_cost = equations_21_and_22(work, spot, prices)
        if next_cost > cost or not meets_deadline(work, spot, prices):
            break
        cost = next_cost
    return cost


positive_rates = st.floats(1, 250)
rates = st.lists(st.one_of(positive_rates, st.just(0.0), st.just(125.0)), min_size=1, max_size=12)
works = st.builds(due, rates.filter(any), st.floats(1, 2))
# Nearer to 1, the rounding of a deadline decides how many spot machines meet it.
availabilities = st.one_of(st.just(1.0), st.floats(0.05, 0.9999))
# Positive prices are bounded below, because products of tiny ones underflow to 0.
spot_prices = st.one_of(st.just(0.0), st.floats(1e-6, 0.95))
markets = st.builds(market, st.just(1.0), spot_prices, availabilities)


@pytest.mark.parametrize(("alpha", "ratio", "spot", "share"), SETTINGS)
def test_plan_in_the_paper_settings_gives_the_paper_numbers(
    alpha: float, ratio: float, spot: int, share: float
) -> None:
    work, prices = equal(ratio), market(*PRICES, alpha)

    best = plan(work, prices)
    (_, alone), (_, cost) = (equations_21_and_22(work, number, prices) for number in (0, spot))

    assert best.spot == spot
    assert best.on_demand == 64 - spot
    assert round(100 * cost / alone, 2) == share
    assert best.cost_ratio_to_on_demand == pytest.approx(cost / alone)
    assert best.binding == "deadline"
    assert str(spot) in best.reason


@given(works, markets)
def test_cost_curve_equals_equations_21_and_22_at_every_number(
    work: Work, prices: PaperMarket
) -> None:
    curve = provisioning.cost_curve(work, prices)

    for spot in range(work.workers + 1):
        point = curve.runtimes_s[spot], curve.costs_usd[spot]
        assert point == pytest.approx(equations_21_and_22(work, spot, prices))


@given(st.integers(1, 200), st.floats(0.05, 0.99), st.data())
def test_plan_loses_no_spot_worker_to_rounding(
    workers: int, alpha: float, data: st.DataObject
) -> None:
    spot = data.draw(st.integers(0, workers))
    work = equal(workers / (workers - (1 - alpha) * spot), workers)  # theta fits exactly

    assert plan(work, market(1.0, 0.5, alpha)).spot == spot
    assert meets_deadline(work, spot, market(1.0, 0.5, alpha))


@given(works, markets)
def test_plan_has_the_cheapest_feasible_number_of_spot_workers(
    work: Work, prices: PaperMarket
) -> None:
    best = plan(work, prices)

    costs = [
        equations_21_and_22(work, spot, prices)[1]
        for spot in range(work.workers + 1)
        if meets_deadline(work, spot, prices)
    ]

    assert best.expected_cost_usd <= min(costs) * (1 + 1e-9)
    assert best.expected_runtime_s <= work.deadline_s * (1 + 1e-9)


@given(st.builds(due, st.lists(positive_rates, min_size=1, max_size=6), st.floats(1, 2)), markets)
def test_plan_has_the_best_choice_of_workers(work: Work, prices: PaperMarket) -> None:
    alpha = prices.spot.availability
    best = plan(work, prices)
    for spot in range(work.workers + 1):
        for chosen in itertools.combinations(range(work.workers), spot):
            up = np.ones(work.workers)
            up[list(chosen)] = alpha
            runtime = work.records / float(work.rates_per_s @ up) if work.rates_per_s @ up else 1e9
            price = (work.workers - spot) * prices.on_demand.usd_per_s
            price += alpha * spot * prices.spot.usd_per_s
            assert runtime > work.deadline_s or runtime * price >= best.expected_cost_usd * (
                1 - 1e-9
            )


@given(works, markets)
def test_search_up_to_the_first_rise_finds_the_exact_plan(work: Work, prices: PaperMarket) -> None:
    best = plan(work, prices)

    assert best.expected_cost_usd == pytest.approx(walked(work, prices), rel=1e-9)


@given(works, markets)
def test_cost_curve_never_falls_after_its_first_rise(work: Work, prices: PaperMarket) -> None:
    costs = provisioning.cost_curve(work, prices).costs_usd
    steps = np.diff(costs) / costs[:-1]
    rises = np.flatnonzero(steps > 1e-12)

    assert not len(rises) or (steps[rises[0] :] >= -1e-12).all()


def test_fast_worker_is_not_placed_on_spot() -> None:
    # On demand the work takes 100 s. The two slow workers lose little on spot, but the fast one
    # would double the runtime.
    work = Work(np.array([1.0, 98.0, 1.0]), 1, 1, 10_000, 1_000)
    prices = market(1.0, 0.6, 0.5)

    best = plan(work, prices)

    assert (best.spot, best.binding) == (2, "cost")
    assert best.spot_workers.tolist() == [0, 2]
    assert "one more" in best.reason


def test_always_available_spot_takes_all_workers() -> None:
    best = plan(equal(1.0), market(*PRICES, 1.0))

    assert (best.spot, best.binding) == (64, "workers")
    assert best.cost_ratio_to_on_demand == pytest.approx(PRICES[1] / PRICES[0])


def test_never_available_spot_takes_no_workers() -> None:
    best = plan(equal(1.05), market(*PRICES, 0.0))

    assert (best.feasible, best.spot, best.binding) == (True, 0, "availability")


@pytest.mark.parametrize("spot_price", [0.286, 0.5])
def test_spot_that_is_not_cheaper_is_not_used(spot_price: float) -> None:
    best = plan(equal(1.05), market(0.286, spot_price, 0.9))

    assert (best.feasible, best.spot, best.binding) == (True, 0, "price")
    assert f"${spot_price}" in best.reason


def test_deadline_below_theta_0_is_infeasible() -> None:
    best = plan(equal(0.99), market(*PRICES, 0.9))

    assert (best.feasible, best.spot, best.on_demand, best.binding) == (False, 0, 64, "infeasible")
    assert best.expected_runtime_s == pytest.approx(6_400)
    assert best.cost_ratio_to_on_demand == 1
    assert "theta_0 = 6,400 s" in best.reason


def test_deadline_of_zero_is_infeasible() -> None:
    work = dataclasses.replace(equal(1.0), deadline_s=0.0)

    assert not plan(work, market(*PRICES, 0.9)).feasible


def test_plan_with_no_updates_left_costs_nothing() -> None:
    work = dataclasses.replace(equal(1.0), updates=0.0, deadline_s=0.0)

    best = plan(work, market(*PRICES, 0.9))

    assert (best.feasible, best.spot, best.expected_cost_usd) == (True, 0, 0)
    assert (best.expected_runtime_s, best.cost_ratio_to_on_demand) == (0, 1)
    assert "no updates are left" in best.reason


def test_plan_is_limited_by_the_capacity_of_the_pool() -> None:
    prices = market(*PRICES, 0.9)
    few = PaperMarket(prices.on_demand, dataclasses.replace(prices.spot, capacity=20))

    best = plan(equal(1.05), few)

    assert (best.feasible, best.spot, best.binding) == (True, 20, "capacity")
    assert not plan_of(equal(1.05), few, 21).feasible


def test_plan_of_a_given_number_is_priced() -> None:
    work, prices = equal(1.05), market(*PRICES, 0.9)

    enough, late = plan_of(work, prices, 12), plan_of(work, prices, 40)

    assert (enough.feasible, enough.spot, enough.on_demand) == (True, 12, 52)
    assert enough.expected_cost_usd == pytest.approx(equations_21_and_22(work, 12, prices)[1])
    assert (late.feasible, late.binding) == (False, "deadline")
    assert late.expected_runtime_s > work.deadline_s


def test_cost_without_any_available_machine_is_infinite() -> None:
    work, prices = equal(1.05), market(*PRICES, 0.0)

    curve = provisioning.cost_curve(work, prices)

    assert math.isinf(curve.costs_usd[64])
    assert not curve.feasible[64]


def test_plan_of_an_invalid_number_is_rejected() -> None:
    mixed = due([1.0, 2.0], 1.05)
    with pytest.raises(ParameterError, match="spot: must be 0 to 2 workers, got 3"):
        plan_of(mixed, market(*PRICES, 0.9), 3)
    with pytest.raises(ParameterError, match="spot: must be 0 to 2 workers, got -1"):
        plan_of(mixed, market(*PRICES, 0.9), -1)
