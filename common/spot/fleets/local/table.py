"""Machines that are processes, found in the table of all processes by their environment.

A machine is the leader of its own session: what it starts inherits the environment, and belongs to
the machine without being one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import psutil
from psutil import Process as Process  # noqa: PLC0414 -- `fleet` names it, too

if TYPE_CHECKING:
    from pathlib import Path

# The first is a mark that processes are found by again, and no setting.
_TAG, _DIRECTORY = "FLEET_MACHINE", "DOLL_FLEET_DIRECTORY"


class Table:
    """The processes of this user that are machines of one job.

    Args:
        job: Its id.
        directory: Of the fleet: another fleet's machines are not ours, whatever their job's name.
    """

    def __init__(self, job: str, directory: Path) -> None:
        self._job = quote(job, safe="") + "/"  # how our tags begin
        self._directory = str(directory)

    def environment(self, token: str) -> dict[str, str]:
        """What the process of an order carries, and is found by."""
        return {_TAG: self._job + quote(token, safe=""), _DIRECTORY: self._directory}

    def find(self) -> dict[str, Process]:
        """All that run now, by their orders' tokens."""
        found: dict[str, Process] = {}
        for pid in psutil.pids():
            # Most processes are somebody else's, or end while we look.
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == pid:
                    process = Process(pid)
                    environment = process.environ()  # empty if it ended and was not waited for
                    tag = environment.get(_TAG, "")
                    if tag.startswith(self._job) and environment.get(_DIRECTORY) == self._directory:
                        found[unquote(tag.removeprefix(self._job))] = process
        return found


def ask_to_end(process: Process) -> None:
    """Tell a machine to leave, by SIGTERM; nothing happens where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()


def end(process: Process) -> None:
    """Switch a machine off: everything on it ends by SIGKILL."""
    if process.is_running():  # and is still the same
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
