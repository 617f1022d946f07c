"""A backlog in two streams is learned about as well as the same rows shuffled into one topic.

That updates take from all streams alike is tested on every change in
tests/unit/core/test_grouping.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "streams" / "nsl-kdd-train-20percent.csv.gz"
PATIENCE_S = 280.0
ROWS = 4_000


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark."""
    command = [sys.executable, str(ROOT / "load" / "fairness.py"), "--kafka", "embedded"]
    return subprocess.run(  # noqa: S603 -- our own command line, no shell
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.mark.nightly
@pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")
def test_two_streams_teach_what_one_shuffled_topic_teaches(tmp_path: Path) -> None:
    found = tmp_path / "fairness.json"
    ended = run("--rows", str(ROWS), "--data", str(DATA), "--json", str(found))
    assert ended.returncode in (0, 1), ended.stderr
    told = json.loads(found.read_text())
    assert [each["samples"] for each in told["measurements"]] == [int(0.8 * ROWS)] * 2
    # One stream after the other it is worse by more than 0.4; with so few rows both vary a little.
    assert told["worse"] < 0.1, told


def test_without_the_data_it_says_what_it_needs(tmp_path: Path) -> None:
    ended = run("--data", str(tmp_path / "nothing.csv"))
    assert ended.returncode == 2
    assert "nothing.csv" in ended.stderr
    assert "NSL-KDD" in ended.stderr
