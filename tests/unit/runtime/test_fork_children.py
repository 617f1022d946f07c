"""A forked child belongs to the process that asked for it, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.runtime.fork_server import Adopted, end_strangers, fork_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")

MODULE = "tests.unit.runtime.forked_child"
PATIENCE_S = 60.0
PARENT = f"""
import os, socket, sys, time
from common.runtime.fork_server import fork_child
ours, theirs = socket.socketpair()
child = fork_child("{MODULE}", ("echo",), 2, theirs)
print(child.pid, os.getpid(), flush=True)
time.sleep(600)
"""


class Started:
    """A child, this end of its socket, and its output."""

    def __init__(self, action: str, log: Path) -> None:
        self.channel, theirs = socket.socketpair()
        self.log = log
        with theirs, log.open("ab") as output:
            self.process: Adopted = fork_child(MODULE, (action,), output.fileno(), theirs)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Started]]:
    """Return a function that starts a child, which ends with the test."""
    made = list[Started]()

    def begin(action: str) -> Started:
        made.append(Started(action, tmp_path / f"{len(made)}.log"))
        return made[-1]

    yield begin
    for each in made:
        each.process.kill()
        each.process.wait(PATIENCE_S)
        each.channel.close()
    end_strangers()


def state(pid: int) -> str:
    """Return the state of a process in the kernel's characters. Empty if the process is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_so(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.01)


def server(*others: Started) -> int:
    """Return the process id of the fork server: the child that is none of the others."""
    known = {each.process.pid for each in others}
    [pid] = [
        pid
        for pid in children_of(os.getpid())
        if pid not in known and b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_child_belongs_to_this_process_and_leads_a_session(start: Callable[[str], Started]) -> None:
    child = start("wait").process
    assert parent_of(child.pid) == os.getpid()
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)


@pytest.mark.parametrize("status", [0, 3, 255])
def test_exit_status_is_the_child_s(start: Callable[[str], Started], status: int) -> None:
    child = start(str(status)).process
    assert child.wait(PATIENCE_S) == status
    assert child.poll() == child.wait() == status
    # Both do nothing to a process that has ended.
    child.terminate()
    child.kill()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_signal_is_a_negative_exit_status(start: Callable[[str], Started], name: str) -> None:
    assert start(name).process.wait(PATIENCE_S) == -signal.Signals[name]


def test_child_has_its_output_and_the_inherited_socket(start: Callable[[str], Started]) -> None:
    child = start("echo")
    child.channel.sendall(b"hello")
    child.channel.settimeout(PATIENCE_S)
    assert child.channel.recv(100) == b"hello"
    assert child.log.read_text().split() == ["output", "error"]
    child.process.terminate()
    assert child.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert child.channel.recv(100) == b""


def test_kill_ends_the_process_group(start: Callable[[str], Started]) -> None:
    child = start("group")
    pids = set(numbers(child, 2))
    assert child.process.pid in pids
    child.process.kill()
    assert child.process.wait(PATIENCE_S) == -signal.SIGKILL
    end_strangers()
    assert [state(pid) for pid in pids] == ["", ""]


def test_end_of_a_child_ends_its_process_group(start: Callable[[str], Started]) -> None:
    child = start("group")
    pids = set(numbers(child, 2))
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.process.wait(PATIENCE_S) == -signal.SIGTERM
    end_strangers()
    assert [state(pid) for pid in pids] == ["", ""]


@pytest.mark.parametrize(("action", "count"), [("daemon", 1), ("tree", 2)])
def test_end_strangers_kills_daemons_that_a_child_left_and_no_child(
    start: Callable[[str], Started], action: str, count: int
) -> None:
    other, child = start("wait"), start(action)
    pids = set(numbers(child, count + 1)) - {child.process.pid}
    assert len(pids) == count
    child.process.kill()
    child.process.wait(PATIENCE_S)
    assert "" not in [state(pid) for pid in pids]

    end_strangers()

    assert [state(pid) for pid in pids] == [""] * count
    assert state(server(other)) in ("S", "R", "D")
    assert other.process.poll() is None


def test_children_survive_their_server_and_the_next_child_gets_another(
    start: Callable[[str], Started],
) -> None:
    first = start("echo")
    before = server(first)
    os.kill(before, signal.SIGKILL)
    await_so(lambda: state(before) in ("", "Z"), "the server has ended")

    second = start("echo")

    assert server(first, second) != before
    for each in (first, second):
        each.channel.sendall(b"hello")
        each.channel.settimeout(PATIENCE_S)
        assert each.channel.recv(100) == b"hello"
        assert each.process.poll() is None


def test_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, parent_pid = map(int, parent.stdout.readline().split())
        assert parent_pid == parent.pid == parent_of(pid)
        pids = [pid, *children_of(parent.pid)]
        parent.kill()
    await_so(lambda: all(state(each) in ("", "Z") for each in pids), "all have ended")


def numbers(child: Started, count: int) -> list[int]:
    """Return numbers that a child and its descendants send, a line each."""
    child.channel.settimeout(PATIENCE_S)
    data = b""
    while data.count(b"\n") < count:
        data += child.channel.recv(100)
    return [*map(int, data.split())]
