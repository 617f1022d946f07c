"""How a process is told to end: by SIGTERM or SIGINT, answered by a thread that waits for them.

A handler runs inside whatever the main thread is doing, perhaps while that holds the very lock that
the answer needs. So the handler only puts a word on a queue that is made for this.
"""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def on_termination(act: Callable[[], object]) -> None:
    """Call `act`, from another thread, when this process is asked to end; for the main thread."""
    asked = SimpleQueue[int]()

    def wait() -> None:
        asked.get()
        act()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: asked.put(number))
    threading.Thread(target=wait, name="termination", daemon=True).start()
