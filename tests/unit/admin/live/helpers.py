"""Jobs and audit records for tests of the followers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from common.core.messages import (
    GENESIS,
    Batch,
    BatchReady,
    Lead,
    ModelId,
    Quarantined,
    Skipped,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord, by_stream
from common.kafka import names as topics
from common.kafka.memory import MemoryLog
from common.kafka.port import NewTopic
from common.spot.plans import encode_plan
from common.wire.messages import encode_audit, encode_claim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from common.core.messages import AuditRecord, Positions, Wanted
    from common.spot.provisioning.records import PlanRecord

JOB = "digits"
STREAMS = ("clicks", "views")
# A test that waits longer than this has failed.
PATIENCE_S = 120.0
BATCH = 10  # records of a batch

SPEC = f"""
name: {JOB}
streams: [{", ".join(STREAMS)}]
records:
  codec: tensor
  fields: {{features: {{dtype: float32, shape: [4]}}, label: {{dtype: int64}}}}
task: {{name: logistic-regression, classes: 2}}
batch_size: {BATCH}
group_size: 2
optimizer: {{name: sgd, learning_rate: 0.1}}
"""


def job(wanted: Wanted = "running", name: str = JOB) -> JobRecord:
    """Return a job on two streams of two partitions each, which begins at offset 100 everywhere."""
    spec = parse_job(SPEC.replace(f"name: {JOB}", f"name: {name}"))
    first = {Partition(stream, index): 100 for stream in STREAMS for index in (0, 1)}
    return JobRecord(spec, wanted, by_stream(first), "submitted", 1000.0)


HELD = Partition("clicks", 0)


class HeldLog(MemoryLog):
    """A log with an open transaction of seven records on one partition."""

    def high_watermarks(self, partitions: Collection[Partition]) -> Positions:
        """Add the transaction's records."""
        found = super().high_watermarks(partitions)
        return {place: end + 7 * (place == HELD) for place, end in found.items()}


def batch(
    number: int, worker: str = "w0", skipped: int = 0, samples: int = BATCH, stream: str = "clicks"
) -> Batch:
    """Return the batch whose claim has this offset in the control topic."""
    span = Span(stream, 0, 100 + number * 20, 100 + number * 20 + BATCH)
    left_out = tuple(Skipped(stream, 0, span.start + index, "torn") for index in range(skipped))
    return Batch(number, WorkerId(worker), (span,), samples, left_out)


def update(
    epoch: int,
    version: int,
    *batches: Batch,
    loss: float = 0.5,
    metrics: dict[str, float] | None = None,
    short: str = "",
) -> UpdateApplied:
    """Return an update of these batches. By default it has one batch."""
    made = batches or (batch(version),)
    samples = sum(each.samples for each in made)
    accuracy = {"accuracy": 0.25} if metrics is None else metrics
    return UpdateApplied(epoch, version, made, samples, loss, accuracy, short)


def lead(after: int = -1, base: ModelId = GENESIS, candidate: str = "c", epoch: int = 0) -> Lead:
    """Return a Lead record."""
    return Lead(after, base, candidate, epoch)


def quarantine(epoch: int, number: int, reason: str = "poison: it raised") -> Quarantined:
    """Return a Quarantined record."""
    return Quarantined(epoch, batch(number), reason)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: If it does not hold within `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


async def happens(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, while other coroutines run.

    Raises:
        AssertionError: If the condition does not hold within `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


class Topics:
    """Create the topics of a job in a log in memory."""

    def __init__(self, log: MemoryLog, name: str = JOB, partitions: int = 2) -> None:
        self.log = log
        self.name = name
        for stream in STREAMS:
            log.create_topics([NewTopic(stream, partitions)])
        own = (topics.control_topic(name), topics.updates_topic(name))
        log.create_topics([NewTopic(topic, kept_forever=True) for topic in own])
        self._writer = log.writer()

    def audit(self, *records: AuditRecord) -> None:
        """Append to the updates topic."""
        for record in records:
            self._writer.append(topics.updates_topic(self.name), encode_audit(record))

    def claim(self, *batches: Batch) -> None:
        """Append the claims of these batches to the control topic."""
        for each in batches:
            claim = BatchReady(each.worker, each.address, each.samples, each.skipped)
            self._writer.append(topics.control_topic(self.name), encode_claim(claim))

    def plan(self, *records: PlanRecord) -> None:
        """Append to the plans topic. The first call creates the topic."""
        self.log.create_topics([NewTopic(topics.plans_topic(self.name))])
        for record in records:
            self._writer.append(topics.plans_topic(self.name), encode_plan(record))

    def arrive(self, stream: str, count: int) -> None:
        """Append records to a stream's first partition."""
        for _ in range(count):
            self._writer.append(stream, b"record")
