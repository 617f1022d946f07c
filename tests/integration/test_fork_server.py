"""A forked process is independent: it has its own environment, and its end is noticed both ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.embedded.process import Child
from tests.integration.cluster import await_condition

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")

MODULE = "tests.integration.forked"
PATIENCE_S = 60.0
PARENT = f"""
import sys, time
from pathlib import Path
from common.embedded.process import Child
child = Child([sys.executable, "-P", "-m", "{MODULE}", "wait"], Path(sys.argv[1]), forks=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def forked(log: Path, *arguments: str, **environment: str) -> Child:
    command = [sys.executable, "-P", "-m", MODULE, *arguments]
    return Child(command, log, {**os.environ, **environment} if environment else None, forks=True)


def read_state(child: Child, log: Path) -> dict[str, Any]:
    """Return the state that a child reports of itself."""
    child.await_ready(lambda: log.read_text().endswith("\n"), PATIENCE_S)
    found: dict[str, Any] = json.loads(log.read_text())
    return found


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Child]:
    """A child that waits for a signal."""
    child = forked(tmp_path / "log", "wait")
    read_state(child, tmp_path / "log")
    yield child
    child.kill()


def state(pid: int) -> str:
    """Return the state of a process in the kernel's letters. Empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return ""


def test_fork_has_the_given_environment_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"DOLL_GREETING": "grüß dich", "PYTHONPATH": "/nowhere"}
    child = forked(tmp_path / "log", "0", "--name", "w1", **variables)
    found = read_state(child, tmp_path / "log")

    assert found["arguments"] == ["0", "--name", "w1"]
    assert found["environment"] == {**os.environ, **variables}
    assert found["folder"] == str(tmp_path)
    assert found["path"][0] == "/nowhere"
    assert found["session"] == found["group"] == child.pid
    assert found["threads"] == 1
    assert found["files"][:3] == [0, 1, 2]
    assert len(found["files"]) == 4  # and the folder that it lists
    assert found["interrupts"]
    assert found["gradient"] == 1000 * 1000


def test_two_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    logs = [tmp_path / "1", tmp_path / "2"]
    drawn = {read_state(forked(log, "0"), log)["chance"] for log in logs}
    assert len(drawn) == 2


@pytest.mark.parametrize("code", [0, 3])
def test_fork_reports_its_exit_code(code: int, tmp_path: Path) -> None:
    child = forked(tmp_path / "log", str(code))
    await_condition(lambda: not child.running(), "it has ended", PATIENCE_S)
    assert child.exit_code == code
    child.kill()  # does nothing to it
    assert child.exit_code == code


def test_exception_in_fork_is_logged(tmp_path: Path) -> None:
    child = forked(tmp_path / "log", "no number")
    await_condition(lambda: not child.running(), "it has ended", PATIENCE_S)
    assert child.exit_code == 1
    assert child.last_words().endswith("invalid literal for int() with base 10: 'no number'")


@pytest.mark.parametrize(
    "fault", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT]
)
def test_fork_that_dies_of_a_fault_logs_its_stack(fault: signal.Signals, waiting: Child) -> None:
    os.kill(waiting.pid, fault)
    await_condition(lambda: not waiting.running(), "it has ended", PATIENCE_S)

    assert waiting.exit_code == -fault
    assert "Fatal Python error: " in waiting.last_words()
    assert "forked.py" in waiting.last_words()


def test_fork_can_be_frozen_and_terminated(waiting: Child) -> None:
    os.kill(waiting.pid, signal.SIGSTOP)
    await_condition(lambda: state(waiting.pid) == "T", "it is frozen", PATIENCE_S)
    assert waiting.running()
    waiting.ask_to_end()
    assert waiting.running()
    os.kill(waiting.pid, signal.SIGCONT)
    await_condition(lambda: not waiting.running(), "it has ended", PATIENCE_S)
    assert waiting.exit_code == -signal.SIGTERM
    assert state(waiting.pid) == ""


def test_killed_fork_is_dead_at_once(waiting: Child) -> None:
    waiting.kill()
    assert waiting.exit_code == -signal.SIGKILL
    assert state(waiting.pid) == ""


def test_killed_fork_server_ends_its_forks_and_is_restarted(waiting: Child, tmp_path: Path) -> None:
    server = int(Path(f"/proc/{waiting.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    await_condition(lambda: waiting.exit_code == -signal.SIGKILL, "the fork is dead")

    after = forked(tmp_path / "after", "wait")

    assert read_state(after, tmp_path / "after")
    after.kill()


def test_too_large_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="larger than"):
        forked(tmp_path / "log", "wait", LARGE="x" * (1 << 17))


def test_fork_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert state(pid) not in ("", "Z")
        parent.kill()
    await_condition(lambda: state(pid) in ("", "Z"), "it has ended", PATIENCE_S)
