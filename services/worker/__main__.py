"""Start a worker: `python -m services.worker --help`, or `doll worker`."""

from __future__ import annotations

import argparse
import gc
import os
import random
import socket
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import torch

from common.config.settings import Settings, read_settings
from common.core.messages import WorkerId
from common.errors import UnavailableError, UserError
from common.jobs.spec import BUILT_IN_TASKS
from common.jobs.store import JobBook
from common.learning.gradients import resolve_device
from common.runtime.connect import open_boards, open_log, open_notices, open_tracer
from common.runtime.service import freeze_imports
from common.runtime.termination import end_with, on_termination
from common.telemetry.logging import EventLogger, Outage, event_logger, set_up_logging
from common.telemetry.metrics.serving import Pulses, serve
from common.telemetry.metrics.worker import WorkerMetrics
from services.worker.loop import JobWorker, Observers
from services.worker.memory import keep_freed_memory
from services.worker.notices import NoticeWatch
from services.worker.selection import JOBS_S, JobSelector, Worker

if TYPE_CHECKING:
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.ports.servers import Boards, Log

EXIT_OK = 0  # it left because it was told to: by a signal, or by notice that the machine goes
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
SELECTED_S = 0.05  # between looks whether there is a job by now


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
            if settings.device:
                resolve_device(settings.device)  # one that is not here makes no sense for any job
            tasks = (*BUILT_IN_TASKS, *settings.tasks)
            freeze_imports()
            worker = Worker(name, arguments.job or "", tasks)
            _work(_Process(worker, settings, leaving, observers, logger))
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


class _Process(NamedTuple):
    """What every job's part in this process is made with."""

    worker: Worker
    settings: Settings
    leaving: threading.Event
    observers: Observers
    logger: EventLogger


def _work(process: _Process) -> None:
    """Work for one job after the other until told to leave.

    Raises:
        BaseException: What ended the thread that selects jobs: nobody would hear of them any more.
    """
    log = _opened(process)
    if log is None:
        return
    boards = open_boards(process.settings)
    selector = JobSelector(
        process.worker,
        JobBook(log),
        boards.roster(),
        process.observers.metrics,
        process.logger,
        random.SystemRandom().random,
    )
    faults = list[BaseException]()
    thread = threading.Thread(
        target=_select, args=(selector, process.leaving, faults), name="jobs", daemon=True
    )
    thread.start()
    while not process.leaving.is_set():
        process.observers.pulse.beat()
        job = selector.selected()
        if job is None:
            process.leaving.wait(SELECTED_S)
        else:
            _work_for(job, selector, log, boards, process)
    thread.join()
    boards.close()
    log.close()
    if faults:
        raise faults[0]


def _select(selector: JobSelector, leaving: threading.Event, faults: list[BaseException]) -> None:
    try:
        while not leaving.is_set():
            selector.turn()
        selector.close()
    except BaseException as fault:  # noqa: BLE001 -- raised again in the main thread
        faults.append(fault)
        leaving.set()


def _work_for(
    job: JobRecord, selector: JobSelector, log: Log, boards: Boards, process: _Process
) -> None:
    """Work for one job until the selector says otherwise, or something ends it."""
    worker, settings, leaving, observers, logger = process

    def look() -> JobSpec | None:
        return None if leaving.is_set() else selector.still(job)

    board = boards.board(job.spec.name)
    name = WorkerId(worker.name)
    try:
        JobWorker(name, job.spec, settings, log, board, observers, logger).run(look)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it ends this job here alone
        selector.failed(job.spec.name, error)
    finally:
        board.close()
        gc.collect()  # the model: objects that name each other may hold on to it for minutes


def _opened(process: _Process) -> Log | None:
    """Kafka; None where the process is told to end before it can be had."""
    outage = Outage(process.logger, "kafka")
    while not process.leaving.is_set():
        process.observers.pulse.beat()
        try:
            log = open_log(process.settings, process.worker.name)
        except UnavailableError as error:
            outage.met(error)
            process.leaving.wait(JOBS_S)
        else:
            outage.over()
            return log
    return None


if __name__ == "__main__":
    sys.exit(main())
