"""Replicas of the coordinator in memory, with all parts of their process."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from common.config.settings import Settings
from common.jobs.store import JobStore
from common.redis.memory import MemoryBoards
from common.runtime.faults import Patience
from common.runtime.jobs import Jobs
from common.runtime.supervisor import Supervisor
from common.telemetry.logging import event_logger
from common.telemetry.metrics.registry import ProcessMetrics
from common.telemetry.metrics.serving import Watchdogs
from common.telemetry.tracing import NoTracer
from services.coordinator.dead_letters import SharedSpans
from services.coordinator.loop import JobCoordinator, begins
from services.coordinator.replica import Candidates, CoordinatorReplica
from services.coordinator.replies import ReplyReader
from services.coordinator.streams import StreamWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.kafka.memory import MemoryLog
    from common.redis.memory import MemoryRedis
    from common.storage.port import Blobs
    from common.telemetry.tracing import Tracer

PATIENCE_S = 120.0
IMPATIENT = Patience(first_s=0.01, longest_s=0.01)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition is true."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.005)


class MemoryReplica:
    """A coordinator's process without its loop: a test decides when it reads the jobs."""

    def __init__(  # noqa: PLR0913, PLR0917 -- whatever of a process a test wants another of
        self,
        log: MemoryLog,
        redis: MemoryRedis,
        name: str = "c1",
        settings: Settings | None = None,
        blobs: Blobs | None = None,
        tracer: Tracer | None = None,
        candidates: Candidates | None = None,
        job_store: JobStore | None = None,
    ) -> None:
        logger = event_logger("test")
        self.watchdogs, self.metrics = Watchdogs(), ProcessMetrics("coordinator")
        self.steps = Supervisor(None, self.watchdogs, logger, threads=1)
        self.looks = Supervisor(None, self.watchdogs, logger, threads=2)
        boards = MemoryBoards(redis)
        self.job_store = job_store or JobStore(log)
        self.streams = StreamWatch(log, boards, logger, used=lambda: 0.0)
        self.replica = CoordinatorReplica(
            name=name,
            settings=settings or Settings(),
            log=log,
            boards=boards,
            exchange=boards.exchange(),
            blobs=blobs,
            job_store=self.job_store,
            metrics=self.metrics,
            tracer=tracer or NoTracer(),
            logger=logger,
            steps=self.steps,
            candidates=candidates or Candidates(),
            streams=self.streams,
            replies=ReplyReader(boards.replies(name), logger),
            spans=SharedSpans(log),
        )
        self.looks.begin("replies", lambda _wake, _fault: self.replica.replies)
        self.looks.begin("streams", lambda _wake, _fault: self.streams)
        metrics = self.metrics
        self.supervisor = Supervisor(metrics, self.watchdogs, logger, threads=2, patience=IMPATIENT)
        self.jobs = Jobs(self.supervisor, partial(JobCoordinator, self.replica), begins)

    def look(self) -> None:
        """Follow the jobs as they are in the topic now."""
        self.jobs.follow(self.job_store.read())

    def look_until(self, condition: Callable[[], bool], what: str) -> None:
        """Follow the jobs until the condition is true."""

        def looked() -> bool:
            self.look()
            return condition()

        until(looked, what)

    def takes_part_in(self, job: str) -> bool:
        """Return True if the replica leads a job or is a candidate."""
        return f'doll_leading{{job_name="{job}"}}' in self.metrics.exposed().decode()

    def leads(self, job: str) -> bool:
        """Return True if the replica leads a job."""
        leading = self.metrics.registry.get_sample_value("doll_leading", {"job_name": job})
        return bool(leading)

    def close(self) -> None:
        """Stop as a process does."""
        assert self.supervisor.close(PATIENCE_S)
        assert self.looks.close(PATIENCE_S)
        assert self.steps.close(PATIENCE_S)
