"""Start a coordinator: `python -m services.coordinator --help`, or `doll coordinator`."""

from __future__ import annotations

import argparse
import socket
import sys
import uuid
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.jobs.store import JobBook
from common.learning.optimizers import load_optimizers
from common.runtime.connect import open_blobs, open_boards, open_log, open_tracer
from common.runtime.jobs import Jobs
from common.runtime.service import END_S, follow_jobs, run
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import EventLogger, event_logger
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.metrics.serving import Pulses, serve
from common.telemetry.metrics.supervision import SupervisionMetrics
from services.coordinator.candidates import Candidates
from services.coordinator.dead_letters import SharedSpans
from services.coordinator.loop import JobCoordinator, begins
from services.coordinator.replica import Replica
from services.coordinator.replies import ReplyReader
from services.coordinator.streams import StreamWatch

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from common.config.settings import Settings
    from common.telemetry.tracing import Tracer

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
    name = parser.parse_args().name
    name = f"{name}-{uuid.uuid4().hex[:8]}"  # no two lives of a process are one candidate
    return run("coordinator", name, partial(_coordinate, name))


def _coordinate(name: str, settings: Settings, stopping: threading.Event) -> None:
    torch.set_num_threads(settings.threads or 1)
    load_optimizers()  # before anybody holds a lease: it takes a second
    metrics, pulses = CoordinatorMetrics(), Pulses()
    if settings.metrics_port:
        serve(metrics.meters, pulses, settings.metrics_host, settings.metrics_port)
    with closing(open_tracer(settings, "coordinator", name)) as tracer:
        logger = event_logger("coordinator")
        opened = partial(opened_jobs, name, settings, metrics, pulses, tracer, logger)
        follow_jobs("coordinator", opened, stopping, pulses)


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
        yield Jobs(supervisor, partial(JobCoordinator, replica), begins), book


if __name__ == "__main__":
    sys.exit(main())
