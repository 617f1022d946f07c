"""What every process with jobs does: starts, follows the jobs topic, ends in order."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

from common.config.settings import read_settings
from common.errors import UnavailableError, UserError
from common.runtime.termination import end_with, on_termination
from common.telemetry.logging import Outage, event_logger, set_up_logging

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from common.config.settings import Settings
    from common.jobs.store import JobBook
    from common.runtime.jobs import Jobs
    from common.telemetry.metrics.serving import Pulses

    Opened: TypeAlias = AbstractContextManager[tuple[Jobs, JobBook]]

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
JOBS_S = 0.5  # between looks at the jobs topic
END_S = 10.0  # for all jobs to end in order


def run(service: str, name: str, work: Callable[[Settings, threading.Event], None]) -> int:
    """Run a process until it is told to end.

    Args:
        service: What it is, for logs and people.
        name: Of this replica, for logs.
        work: Gets the settings, and what is set once the process is to end.

    Returns:
        The exit status.
    """
    stopping = threading.Event()
    on_termination(stopping.set)
    try:
        settings = read_settings(os.environ)
        set_up_logging(settings, service=service, replica=name)
        if settings.owner_pid:
            end_with(settings.owner_pid)
        work(settings, stopping)
    except UserError as error:
        print(f"{service}: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger(service).exception(f"{service}_failed")
        return EXIT_FAILED
    return EXIT_OK


def follow_jobs(
    service: str, open_jobs: Callable[[], Opened], stopping: threading.Event, pulses: Pulses
) -> None:
    """Tell the jobs of a process what is wanted of them, until it is told to end.

    Args:
        service: What it is, for logs.
        open_jobs: Opens the outside and makes the jobs, with the book that was read to its end: by
            its first records alone, a stopped job seems to run. What it opened it closes.
        stopping: Set once the process is to end.
        pulses: Of the process.
    """
    outage = Outage(event_logger(service), "kafka")
    pulse = pulses.begin("the loop of jobs")
    freeze_imports()
    with ExitStack() as opened:
        jobs: Jobs | None = None
        book: JobBook | None = None
        while not stopping.is_set():
            pulse.beat()
            try:
                if jobs is None or book is None:
                    jobs, book = opened.enter_context(open_jobs())
                jobs.follow(book.refresh(JOBS_S))
                outage.quiet()
            except UnavailableError as error:
                outage.met(error)
                stopping.wait(JOBS_S)


def freeze_imports() -> None:
    """Keep the garbage collector from going through what a process has loaded to keep.

    PyTorch alone is 200,000 objects: each full collection would hold all threads for 90 ms.
    """
    gc.collect()
    gc.freeze()
