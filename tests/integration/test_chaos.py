"""Chaos on real servers: every component fails, and every record is used exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from load.faults.schedule import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

pytest_plugins = ["tests.servers", "tests.redis_servers"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


@pytest.mark.parametrize(
    ("minutes", "seed", "missed"),
    # Each seed's schedule has faults of nearly all families in the given time.
    [
        pytest.param(0.25, 602, {"storage"}, id="15 s"),
        pytest.param(1, 3, set(), id="a minute", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.alone
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.timeout(PATIENCE_S + 30)
# The run can use real servers if they are installed here.
@pytest.mark.usefixtures("apache_kafka", "system_redis")
def test_chaos_uses_every_record_exactly_once(
    minutes: float, seed: int, missed: set[str], tmp_path: Path
) -> None:
    found, said = chaos(tmp_path, minutes, seed)

    assert [each for each in found["failures"] if each not in found["slow"]] == [], said
    assert found["wrong_weights"] == 0
    assert found["flaws"] == []
    assert found["trained"] == found["records"] > 0
    assert found["updates"] > 0
    assert found["quarantined"] == 0
    assert found["faults_by_family"].keys() == FAMILIES - missed
    assert found["unexpected_exits"] == []


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.timeout(PATIENCE_S + 30)
@pytest.mark.usefixtures("apache_kafka", "system_redis")
def test_job_never_restarts_at_version_0_if_object_storage_lies(tmp_path: Path) -> None:
    found, said = chaos(tmp_path, 1, 3, "--lies", "--only", "store lies", "worker killed")

    assert [each for each in found["failures"] if each not in found["slow"]] == [], said
    assert found["wrong_weights"] == 0
    assert "store" in found["faults_by_family"]
    assert found["unexpected_exits"] == []


def chaos(folder: Path, minutes: float, seed: int, *options: str) -> tuple[Mapping[str, Any], str]:
    """Return the results file and the output of a run, which must have ended."""
    result = folder / "chaos.json"
    command = [sys.executable, "load/chaos.py", "--minutes", str(minutes), "--seed", str(seed)]
    command += options
    ended = subprocess.run(  # noqa: S603 -- our own interpreter and program
        [*command, "--json", str(result), "--logs", str(folder / "logs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode in (0, 1), said
    found: dict[str, Any] = json.loads(result.read_text())
    return found, said
