"""A simulation process answers in one line, and ends with the process that started it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from common.spot.planning.simulation import REPORT, SimulateRequest
from common.spot.planning.simulation_process import simulated

COMMAND = (sys.executable, "-m", "common.spot.planning.simulation_process")
SMALL = {
    "workers": 4,
    "rates": 50,
    "group_size": 2,
    "batch_size": 10,
    "updates": 60,
    "deadline_factor": 1.4,
    "on_demand": {"usd_per_hour": 0.286},
    "spot": [{"usd_per_hour": 0.158, "availability": 0.8, "cycle_s": 20}],
}


def order(runs: int, **changed: object) -> bytes:
    asked = SimulateRequest.model_validate({"experiment": {**SMALL, **changed}, "runs": runs})
    return asked.model_dump_json().encode()


def started(*arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen((*COMMAND, *arguments), stdin=pipe, stdout=pipe)  # noqa: S603 -- our own command line


def test_process_answers_one_line_with_one_line() -> None:
    with started() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order(2) + b"\n")
        process.stdin.flush()
        report = REPORT.decode(process.stdout.read())
        assert process.wait() == 0
    results = json.loads(bytes(report.results))
    assert len(results["runs"]["static"]) == 2
    assert report.refused == ""


def test_process_with_a_folder_reports_progress_before_the_result() -> None:
    with started(".") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order(2) + b"\n")
        process.stdin.flush()
        *progress, last = map(REPORT.decode, process.stdout)
        assert process.wait() == 0
    assert [report.progress for report in progress][-1:] == [("static", 1.0)]
    assert last.progress is None
    assert len(json.loads(bytes(last.results))["runs"]["static"]) == 2


def test_simulation_that_needs_too_much_memory_is_refused() -> None:
    asked = order(1, mode="protocol", updates=20, group_size=1000, batch_size=10**6, rates=1e9)
    with started() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(asked + b"\n")
        process.stdin.flush()
        report = REPORT.decode(process.stdout.read())
        assert process.wait() == 0
    assert "more memory than there is" in report.refused


def test_process_ends_when_its_parent_closes_stdin() -> None:
    with started() as process:
        assert process.stdin is not None
        process.stdin.write(order(1000, updates=10**8) + b"\n")
        process.stdin.close()
        assert process.wait(120) == 1


def test_process_ends_silently_if_stdin_closes_before_the_order() -> None:
    pipe = subprocess.PIPE
    done = subprocess.run(COMMAND, input=order(1), stdout=pipe, stderr=pipe, check=True)  # noqa: S603 -- our own command line
    assert done.stdout + done.stderr == b""


def test_invalid_simulation_is_refused_with_a_reason() -> None:
    report = simulated(order(1, rates=[0, 0, 0, 0]), Path(), lambda _policy, _share: None)
    assert "all rates of a run are 0" in report.refused
