"""A service process: settings, logs, metrics, its jobs, and its end in order."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from common.config.program import EXIT_USAGE
from common.config.settings import Settings, read_settings
from common.errors import UserError
from common.runtime.termination import end_with, on_termination
from common.telemetry.logging import EventLogger, event_logger, set_up_logging
from common.telemetry.metrics.serving import Watchdogs, serve

if TYPE_CHECKING:
    from common.telemetry.metrics.registry import ProcessMetrics

EXIT_OK = 0  # it was told to end: by a signal, or a worker by notice that its machine goes
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
# A thread that a trigger or a reply woke waits so long for one that computes in Python. The
# default, 5 ms, is longer than a whole round of a small model.
SWITCH_S = 0.0005


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
