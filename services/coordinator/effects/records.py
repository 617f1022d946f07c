"""Writes a coordinator's records to Kafka: its decisions, and openings of partitions."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from common.core import events
from common.core.messages import AuditRecord, Lead
from common.errors import BrokenWriterError, UnavailableError, UnknownTopicError
from common.kafka.names import control_topic, updates_topic
from common.wire import messages as wire
from services.coordinator.tails import deleted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core import commands as do
    from services.coordinator.replica import JobContext

FLUSH_S = 5.0


class RecordWriter:
    """Appends records to the job's own topics."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._writer = job.replica.log.writer(waits=False, on_ready=job.inbox.wake)

    def open_partition(self, command: do.OpenPartition) -> Iterator[events.CoordinatorEvent]:
        """Write an `Opened`. If it is lost, the next poll of the streams orders it again."""
        record, topic = command.record, control_topic(self._job.id)
        try:
            self._writer.append(topic, wire.encode_claim(record))
        except UnknownTopicError:
            yield events.HoldRequired(deleted(topic))
            return
        self._job.log.info(
            "opens_partition",
            partition=str(record.partition),
            generation=record.generation,
            start=record.start,
        )

    def append(self, record: AuditRecord) -> Iterator[events.CoordinatorEvent]:
        """Write a decision. If that fails, the attempt fails: an unwritten decision is void."""
        topic = updates_topic(self._job.id)
        delivered = partial(self._delivered, record) if isinstance(record, Lead) else None
        try:
            self._writer.append(topic, wire.encode_audit(record), on_delivered=delivered)
        except UnavailableError as error:
            yield events.AttemptFailed(f"a decision could not be written: {error}")
            return
        except UnknownTopicError:
            yield events.HoldRequired(deleted(topic))
            return
        if isinstance(record, Lead):
            # The expensive part is done, so other candidates may start while Kafka delivers the
            # record.
            self._job.replica.candidates.leave(self._job.id)
            self._job.log.info(
                "stands_to_lead",
                epoch=record.base.epoch,
                version=record.base.version,
                after=record.after,
            )

    def _delivered(self, lead: Lead, _offset: int | None) -> None:
        inbox = self._job.inbox
        inbox.put(inbox.leadership, events.LeadDelivered(lead.candidate))

    def poll(self) -> None:
        """Run delivery reports.

        Raises:
            DeliveryError: If an audit record was not delivered. The actor must end.
        """
        self._writer.poll()
        self._job.outage.watch(self._writer)

    def close(self) -> None:
        """Deliver the appended records and close the writer."""
        try:
            # `poll` has raised this error already.
            with suppress(BrokenWriterError):
                self._writer.flush(FLUSH_S)
        finally:
            self._writer.close()
