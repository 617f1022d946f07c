"""Who used the processor meanwhile: the processes under test, others, or nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import psutil


class Block(NamedTuple):
    """One measured stretch of time."""

    records_per_s: float
    cores: dict[str, float]  # used by each process, by `others` and, `idle`, by nobody

    @property
    def cpu_us_per_record(self) -> float:
        """Processor time that our processes spent on a record: it hardly feels a busy machine."""
        ours = sum(self.cores.values()) - self.cores["others"] - self.cores["idle"]
        return 1e6 * ours / self.records_per_s


class Processor:
    """Counts from when it is made.

    Args:
        pids: The processes under test, by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._started = time.perf_counter()
        self._own_s = {name: used_s(pid) for name, pid in pids.items()}
        self._busy_s, self._idle_s = _machine_s()

    def cores(self) -> dict[str, float]:
        """How many cores each process kept busy in the mean, and how many were left."""
        seconds = time.perf_counter() - self._started
        own = {name: used_s(pid) - self._own_s[name] for name, pid in self._pids.items()}
        busy_s, idle_s = _machine_s()
        others = max(busy_s - self._busy_s - sum(own.values()), 0.0)
        used = own | {"others": others, "idle": idle_s - self._idle_s}
        return {name: used_s / seconds for name, used_s in used.items()}


class Neighbours:
    """Counts what processes other than this one and its children use, from when it is made.

    Unlike `Processor` it allows for children that end and come back meanwhile.

    Args:
        running: Gives the process ids of all children that run.
    """

    def __init__(self, running: Callable[[], Iterable[int]]) -> None:
        self._running = running
        self._started = time.perf_counter()
        self._others_s = self._so_far_s()

    def cores(self) -> float:
        """How many cores they kept busy in the mean."""
        seconds = time.perf_counter() - self._started
        return max(self._so_far_s() - self._others_s, 0.0) / seconds

    def _so_far_s(self) -> float:
        own = os.times()  # with those of our children that have ended
        ended_s = own.children_user + own.children_system
        ours_s = own.user + own.system + ended_s + sum(map(used_s, self._running()))
        return _machine_s()[0] - ours_s


def used_s(pid: int) -> float:
    """Processor time of a process so far, all of its threads together."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _machine_s() -> tuple[float, float]:
    """Processor time of the whole machine so far: busy, idle. The hypervisor's is of the busy."""
    it = psutil.cpu_times()
    busy_s = it.user + it.nice + it.system + it.irq + it.softirq + it.steal
    return busy_s, it.idle + it.iowait
