"""Parts that all jobs of a coordinator replica share, and parts that a job's effects share."""

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


# Most candidates of one replica at a time.
MOST = 4
# A candidate that takes longer has a problem of its own (an outage, or a task that is slow to
# import) and must not keep others waiting.
LONGEST_S = 30.0


class Candidates:
    """Limits how many jobs of a replica are candidates at once. Safe to use from several threads.

    A candidate reads snapshots and builds a model. If a replica starts among a hundred jobs without
    a leader, a hundred candidates at once would slow each other down until their leases expire. A
    candidate stops counting once its Lead record is sent, because it only waits from then on.

    Args:
        most: Maximum number of candidates.
        clock: Monotonic time in seconds.
    """

    def __init__(self, most: int = MOST, clock: Callable[[], float] = monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._since = dict[str, float]()
        # Ordered by arrival.
        self._waiting: dict[str, Callable[[], None]] = {}

    def may_enter(self, job: str, wake: Callable[[], None]) -> bool:
        """Return True if a job may become a candidate now; otherwise wake it once it may."""
        with self._lock:
            return self._has_place(job, wake)

    def enter(self, job: str, wake: Callable[[], None]) -> bool:
        """Make a job a candidate. If there is no place, return False and wake it when there is."""
        with self._lock:
            if not self._has_place(job, wake):
                return False
            self._since[job] = self._clock()
            return True

    def leave(self, job: str) -> None:
        """Free a job's place once it has sent its Lead record or given up. Safe at any time."""
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
    """The parts of the process. All are safe to use from several threads."""

    # Unique across restarts.
    name: str
    settings: Settings
    log: Log
    boards: LeaderBoards
    exchange: Exchange
    # None without object storage.
    blobs: Blobs | None
    job_store: JobStore
    metrics: ProcessMetrics
    tracer: Tracer
    logger: EventLogger  # bound to the replica
    # Runs slow work.
    steps: Supervisor
    candidates: Candidates
    streams: StreamWatch
    replies: ReplyReader
    spans: SharedSpans


@dataclass(slots=True)
class JobContext:
    """One job in one replica. Only the job's actor changes it."""

    replica: CoordinatorReplica
    # The newest record that the actor has seen.
    record: JobRecord
    board: LeaderBoard
    inbox: CoordinatorInbox
    observer: MetricsObserver
    # Bound to the job, and to the epoch while this replica leads.
    log: EventLogger
    # Outage of Redis.
    outage: Outage
    changes: Changes = field(default_factory=Changes)
    role: Literal["standby", "candidate", "leader"] = "standby"
    # True if no worker is alive and no batch waits. Requests to Redis then wait until other jobs
    # send some.
    idle: bool = False
    # True while the end of the job waits for the last checkpoint, or for the jobs topic.
    ends: bool = False
    # True if members hold the weights.
    members: bool = False
    # Set for a candidate or a leader.
    weights: Trainer | None = None
    # Version of `weights` once they are published.
    in_hand: ModelId | None = None
    # A fault that ended slow work in another thread.
    fault: BaseException | None = None

    @property
    def spec(self) -> JobSpec:
        """Newest specification of the job."""
        return self.record.spec

    @property
    def id(self) -> str:
        """Identifier used in the names of all of the job's resources."""
        return self.record.id

    @property
    def trainer(self) -> Trainer:
        """Weights of a candidate or a leader."""
        if self.weights is None:
            raise AssertionError("only a candidate or a leader has weights")
        return self.weights

    def newest(self) -> JobRecord | None:
        """Return the newest record; None if the job was deleted, even if its name is used again."""
        record = self.replica.job_store.read().get(self.record.spec.name)
        return record if self.record.is_same_job(record) else None

    def fail(self, fault: BaseException) -> None:
        """End the job's part in this process with a fault. Safe to call from any thread."""
        self.fault = fault
        self.inbox.wake()
