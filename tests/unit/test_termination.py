"""A process that is asked to end, whatever its main thread is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import threading
from common.termination import on_termination
asked = threading.Event()
on_termination(asked.set)
print("ready", flush=True)
while not asked.is_set():  # holds the event's lock over and over
    asked.wait(0.0)
print("ended", flush=True)
"""


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_end_ends_in_order(asked: signal.Signals) -> None:
    process = subprocess.Popen(  # noqa: S603 -- our own program
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(asked)
    said, _ = process.communicate(timeout=60.0)
    assert (said, process.returncode) == ("ended\n", 0)
