"""Start a coordinator: `python -m services.coordinator --help`, or `doll coordinator`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import uuid
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import torch

from common.config import Settings, read_settings
from common.connections import open_blobs, open_boards, open_log, open_tracer
from common.errors import UnavailableError, UserError
from common.jobs.store import JobBook
from common.learning.optimizers import load_optimizers
from common.metrics.coordinator import CoordinatorMetrics
from common.metrics.serving import Pulses, serve
from common.metrics.supervision import SupervisionMetrics
from common.runtime.supervisor import Supervisor
from common.telemetry import EventLogger, Outage, event_logger, set_up_logging
from common.termination import on_termination
from services.coordinator.candidates import Candidates
from services.coordinator.dead_letters import SharedSpans
from services.coordinator.jobs import Jobs
from services.coordinator.replica import Replica
from services.coordinator.replies import ReplyReader
from services.coordinator.streams import StreamWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.tracing import Tracer

EXIT_OK = 0
EXIT_FAILED = 1  # a fault; whoever supervises this process starts it again
EXIT_USAGE = 2  # settings make no sense; starting again will not help
JOBS_S = 0.5  # between looks at the jobs topic
END_S = 10.0  # for all jobs to end in order
# Of what takes its time: one waits for replies, one looks at streams now and then, and the others
# upload checkpoints and write dead letters.
STEPS = 5


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
        load_optimizers()
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
    pulse = pulses.begin("the main loop")
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    with ExitStack() as opened:
        tracer = opened.enter_context(closing(open_tracer(settings, "coordinator", name)))
        jobs: Jobs | None = None
        book: JobBook | None = None
        while not stopping.is_set():
            pulse.beat()
            try:
                if jobs is None or book is None:
                    jobs, book = opened.enter_context(
                        opened_jobs(name, settings, metrics, pulses, tracer, logger)
                    )
                jobs.follow(book.refresh(JOBS_S))
                outage.quiet()
            except UnavailableError as error:
                outage.met(error)
                stopping.wait(JOBS_S)


@contextmanager
def opened_jobs(
    name: str,
    settings: Settings,
    metrics: CoordinatorMetrics,
    pulses: Pulses,
    tracer: Tracer,
    logger: EventLogger,
) -> Iterator[tuple[Jobs, JobBook]]:
    """Open the outside, and what runs the jobs; at the end, end all in order.

    Raises:
        UnavailableError: If the jobs topic or the directory of blobs is away.
        UserError: If a setting makes no sense.
    """
    with ExitStack() as opened:
        log = opened.enter_context(closing(open_log(settings, name)))
        book = opened.enter_context(closing(JobBook(log)))
        book.read()  # all of it: by its first records alone, a stopped job seems to run
        boards = opened.enter_context(closing(open_boards(settings)))
        exchange = opened.enter_context(closing(boards.exchange()))
        spans = opened.enter_context(closing(SharedSpans(log)))
        steps = Supervisor(None, pulses, logger, threads=STEPS)
        opened.callback(steps.close, END_S)
        replies = ReplyReader(boards.replies(name), logger)
        streams = StreamWatch(log, boards.roster(), logger)
        steps.begin("replies", lambda _wake, _fault: replies)
        steps.begin("streams", lambda _wake, _fault: streams)
        replica = Replica(
            name=name,
            settings=settings,
            log=log,
            boards=boards,
            exchange=exchange,
            blobs=open_blobs(settings) if settings.blobs else None,
            book=book,
            metrics=metrics,
            tracer=tracer,
            logger=logger,
            steps=steps,
            candidates=Candidates(),
            streams=streams,
            replies=replies,
            spans=spans,
        )
        supervisor = Supervisor(SupervisionMetrics(metrics.meters), pulses, logger)
        opened.callback(supervisor.close, END_S)
        yield Jobs(replica, supervisor), book


if __name__ == "__main__":
    sys.exit(main())
