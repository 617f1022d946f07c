"""Dead-letter topics: records and batches that could not be used, and notes of replays.

A letter's key names the job, the topic's generation (Kafka's id of the topic) and the address:
`digits/ID/clicks[0]@17` for a record, `digits/ID/clicks[0]@10:20` for a batch's part. A letter that
is written twice has the same key, and a compacted topic keeps the letters of all jobs.

A note says that records were written anew to a topic. It names the records by topic id, partition
and offsets, and the jobs that had letters about them by then. A record counts as replayed for a
letter if a note names the record and the letter's job, or stands behind the letter. So a record
that two jobs quarantined is written once, a letter that a new leader repeats stays replayed, and
another job's letter that stands behind the note is a new one. A note has a key of its own: a
compacted topic keeps both.

| header                       | what                                                             |
| ---------------------------- | ---------------------------------------------------------------- |
| reason                       | why the record is here                                           |
| job                          | job that could not use the record                                |
| topic, partition, offset     | place of the record, or of the first record of the batch's part  |
| topic_id                     | Kafka's id of that topic; absent if Kafka gives none             |
| end                          | of a batch or note: the offset after the last record there       |
| truncated                    | size of the value in bytes, if the letter lacks a part of it     |
| replayed_to                  | of a note: the topic that the records were written to            |
| jobs                         | of a note: jobs that had letters about these records             |
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

REASON_BYTES = 4_000  # an exception's text may be of any length, and the address must fit beside it
# Of a value that was refused, so much is tried next: nobody says how much the topic would take, and
# a question takes a millisecond. What is left after so many cuts tells nobody anything.
_KEEP = 3 / 4
_LEAST_BYTES = 64
# Offsets that one note names at most: a reader keeps each of them, so a note that names more was
# not written by this program and is ignored.
NOTED = 1_000


class EncodedDeadLetter(NamedTuple):
    """One record of a dead-letter topic, to be written."""

    topic: str
    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    def shortened(self) -> EncodedDeadLetter | None:
        """The same with less of its value; None where it has none any more."""
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
    """Return the letter of one record that does not decode.

    Args:
        job: Job whose workers left the record out.
        record: Claim's entry that names the record.
        offset: Offset of the record.
        value: None if the record has no value, or if retention deleted it.
        topic_id: Kafka's id of the record's topic. Empty if it is not known.
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
    """Yield one letter for each span of a quarantined batch, each with the whole record.

    Args:
        job: Job that quarantined the batch.
        record: The quarantine.
        topic_ids: Kafka's ids of the topics of the spans, as far as they are known.
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

    topic_id: str  # Kafka's; empty: not known
    partition: Partition


class Note(NamedTuple):
    """Says that records were written anew."""

    place: TopicIdPartition
    start: int
    end: int  # at most NOTED offsets after `start`
    to: str  # topic
    jobs: frozenset[str]  # that had letters about these records
    at: int = sys.maxsize  # its offset in the dead-letter topic; not read back yet: behind all

    @property
    def record(self) -> NewRecord:
        """The note as it is written."""
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
    """Records that were written anew, as notes say."""

    def __init__(self) -> None:
        self._of = dict[TopicIdPartition, dict[int, tuple[Note, ...]]]()

    def add(self, note: Note) -> None:
        """Take in a note."""
        of = self._of.setdefault(note.place, {})
        for offset in range(note.start, note.end):
            of[offset] = (*of.get(offset, ()), note)

    def covers(
        self, place: TopicIdPartition, offset: int, job: str, at: int, to: str | None
    ) -> bool:
        """True if a record counts as replayed.

        Args:
            place: Partition of the record.
            offset: Its offset.
            job: Job whose letter is asked about.
            at: Offset of that letter in the dead-letter topic; -1: there is none.
            to: Topic that the record is to be written to; None: whichever.
        """
        return any(
            to in {None, note.to} and (job in note.jobs or note.at > at)
            for note in self._of.get(place, {}).get(offset, ())
        )


class DeadLetter(NamedTuple):
    """One letter as it is read."""

    job: str  # empty: of a program that did not say it
    topic_id: str  # empty: not known
    span: Span
    reason: str
    value: bytes | None
    is_batch: bool
    is_whole: bool
    at: int = 0  # offset in the dead-letter topic, where it was written first

    @property
    def place(self) -> TopicIdPartition:
        """Partition of what the letter is about."""
        return TopicIdPartition(self.topic_id, self.span.place)

    @property
    def batch(self) -> Batch | None:
        """The quarantined batch; None if the letter is about a record, or was shortened."""
        if not (self.is_batch and self.value):
            return None
        try:
            record = wire.decode_audit(self.value)
        except WireError:
            return None
        return record.batch if isinstance(record, Quarantined) else None

    def is_of(self, record: LogRecord | None) -> bool:
        """True if this is the record that could not be used; its log may have lost records."""
        if record is None or None in {record.value, self.value}:
            return record is not None and record.value is self.value
        kept = self.value or b""
        return record.value == kept if self.is_whole else (record.value or b"").startswith(kept)


def offsets_of(span: Span, batch: Batch | None) -> Iterator[int]:
    """Yield the offsets of a span, without the records of a batch that did not decode.

    Those have letters of their own.
    """
    bad = {
        offset
        for skipped in (() if batch is None else batch.skipped)
        if (skipped.topic, skipped.partition) == span.place
        for offset in skipped.offsets
    }
    return (offset for offset in range(span.start, span.end) if offset not in bad)


class DeadLettersRead(NamedTuple):
    """What a dead-letter topic holds."""

    dead_letters: list[DeadLetter]  # in order; of each job one for each address
    notes: Notes

    def replayed(self, dead_letter: DeadLetter, to: str | None = None) -> bool:
        """True if all records of a letter were written anew.

        Args:
            dead_letter: One of these.
            to: Topic that they were to be written to; None: whichever.
        """
        return all(
            self.notes.covers(dead_letter.place, offset, dead_letter.job, dead_letter.at, to)
            for offset in offsets_of(dead_letter.span, dead_letter.batch)
        )

    def jobs(self, place: TopicIdPartition) -> Callable[[int], frozenset[str]]:
        """Return a function from the offset of a record to the jobs that have letters about it."""
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
    """Read the dead letters of a datastream; what is no letter is left out.

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
    except UnknownTopicError:  # nothing ever failed there
        pass
    return DeadLettersRead(list(found.values()), notes)


class DeadLettersOfReason(NamedTuple):
    """The dead letters of one job and one reason."""

    job: str
    reason: str
    dead_letters: list[DeadLetter]  # in order
    batches: int  # of them; the others are records
    replayed: int


def by_reason(read: DeadLettersRead) -> list[DeadLettersOfReason]:
    """Dead letters by job and reason, the commonest first."""
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
