"""How a process ends: told by SIGTERM or SIGINT, or with the process that it belongs to.

A handler runs inside whatever the main thread is doing, perhaps while that holds the very lock that
the answer needs. So the handler only puts a word on a queue that is made for this.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_LOOK_S = 0.5  # between looks at the owner, where the kernel does not tell of its end


def on_termination(act: Callable[[], object]) -> None:
    """Call `act`, from another thread, when this process is asked to end; for the main thread."""
    asked = SimpleQueue[int]()

    def wait() -> None:
        asked.get()
        act()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: asked.put(number))
    threading.Thread(target=wait, name="termination", daemon=True).start()


def end_with(pid: int) -> None:
    """End this process, by SIGKILL, as soon as another one has ended.

    Unlike with the parent-death signal, the other need not be the parent: what a program starts may
    survive it and yet not outlive the program above.
    """
    threading.Thread(target=_end_after, args=(pid,), name="owner", daemon=True).start()


def _end_after(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        if sys.platform == "linux":
            owner = select.poll()
            owner.register(os.pidfd_open(pid), select.POLLIN)  # which is readable from its end on
            owner.poll()
        else:
            while True:
                with contextlib.suppress(PermissionError):  # it is there, as another user's
                    os.kill(pid, 0)
                time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
