"""The placement of workers in virtual time, and rules of the plan whose loss tests must notice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changes import has_changed
from tests.system.mutants import Edit, Mutant, cases
from tests.system.spread_world import Setting, World

ROOT = Path(__file__).parents[2]
# A seed has the same result unless its code has changed.
SEEDS = 3 if has_changed("common/core/", "tests/system/spread_world.py") else 1
SPREAD = "common/core/job_placement.py"
TESTS = ("tests/unit/core/test_job_placement.py", "tests/system/spread_world.py")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_four_workers_train_ten_jobs_without_starving_any(seed: int) -> None:
    result = World(Setting(workers=4, jobs=10, seed=seed)).run()

    assert result.trained >= 0.99
    assert result.starved_s <= 90.0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_four_workers_drain_a_hundred_small_jobs(seed: int) -> None:
    # 25 turns of about seven seconds, half of it to join.
    result = World(
        Setting(workers=4, jobs=100, seed=seed, load=0.0, backlog=200.0, faults=False)
    ).run()

    assert result.drained_s is not None
    assert result.drained_s <= 240.0


def test_enough_workers_starve_no_job_and_rarely_move() -> None:
    result = World(Setting(workers=16, jobs=4, seconds=1200.0, faults=False)).run()

    assert result.trained >= 0.99
    assert result.starved_s <= 30.0
    assert result.moves <= 16 * 4


def mutant(rule: str, before: str, after: str) -> Mutant:
    """Return the plan without one of its rules; `seeds` has no meaning here."""
    return Mutant(rule, 0, (Edit(SPREAD, before, after),))


MUTANTS = (
    mutant("a pinned worker stays", "if worker.pinned or worker.goes or", "if worker.goes or"),
    mutant(
        "a worker that moved recently stays",
        "and worker.stay_s < settings.shortest_stay_s",
        "and False",
    ),
    mutant("no worker leaves a job during its takeover", " or worker.job in self._stale:", ":"),
    mutant(
        "no worker moves to a job during its takeover",
        "if job not in self._jobs or job in self._stale:",
        "if job not in self._jobs:",
    ),
    mutant(
        "a slot that no worker can fill is left out",
        "if not bound and not any(it.can_do(demand) for it in self._workers):",
        "if False:",
    ),
    mutant(
        "no worker moves to a job whose task it cannot run",
        "if it.can_do(self._jobs[slot.job])), None)",
        "if True), None)",
    ),
    mutant("requested workers are assigned first", "if number < demand.target:", "if False:"),
    mutant(
        "the job that has waited longest goes first",
        "if number == 0 and waited_s > settings.longest_wait_s:",
        "if False:",
    ),
    mutant(
        "an occupied slot has preference", "occupied = settings.occupied if", "occupied = 1.0 if"
    ),
    mutant("weights of jobs count", "(needed * demand.weight)", "(needed * 1.0)"),
    mutant(
        "the last of too many workers that move to one job stay",
        "if over > 0 and me.worker in rivals[-over:]:",
        "if False:",
    ),
    mutant(
        "paused jobs need no workers",
        "if not demand.runs or not records_per_s:",
        "if not records_per_s:",
    ),
    mutant(
        "drained jobs need no workers, even if their owners request some",
        "if not demand.runs or not records_per_s:",
        "if not demand.runs:",
    ),
    mutant("a job without recent status is stale", "if at <= stale_since)", "if False)"),
)


@pytest.mark.parametrize("mutant", cases(MUTANTS))
def test_placement_tests_fail_if_a_rule_of_the_plan_is_removed(
    mutant: Mutant, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "common/core", tmp_path / "common/core")
    for path in TESTS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    mutant.write(tmp_path)

    command = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", TESTS[0])
    run = subprocess.run(  # noqa: S603 -- our own command line
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
