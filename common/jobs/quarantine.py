"""Quarantine of a job for operators: its batches, and requests to requeue them.

Each decision of an operator is one record per batch in the job's updates topic. Of a requeue and a
replay of the same batch, only the first in the topic counts. So a process that writes such a record
reads it back to learn if it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field

from common.core.history import History
from common.core.messages import Batch, Replayed, Requeued
from common.core.spans import Partition
from common.errors import ConflictError, UnavailableError, UnknownTopicError
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.wire.messages import decode_audit, encode_audit

if TYPE_CHECKING:
    from common.kafka.port import Log

_DELIVERED_S = 30.0

Count = Annotated[int, Field(ge=0)]
Final: TypeAlias = Literal["", "expired", "replayed"]
Outcome: TypeAlias = Literal["requeued", "before", "replayed"]


class QuarantinedBatchAnswer(BaseModel):
    """A batch of records that was given up without training (quarantined)."""

    batch: Count = Field(
        description="Number of the batch: offset, in the job's control topic in Kafka, of the"
        " record that created it."
    )
    records: Count = Field(description="Number of records in the quarantined batch.")
    spans: tuple[tuple[str, Count, Count, Count], ...] = Field(
        description="Location of the quarantined batch's records in Kafka. For each partition:"
        " topic, partition, first offset, and the offset after the last record.",
        examples=[[["clinic-a", 0, 128, 192]]],
    )
    reason: str = Field(
        description="Reason why the batch was quarantined.",
        examples=["poison: raised: KeyError: 'label'"],
    )
    final: Final = Field(
        description="Reason why the quarantined batch cannot be requeued: `expired` (Kafka deleted"
        " its records) or `replayed` (its records were written to the stream again). Empty if it"
        " can be requeued."
    )


_FINAL: dict[Final, str] = {
    "expired": "expired: its records are deleted",
    "replayed": "was replayed: its records were written to the stream again",
}


def format_batches(batches: Sequence[int]) -> str:
    """Format batches for the record of a job."""
    return f"{len(batches)} batches: {', '.join(map(str, batches))}"


class Quarantine:
    """Quarantined batches of a job, as of its updates topic when the object is created.

    Args:
        job: Id of an existing job.

    Raises:
        ConflictError: If the topic's beginning is missing.
        UnavailableError: If Kafka is unavailable.
    """

    def __init__(self, log: Log, job: str) -> None:
        self.job = job
        self._log = log
        self._name = topics.job_name(job)
        self._topic = topics.updates_topic(job)
        self._history = History()
        self._replayed = set[int]()
        try:
            start = log.bounds(Partition(self._topic, 0)).start
        except UnknownTopicError:
            # The job has had no leader yet.
            return
        if start > 0:
            raise ConflictError(
                f"{self._topic} begins at offset {start}: earlier quarantined batches are unknown,"
                " so none can be requeued; this topic must have no retention"
            )
        self._read()

    def listed(self) -> list[QuarantinedBatchAnswer]:
        """Return all quarantined batches, oldest first."""
        possible = {batch.offset for batch in self._history.poison}
        return [
            QuarantinedBatchAnswer(
                batch=offset,
                records=each.batch.samples,
                spans=tuple(span[:4] for span in each.batch.address),
                reason=each.reason,
                final=""
                if offset in possible
                else "replayed"
                if offset in self._replayed
                else "expired",
            )
            for offset, each in sorted(self._history.quarantined.items())
        ]

    def choose(self, offsets: Sequence[int] | None) -> list[Batch]:
        """Return the chosen batches, oldest first; None chooses all that can be requeued.

        Raises:
            ConflictError: If a chosen batch is not quarantined, or can no longer be requeued.
        """
        poison = {batch.offset: batch for batch in self._history.poison}
        found = {each.batch: each.final for each in self.listed()}
        for offset in offsets or ():
            if offset not in found:
                raise ConflictError(
                    f"batch {offset} of {self._name} is not quarantined; `doll job requeue"
                    f" {self._name}` lists the quarantined batches"
                )
            if found[offset]:
                raise ConflictError(f"batch {offset} of {self._name} {_FINAL[found[offset]]}")
        return [poison[offset] for offset in sorted(poison if offsets is None else {*offsets})]

    def replayed(self) -> list[Batch]:
        """Return the batches whose quarantine is final because their records were written again."""
        return [self._history.quarantined[offset].batch for offset in sorted(self._replayed)]

    def requeue(self, offsets: Sequence[int] | None, by: str, at_s: float) -> dict[int, Outcome]:
        """Requeue batches: each waits for an update again, as if it were new.

        Args:
            offsets: Batches to requeue. Those that were requeued before are skipped. None means all
                that can be requeued.
            by: Name of the operator, for people.
            at_s: Time of the request, in seconds since 1970.

        Raises:
            ConflictError: If a chosen batch is not quarantined, or can no longer be requeued. Then
                no batch is requeued.
            UnavailableError: If Kafka did not accept the records in time.
        """
        before = sorted(set(offsets or ()) & self._history.requeued.keys())
        named = None if offsets is None else [each for each in offsets if each not in before]
        chosen = self.choose(named)
        counts = self.write([Requeued(each, by, at_s) for each in chosen]) if chosen else []
        requeued = self._history.requeued
        outcomes: dict[int, Outcome] = dict.fromkeys(before, "before")
        for each, counted in zip(chosen, counts, strict=True):
            other: Outcome = "before" if each.offset in requeued else "replayed"
            outcomes[each.offset] = "requeued" if counted else other
        return outcomes

    def write(self, records: Sequence[Requeued | Replayed]) -> list[bool]:
        """Write records, and read back which of them count.

        Raises:
            UnavailableError: If Kafka did not accept them in time.
        """
        offsets: list[int | None] = [None] * len(records)
        with closing(self._log.writer()) as writer:
            for number, record in enumerate(records):

                def delivered(offset: int | None, number: int = number) -> None:
                    offsets[number] = offset

                writer.append(self._topic, encode_audit(record), on_delivered=delivered)
            if not writer.flush(_DELIVERED_S):
                raise UnavailableError(
                    f"{self._topic}: Kafka did not confirm all records in time; `doll audit"
                    f" {self._name} --json` shows which batches are still quarantined"
                )
        counted = self._read()
        # If Kafka has not reported a record's offset, the record is recognized by its content.
        return [
            record in counted.values() if offset is None else offset in counted
            for offset, record in zip(offsets, records, strict=True)
        ]

    def _read(self) -> dict[int, Requeued | Replayed]:
        """Continue reading; return the operators' records that count, by offset."""
        counted = dict[int, Requeued | Replayed]()
        start = self._history.position
        for offset, record in read_decoded(self._log, self._topic, decode_audit, start=start):
            if self._history.feed(offset, record) and isinstance(record, Requeued | Replayed):
                counted[offset] = record
                if isinstance(record, Replayed):
                    self._replayed.add(record.batch.offset)
        return counted
