"""What all jobs of one replica of the coordinator share, and what all effects of one job share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal

from common.telemetry.logging import Changes

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.core.messages import ModelId
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord, JobStore
    from common.kafka.port import Log
    from common.learning.trainer import Trainer
    from common.redis.port import Exchange, LeaderBoard, LeaderBoards
    from common.runtime.supervisor import Supervisor
    from common.storage.port import Blobs
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics
    from common.telemetry.outages import Outage
    from common.telemetry.tracing import Tracer
    from services.coordinator.dead_letters import SharedSpans
    from services.coordinator.inbox import CoordinatorInbox
    from services.coordinator.metrics_observer import MetricsObserver
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


@dataclass(slots=True)
class JobContext:
    """One job in one replica; its actor alone changes it."""

    replica: CoordinatorReplica
    record: JobRecord  # the newest that its actor has seen
    board: LeaderBoard
    inbox: CoordinatorInbox
    observer: MetricsObserver
    log: EventLogger  # bound to the job, and to the epoch while this replica leads
    outage: Outage  # of Redis
    changes: Changes = field(default_factory=Changes)
    role: Literal["standby", "candidate", "leader"] = "standby"
    idle: bool = False  # nothing happens: what it asks of Redis can wait for others
    ends: bool = False  # its end waits for the last checkpoint, or to be written down
    members: bool = False  # hold the weights
    weights: Trainer | None = None  # of a candidate or a leader
    in_hand: ModelId | None = None  # their name, once they are published
    fault: BaseException | None = None  # that ended a step in another thread

    @property
    def spec(self) -> JobSpec:
        """The job's newest specification."""
        return self.record.spec

    @property
    def id(self) -> str:
        """Identifier used in the names of all of the job's resources."""
        return self.record.id

    @property
    def trainer(self) -> Trainer:
        """The weights of a candidate or a leader."""
        if self.weights is None:
            raise AssertionError("only a candidate or a leader has weights")
        return self.weights

    def newest(self) -> JobRecord | None:
        """Return the job as it is wanted now; None if it was deleted, even if its name lives on."""
        record = self.replica.job_store.read().get(self.record.spec.name)
        return record if self.record.is_same_job(record) else None

    def fail(self, fault: BaseException) -> None:
        """End the job's part in this process with a fault; for any thread."""
        self.fault = fault
        self.inbox.wake()
