"""A service process: settings, logs, metrics, and its end: by a signal, or with its owner."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from common.config.program import EXIT_USAGE
from common.config.settings import Settings, read_settings
from common.errors import UserError
from common.telemetry.logging import EventLogger, event_logger, set_up_logging
from common.telemetry.metrics.serving import Watchdogs, serve

if TYPE_CHECKING:
    from common.telemetry.metrics.registry import ProcessMetrics

EXIT_OK = 0  # it was told to end: by a signal, or a worker by notice that its machine goes
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
# A thread that a trigger or a reply woke waits so long for one that computes in Python. The
# default, 5 ms, is longer than a whole round of a small model.
SWITCH_S = 0.0005
_LOOK_S = 0.5  # between looks at the owner, where the kernel does not tell of its end


class ServiceProcess(NamedTuple):
    """What a service has once its process has started."""

    service: str
    name: str  # of this replica
    settings: Settings
    stopping: threading.Event  # set once the process is to end
    watchdogs: Watchdogs
    logger: EventLogger

    def serve_metrics(self, metrics: ProcessMetrics) -> None:
        """Answer scrapes and questions for health, where the settings name a port.

        Raises:
            UserError: If the address cannot be had.
        """
        if self.settings.metrics_port:
            serve(metrics, self.watchdogs, self.settings.metrics_host, self.settings.metrics_port)


def run(
    service: str,
    name: str,
    work: Callable[[ServiceProcess], int | None],
    *,
    called: str = "replica",
) -> int:
    """Run a process until SIGTERM or SIGINT, or until its work is done.

    A process that dies of SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT writes the stacks of all its
    threads to its log.

    Args:
        service: What it is, for logs and people.
        name: Of this replica.
        work: What it does; may return the exit status.
        called: What the name is called in logs.

    Returns:
        The exit status.
    """
    keep_imports()
    if not faulthandler.is_enabled():
        faulthandler.enable()
    stopping = threading.Event()
    on_termination(stopping.set)
    sys.setswitchinterval(SWITCH_S)
    try:
        settings = read_settings(os.environ)
        set_up_logging(settings, service=service, **{called: name})
        if settings.owner_pid:
            end_with(settings.owner_pid)
        logger = event_logger(service)
        status = work(ServiceProcess(service, name, settings, stopping, Watchdogs(), logger))
    except UserError as error:
        print(f"{service}: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger(service).exception(f"{service}_failed")
        return EXIT_FAILED
    return EXIT_OK if status is None else status


def keep_imports() -> None:
    """Keep the garbage collector from ever going through what a process has loaded to keep.

    PyTorch alone is 200,000 objects: each full collection would hold all threads for 90 ms. While a
    process loads it, collections would take a fifth of the time, and find next to nothing: whoever
    imports much disables them until then. Nor is there one here, of what those have left behind.
    """
    gc.freeze()
    gc.enable()


def on_termination(act: Callable[[], object]) -> None:
    """Call `act`, from another thread, when this process is asked to end; for the main thread.

    A handler runs inside whatever the main thread is doing, perhaps while that holds the very lock
    that the answer needs. So the handler only puts a word on a queue that is made for this.
    """
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
                with contextlib.suppress(PermissionError):  # somebody else's by now, or at first
                    os.kill(pid, 0)
                time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
