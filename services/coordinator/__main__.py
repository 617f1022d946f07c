"""Start a coordinator: `python -m services.coordinator --help`, or `doll coordinator`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import uuid
from typing import TYPE_CHECKING

import torch

from common.checkpoints import CheckpointStore
from common.config import Settings, read_settings
from common.connections import open_blobs, open_board, open_log, open_tracer
from common.errors import UnavailableError, UserError
from common.jobs.store import JobBook, JobRecord
from common.metrics.coordinator import CoordinatorMetrics
from common.metrics.serving import Pulses, serve
from common.telemetry import EventLogger, Outage, event_logger, set_up_logging
from common.termination import on_termination
from services.coordinator.loop import JobCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ports import Log
    from common.tracing import Tracer

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
JOBS_S = 0.5  # between looks at the jobs topic
END_S = 10.0  # for all jobs to end in order
# Without a turn for so long the loop of a job hangs: longer than it waits for the upload of a last
# checkpoint, or reads what was written since an old one. Likewise the main loop, which makes the
# model of a job that it begins with: 13 s for 400 million parameters on a busy core.
JOB_STILL_S = 300.0


class Jobs:
    """The jobs that this replica takes part in, one thread each."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        log: Log,
        metrics: CoordinatorMetrics,
        pulses: Pulses,
        tracer: Tracer,
        logger: EventLogger,
    ) -> None:
        self._name = name
        self._settings = settings
        self._source = log
        self._metrics = metrics
        self._pulses = pulses
        self._tracer = tracer
        self._log = logger
        self._running = dict[str, tuple[JobCoordinator, threading.Thread]]()
        self.fault: Exception | None = None

    def follow(self, jobs: dict[str, JobRecord], beat: Callable[[], object]) -> None:
        """Begin with new jobs, tell the others what is wanted of them, end those that are gone.

        Args:
            jobs: All that there are.
            beat: Told before each: a replica that starts makes the models of all that run.
        """
        for job, record in jobs.items():
            beat()
            coordinator, thread = self._running.get(job, (None, None))
            if coordinator is not None and thread is not None and thread.is_alive():
                coordinator.follow(record)
            elif record.wanted != "stopped":
                self._begin(job, record)
        for job in self._running.keys() - jobs.keys():
            coordinator, thread = self._running[job]
            coordinator.follow(None)
            if not thread.is_alive():
                del self._running[job]

    def end(self) -> None:
        """End all threads in order."""
        for coordinator, _ in self._running.values():
            coordinator.stop()
        for _, thread in self._running.values():
            thread.join(END_S)

    def _begin(self, job: str, record: JobRecord) -> None:
        settings = self._settings
        store = CheckpointStore(open_blobs(settings), job) if settings.blobs else None
        coordinator = JobCoordinator(
            self._name,
            record,
            settings,
            log=self._source,
            board=open_board(settings, job),
            checkpoints=store,
            book=JobBook(self._source),
            metrics=self._metrics,
            tracer=self._tracer,
            logger=self._log,
        )
        thread = threading.Thread(target=self._run, args=(coordinator,), name=job, daemon=True)
        self._running[job] = (coordinator, thread)
        thread.start()

    def _run(self, coordinator: JobCoordinator) -> None:
        pulse = self._pulses.begin(f"the loop of job {coordinator.job}", JOB_STILL_S)
        try:
            coordinator.run(pulse.beat)
        except Exception as fault:  # noqa: BLE001 -- raised again in the main thread
            self.fault = fault
        finally:
            self._pulses.end(pulse)


def main() -> int:
    """Run until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.coordinator",
        description="One replica of the coordinator: leads jobs, or stands by for those who do.",
        epilog="example: python -m services.coordinator --name c1",
    )
    parser.add_argument(
        "--name", default=socket.gethostname(), help="for people; default: the host"
    )
    arguments = parser.parse_args()
    stopping = threading.Event()
    on_termination(stopping.set)
    name = f"{arguments.name}-{uuid.uuid4().hex[:8]}"  # no two lives of a process are one candidate
    try:
        settings = read_settings(os.environ)
        set_up_logging(settings, service="coordinator", replica=name)
        torch.set_num_threads(settings.threads or 1)
        _coordinate(name, settings, stopping)
    except UserError as error:
        print(f"coordinator: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger("coordinator").exception("coordinator_failed")
        return EXIT_FAILED
    return EXIT_OK


def _coordinate(name: str, settings: Settings, stopping: threading.Event) -> None:
    logger = event_logger("coordinator")
    outage = Outage(logger, "kafka")
    metrics, pulses = CoordinatorMetrics(), Pulses()
    pulse = pulses.begin("the main loop", JOB_STILL_S)
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    tracer = open_tracer(settings, "coordinator", name)
    jobs: Jobs | None = None
    book: JobBook | None = None
    while not stopping.is_set():
        pulse.beat()
        try:
            if jobs is None or book is None:
                log = open_log(settings, name)
                found = JobBook(log)
                found.read()  # all of it: by its first records alone, a stopped job seems to run
                jobs = Jobs(name, settings, log, metrics, pulses, tracer, logger)
                book = found
            jobs.follow(book.refresh(JOBS_S), pulse.beat)
            outage.quiet()
        except UnavailableError as error:
            outage.met(error)
            stopping.wait(JOBS_S)
        if jobs is not None and jobs.fault is not None:
            raise jobs.fault
    if jobs is not None:
        jobs.end()
    tracer.close()


if __name__ == "__main__":
    sys.exit(main())
