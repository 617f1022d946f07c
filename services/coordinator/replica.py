"""What all jobs of one replica of the coordinator share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.jobs.store import JobStore
    from common.ports.servers import Blobs, Boards, Exchange, Log
    from common.runtime.supervisor import Supervisor
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.registry import ProcessMetrics
    from common.telemetry.tracing import Tracer
    from services.coordinator.candidates import Candidates
    from services.coordinator.dead_letters import SharedSpans
    from services.coordinator.replies import ReplyReader
    from services.coordinator.streams import StreamWatch


@dataclass(frozen=True, slots=True)
class Replica:
    """The parts of the process; all may be shared between threads."""

    name: str  # unique among all that ever live
    settings: Settings
    log: Log
    boards: Boards
    exchange: Exchange
    blobs: Blobs | None  # None without object storage
    book: JobStore
    metrics: ProcessMetrics
    tracer: Tracer
    logger: EventLogger  # bound to the replica
    steps: Supervisor  # of what takes its time
    candidates: Candidates
    streams: StreamWatch
    replies: ReplyReader
    spans: SharedSpans
