"""What all effects of one job share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from common.telemetry.logging import Changes

if TYPE_CHECKING:
    from common.core.messages import ModelId
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.learning.trainer import Trainer
    from common.redis.port import Board
    from common.telemetry.logging import EventLogger
    from common.telemetry.outages import Outage
    from services.coordinator.inbox import CoordinatorInbox
    from services.coordinator.metrics_observer import MetricsObserver
    from services.coordinator.replica import CoordinatorReplica


@dataclass(slots=True)
class JobContext:
    """One job in one replica; its actor alone changes it."""

    replica: CoordinatorReplica
    record: JobRecord  # the newest that its actor has seen
    spec: JobSpec  # the newest
    board: Board
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
