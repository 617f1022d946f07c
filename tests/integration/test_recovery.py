"""The benchmark of recovery times returns times. Its results are meaningful on idle machines only.

test_training.py checks on every change that training continues after a kill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 200.0


@pytest.mark.nightly
def test_recovery_benchmark_measures_a_killed_worker(tmp_path: Path) -> None:
    found = tmp_path / "recovery.json"
    command = [sys.executable, str(ROOT / "load" / "recovery.py"), "--kafka", "embedded"]
    ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
        [*command, "--only", "worker", "--kills", "1", "--json", str(found)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ended.returncode in (0, 1), ended.stderr
    [value_ms] = json.loads(found.read_text())["measurements"]["worker"]["values_ms"]
    assert value_ms > 0
