"""Provisioning under hundreds of schedules of faults, and proof that the worlds detect bugs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.spot.provisioning.records import Ended, Planned, ProvisionerLead, Settled
from tests.changes import has_changed
from tests.system.mutants import cases
from tests.system.provisioning_mutants import PROVISIONING_MUTANTS
from tests.system.provisioning_world import World

if TYPE_CHECKING:
    from tests.system.mutants import Mutant

ROOT = Path(__file__).parents[2]
FEW_SEEDS = range(30)
# Code that a world's result depends on. Unless it has changed, a seed has the same result.
RUNS_ON = (
    *("common/core/", "common/spot/policies/", "common/spot/provisioning/"),
    *(
        "common/testing/",
        "common/spot/theory/",
        "common/wire/",
        "tests/system/provisioning_world.py",
    ),
)
SEEDS = range(120) if has_changed(*RUNS_ON) else FEW_SEEDS
EXIT_VIOLATED = 1


def test_fault_schedules_neither_launch_twice_nor_leak_a_machine() -> None:
    met = Counter[str]()
    for seed in SEEDS:
        world = World(seed).run()
        assert not world.violations, (
            f"seed {seed}: python -m tests.system.provisioning_world {seed} {seed + 1}"
        )
        met.update(type(record).__name__ for record in world.counted)
        met.update(record.cause for record in world.counted if isinstance(record, Ended))
        met["void"] += len(world.log) - len(world.counted)
        met["policies"] += len({r.policy for r in world.counted if isinstance(r, Planned)})
        if seed in (FEW_SEEDS[-1], SEEDS[-1]):
            check_eventful(met, seed + 1)


def check_eventful(met: Counter[str], worlds: int) -> None:
    """Check that enough faults of each kind happened."""
    assert met["ProvisionerLead"] > 2 * worlds
    assert min(met[cause] for cause in ("preempted", "released", "failed", "refused")) > worlds // 6
    assert met["lost"]
    assert met["void"] > worlds // 12
    assert met["Planned"] > 3 * worlds
    assert met["policies"] >= worlds


def test_provisioner_without_faults_takes_charge_once() -> None:
    for seed in range(10):
        world = World(seed, faulty=False).run()

        assert not world.violations, f"seed {seed}"
        kinds = Counter(type(record) for record in world.counted)
        # A standby may learn late that the job has ended.
        assert kinds[ProvisionerLead] == kinds[Settled]
        assert not any(r.cause == "lost" for r in world.counted if isinstance(r, Ended))


def test_seed_determines_the_story() -> None:
    for seed in (3, 14):
        assert World(seed).run().log == World(seed).run().log


@pytest.mark.parametrize("mutant", cases(PROVISIONING_MUTANTS))
def test_provisioning_world_fails_if_a_rule_is_removed(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "tests").mkdir()
    for file in ("__init__.py", "counting_policy.py", "memory_fleet.py"):
        shutil.copy(ROOT / "tests" / file, tmp_path / "tests")
    shutil.copytree(ROOT / "tests" / "system", tmp_path / "tests" / "system")
    mutant.write(tmp_path)

    command = (sys.executable, "-m", "tests.system.provisioning_world", "0", str(mutant.seeds))
    run = subprocess.run(  # noqa: S603 -- our own command line
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert run.returncode == EXIT_VIOLATED, run.stdout + run.stderr
    assert "1 failures" in run.stdout, run.stderr  # it ran, and did not just break
