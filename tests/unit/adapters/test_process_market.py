"""The schedule of local machines: the same for whoever looks, and down as often as asked."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.adapters.local.market import Chain, schedule_of
from common.config.market_file import ProcessProvider
from common.errors import UserError
from common.traces.spec import TraceSpec

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 2e5  # times a hundred cycles

availabilities = st.floats(0.05, 0.95)
seeds = st.tuples(st.integers(0, 2**32), st.integers(0, 1000))


def stays(chain: Chain, until_s: float) -> list[tuple[bool, float, float]]:
    """All stays until a time: the state, from, to."""
    found, at_s = [], 0.0
    while at_s < until_s:
        end_s = chain.next_switch_s(at_s)
        found.append((chain.up(at_s), at_s, end_s))
        at_s = end_s
    return found


@given(availability=availabilities, seed=seeds)
def test_stays_follow_each_other_in_turn(availability: float, seed: tuple[int, int]) -> None:
    found = stays(Chain(availability, 10.0, seed), 500.0)
    for (before, _, end_s), (after, begin_s, later_s) in pairwise(found):
        assert before != after
        assert end_s == begin_s < later_s


@given(availability=availabilities, seed=seeds, times_s=st.lists(st.floats(0, 1e4), max_size=20))
def test_whoever_looks_finds_the_same_in_whatever_order(
    availability: float, seed: tuple[int, int], times_s: list[float]
) -> None:
    one, other = Chain(availability, 10.0, seed), Chain(availability, 10.0, seed)
    found = [(one.up(each), one.next_switch_s(each), one.next_down_s(each)) for each in times_s]
    again = [
        (other.up(each), other.next_switch_s(each), other.next_down_s(each))
        for each in reversed(times_s)
    ]
    assert found == again[::-1]


@given(availability=availabilities, seed=seeds, at_s=st.floats(0, 1e3))
def test_it_is_next_down_at_once_or_when_it_next_switches(
    availability: float, seed: tuple[int, int], at_s: float
) -> None:
    chain = Chain(availability, 10.0, seed)
    down_s = chain.next_down_s(at_s)
    assert not chain.up(down_s)
    assert down_s == (chain.next_switch_s(at_s) if chain.up(at_s) else at_s)


@pytest.mark.parametrize("availability", [0.2, 0.5, 0.9])
def test_it_is_up_for_its_share_and_lost_once_in_a_cycle(availability: float) -> None:
    found = stays(Chain(availability, 20.0, (1, 2)), LONG_S)
    up_s = sum(end_s - begin_s for up, begin_s, end_s in found if up)
    assert up_s / LONG_S == pytest.approx(availability, abs=0.02)
    assert LONG_S / sum(up for up, _, _ in found) == pytest.approx(20.0, rel=0.05)


def test_at_first_as_many_are_up_as_ever() -> None:
    up = sum(Chain(0.7, 20.0, (3, slot)).up(0.0) for slot in range(2000))
    assert up / 2000 == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize(("availability", "down_s"), [(1.0, math.inf), (0.0, 5.0)])
def test_machines_that_are_always_or_never_there(availability: float, down_s: float) -> None:
    chain = Chain(availability, 20.0, (1, 2))
    assert chain.up(5.0) == (availability == 1)
    assert chain.next_switch_s(5.0) == math.inf
    assert chain.next_down_s(5.0) == down_s


def test_slots_and_seeds_differ(tmp_path: Path) -> None:
    providers = [ProcessProvider(availability=0.5, cycle_s=10.0, seed=seed) for seed in (0, 1)]
    schedules = [schedule_of(provider, tmp_path) for provider in providers]
    ends_s = {schedule.next_down_s(slot, 1e3) for schedule in schedules for slot in range(20)}
    assert len(ends_s) > 15  # those that are down just then are alike


# --- recorded ------------------------------------------------------------------------------------


def recorded(folder: Path, rows: str, **more: float) -> ProcessProvider:
    (folder / "there.csv").write_text(f"seconds,machines\n{rows}")
    return ProcessProvider(
        availability=TraceSpec(file="there.csv", start_s=0.0).model_copy(update=more)
    )


def test_where_machines_were_counted_lower_slots_have_them(tmp_path: Path) -> None:
    # machines  3       1               3       1
    # seconds   0       10      20      30      40
    schedule = schedule_of(recorded(tmp_path, "0,3\n10,1\n20,1\n"), tmp_path)
    assert [schedule.next_down_s(slot, 2.0) for slot in range(4)] == [math.inf, 10.0, 10.0, 2.0]
    assert schedule.next_down_s(1, 15.0) == 15.0
    assert schedule.next_down_s(1, 31.0) == 40.0


def test_where_it_was_recorded_whether_there_were_any_all_slots_are_alike(tmp_path: Path) -> None:
    schedule = schedule_of(recorded(tmp_path, "0,1\n6,0\n9,1\n12,1\n"), tmp_path)
    # there     yes     no      yes             no
    # seconds   0       6       9       12      18
    for slot in (0, 7):
        assert [schedule.next_down_s(slot, at_s) for at_s in (0, 6, 8.5, 10)] == [6, 6, 8.5, 18]


def test_a_recording_is_gone_through_at_its_speed_from_where_it_is_said(tmp_path: Path) -> None:
    provider = recorded(tmp_path, "0,1\n6,0\n9,1\n12,1\n", speed=3.0, start_s=3.0)
    assert schedule_of(provider, tmp_path).next_down_s(0, 0.0) == pytest.approx(1.0)


def test_machines_that_were_always_there_are_never_taken_away(tmp_path: Path) -> None:
    schedule = schedule_of(recorded(tmp_path, "0,1\n6,1\n"), tmp_path)
    assert schedule.next_down_s(0, 3.0) == math.inf


def test_a_recording_that_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        schedule_of(ProcessProvider(availability=TraceSpec(file="nowhere.csv")), tmp_path)
