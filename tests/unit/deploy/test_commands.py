"""Whoever asks a command what it is for is told, with an example."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = (
    "common.telemetry.metrics",
    "common.runtime.healthcheck",
    "deploy.grafana",
    "load.monitoring.dashboards",
)
SCRIPT = "deploy/compose/make-secrets"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # runpy's, of what tests have imported
@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for_with_an_example(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    check(said.out, module)


def test_a_script_says_what_it_is_for_with_an_example() -> None:
    answer = subprocess.run(  # noqa: S603 -- our own command line
        [SCRIPT, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    check(answer.stdout, SCRIPT)


def check(said: str, command: str) -> None:
    assert "usage: " in said
    assert "example: " in said
    assert Path(command).name.rpartition(".")[2] in said
