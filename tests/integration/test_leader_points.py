"""A group's leader is killed at each point of its work: its successor rolls nothing back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900.0

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(PATIENCE_S + 30)]


def test_killed_group_leader_takes_no_update_back(tmp_path: Path) -> None:
    found = tmp_path / "points.json"
    command = [sys.executable, str(ROOT / "load" / "aggregation.py"), "--kafka", "embedded"]
    ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
        [*command, "--only", "leader_taken_back", "--json", str(found)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert json.loads(found.read_text())["leader_taken_back"]["value"] == 0
