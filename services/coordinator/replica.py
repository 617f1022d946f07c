"""What all jobs of one replica of the coordinator share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.store import JobStore
    from common.kafka.port import Log
    from common.redis.port import Exchange, LeaderBoards
    from common.runtime.supervisor import Supervisor
    from common.storage.port import Blobs
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics
    from common.telemetry.tracing import Tracer
    from services.coordinator.dead_letters import SharedSpans
    from services.coordinator.replies import ReplyReader
    from services.coordinator.streams import StreamWatch


MOST = 4  # candidates at a time
# A candidate that takes longer than that is in trouble of its own, an outage or a task that is slow
# to import: it must not keep the others waiting.
LONGEST_S = 30.0


class Candidates:
    """The jobs of a replica that are candidates now; may be shared between threads.

    A candidate reads snapshots and makes a model. When a replica starts among a hundred jobs that
    nobody leads, a hundred at once would be in each other's way, each for longer than the lease
    that it holds lasts. Once its Lead record is on its way it only waits, and counts no longer.

    Args:
        most: How many there may be.
        clock: Seconds that never go back.
    """

    def __init__(self, most: int = MOST, clock: Callable[[], float] = monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._since = dict[str, float]()
        self._waiting: dict[str, Callable[[], None]] = {}  # in the order in which they came

    def may_enter(self, job: str, wake: Callable[[], None]) -> bool:
        """Whether a job may become a candidate; if not, it is woken when it may be."""
        with self._lock:
            return self._has_place(job, wake)

    def enter(self, job: str, wake: Callable[[], None]) -> bool:
        """Let a job become a candidate; False where it cannot: then it is woken when it may be."""
        with self._lock:
            if not self._has_place(job, wake):
                return False
            self._since[job] = self._clock()
            return True

    def leave(self, job: str) -> None:
        """It stands to lead, or it has given up; may be told at any time."""
        with self._lock:
            self._waiting.pop(job, None)
            if self._since.pop(job, None) is None or not self._waiting:
                return
            wake = self._waiting.pop(next(iter(self._waiting)))
        wake()

    def _has_place(self, job: str, wake: Callable[[], None]) -> bool:
        late = self._clock() - LONGEST_S
        others = sum(since > late for other, since in self._since.items() if other != job)
        if others < self._most:
            self._waiting.pop(job, None)
            return True
        self._waiting[job] = wake
        return False


@dataclass(frozen=True, slots=True)
class CoordinatorReplica:
    """The parts of the process; all may be shared between threads."""

    name: str  # unique among all that ever live
    settings: Settings
    log: Log
    boards: LeaderBoards
    exchange: Exchange
    blobs: Blobs | None  # None without object storage
    job_store: JobStore
    metrics: ProcessMetrics
    tracer: Tracer
    logger: EventLogger  # bound to the replica
    steps: Supervisor  # of what takes its time
    candidates: Candidates
    streams: StreamWatch
    replies: ReplyReader
    spans: SharedSpans
