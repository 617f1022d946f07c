"""Start a worker: `python -m services.worker --help`, or `doll worker`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from contextlib import closing, suppress
from time import monotonic
from typing import TYPE_CHECKING

import torch

from common.config import Settings, read_settings
from common.connections import open_board, open_log, open_notices, open_tracer
from common.core.messages import WorkerId
from common.errors import UnavailableError, UserError
from common.jobs.store import JobBook
from common.metrics.serving import Pulse, Pulses, serve
from common.metrics.worker import WorkerMetrics
from common.telemetry import EventLogger, Outage, event_logger, set_up_logging
from common.termination import end_with, on_termination
from services.worker.loop import JobWorker, Observers
from services.worker.memory import keep_freed_memory
from services.worker.notices import NoticeWatch

if TYPE_CHECKING:
    from common.job import JobSpec

EXIT_OK = 0  # it left because it was told to: by a signal, or by notice that the machine goes
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings or job make no sense; starting again will not help
JOBS_S = 0.5  # between looks at the jobs topic


class Watch:
    """Which job this worker is for, what it is now, and whether this worker is still for it."""

    def __init__(
        self, book: JobBook, job: str | None, leaving: threading.Event, pulse: Pulse
    ) -> None:
        self._book = book
        self._job = job
        self._leaving = leaving
        self._pulse = pulse
        self._looked_at = monotonic()
        self._spec: JobSpec | None = None  # as last seen

    def find(self, settings: Settings) -> JobSpec | None:
        """The job to work for, once there is one; None when the process is told to end."""
        while not self._leaving.is_set():
            self._pulse.beat()
            # All of the topic: by its first records alone, a job that was stopped seems to run.
            jobs = self._book.read()
            running = [r.spec for r in jobs.values() if r.wanted != "stopped"]
            if self._job is not None:
                running = [spec for spec in running if spec.name == self._job]
            if running:
                self._spec = min(running, key=lambda spec: _workers_of(spec.name, settings))
                return self._spec
            self._leaving.wait(JOBS_S)
        return None

    def look(self) -> JobSpec | None:
        """The job that was found, as it is now; None where this worker is to leave."""
        if self._spec is None or self._leaving.is_set():
            return None
        if monotonic() - self._looked_at < JOBS_S:
            return self._spec
        self._looked_at = monotonic()
        with suppress(UnavailableError):
            record = self._book.refresh(0.0).get(self._spec.name)
            self._spec = record.spec if record and record.wanted != "stopped" else None
        return self._spec

    def close(self) -> None:
        """Let go of the jobs topic."""
        self._book.close()


def main() -> int:
    """Run until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.worker",
        description="One worker: reads the job's streams and computes gradients.",
        epilog="example: python -m services.worker --job digits --name w1",
    )
    parser.add_argument("--job", help="the only job to work for; default: whichever needs workers")
    parser.add_argument("--name", help="unique among the job's workers; default: host and process")
    arguments = parser.parse_args()
    name = WorkerId(arguments.name or f"{socket.gethostname()}-{os.getpid()}")
    leaving = threading.Event()
    on_termination(leaving.set)
    try:
        settings = read_settings(os.environ)
        if settings.owner_pid:
            end_with(settings.owner_pid)
        set_up_logging(settings, service="worker", worker=name)
        keep_freed_memory()
        torch.set_num_threads(settings.threads or 1)
        logger = event_logger("worker")
        notices = open_notices(settings)
        if notices is not None:  # a notice that stands already keeps the worker from joining
            NoticeWatch(notices, leaving, settings.on_rebalance, logger).start()
        observers = _observers(name, settings)
        with closing(observers.tracer):
            _work(name, arguments.job, settings, leaving, observers, logger)
    except UserError as error:
        print(f"worker: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger("worker").exception("worker_failed")
        return EXIT_FAILED
    return EXIT_OK


def _observers(name: WorkerId, settings: Settings) -> Observers:
    metrics, pulses = WorkerMetrics(), Pulses()
    pulse = pulses.begin("the main loop")
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    return Observers(metrics, open_tracer(settings, "worker", name), pulses, pulse)


def _work(
    name: WorkerId,
    job: str | None,
    settings: Settings,
    leaving: threading.Event,
    observers: Observers,
    logger: EventLogger,
) -> None:
    outage = Outage(logger, "servers")
    while not leaving.is_set():
        observers.pulse.beat()
        try:
            log = open_log(settings, name)
            watch = Watch(JobBook(log), job, leaving, observers.pulse)
            spec = watch.find(settings)
            if spec is None:
                return
            board = open_board(settings, spec.name)
            worker = JobWorker(name, spec, settings, log, board, observers, logger)
            outage.over()
        except UnavailableError as error:
            outage.met(error)
            leaving.wait(JOBS_S)
            continue
        worker.run(watch.look)
        board.close()
        watch.close()


def _workers_of(job: str, settings: Settings) -> int:
    board = open_board(settings, job)
    try:
        return len(board.alive())
    finally:
        board.close()


if __name__ == "__main__":
    sys.exit(main())
