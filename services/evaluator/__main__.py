"""Start an evaluator: `python -m services.evaluator --help`, or `doll evaluator`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.jobs.store import JobBook
from common.runtime.connect import open_boards, open_log
from common.runtime.jobs import Jobs
from common.runtime.service import END_S, follow_jobs, run
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger
from common.telemetry.metrics.evaluator import EvaluatorMetrics
from common.telemetry.metrics.serving import Pulses, serve
from common.telemetry.metrics.supervision import SupervisionMetrics
from services.evaluator.loop import JobEvaluator, Process

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from common.config.settings import Settings
    from common.jobs.store import JobRecord

NICE = 10  # beside whoever trains on the same machine: it comes second
# A turn is the evaluation of one version at the longest: minutes, on a large test set or a busy
# machine.
SLOW_S = 60.0
HANGS_S = 1800.0


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
    return run("evaluator", arguments.name, partial(_evaluate, arguments.name, arguments.job))


def _evaluate(name: str, job: str | None, settings: Settings, stopping: threading.Event) -> None:
    os.nice(NICE)
    torch.set_num_threads(settings.threads or 1)
    metrics, pulses = EvaluatorMetrics(), Pulses()
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    opened = partial(_opened, name, job, settings, metrics, pulses)
    follow_jobs("evaluator", opened, stopping, pulses)


@contextmanager
def _opened(
    name: str, job: str | None, settings: Settings, metrics: EvaluatorMetrics, pulses: Pulses
) -> Iterator[tuple[Jobs, JobBook]]:
    logger = event_logger("evaluator")
    with ExitStack() as opened:
        log = opened.enter_context(closing(open_log(settings, name)))
        book = opened.enter_context(closing(JobBook(log)))
        book.read()
        boards = opened.enter_context(closing(open_boards(settings)))
        supervisor = Supervisor(
            SupervisionMetrics(metrics.meters), pulses, logger, slow_s=SLOW_S, hangs_s=HANGS_S
        )
        opened.callback(supervisor.close, END_S)
        process = Process(settings, log, boards.board, metrics, logger)
        yield Jobs(supervisor, partial(JobEvaluator, process), partial(begins, job)), book


def begins(only: str | None, record: JobRecord, new: bool) -> bool:  # noqa: FBT001 -- as `Jobs` asks it
    """Whether to judge a job: a stopped one too, at first, for it may have left its last version.

    Args:
        only: The only job; None: all that ask for it.
        record: The job.
        new: Whether this process has not had it yet.
    """
    spec = record.spec
    if spec.evaluation is None or only not in (None, spec.name):
        return False
    return new or record.wanted != "stopped"


if __name__ == "__main__":
    sys.exit(main())
