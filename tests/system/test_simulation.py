"""The protocol under a thousand schedules of faults, and proof that the simulation detects bugs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.simulation.faults.cluster import (
    Cluster,
    Outcome,
    run_seed,
    run_seeds,
    shrink,
    smaller,
)
from common.simulation.faults.scenario import (
    CUTS,
    LOSSES,
    WORLDS,
    FaultKind,
    Poison,
    Scenario,
    from_seed,
)
from tests.changes import has_changed
from tests.system.mutants import (
    BUILDS_MUTANTS,
    GROUP_MUTANTS,
    MUTANTS,
    SLICES_MUTANTS,
    STORE_MUTANTS,
    Mutant,
    cases,
)
from tests.system.provisioning_mutants import PROVISIONING_MUTANTS

ROOT = Path(__file__).parents[2]
# A seed has the same result unless its code has changed.
CHANGED = has_changed("common/core/", "common/simulation/")
SEEDS = range(1000 if CHANGED else 250)
FEW_SEEDS = range(20)
GROUP_SEEDS = range(80 if CHANGED else 40)
SLICES_SEEDS = range(40)
FROZEN_SEEDS = range(80 if CHANGED else 40)
FORGED_SEEDS = range(20)
STORE_SEEDS = range(80 if CHANGED else 40)
# Seeds run one after the other until one fails, because other tests use the other processors.
FIRST_FAILURE = """\
import sys
from common.simulation.faults import cluster
outcomes = (cluster.run_seed(seed, sys.argv[2]) for seed in range(int(sys.argv[1])))
print(next((f"seed {it.seed}: {it.failure}" for it in outcomes if it.failure), "none fails"))
"""


def test_thousand_fault_schedules_break_no_invariant() -> None:
    outcomes = list(run_seeds(SEEDS))

    assert not [
        f"{outcome.failure}; replay: python -m common.simulation --story {outcome.seed}"
        for outcome in outcomes
        if outcome.failure
    ]
    assert len(outcomes) == len(SEEDS)
    # Enough has happened in these worlds.
    assert sum(outcome.updates for outcome in outcomes) > 10 * len(SEEDS)
    assert sum(outcome.takeovers for outcome in outcomes) > len(SEEDS)
    assert sum(outcome.stale for outcome in outcomes) > len(SEEDS)
    assert sum(outcome.single_worker for outcome in outcomes) > 2 * len(SEEDS)
    assert sum(outcome.local_steps for outcome in outcomes) > len(SEEDS)
    assert sum(outcome.switched for outcome in outcomes) > len(SEEDS) // 4
    assert sum(outcome.changed for outcome in outcomes) > len(SEEDS) // 4
    assert sum(outcome.tuned for outcome in outcomes) > len(SEEDS) // 5
    assert sum(outcome.quarantined for outcome in outcomes) > len(SEEDS) // 2


def test_frozen_and_thawed_processes_break_no_invariant() -> None:
    outcomes = list(run_seeds(FROZEN_SEEDS, "frozen"))

    assert not [
        f"{outcome.failure}; replay: python -m common.simulation --frozen --story {outcome.seed}"
        for outcome in outcomes
        if outcome.failure
    ]
    assert sum(outcome.updates for outcome in outcomes) > 10 * len(FROZEN_SEEDS)


def _faults_of(*kinds: str) -> Counter[FaultKind]:
    """Count the faults of all seeds in these kinds of worlds."""
    worlds = (WORLDS[kind](seed) for kind in kinds for seed in SEEDS)
    return Counter(fault.kind for world in worlds for fault in world.faults)


def test_every_kind_of_fault_occurs_in_some_world() -> None:
    met = _faults_of("", "group")
    # Worlds of other kinds have the same faults once more, so only faults of their own count.
    own = _faults_of("forged", "frozen", "store")
    met += Counter({kind: times for kind, times in own.items() if kind not in met})

    assert met.keys() == set(get_args(FaultKind))
    assert min(met.values()) > len(SEEDS) // 5


def test_seed_determines_the_story() -> None:
    def story(seed: int) -> tuple[Outcome, list[str]]:
        lines = list[str]()
        cluster = Cluster(from_seed(seed), lambda now, text: lines.append(f"{now} {text}"))
        return cluster.run(), lines

    for seed in FEW_SEEDS[:8]:
        outcome, lines = story(seed)
        assert (outcome, lines) == story(seed)
        # A listener changes nothing.
        assert outcome == run_seed(seed)
        assert len(set(outcome.applied)) == len(outcome.applied) >= outcome.updates > 0


def test_worker_recovers_from_forged_trigger_that_redis_lost() -> None:
    # A forged id in the leader's stream precedes a failover to a copy without it. The leader does
    # not notice it, and the worker waits for a higher id.
    assert run_seed(700753).failure == ""


def test_world_without_faults_needs_one_leader_and_no_quarantine() -> None:
    for seed in FEW_SEEDS:
        quiet = replace(
            from_seed(seed),
            faults=(),
            lossy=0.0,
            copies=0.0,
            misheard=0.0,
            poisons=(),
            kafka_s=0.01,
            board_s=0.002,
        )
        outcome = Cluster(quiet).run()
        assert (outcome.failure, outcome.takeovers, outcome.quarantined) == ("", 1, 0)


def test_workers_of_another_build_get_no_order_in_any_world() -> None:
    outcomes = [run_seed(seed, "builds") for seed in FEW_SEEDS]
    assert not [outcome for outcome in outcomes if outcome.failure]


def test_live_coordinators_reported_as_ended_break_no_invariant() -> None:
    reported = list[str]()
    for seed in FEW_SEEDS:
        world = replace(from_seed(seed), misheard=0.02)
        assert not Cluster(world, lambda _, text: reported.append(text)).run().failure
    taken = [text for text in reported if "takes the lease of" in text]
    lived = sum(text.endswith("!") for text in taken)
    assert 0 < lived < len(taken)  # others had ended


# --- the shrinker --------------------------------------------------------------------------------


# Faults after which a job is rightly held.
LOSING = {*LOSSES, *CUTS}


def diverging() -> Scenario:
    """Return a busy world that is held, because the first round's batches are not finite."""
    records = tuple((offset, 0.0) for offset in range(20))
    lossless = (s for s in map(from_seed, SEEDS) if not LOSING & {fault.kind for fault in s.faults})
    worlds = (
        replace(
            busy,
            batch_size=1,
            group_size=2,
            bound=4,
            arrivals=(records, *busy.arrivals[1:]),
            poisons=tuple(Poison(0, offset, "is not finite", 1.0) for offset in range(20)),
        )
        for busy in lossless
        if len(busy.faults) > 30 and len(busy.arrivals) > 1
    )
    # Some worlds are held earlier, for poison.
    return next(world for world in worlds if Cluster(world).run().kind == "held")


def test_shrinker_keeps_only_what_the_failure_needs() -> None:
    said = list[str]()

    least = shrink(diverging(), said.append)

    assert Cluster(least).run().kind == "held"
    assert not least.faults
    assert sum(map(len, least.arrivals)) == len(least.poisons) == 2  # one batch each, K = 2
    assert said[-1].endswith("still held")


def test_shrinker_rejects_scenario_that_does_not_fail() -> None:
    with pytest.raises(ValueError, match="seed 0 does not fail"):
        shrink(from_seed(0), lambda _: None)


def size(scenario: Scenario) -> tuple[float, ...]:
    """Return the number of each kind of thing that the shrinker may remove."""
    return (
        len(scenario.faults),
        sum(map(len, scenario.arrivals)),
        scenario.workers,
        len(scenario.bad),
        len(scenario.poisons),
        scenario.lossy,
        scenario.copies,
    )


@given(st.integers(0, 10_000))
def test_each_shrinker_step_removes_one_kind_of_thing(seed: int) -> None:
    scenario = from_seed(seed)

    for candidate in smaller(scenario):
        before, after = size(scenario), size(candidate)
        assert sum(x != y for x, y in zip(before, after, strict=True)) == 1
        # The sizes fall, so the shrinker ends.
        assert all(y <= x for x, y in zip(before, after, strict=True))


def test_seeds_that_failed_before_no_longer_fail() -> None:
    # The leader asked a dead process to store the weights; an operator requeued one batch 4 times.
    for seed, world in ((502091, "group"), (504825, "slices")):
        assert run_seed(seed, world).failure == ""


def test_group_members_lose_nothing_and_use_nothing_twice() -> None:
    outcomes = list(run_seeds(GROUP_SEEDS, "group"))

    assert not [
        f"{outcome.failure}; replay: python -m common.simulation --group --story {outcome.seed}"
        for outcome in outcomes
        if outcome.failure
    ]
    # Enough has happened in these worlds.
    among = sum((outcome.among for outcome in outcomes), Counter[str]())
    assert sum(outcome.updates for outcome in outcomes) > 10 * len(GROUP_SEEDS)
    assert min(among[it] for it in ("copied", "torn", "fetched")) > len(GROUP_SEEDS) // 2
    assert among["fallen back"] > len(GROUP_SEEDS) // 2
    assert among["broken"] > len(GROUP_SEEDS) // 4
    assert among["adopted"] > len(GROUP_SEEDS) // 16
    # No fallback gave up an update that a live member held.
    assert not among["in vain"]


def test_slices_are_stepped_by_their_owners_and_never_partly_lost() -> None:
    outcomes = list(run_seeds(SLICES_SEEDS, "slices"))

    assert not [
        f"{outcome.failure}; replay: python -m common.simulation --slices --story {outcome.seed}"
        for outcome in outcomes
        if outcome.failure
    ]
    among = sum((outcome.among for outcome in outcomes), Counter[str]())
    assert sum(outcome.updates for outcome in outcomes) > 10 * len(SLICES_SEEDS)
    assert min(among[way] for way in ("moved", "fallen back", "fetched")) > len(SLICES_SEEDS) // 4


def test_group_members_with_forged_messages_lose_nothing_and_use_nothing_twice() -> None:
    outcomes = list(run_seeds(FORGED_SEEDS, "forged"))

    assert not [
        f"{outcome.failure}; replay: python -m common.simulation --forged --story {outcome.seed}"
        for outcome in outcomes
        if outcome.failure
    ]
    assert sum(outcome.updates for outcome in outcomes) > 10 * len(FORGED_SEEDS)


def test_no_checkpoint_is_forgotten_if_object_storage_answers_wrongly() -> None:
    outcomes = list(run_seeds(STORE_SEEDS, "store"))

    assert not [
        f"{outcome.failure}; replay: python -m common.simulation --store --story {outcome.seed}"
        for outcome in outcomes
        if outcome.failure
    ]
    assert sum(outcome.named for outcome in outcomes) > 3 * len(STORE_SEEDS)
    assert sum(outcome.awaited for outcome in outcomes) > len(STORE_SEEDS) // 4


# --- the simulation detects bugs -----------------------------------------------------------------


@pytest.mark.parametrize(
    "mutant",
    [
        *MUTANTS,
        *BUILDS_MUTANTS,
        *GROUP_MUTANTS,
        *SLICES_MUTANTS,
        *STORE_MUTANTS,
        *PROVISIONING_MUTANTS,
    ],
    ids=lambda each: each.rule,
)
def test_text_replaced_by_a_mutant_occurs_once_in_the_code(mutant: Mutant) -> None:
    for path, before, _ in mutant.edits:
        assert (ROOT / path).read_text().count(before) == 1, f"{path} reads otherwise now: {before}"


@pytest.mark.parametrize("mutant", cases(MUTANTS))
def test_simulation_fails_if_a_rule_is_removed(mutant: Mutant, tmp_path: Path) -> None:
    check_without(mutant, tmp_path, "")


@pytest.mark.parametrize("mutant", cases(BUILDS_MUTANTS))
def test_simulation_fails_if_a_rule_of_builds_is_removed(mutant: Mutant, tmp_path: Path) -> None:
    check_without(mutant, tmp_path, "builds")


@pytest.mark.parametrize("mutant", cases(GROUP_MUTANTS))
def test_simulation_fails_if_a_rule_of_members_is_removed(mutant: Mutant, tmp_path: Path) -> None:
    check_without(mutant, tmp_path, "group")


@pytest.mark.parametrize("mutant", cases(SLICES_MUTANTS))
def test_simulation_fails_if_a_rule_of_slices_is_removed(mutant: Mutant, tmp_path: Path) -> None:
    check_without(mutant, tmp_path, "slices")


@pytest.mark.parametrize("mutant", cases(STORE_MUTANTS))
def test_simulation_fails_if_a_rule_of_checkpoints_is_removed(
    mutant: Mutant, tmp_path: Path
) -> None:
    check_without(mutant, tmp_path, "store")


def check_without(mutant: Mutant, tmp_path: Path, world: str) -> None:
    for package in ("core", "simulation"):
        shutil.copytree(ROOT / "common" / package, tmp_path / "common" / package)
    shutil.copy(ROOT / "common" / "__init__.py", tmp_path / "common")
    mutant.write(tmp_path)

    run = subprocess.run(  # noqa: S603 -- our own command line
        [sys.executable, "-c", FIRST_FAILURE, str(mutant.seeds), world],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr  # it ran, and did not just break
    assert run.stdout.startswith("seed "), run.stdout
