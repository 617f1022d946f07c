"""The help of each command explains its purpose, with an example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMANDS = (
    (sys.executable, "-m", "common.telemetry.metrics"),
    (sys.executable, "-m", "common.runtime.healthcheck"),
    (sys.executable, "-m", "deploy.grafana"),
    ("deploy/compose/make-secrets",),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_command_help_explains_its_purpose_with_an_example(command: tuple[str, ...]) -> None:
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "usage: " in answer.stdout
    assert "example: " in answer.stdout
    assert Path(command[-1]).name.rpartition(".")[2] in answer.stdout
