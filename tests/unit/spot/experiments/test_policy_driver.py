"""The driver consults policies at the right times, with the right situations."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from common.spot.experiments.fleet import SimulatedFleet
from common.spot.experiments.policy_driver import Givens, PolicyDriver, Priors
from common.spot.experiments.results import PolicyChange
from common.spot.machines import Offer
from common.spot.theory.estimates import CyclePrior, RatePrior
from common.spot.theory.work import Pool
from tests.unit.spot.experiments.decisions import (
    NOWHERE,
    ON_DEMAND,
    SPOT,
    Scripted,
    always,
    count,
    decide,
)

if TYPE_CHECKING:
    from common.spot.policies.policy import Decision, Situation

Array: TypeAlias = npt.NDArray[np.float64]

STEP_S = 2.0
POOLS = (Pool("on-demand", 0.286), Pool("spot", 0.158, 0.9, 1000.0))


def givens(runs: int = 1, workers: int = 2) -> Givens:
    rates = 10.0 + np.arange(runs * workers, dtype=np.float64).reshape(runs, workers)
    return Givens(POOLS, rates, 2, 5, 100, np.full(runs, 60.0), 0.01)


class Table:
    """A fleet under one policy, step by step."""

    def __init__(self, policy: Scripted, runs: int = 1, workers: int = 2) -> None:
        self.givens = givens(runs, workers)
        self.fleet = SimulatedFleet(POOLS, runs, workers, STEP_S)
        self.policy = policy
        self.driver = PolicyDriver(policy, self.fleet, self.givens)
        self.going = np.ones(runs, np.bool_)
        self.step = 0

    def next_step(
        self, offered: list[list[bool]], prices: list[float] | None = None, left: float = 100.0
    ) -> None:
        """Consult the policies that are due, then process a step."""
        runs = self.givens.runs
        spot = np.array(prices or [0.158] * runs)
        usd_per_hour = [np.full(runs, 0.286), spot]
        now_s = self.step * STEP_S
        changed = (spot != 0.158) & (self.step > 0)
        self.driver.consider(now_s, usd_per_hour, changed, np.full(runs, left), self.going)
        self.fleet.step(now_s, (None, np.array(offered)), usd_per_hour)
        self.step += 1

    @property
    def times_s(self) -> list[float]:
        """Return the times at which the policy was consulted."""
        return [situation.now_s for situation in self.policy.asked]


ALL = [[True, True]]


def test_policy_without_reviews_is_consulted_once() -> None:
    table = Table(Scripted(always([SPOT, ON_DEMAND])))
    for offered in (ALL, [[False, True]], ALL):
        table.next_step(offered)
    assert table.times_s == [0.0]
    assert table.driver.history == [[PolicyChange(0.0, "scripted decision", 1, 1)]]


def test_reviews_come_at_their_interval() -> None:
    # step   0 2 4 6 8 10 12
    # review *     *      *     every 5 s
    table = Table(Scripted(always([SPOT, SPOT]), review_s=5.0))
    for _ in range(7):
        table.next_step(ALL)
    assert table.times_s == [0.0, 6.0, 12.0]


def test_price_change_consults_the_policy_in_its_run_alone() -> None:
    table = Table(Scripted(always([SPOT, SPOT])), runs=2)
    table.next_step(ALL * 2)
    table.next_step(ALL * 2, prices=[0.158, 0.2])
    assert table.times_s == [0.0, 0.0, 2.0]
    asked = table.policy.asked[-1]
    assert [pool.usd_per_hour for pool in asked.pools] == [0.286, 0.2]
    assert asked.work.rates_per_s.tolist() == table.givens.rates_per_s[1].tolist()


def test_outage_and_its_end_consult_the_policy_one_step_later() -> None:
    # slot 1  # # . . # #     in steps of 2 s
    # asked   *     *   *     one step after the outage began, and one step after it ended
    table = Table(Scripted(always([ON_DEMAND, SPOT]), watches_outages=True))
    for up in (True, True, False, False, True, True):
        table.next_step([[True, up]])
    assert table.times_s == [0.0, 6.0, 10.0]
    assert [asked.up.tolist() for asked in table.policy.asked] == [
        [True, True],
        [True, False],
        [True, True],
    ]


def test_machine_that_is_unavailable_at_first_consults_the_policy() -> None:
    table = Table(Scripted(always([SPOT, SPOT]), watches_outages=True))
    for _ in range(3):
        table.next_step([[True, False]])
    assert table.times_s == [0.0, 2.0]


def test_change_of_ready_machines_consults_a_counting_policy() -> None:
    # offered   ##    ##   #.   #.   ##
    # reported  0     2         1
    decided = count(spot=2)
    table = Table(Scripted(lambda _, last: last or decided, watches_outages=True))
    for offered in ([True, True], [True, True], [True, False], [True, False], [True, True]):
        table.next_step([offered])
    assert table.times_s == [0.0, 2.0, 6.0]
    counts = [asked.machines[Offer("spot")] for asked in table.policy.asked]
    assert counts == [(0, 0), (2, 0), (1, 0)]
    assert table.driver.history[0] == [PolicyChange(0.0, decided.reason, 2, 0)]


def test_remaining_time_and_updates_are_passed_and_not_negative() -> None:
    table = Table(Scripted(always([SPOT, SPOT]), review_s=40.0))
    for step in range(42):
        table.next_step(ALL, left=100.0 - step)
    works = [asked.work for asked in table.policy.asked]
    assert [work.deadline_s for work in works] == [60.0, 20.0, 0.0]
    assert [work.updates for work in works] == [100.0, 80.0, 60.0]


def test_finished_run_does_not_consult_the_policy() -> None:
    table = Table(Scripted(always([SPOT, SPOT]), review_s=2.0), runs=2)
    table.next_step(ALL * 2)
    table.going[0] = False
    table.next_step(ALL * 2)
    assert len(table.policy.asked) == 3
    assert table.policy.asked[-1].work.rates_per_s[0] == 12.0


def test_only_a_new_object_is_a_new_decision() -> None:
    def answer(situation: Situation, last: Decision | None) -> Decision:
        if last is not None and situation.now_s < 4:
            return last
        first = NOWHERE if last is None else ON_DEMAND
        return decide([first, SPOT], situation, f"at {situation.now_s:g}")

    table = Table(Scripted(answer, review_s=2.0))
    for _ in range(3):
        table.next_step(ALL)
    assert table.driver.history[0] == [
        PolicyChange(0.0, "at 0", 1, 0),
        PolicyChange(4.0, "at 4", 1, 1),
    ]
    last = table.driver.last[0]
    assert last is not None
    assert last.basis is table.policy.asked[-1]


class Counted:
    """Observes each slot for all of the elapsed time, with 30 records per second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, runs: npt.NDArray[np.intp]) -> tuple[Array, Array]:
        """Return the counts."""
        return np.full((len(runs), 2), 30.0 * self.seconds), np.full((len(runs), 2), self.seconds)


def test_priors_give_way_to_observations() -> None:
    # slot 0  # . . . #   up for 4 of 10 s, preempted once; slot 1 was up for all 10 s
    # The prior is an availability of 0.9 with a cycle of 100 s.
    beliefs = Priors(RatePrior(10.0, 1.0), CyclePrior(0.9, 100.0))
    counted = Counted()
    fleet = SimulatedFleet(POOLS, 1, 2, STEP_S)
    policy = Scripted(always([SPOT, SPOT]), review_s=10.0)
    driver = PolicyDriver(policy, fleet, givens(), (beliefs, counted))
    usd_per_hour = [np.array([0.286]), np.array([0.158])]
    no, going, left = np.array([False]), np.array([True]), np.array([9.0])
    for step, up in enumerate([True, False, False, False, True]):
        driver.consider(step * STEP_S, usd_per_hour, no, left, going)
        fleet.step(step * STEP_S, (None, np.array([[up, True]])), usd_per_hour)
    counted.seconds = 9.0
    driver.consider(10.0, usd_per_hour, no, left, going)

    first, later = policy.asked
    assert first.work.rates_per_s.tolist() == [10.0, 10.0]
    assert later.work.rates_per_s.tolist() == [28.0, 28.0]
    assert [pool.availability for pool in first.pools] == [1.0, 0.9]
    assert later.pools[SPOT].availability == pytest.approx((90 + 14) / 120)
    assert later.pools[SPOT].cycle_s == pytest.approx(120 / 2)
    assert later.pools[ON_DEMAND] is POOLS[ON_DEMAND]


def test_theta_0_and_its_cost_come_from_the_rates() -> None:
    job = givens(workers=2)
    assert job.undisturbed_s == pytest.approx([1000 / 21])
    assert job.on_demand_only_usd == pytest.approx([1000 / 21 * 2 * 0.286 / 3600])
