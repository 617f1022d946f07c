"""A process ends on request or when its owner ends, even if its main thread is busy."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 120.0
PROGRAM = """
import threading
from common.runtime.service import on_termination
asked = threading.Event()
on_termination(asked.set)
print("ready", flush=True)
while not asked.is_set():  # holds the event's lock over and over
    asked.wait(0.0)
print("ended", flush=True)
"""


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_process_ends_in_order_on_sigterm_or_sigint(asked: signal.Signals) -> None:
    process = subprocess.Popen(  # noqa: S603 -- our own program
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(asked)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert (said, process.returncode) == ("ended\n", 0)


OWNED = """
import sys
from common.runtime.service import end_with
end_with(int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def owned_by(pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 -- our own program
        [sys.executable, "-c", OWNED, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("end", [subprocess.Popen.kill, subprocess.Popen.terminate])
def test_process_ends_when_its_owner_ends(
    end: Callable[[subprocess.Popen[bytes]], None],
) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner, owned_by(owner.pid) as process:  # noqa: S607 -- any sleep
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        end(owner)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL


def test_process_whose_owner_has_already_ended_ends() -> None:
    with subprocess.Popen(["true"]) as owner:  # noqa: S607 -- any that ends
        owner.wait(timeout=PATIENCE_S)
    with owned_by(owner.pid) as process:
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
