"""Machines that are processes, found in the table of all processes by their environment.

A machine is the leader of its own session: what it starts inherits the environment, and belongs to
the machine without being one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

import psutil

from common.adapters.local.records import Claim

if TYPE_CHECKING:
    from pathlib import Path

    from common.ports.machines import LaunchOrder

_TAG = "DOLL_MACHINE"
_DIRECTORY = "DOLL_FLEET_DIRECTORY"
_SEPARATOR = "/"


class Found(NamedTuple):
    """A machine that runs."""

    claim: Claim  # of its order, as the process carries it
    process: psutil.Process


class Table:
    """The processes of this user that are machines of one job.

    Args:
        job: Its name.
        directory: Of the fleet: another fleet's machines are not ours, whatever their job's name.
    """

    def __init__(self, job: str, directory: Path) -> None:
        self._job = job
        self._directory = str(directory)

    def environment(self, order: LaunchOrder) -> dict[str, str]:
        """What the process of an order carries, and is found by."""
        parts = (self._job, order.launch, order.slot, order.pool, order.worker, order.token)
        tag = _SEPARATOR.join(quote(str(part), safe="") for part in parts)
        return {_TAG: tag, _DIRECTORY: self._directory}

    def find(self) -> dict[str, Found]:
        """All that run now, by their orders' tokens."""
        found: dict[str, Found] = {}
        for pid in psutil.pids():
            # Most processes are somebody else's, or end while we look.
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == pid:
                    self._add(psutil.Process(pid), found)
        return found

    def _add(self, process: psutil.Process, found: dict[str, Found]) -> None:
        environment = process.environ()  # empty for one that has ended and not been waited for
        parts = [unquote(part) for part in environment.get(_TAG, "").split(_SEPARATOR)]
        if len(parts) == 6 and environment.get(_DIRECTORY) == self._directory:
            job, launch, slot, pool, worker, token = parts
            if job == self._job and launch.isdecimal() and slot.isdecimal():
                claim = Claim(int(launch), int(slot), pool, worker, process.create_time())
                found[token] = Found(claim, process)


def ask_to_end(process: psutil.Process) -> None:
    """Tell a machine to leave, by SIGTERM; nothing happens where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()


def end(process: psutil.Process) -> None:
    """Switch a machine off: everything on it ends by SIGKILL."""
    if process.is_running():  # and is still the same
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
