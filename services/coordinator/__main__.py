"""Start a coordinator: `python -m services.coordinator --help`, or `doll coordinator`."""

from __future__ import annotations

import gc

# This comes before the other imports: see `keep_imports`.
if __name__ == "__main__":
    gc.disable()

import sys
import uuid
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.config.program import command_line
from common.redis.exchange import open_leader_boards
from common.runtime.jobs import END_S, follow_jobs
from common.runtime.service import run
from common.runtime.supervisor import Supervisor
from common.runtime.traces import open_tracer
from common.storage.port import open_blobs
from common.telemetry.metrics.registry import ProcessMetrics
from services.coordinator.dead_letters import SharedSpans
from services.coordinator.loop import JobCoordinator, begins
from services.coordinator.replica import Candidates, CoordinatorReplica
from services.coordinator.replies import ReplyReader
from services.coordinator.streams import StreamWatch

if TYPE_CHECKING:
    from common.redis.port import LeaderBoards
    from common.runtime.jobs import MakePart, OpenedKafka
    from common.runtime.service import ServiceProcess
    from common.telemetry.tracing import Tracer

# Threads for slow work: uploads of checkpoints, writes of dead letters.
STEPS = 3
# One thread waits for replies and one watches the streams. They are separate from the slow steps:
# if storage hangs, every job's upload hangs, and without replies all jobs would stop.
LOOKS = 2


def main(actor: type[JobCoordinator] = JobCoordinator) -> int:
    """Run until asked to stop, and return the exit status.

    Args:
        actor: The class that runs one replica's part in one job.
    """
    name = command_line("coordinator").name
    # The suffix keeps a restarted process from being taken for the same candidate.
    return run("coordinator", f"{name}-{uuid.uuid4().hex[:8]}", partial(_coordinate, actor))


def _coordinate(actor: type[JobCoordinator], process: ServiceProcess) -> None:
    torch.set_num_threads(process.settings.threads or 1)
    metrics = ProcessMetrics("coordinator")
    with (
        closing(open_tracer(process.settings, process.service, process.name)) as tracer,
        closing(open_leader_boards(process.settings)) as boards,
    ):
        parts = partial(_parts, actor, process, metrics, tracer, boards)
        follow_jobs(process, metrics, parts, begins, repairs=True)


def _parts(
    actor: type[JobCoordinator],
    process: ServiceProcess,
    metrics: ProcessMetrics,
    tracer: Tracer,
    boards: LeaderBoards,
    opened: OpenedKafka,
) -> MakePart:
    log, job_store, closed_after = opened
    logger, settings = process.logger, process.settings
    exchange = closed_after.enter_context(closing(boards.exchange()))
    spans = closed_after.enter_context(closing(SharedSpans(log)))
    steps = Supervisor(None, process.watchdogs, logger, threads=STEPS)
    closed_after.callback(steps.close, END_S)
    looks = Supervisor(None, process.watchdogs, logger, threads=LOOKS)
    closed_after.callback(looks.close, END_S)
    replies = ReplyReader(boards.replies(process.name), logger)
    streams = StreamWatch(log, boards, logger)
    looks.begin("replies", lambda _wake, _fault: replies)
    looks.begin("streams", lambda _wake, _fault: streams)
    replica = CoordinatorReplica(
        name=process.name,
        settings=settings,
        log=log,
        boards=boards,
        exchange=exchange,
        blobs=open_blobs(settings) if settings.blobs else None,
        job_store=job_store,
        metrics=metrics,
        tracer=tracer,
        logger=logger,
        steps=steps,
        candidates=Candidates(),
        streams=streams,
        replies=replies,
        spans=spans,
    )
    return partial(actor, replica)


if __name__ == "__main__":
    sys.exit(main())
