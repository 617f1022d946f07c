"""A schedule of faults is data: reproducible by its seed, complete, and feasible."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from load.faults.schedule import FAMILIES, KINDS, LOSSES, Fault, Kind, draw

SIZES = {"worker": 4, "worker-redis": 4, "worker-kafka": 4, "coordinator": 2}
SEEDS = st.integers(0, 2**32)
RUNS_S = st.floats(60.0, 600.0)


def drawn(seed: int, seconds: float) -> tuple[Fault, ...]:
    return draw(seed, seconds, SIZES)


@given(SEEDS, RUNS_S)
def test_same_seed_gives_the_same_schedule(seed: int, seconds: float) -> None:
    assert drawn(seed, seconds) == drawn(seed, seconds)


def test_different_seeds_give_different_schedules() -> None:
    assert len({drawn(seed, 60.0) for seed in range(20)}) == 20


@given(SEEDS, RUNS_S)
def test_faults_begin_and_end_within_the_run(seed: int, seconds: float) -> None:
    for fault in drawn(seed, seconds):
        assert 0.0 < fault.at_s <= fault.ends_s < seconds + 1e-6
        assert 0 <= fault.number < SIZES.get(fault.family, 1)


@given(SEEDS)
def test_every_family_has_a_fault_in_two_minutes(seed: int) -> None:
    assert {fault.family for fault in drawn(seed, 120.0)} == FAMILIES


@given(SEEDS)
def test_every_kind_of_fault_occurs_in_five_minutes(seed: int) -> None:
    assert {fault.kind for fault in drawn(seed, 300.0)} == {kind.name for kind in KINDS}


@given(SEEDS, RUNS_S)
def test_target_recovers_before_its_next_fault(seed: int, seconds: float) -> None:
    recovers_s = {kind.name: kind.recovers_s for kind in KINDS}
    by_target = dict[tuple[str, int], list[Fault]]()
    for fault in drawn(seed, seconds):
        by_target.setdefault((fault.family, fault.number), []).append(fault)
    for faults in by_target.values():
        for earlier, later in pairwise(faults):
            assert later.at_s >= earlier.ends_s + recovers_s[earlier.kind] - 1e-6


@given(SEEDS)
def test_faults_of_different_families_overlap(seed: int) -> None:
    faults = drawn(seed, 60.0)
    assert any(
        one.at_s < other.at_s < one.ends_s and one.family != other.family
        for one in faults
        for other in faults
    )


def test_run_too_short_for_a_fault_has_none() -> None:
    assert drawn(1, 1.0) == ()


@given(SEEDS, RUNS_S)
def test_at_most_three_targets_have_faults_at_once(seed: int, seconds: float) -> None:
    faults = drawn(seed, seconds)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    for fault in faults:
        others = (each for each in faults if each.at_s <= fault.at_s < each.ends_s)
        assert len({(each.family, each.number) for each in others}) <= 3


@given(SEEDS, st.sampled_from([*KINDS, *LOSSES]))
def test_schedule_of_one_kind_lets_its_target_recover(seed: int, kind: Kind) -> None:
    faults = draw(seed, 300.0, SIZES, [kind])
    assert {fault.kind for fault in faults} == {kind.name}
    assert len({fault.at_s for fault in faults}) == len(faults)
    for earlier, later in pairwise(faults):
        same = (earlier.family, earlier.number) == (later.family, later.number)
        assert not same or later.at_s >= earlier.ends_s + kind.recovers_s - 1e-6


def test_default_schedule_contains_no_data_loss() -> None:
    names = {fault.kind for seed in range(20) for fault in drawn(seed, 300.0)}
    assert names.isdisjoint(kind.name for kind in LOSSES)
