"""A service process: settings, logs, metrics, and its end by a signal or with its owner."""

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

# The process ended on request: by a signal, or because of a preemption notice.
EXIT_OK = 0
# A fault. The supervisor of this process, such as Kubernetes, starts it again.
EXIT_FAILED = 1
# Longest time that a thread with a message to handle waits for another that computes in Python.
# The default, 5 ms, is longer than a complete round of a small model.
SWITCH_S = 0.0005
# Time between checks of the owner on systems without pidfd.
_LOOK_S = 0.5


class ServiceProcess(NamedTuple):
    """A started service process.

    Attributes:
        service: Name of the service.
        name: Name of this replica.
        settings: Settings from the environment.
        stopping: Set when the process has to end.
        watchdogs: Watchdogs of the process's loops.
        logger: Log of the process.
    """

    service: str
    name: str
    settings: Settings
    stopping: threading.Event
    watchdogs: Watchdogs
    logger: EventLogger

    def serve_metrics(self, metrics: ProcessMetrics) -> None:
        """Answer scrapes and health checks if the settings name a port.

        Raises:
            UserError: If the address cannot be used.
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

    If the process dies of SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT, it writes the stacks of all
    threads to its log.

    Args:
        service: Name of the service in logs and messages.
        name: Name of this replica.
        work: Work of the process; may return the exit status.
        called: Log field that holds the replica's name.

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
        print(f"{service}: {error}", file=sys.stderr)  # noqa: T201 -- for the user who started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: a restart replays from the log
        event_logger(service).exception(f"{service}_failed")
        return EXIT_FAILED
    return EXIT_OK if status is None else status


def keep_imports() -> None:
    """Exclude everything that is loaded so far from garbage collection, and enable collection.

    PyTorch alone has 200,000 objects; each full collection would stop all threads for 90 ms. During
    imports, collections would take a fifth of the time and find almost nothing, so callers disable
    collection before they import. For the same reason this function does not collect either.
    """
    gc.freeze()
    gc.enable()


def on_termination(act: Callable[[], object]) -> None:
    """Call `act` from another thread on SIGTERM or SIGINT. To be called by the main thread.

    A signal handler interrupts the main thread, which may hold a lock that `act` needs. So the
    handler only puts the signal into a `SimpleQueue`, which is safe in handlers.
    """
    asked = SimpleQueue[int]()

    def wait() -> None:
        asked.get()
        act()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: asked.put(number))
    threading.Thread(target=wait, name="termination", daemon=True).start()


def end_with(pid: int) -> None:
    """Kill this process with SIGKILL as soon as another process has ended.

    Unlike with the parent-death signal, the other process need not be the parent. So a process may
    survive its parent and still end with its grandparent.
    """
    threading.Thread(target=_end_after, args=(pid,), name="owner", daemon=True).start()


def _end_after(pid: int) -> None:
    # ProcessLookupError means that the owner has ended.
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "linux":
            # A pidfd becomes readable when its process ends.
            owner = select.poll()
            owner.register(os.pidfd_open(pid), select.POLLIN)
            owner.poll()
        else:
            while True:
                # PermissionError means that a process of another user has this pid.
                with contextlib.suppress(PermissionError):
                    os.kill(pid, 0)
                time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
