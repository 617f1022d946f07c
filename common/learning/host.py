"""The processor and the memory of this machine, without torch."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_PROCESSORS = Path("/proc/cpuinfo")


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or less in a container."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # There is no cgroup, or its limit is "max".
    with suppress(OSError, ValueError):
        machine = min(machine, int(_CGROUP.read_text()))
    return machine


def processor_name() -> str:
    """Return the model of the processor; its architecture if the system does not name the model."""
    with suppress(OSError):
        for line in _PROCESSORS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine() or "unknown"
