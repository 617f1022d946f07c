"""Processor use over a time: by the processes under test, by others, and idle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import psutil

from common.embedded.process import family


class Block(NamedTuple):
    """One measured stretch of time."""

    records_per_s: float
    # Cores used by each process, by `others`, and `idle`.
    cores: dict[str, float]

    @property
    def cpu_us_per_record(self) -> float:
        """Processor time of our processes per record. A busy machine hardly changes it."""
        ours = sum(self.cores.values()) - self.cores["others"] - self.cores["idle"]
        return 1e6 * ours / self.records_per_s


class Processor:
    """Counts from its creation.

    Args:
        pids: Process ids under test, by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._started = time.perf_counter()
        self._own_s = {name: used_s(pid) for name, pid in pids.items()}
        self._busy_s, self._idle_s = _machine_s()

    def cores(self) -> dict[str, float]:
        """Return the mean number of cores that each process used, and that were idle."""
        seconds = time.perf_counter() - self._started
        own = {name: used_s(pid) - self._own_s[name] for name, pid in self._pids.items()}
        busy_s, idle_s = _machine_s()
        others = max(busy_s - self._busy_s - sum(own.values()), 0.0)
        used = own | {"others": others, "idle": idle_s - self._idle_s}
        return {name: used_s / seconds for name, used_s in used.items()}


class Neighbours:
    """Counts what processes other than this one and its children use, from its creation.

    Unlike `Processor` it allows for children that end and restart meanwhile.

    Args:
        running: Returns the process ids of all running children.
    """

    def __init__(self, running: Callable[[], Iterable[int]]) -> None:
        self._running = running
        self._started = time.perf_counter()
        self._others_s = self._so_far_s()

    def cores(self) -> float:
        """Return the mean number of cores that other processes used."""
        seconds = time.perf_counter() - self._started
        return max(self._so_far_s() - self._others_s, 0.0) / seconds

    def _so_far_s(self) -> float:
        # Includes our children that have ended.
        own = os.times()
        ended_s = own.children_user + own.children_system
        ours_s = own.user + own.system + ended_s + sum(map(used_s, self._running()))
        return _machine_s()[0] - ours_s


def used_s(pid: int) -> float:
    """Return the processor time of a process and its descendants so far, in seconds.

    It includes children that have ended, if their parent has waited for them.
    """
    total = 0.0
    for each in family(pid):
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(each).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _machine_s() -> tuple[float, float]:
    """Return the machine's busy and idle processor time so far. Steal counts as busy."""
    it = psutil.cpu_times()
    busy_s = it.user + it.nice + it.system + it.irq + it.softirq + it.steal
    return busy_s, it.idle + it.iowait
