"""Machines that are processes, found in the process table by their environment.

A machine is the leader of its own session. Its children inherit the environment and belong to the
machine, but are not machines themselves, even if they lead a session.
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

# Variables that identify a machine's process. The first is not a setting of the process.
_TAG, _DIRECTORY = "FLEET_MACHINE", "DOLL_FLEET_DIRECTORY"


class Table:
    """This user's processes that are machines of one job.

    Args:
        job: Id of the job.
        directory: Directory of the fleet. Machines of other fleets are not ours, even for the same
            job.
    """

    def __init__(self, job: str, directory: Path) -> None:
        self._job = quote(job, safe="") + "/"  # prefix of our tags
        self._directory = str(directory)

    def environment(self, token: str) -> dict[str, str]:
        """Return the variables that identify the process of an order."""
        return {_TAG: self._job + quote(token, safe=""), _DIRECTORY: self._directory}

    def find(self) -> dict[str, Process]:
        """Return all running machines, by their orders' tokens."""
        found: dict[str, Process] = {}
        for pid in psutil.pids():
            # Most processes belong to others, or end meanwhile.
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == pid:
                    process = Process(pid)
                    # Empty if it ended and was not waited for.
                    environment = process.environ()
                    tag = environment.get(_TAG, "")
                    if not tag.startswith(self._job) or _tag_of_parent(process) == tag:
                        continue
                    if environment.get(_DIRECTORY) == self._directory:
                        found[unquote(tag.removeprefix(self._job))] = process
        return found


def _tag_of_parent(process: Process) -> str:
    """Return the tag of a process's parent; empty if it has none or belongs to another user."""
    try:
        return Process(process.ppid()).environ().get(_TAG, "")
    except (OSError, psutil.Error):
        return ""


def ask_to_end(process: Process) -> None:
    """Ask a machine to leave, by SIGTERM; skip it if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()


def end(process: Process) -> None:
    """Kill every process of a machine by SIGKILL."""
    if process.is_running():  # it is still the same process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
