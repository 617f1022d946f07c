"""Dead-letter topics: records and batches that could not be used, and notes of replays.

A dead letter's key names the job, the topic's generation (Kafka's id of the topic) and the address:
`digits/ID/clicks[0]@17` for a record, `digits/ID/clicks[0]@10:20` for a part of a batch. A dead
letter that is written twice has the same key, and a compacted topic keeps those of all jobs.

A note says that records were written again to a topic. It names the records by topic id, partition
and offsets, and the jobs that had dead letters about them by then. A record counts as replayed for
a dead letter if a note names the record and the dead letter's job, or if the note comes after the
dead letter. So a record that two jobs quarantined is written once, a dead letter that a new leader
repeats stays replayed, and another job's dead letter after the note is a new one. A note has a key
of its own, so that a compacted topic keeps both.

| header                    | content                                                              |
| ------------------------- | -------------------------------------------------------------------- |
| reason                    | reason why the record is here                                        |
| job                       | job that could not use the record                                    |
| topic, partition, offset  | place of the record, or of the first record of the batch's part      |
| topic_id                  | Kafka's id of that topic; absent if Kafka gives none                 |
| end                       | batches and notes: offset after the last record there                |
| truncated                 | size of the value in bytes, if the dead letter has only a part of it |
| replayed_to               | notes: topic that the records were written to                        |
| jobs                      | notes: jobs that had dead letters about these records                |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Batch, Quarantined
from common.core.spans import Partition, Span
from common.errors import UnknownTopicError, WireError
from common.kafka.names import dead_letter_topic
from common.kafka.port import Log, LogRecord, NewRecord
from common.kafka.read import records_of
from common.wire import messages as wire

if TYPE_CHECKING:
    from common.core.messages import Skipped

# An exception's text may have any length, and the address must fit beside it.
REASON_BYTES = 4_000
# Share of a refused value that is tried next. The topic's limit is unknown, and an attempt takes a
# millisecond. Below the minimum, a value is not worth keeping.
_KEEP = 3 / 4
_LEAST_BYTES = 64
# Maximum number of offsets in a note. A reader keeps every offset, so it ignores longer
# notes, which this program does not write.
NOTED = 1_000


class EncodedDeadLetter(NamedTuple):
    """A record to be written to a dead-letter topic."""

    topic: str
    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    def shortened(self) -> EncodedDeadLetter | None:
        """Return a copy with a shorter value; None if the value is empty already."""
        if not self.value:
            return None
        headers = self.headers
        if "truncated" not in dict(headers):
            headers = (*headers, ("truncated", str(len(self.value)).encode()))
        size = int(len(self.value) * _KEEP)
        value = self.value[:size] if size >= _LEAST_BYTES else b""
        return self._replace(value=value, headers=headers)


def encode_dead_letter(
    job: str, record: Skipped, offset: int, value: bytes | None, topic_id: str = ""
) -> EncodedDeadLetter:
    """Return the dead letter of one record that does not decode.

    Args:
        job: Job whose workers left the record out.
        record: The claim's entry that names the record.
        offset: Offset of the record.
        value: None if the record has no value, or if retention deleted it.
        topic_id: Kafka's id of the record's topic. Empty if it is unknown.
    """
    span = Span(record.topic, record.partition, offset, offset + 1)
    headers = _headers(job, record.reason, span, topic_id)
    return EncodedDeadLetter(
        dead_letter_topic(record.topic),
        _key(job, topic_id, _address_of(span, is_batch=False)),
        value,
        headers,
    )


def encode_dead_letters(
    job: str, record: Quarantined, topic_ids: Mapping[Partition, str] | None = None
) -> Iterator[EncodedDeadLetter]:
    """Yield a dead letter for each span of a quarantined batch. Its value is the whole quarantine.

    Args:
        job: Job that quarantined the batch.
        record: The quarantine.
        topic_ids: Kafka's ids of the spans' topics, as far as they are known.
    """
    value = wire.encode_audit(record)
    for span in record.batch.address:
        topic_id = (topic_ids or {}).get(span.place, "")
        headers = _headers(job, record.reason, span, topic_id)
        end = ("end", str(span.end).encode())
        key = _key(job, topic_id, _address_of(span, is_batch=True))
        yield EncodedDeadLetter(dead_letter_topic(span.topic), key, value, (*headers, end))


class TopicIdPartition(NamedTuple):
    """Partition of one generation of a topic."""

    # Kafka's id; empty if unknown.
    topic_id: str
    partition: Partition


class Note(NamedTuple):
    """A note that records were written again."""

    place: TopicIdPartition
    start: int
    # At most NOTED offsets after `start`.
    end: int
    # Topic that the records were written to.
    to: str
    # Jobs that had dead letters about these records.
    jobs: frozenset[str]
    # Offset in the dead-letter topic. Until the note is read back, this is above all other offsets.
    at: int = sys.maxsize

    @property
    def record(self) -> NewRecord:
        """The note as a record."""
        (topic_id, (topic, index)) = self.place
        span = Span(topic, index, self.start, self.end)
        key = f"{topic_id}/{_address_of(span, is_batch=True)}>{self.to}".encode()
        headers = (
            ("replayed_to", self.to.encode()),
            ("jobs", " ".join(sorted(self.jobs)).encode()),
            *_place_headers(span, topic_id),
            ("end", str(self.end).encode()),
        )
        return NewRecord(dead_letter_topic(topic), None, key, headers, 0)


class Notes:
    """Records that were written again, according to notes."""

    def __init__(self) -> None:
        self._of = dict[TopicIdPartition, dict[int, tuple[Note, ...]]]()

    def add(self, note: Note) -> None:
        """Add a note."""
        of = self._of.setdefault(note.place, {})
        for offset in range(note.start, note.end):
            of[offset] = (*of.get(offset, ()), note)

    def covers(
        self, place: TopicIdPartition, offset: int, job: str, at: int, to: str | None
    ) -> bool:
        """Return True if a record counts as replayed.

        Args:
            place: Partition of the record.
            offset: Offset of the record.
            job: Job of the dead letter.
            at: Offset of the dead letter in its topic; -1 if there is no dead letter.
            to: Topic that the record is to be written to. If None, any topic counts.
        """
        return any(
            to in {None, note.to} and (job in note.jobs or note.at > at)
            for note in self._of.get(place, {}).get(offset, ())
        )


class DeadLetter(NamedTuple):
    """A dead letter that was read."""

    # Empty if the writing program did not name it.
    job: str
    # Empty if unknown.
    topic_id: str
    span: Span
    reason: str
    value: bytes | None
    is_batch: bool
    is_whole: bool
    # Offset in the dead-letter topic at which it was first written.
    at: int = 0

    @property
    def place(self) -> TopicIdPartition:
        """Partition that the dead letter is about."""
        return TopicIdPartition(self.topic_id, self.span.place)

    @property
    def batch(self) -> Batch | None:
        """The quarantined batch; None if the dead letter is about a record, or was shortened."""
        if not (self.is_batch and self.value):
            return None
        try:
            record = wire.decode_audit(self.value)
        except WireError:
            return None
        return record.batch if isinstance(record, Quarantined) else None

    def is_of(self, record: LogRecord | None) -> bool:
        """Return True if `record` is the unusable one. A log that lost records may have another."""
        if record is None or None in {record.value, self.value}:
            return record is not None and record.value is self.value
        kept = self.value or b""
        return record.value == kept if self.is_whole else (record.value or b"").startswith(kept)


def offsets_of(span: Span, batch: Batch | None) -> Iterator[int]:
    """Yield the offsets of a span, without the batch's records that did not decode.

    Those records have dead letters of their own.
    """
    bad = {
        offset
        for skipped in (() if batch is None else batch.skipped)
        if (skipped.topic, skipped.partition) == span.place
        for offset in skipped.offsets
    }
    return (offset for offset in range(span.start, span.end) if offset not in bad)


class DeadLettersRead(NamedTuple):
    """The content of a dead-letter topic."""

    # One for each job and address, in order of the topic.
    dead_letters: list[DeadLetter]
    notes: Notes

    def replayed(self, dead_letter: DeadLetter, to: str | None = None) -> bool:
        """Return True if all records of a dead letter were written again.

        Args:
            dead_letter: One of `dead_letters`.
            to: Topic that they were written to. If None, any topic counts.
        """
        return all(
            self.notes.covers(dead_letter.place, offset, dead_letter.job, dead_letter.at, to)
            for offset in offsets_of(dead_letter.span, dead_letter.batch)
        )

    def jobs(self, place: TopicIdPartition) -> Callable[[int], frozenset[str]]:
        """Return a function from a record's offset to the jobs that have dead letters about it."""
        dead_letters = [each for each in self.dead_letters if each.place == place]
        records = dict[int, set[str]]()
        for each in dead_letters:
            if not each.is_batch:
                records.setdefault(each.span.start, set()).add(each.job)
        batches = [
            (each.job, range(each.span.start, each.span.end))
            for each in dead_letters
            if each.is_batch
        ]
        return lambda offset: frozenset(
            {*records.get(offset, ()), *(job for job, span in batches if offset in span)}
        )


def read_dead_letters(log: Log, stream: str) -> DeadLettersRead:
    """Read the dead letters of a datastream, and leave out all other records.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    found, notes = dict[bytes, DeadLetter](), Notes()
    try:
        for record in records_of(log, Partition(dead_letter_topic(stream), 0)):
            headers = {name: value.decode(errors="replace") for name, value in record.headers}
            dead_letter = _read(record, headers)
            if isinstance(dead_letter, Note):
                notes.add(dead_letter)
            elif dead_letter is not None:
                address = _address_of(dead_letter.span, is_batch=dead_letter.is_batch)
                key = _key(dead_letter.job, dead_letter.topic_id, address)
                first = found.get(key, dead_letter)
                found[key] = dead_letter._replace(at=first.at)
    # No record of this stream has failed yet.
    except UnknownTopicError:
        pass
    return DeadLettersRead(list(found.values()), notes)


class DeadLettersOfReason(NamedTuple):
    """The dead letters of one job and one reason."""

    job: str
    reason: str
    # Sorted as in the topic.
    dead_letters: list[DeadLetter]
    # Number of batches; the other dead letters are records.
    batches: int
    replayed: int


def by_reason(read: DeadLettersRead) -> list[DeadLettersOfReason]:
    """Group dead letters by job and reason, the most frequent first."""
    found = dict[tuple[str, str], list[DeadLetter]]()
    for dead_letter in read.dead_letters:
        found.setdefault((dead_letter.job, dead_letter.reason), []).append(dead_letter)
    return [
        DeadLettersOfReason(
            job,
            reason,
            dead_letters,
            sum(each.is_batch for each in dead_letters),
            sum(map(read.replayed, dead_letters)),
        )
        for (job, reason), dead_letters in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def _read(record: LogRecord, headers: dict[str, str]) -> DeadLetter | Note | None:
    try:
        topic_id, start = headers.get("topic_id", ""), int(headers["offset"])
        end = int(headers.get("end", start + 1))
        span = Span(headers["topic"], int(headers["partition"]), start, end)
        if "replayed_to" in headers:
            jobs = frozenset(headers["jobs"].split())
            place = TopicIdPartition(topic_id, span.place)
            note = Note(place, start, end, headers["replayed_to"], jobs, record.offset)
            return note if end - start <= NOTED else None
        return DeadLetter(
            headers.get("job", ""),
            topic_id,
            span,
            headers["reason"],
            record.value,
            is_batch="end" in headers,
            is_whole="truncated" not in headers,
            at=record.offset,
        )
    except (KeyError, ValueError):
        return None


def _address_of(span: Span, *, is_batch: bool) -> str:
    return str(span) if is_batch else f"{span.place}@{span.start}"


def _key(job: str, topic_id: str, address: str) -> bytes:
    return f"{job}/{topic_id}/{address}".encode()


def _headers(job: str, reason: str, span: Span, topic_id: str) -> tuple[tuple[str, bytes], ...]:
    why = reason.encode(errors="replace")[:REASON_BYTES]
    return (("reason", why), ("job", job.encode()), *_place_headers(span, topic_id))


def _place_headers(span: Span, topic_id: str) -> tuple[tuple[str, bytes], ...]:
    known = (("topic_id", topic_id.encode()),) if topic_id else ()
    return (
        ("topic", span.topic.encode()),
        ("partition", str(span.partition).encode()),
        ("offset", str(span.start).encode()),
        *known,
    )
