"""The schedule of local machines: the same for all readers, down as often as requested."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.spot.fleets.local.market import PoolSchedules, SlotChain
from common.spot.fleets.local.market import schedule_of as schedule_of_market
from common.spot.market.market_file import (
    Market,
    OnDemandPool,
    ProcessProvider,
    SpotPool,
    with_common_start,
)
from common.spot.traces.spec import TraceSpec

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 2e5  # times a hundred cycles

availabilities = st.floats(0.05, 0.95)
seeds = st.tuples(st.integers(0, 2**32), st.integers(0, 1000))


def stays(chain: SlotChain, until_s: float) -> list[tuple[bool, float, float]]:
    """Return (state, from, to) for all intervals up to a time."""
    found, at_s = [], 0.0
    while at_s < until_s:
        end_s = chain.next_switch_s(at_s)
        found.append((chain.up(at_s), at_s, end_s))
        at_s = end_s
    return found


@given(availability=availabilities, seed=seeds)
def test_chain_alternates_between_up_and_down(availability: float, seed: tuple[int, int]) -> None:
    found = stays(SlotChain(availability, 10.0, seed), 500.0)
    for (before, _, end_s), (after, begin_s, later_s) in pairwise(found):
        assert before != after
        assert end_s == begin_s < later_s


@given(availability=availabilities, seed=seeds, times_s=st.lists(st.floats(0, 1e4), max_size=20))
def test_chain_does_not_depend_on_the_query_order(
    availability: float, seed: tuple[int, int], times_s: list[float]
) -> None:
    one, other = SlotChain(availability, 10.0, seed), SlotChain(availability, 10.0, seed)
    found = [(one.up(each), one.next_switch_s(each), one.next_down_s(each)) for each in times_s]
    again = [
        (other.up(each), other.next_switch_s(each), other.next_down_s(each))
        for each in reversed(times_s)
    ]
    assert found == again[::-1]


@given(availability=availabilities, seed=seeds, at_s=st.floats(0, 1e3))
def test_next_down_is_now_if_down_or_else_the_next_switch(
    availability: float, seed: tuple[int, int], at_s: float
) -> None:
    chain = SlotChain(availability, 10.0, seed)
    down_s = chain.next_down_s(at_s)
    assert not chain.up(down_s)
    assert down_s == (chain.next_switch_s(at_s) if chain.up(at_s) else at_s)


@pytest.mark.parametrize("availability", [0.2, 0.5, 0.9])
def test_chain_has_the_requested_availability_and_cycle(availability: float) -> None:
    found = stays(SlotChain(availability, 20.0, (1, 2)), LONG_S)
    up_s = sum(end_s - begin_s for up, begin_s, end_s in found if up)
    assert up_s / LONG_S == pytest.approx(availability, abs=0.02)
    assert LONG_S / sum(up for up, _, _ in found) == pytest.approx(20.0, rel=0.05)


def test_chain_starts_with_the_requested_availability() -> None:
    up = sum(SlotChain(0.7, 20.0, (3, slot)).up(0.0) for slot in range(2000))
    assert up / 2000 == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize(("availability", "down_s"), [(1.0, math.inf), (0.0, 5.0)])
def test_chain_with_availability_0_or_1_never_switches(availability: float, down_s: float) -> None:
    chain = SlotChain(availability, 20.0, (1, 2))
    assert chain.up(5.0) == (availability == 1)
    assert chain.next_switch_s(5.0) == math.inf
    assert chain.next_down_s(5.0) == down_s


def market_of(provider: ProcessProvider, *spot: SpotPool) -> Market:
    pools = spot or (SpotPool(usd_per_hour=1.0),)
    return Market(on_demand=OnDemandPool(usd_per_hour=2.0), spot=pools, process=provider)


@dataclass
class SinglePoolSchedule:
    """A market's schedule for one pool, from 0 on."""

    schedule: PoolSchedules
    pool: str = "spot"

    def next_down_s(self, slot: int, at_s: float) -> float:
        """Return the first time from `at_s` on at which the slot is down."""
        return self.schedule.next_down_s(self.pool, slot, at_s, 0.0)


def schedule_of(provider: ProcessProvider, folder: Path) -> SinglePoolSchedule:
    return SinglePoolSchedule(schedule_of_market(market_of(provider), folder, 0.0))


def test_slots_and_seeds_have_different_schedules(tmp_path: Path) -> None:
    providers = [ProcessProvider(availability=0.5, cycle_s=10.0, seed=seed) for seed in (0, 1)]
    schedules = [schedule_of(provider, tmp_path) for provider in providers]
    ends_s = {schedule.next_down_s(slot, 1e3) for schedule in schedules for slot in range(20)}
    # Slots that are down at this time all return the time itself.
    assert len(ends_s) > 15


# --- recorded ------------------------------------------------------------------------------------


def recorded(folder: Path, rows: str, **more: float) -> ProcessProvider:
    (folder / "there.csv").write_text(f"seconds,machines\n{rows}")
    return ProcessProvider(
        availability=TraceSpec(file="there.csv", start_s=0.0).model_copy(update=more)
    )


def test_recorded_count_serves_the_lower_slots(tmp_path: Path) -> None:
    # machines  3       1               3       1
    # seconds   0       10      20      30      40
    schedule = schedule_of(recorded(tmp_path, "0,3\n10,1\n20,1\n"), tmp_path)
    assert [schedule.next_down_s(slot, 2.0) for slot in range(4)] == [math.inf, 10.0, 10.0, 2.0]
    assert schedule.next_down_s(1, 15.0) == 15.0
    assert schedule.next_down_s(1, 31.0) == 40.0


def test_recorded_availability_serves_all_slots_alike(tmp_path: Path) -> None:
    schedule = schedule_of(recorded(tmp_path, "0,1\n6,0\n9,1\n12,1\n"), tmp_path)
    # there     yes     no      yes             no
    # seconds   0       6       9       12      18
    for slot in (0, 7):
        assert [schedule.next_down_s(slot, at_s) for at_s in (0, 6, 8.5, 10)] == [6, 6, 8.5, 18]


def test_recording_is_replayed_at_its_speed_from_its_start(tmp_path: Path) -> None:
    provider = recorded(tmp_path, "0,1\n6,0\n9,1\n12,1\n", speed=3.0, start_s=3.0)
    assert schedule_of(provider, tmp_path).next_down_s(0, 0.0) == pytest.approx(1.0)


def test_recording_without_outages_never_preempts(tmp_path: Path) -> None:
    schedule = schedule_of(recorded(tmp_path, "0,1\n6,1\n"), tmp_path)
    assert schedule.next_down_s(0, 3.0) == math.inf


def test_missing_recording_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        schedule_of(ProcessProvider(availability=TraceSpec(file="nowhere.csv")), tmp_path)


# --- several pools -------------------------------------------------------------------------------


def test_pools_have_different_outages(tmp_path: Path) -> None:
    names = ("spot", "other")
    pools = [SpotPool(name=name, usd_per_hour=1.0) for name in names]
    provider = ProcessProvider(availability=0.5, cycle_s=10.0)
    schedule = schedule_of_market(market_of(provider, *pools), tmp_path, 0.0)
    both = [[schedule.next_down_s(name, slot, 1e3, 0.0) for slot in range(20)] for name in names]
    assert both[0] != both[1]
    alone = schedule_of(provider, tmp_path)
    assert both[0] == [alone.next_down_s(slot, 1e3) for slot in range(20)]


def test_pool_is_preempted_by_its_trace_or_a_price_above_its_bid(tmp_path: Path) -> None:
    # seconds    0      10     20     30     40     50
    # machines   2      2      1      2      2      2      the replay began at 1000
    # price      .1     .3     .1     .1     .3     .1
    rows = "0,2,0.1\n10,2,0.3\n20,1,0.1\n30,2,0.1\n40,2,0.3\n50,2,0.1\n"
    (tmp_path / "zone.csv").write_text(f"seconds,machines,price\n{rows}")
    there = TraceSpec(file="zone.csv", column="machines", start_s=0.0)
    price = TraceSpec(file="zone.csv", column="price", start_s=0.0)
    seen = SpotPool(name="a", usd_per_hour=price, trace=there)
    bought = SpotPool(name="b", usd_per_hour=price, trace=there, bid_usd_per_hour=0.2)
    schedule = schedule_of_market(market_of(ProcessProvider(), seen, bought), tmp_path, 1000.0)
    for slot, pool, down_s in ((0, "a", math.inf), (1, "a", 1020.0), (0, "b", 1010.0)):
        assert schedule.next_down_s(pool, slot, 1000.0, 990.0) == down_s
    assert schedule.next_down_s("b", 0, 1012.0, 990.0) == 1012.0
    assert schedule.next_down_s("b", 1, 1030.0, 990.0) == 1040.0
    assert schedule.next_down_s("on-demand", 1, 1030.0, 990.0) == math.inf


def test_machine_is_preempted_when_the_price_exceeds_its_own_bid(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("seconds,price\n0,0.1\n10,0.3\n20,0.1\n30,0.1\n")
    pools = (
        SpotPool(name="a", usd_per_hour=TraceSpec(file="a.csv", start_s=0.0)),
        SpotPool(name="b", usd_per_hour=0.2),
    )
    market = market_of(ProcessProvider(availability=1.0), *pools)
    schedule = schedule_of_market(market, tmp_path, 1000.0)
    found = {
        (pool, bid): schedule.next_down_s(pool, 0, 1012.0, 990.0, bid)
        for pool in "ab"
        for bid in (0.15, 0.3, None)
    }
    assert found == {
        ("a", 0.15): 1012.0,
        ("a", 0.3): math.inf,
        ("a", None): math.inf,
        ("b", 0.15): 1012.0,
        ("b", 0.3): math.inf,
        ("b", None): math.inf,
    }
    assert schedule.next_down_s("a", 0, 1001.0, 990.0, 0.15) == 1010.0


def test_all_series_of_a_market_start_at_the_same_second(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("seconds,value\n0,1\n500,2\n1000,1\n")
    (tmp_path / "b.csv").write_text("seconds,value\n0,1\n50,2\n100,1\n")
    long, short = TraceSpec(file="a.csv"), TraceSpec(file="b.csv", speed=2.0)
    own = TraceSpec(file="a.csv", start_s=7.0)
    pools = (
        SpotPool(name="a", usd_per_hour=long, trace=short),
        SpotPool(name="b", usd_per_hour=own, trace=long),
    )
    market = market_of(ProcessProvider(seed=3), *pools)
    begun = with_common_start(market, tmp_path)
    starts = [
        spec.start_s
        for pool in begun.spot
        for spec in (pool.usd_per_hour, pool.trace)
        if isinstance(spec, TraceSpec)
    ]
    assert starts[2] == 7.0
    assert starts[0] == starts[1] == starts[3]
    assert starts[0] is not None
    assert 0 < starts[0] < 150
    assert with_common_start(market, tmp_path) == begun
