"""A started server is ready before it is used, reports why it is not, and ends with us."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from common.embedded.process import Child
from common.embedded.redis import EmbeddedRedis
from common.errors import UnavailableError
from common.runtime.fork_server import Forked

PARENT = """
import time
from common.embedded.redis import EmbeddedRedis
server = EmbeddedRedis()
print(server.pid, server.url.removeprefix('unix://'), flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Return True if a process has ended, even if it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_server_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        number, socket = parent.stdout.readline().split()
        pid = int(number)
        assert not gone(pid)
        parent.kill()
    deadline = time.monotonic() + 120
    pause = threading.Event()
    while not gone(pid):
        assert time.monotonic() < deadline, "it survived"
        pause.wait(0.005)
    shutil.rmtree(Path(socket).parent)  # the killed parent could not


def test_server_removes_its_folder_at_exit() -> None:
    with EmbeddedRedis() as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        pid = server.pid
        assert folder.exists()
    assert gone(pid)
    assert not folder.exists()


class Scripted(Forked):
    """A process that ends with an exit code when the test says so."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.is_reaped = False

    def poll(self) -> int | None:
        """See `Forked`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `Forked`."""
        if self.returncode is None:
            raise subprocess.TimeoutExpired("scripted", timeout or 0.0)
        self.is_reaped = True
        return self.returncode


class Script(Child):
    """A child with a scripted process."""

    def ends_right_after(self, answer: bool, code: int) -> bool:  # noqa: FBT001 -- what a condition returns
        """Return the answer to a readiness check. The process ends right after it."""
        self.process.returncode = code
        return answer

    def _started(self, output: BinaryIO) -> Scripted:  # noqa: ARG002 -- its signature
        self.process = Scripted()
        return self.process


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(["demo"], tmp_path / "log")


def test_await_ready_returns_if_process_is_ready_and_ends_between_two_checks(
    script: Script,
) -> None:
    # ready?    no             yes
    # process   runs, ends with 0 right after the answer
    answers = iter([False, True])
    script.await_ready(lambda: script.ends_right_after(next(answers), 0), 20)
    assert script.exit_code == 0


@pytest.mark.parametrize("code", [0, 1, -11])
def test_await_ready_fails_if_process_ends_without_being_ready(code: int, script: Script) -> None:
    with pytest.raises(UnavailableError, match=f"exit code {code} before it was ready"):
        script.await_ready(lambda: script.ends_right_after(answer=False, code=code), 20)


@pytest.mark.parametrize("code", [0, 1, -11])
def test_await_end_returns_the_exit_code(code: int, script: Script) -> None:
    script.process.returncode = code
    assert script.await_end(20) == code
    assert script.process.is_reaped


def test_await_end_of_a_running_process_times_out(script: Script) -> None:
    with pytest.raises(
        UnavailableError, match=r"demo did not end within 0.01 s: it wrote no output"
    ):
        script.await_end(0.01)


def test_await_end_of_a_real_process_returns_its_exit_code(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    assert child.await_end(120) == 3


def test_output_of_a_program_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit('no such port')"], tmp_path / "log")
    with pytest.raises(UnavailableError, match=r"exit code 1 before it was ready: no such port"):
        child.await_ready(lambda: False, 20)
    assert not child.running()


def test_program_that_is_never_ready_is_abandoned(tmp_path: Path) -> None:
    child = Child(["sleep", "600"], tmp_path / "log")
    with pytest.raises(UnavailableError, match=r"not ready after 0.01 s: it wrote no output"):
        child.await_ready(lambda: False, 0.01)
    child.kill()
    assert gone(child.pid)


def test_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    log = tmp_path / "log"
    child = Child([sys.executable, "-c", deaf + "while True: time.sleep(1)"], log)
    child.await_ready(lambda: log.read_text() == "1\n", 20)
    child.stop(grace_s=0.01)
    assert not child.running()
