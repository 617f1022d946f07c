"""Start an evaluator: `python -m services.evaluator --help`, or `doll evaluator`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

import torch

from common.config import read_settings
from common.connections import open_log
from common.errors import UnavailableError, UserError
from common.jobs.store import JobBook
from common.metrics.evaluator import EvaluatorMetrics
from common.metrics.serving import Pulses, serve
from common.telemetry import Outage, event_logger, set_up_logging
from common.termination import end_with, on_termination
from services.evaluator.jobs import Jobs

if TYPE_CHECKING:
    from common.config import Settings

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
JOBS_S = 0.5  # between looks at the jobs topic
NICE = 10  # beside whoever trains on the same machine: it comes second


def main() -> int:
    """Run until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.evaluator",
        description="Judges each n-th version of jobs that ask for it, and tells when a stream"
        " drifts.",
        epilog="example: python -m services.evaluator --job digits",
    )
    parser.add_argument("--job", help="the only job; default: all that have an `evaluation`")
    parser.add_argument(
        "--name", default=socket.gethostname(), help="for people; default: the host"
    )
    arguments = parser.parse_args()
    stopping = threading.Event()
    on_termination(stopping.set)
    try:
        settings = read_settings(os.environ)
        set_up_logging(settings, service="evaluator", replica=arguments.name)
        if settings.owner_pid:
            end_with(settings.owner_pid)
        os.nice(NICE)
        torch.set_num_threads(settings.threads or 1)
        _evaluate(arguments.name, arguments.job, settings, stopping)
    except UserError as error:
        print(f"evaluator: {error}", file=sys.stderr)  # noqa: T201 -- to whoever started it
        return EXIT_USAGE
    except Exception:  # noqa: BLE001 -- the outermost loop: better dead and replayed
        event_logger("evaluator").exception("evaluator_failed")
        return EXIT_FAILED
    return EXIT_OK


def _evaluate(name: str, job: str | None, settings: Settings, stopping: threading.Event) -> None:
    logger = event_logger("evaluator")
    outage = Outage(logger, "kafka")
    metrics, pulses = EvaluatorMetrics(), Pulses()
    pulse = pulses.begin("the loop of jobs")
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    jobs: Jobs | None = None
    book: JobBook | None = None
    while not stopping.is_set():
        pulse.beat()
        try:
            if jobs is None or book is None:
                log = open_log(settings, name)
                found = JobBook(log)
                found.read()  # all of it: by its first records alone, a stopped job seems to run
                jobs = Jobs(settings, log, metrics, pulses, logger, only=job)
                book = found
            jobs.follow(book.refresh(JOBS_S))
            outage.quiet()
        except UnavailableError as error:
            outage.met(error)
            stopping.wait(JOBS_S)
    if jobs is not None:
        jobs.end()


if __name__ == "__main__":
    sys.exit(main())
