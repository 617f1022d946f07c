"""Durations of start-ups, measured by the first heartbeats of workers."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.spot.provisioning.estimators import Estimator
from common.spot.provisioning.events import HeartbeatsSeen
from common.spot.provisioning.slots import readiness
from common.spot.provisioning.startup_times import StartUp, StartUps, median_start_up_s
from common.spot.theory.work import Pool
from tests.unit.spot.provisioning.examples import PRICES, SETTINGS, T0, fold, lead, machine, started
from tests.unit.spot.provisioning.examples import ordered as order

if TYPE_CHECKING:
    from common.spot.provisioning.fleet_ledger import Instance
    from common.spot.provisioning.settings import ProvisionerSettings

SPOT = Pool("spot", 0.25, 0.9, 100.0, start_up_s=5.0)
LOOK_S = 2.0
PATIENCE_S = 15.0


def running(launch: int, started_s: float = 0.0) -> Instance:
    """Return a machine that started this time after T0. Its worker is named after it."""
    found = machine(launch)
    found.started_s, found.member = T0 + started_s, f"w-{launch}"
    return found


def poll(
    start_ups: StartUps, at_s: float, *launches: int, there: tuple[Instance, ...] = ()
) -> None:
    members = frozenset(f"w-{launch}" for launch in launches)
    start_ups.workers_seen(HeartbeatsSeen(members, T0 + at_s), there, PATIENCE_S)


def starts(start_ups: StartUps, count: int, took_s: float, first: int = 1) -> None:
    """Observe machines, one after the other, whose workers appear this time after their start."""
    for launch in range(first, first + count):
        at_s = 1000.0 * launch
        there = (running(launch, at_s),)
        for number in range(round(took_s / LOOK_S) + 1):
            poll(start_ups, at_s + number * LOOK_S, there=there)
        poll(start_ups, at_s + took_s + 1.0, launch, there=there)


def test_start_up_time_without_observations_is_of_the_market_file() -> None:
    assert StartUps().start_up_s(SPOT) == 5.0


def test_start_up_time_of_three_observations_replaces_the_market_file() -> None:
    # The first heartbeat comes between the polls at 60 s and 61 s.
    start_ups = StartUps()
    starts(start_ups, 1, 60.0)
    assert start_ups.start_up_s(SPOT) == 5.0
    starts(start_ups, 2, 60.0, first=2)
    assert start_ups.start_up_s(SPOT) == pytest.approx(60.5)
    assert start_ups.start_up_s(replace(SPOT, name="other")) == 5.0


def test_start_up_time_ignores_a_single_outlier() -> None:
    start_ups = StartUps()
    starts(start_ups, 4, 10.0)
    starts(start_ups, 1, 600.0, first=5)
    assert start_ups.start_up_s(SPOT) == pytest.approx(10.5)


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20))
def test_estimate_without_censored_times_is_the_usual_median(seconds: list[float]) -> None:
    found = median_start_up_s([StartUp(each) for each in seconds])
    assert abs(found - median(seconds)) <= 2 * math.ulp(found)


def test_estimate_with_censored_times_is_that_of_kaplan_and_meier() -> None:
    # At risk: 6, 5, (4), 3, (2), 1. Shares that have not reported: 5/6, 4/6, 4/9, ...
    times = [StartUp(10), StartUp(20), StartUp(25, censored=True)]
    times += [StartUp(30), StartUp(40, censored=True), StartUp(50)]
    assert median_start_up_s(times) == 30
    # The survivors alone would give (10 + 20) / 2, and the longest time is a lower bound.
    censored = [StartUp(60, censored=True)] * 3
    assert median_start_up_s([StartUp(10), StartUp(20), *censored]) == 60


def test_estimate_of_censored_times_is_unbiased_where_survivors_are_not() -> None:
    # Start-ups take 60 s on average, and machines are preempted after 60 s on average.
    chance = np.random.default_rng(7)
    takes_s, ends_s = chance.exponential(60.0, (2, 4000))
    censored = ends_s < takes_s
    seconds = np.minimum(takes_s, ends_s)
    times = [StartUp(*each) for each in zip(seconds.tolist(), censored.tolist(), strict=True)]
    true_s = 60.0 * math.log(2)
    assert median_start_up_s(times) == pytest.approx(true_s, rel=0.06)
    assert median(seconds[~censored]) < 0.6 * true_s


def test_machines_that_end_before_a_heartbeat_lengthen_the_start_up_time() -> None:
    # Three machines report after 60 s, and ten others are preempted after 100 s without a report.
    start_ups = StartUps()
    starts(start_ups, 3, 60.0)
    assert start_ups.start_up_s(SPOT) == pytest.approx(60.5)
    for launch in range(4, 14):
        at_s = 1000.0 * launch
        for number in range(51):
            poll(start_ups, at_s + number * LOOK_S, there=(running(launch, at_s),))
        poll(start_ups, at_s + 102.0)
    assert start_ups.start_up_s(SPOT) == pytest.approx(100.0)


def test_start_up_time_follows_the_latest_observations() -> None:
    start_ups = StartUps()
    starts(start_ups, 20, 10.0)
    starts(start_ups, 15, 40.0, first=21)
    assert start_ups.start_up_s(SPOT) == pytest.approx(40.5)


def test_machines_started_before_the_first_poll_are_not_timed() -> None:
    # Eight machines start at 0 s. A successor polls first at 500 s, when Redis is empty, and sees
    # all heartbeats at 502 s.
    start_ups, there = StartUps(), tuple(running(launch) for launch in range(1, 9))
    poll(start_ups, 500.0, there=there)
    poll(start_ups, 502.0, *range(1, 9), there=there)
    assert start_ups.start_up_s(SPOT) == 5.0
    assert start_ups.reported == frozenset(range(1, 9))


def test_machines_started_between_distant_polls_are_not_timed() -> None:
    # polls    0         100 102
    # machines    started    heartbeats
    start_ups, there = StartUps(), tuple(running(launch, 50.0) for launch in range(1, 9))
    poll(start_ups, 0.0)
    poll(start_ups, 100.0, there=there)
    poll(start_ups, 102.0, *range(1, 9), there=there)
    assert start_ups.start_up_s(SPOT) == 5.0


def test_repeated_or_late_polls_are_ignored() -> None:
    start_ups, there = StartUps(), tuple(running(launch) for launch in range(1, 9))
    poll(start_ups, -2.0)
    for at_s in (2.0, 4.0, 6.0):
        poll(start_ups, at_s, there=there)
    poll(start_ups, 8.0, *range(1, 9), there=there)
    poll(start_ups, 4.0, there=there)
    poll(start_ups, 8.0, there=there)
    assert start_ups.reported == frozenset(range(1, 9))
    assert start_ups.start_up_s(SPOT) == pytest.approx(7.0)


def test_heartbeat_before_the_machine_start_is_read_is_timed() -> None:
    # The machines start at 1 s, their first heartbeats come at 2 s, and the records of their starts
    # are read at 4 s.
    start_ups, there = StartUps(), tuple(running(launch, 1.0) for launch in range(1, 9))
    poll(start_ups, 0.0)
    poll(start_ups, 2.0, *range(1, 9))
    poll(start_ups, 4.0, *range(1, 9), there=there)
    assert start_ups.start_up_s(SPOT) == pytest.approx(0.5)


def test_empty_redis_does_not_restart_start_up_times() -> None:
    start_ups, there = StartUps(), tuple(running(launch) for launch in range(1, 9))
    poll(start_ups, 0.0)
    for at_s, launches in ((2.0, 9), (4.0, 1), (6.0, 9)):
        poll(start_ups, at_s, *range(1, launches), there=there)
    assert start_ups.start_up_s(SPOT) == pytest.approx(1.0)


def test_machine_is_ready_with_heartbeats_or_after_the_usual_time() -> None:
    start_ups, there = StartUps(), (running(8), running(9))
    starts(start_ups, 3, 60.0)
    poll(start_ups, 9000.0, 8, there=there)

    assert [readiness([SPOT], start_ups, T0 + 60.0)(each) for each in there] == [True, False]
    assert [readiness([SPOT], start_ups, T0 + 60.5)(each) for each in there] == [True, True]


@pytest.mark.parametrize(
    ("settings", "learnt"),
    [(SETTINGS, 1.0), (replace(SETTINGS, on_preemption="hold"), 0.0)],
    ids=["reassign", "hold"],
)
def test_policies_see_observed_start_up_times_with_unique_worker_names(
    settings: ProvisionerSettings, learnt: float
) -> None:
    records = [order(launch, slot=launch - 1) for launch in (1, 2, 3)]
    ledger = fold([lead(), *records, *(started(launch) for launch in (1, 2, 3))])
    members = frozenset(instance.member for instance in ledger.running)
    estimator = Estimator(settings)
    estimator.workers_seen(HeartbeatsSeen(frozenset(), T0), ledger)
    estimator.workers_seen(HeartbeatsSeen(members, T0 + 2.0), ledger)

    start_ups_s = {pool.name: pool.start_up_s for pool in estimator.pools(PRICES, T0)}
    said = {pool.name: pool.start_up_s for pool in SETTINGS.pools}
    assert start_ups_s == said | {"spot": learnt}
