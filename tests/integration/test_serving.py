"""A model is served by a process while it trains and its leader is killed: no answer is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 280.0


@pytest.mark.nightly
def test_no_request_fails_and_no_answer_is_taken_back_while_leaders_are_killed(
    tmp_path: Path,
) -> None:
    found = tmp_path / "serving.json"
    command = [sys.executable, str(ROOT / "load" / "serving.py"), "--kafka", "embedded"]
    ended = subprocess.run(  # noqa: S603 -- our own command line, no shell
        [*command, "--seconds", "9", "--rate", "20", "--pairs", "1", "--json", str(found)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ended.returncode in (0, 1), ended.stderr  # how fast is for a quiet machine to say
    told = json.loads(found.read_text())
    assert told["failed_requests"] == 0
    assert told["answers_taken_back"] == 0
    assert told["answers"] == {"leader killed": 180, "board wiped": 180}
    assert min(told["versions_served"].values()) > 1
