"""Dead-letter topics: records and batches that could not be used, and notes of what became of them.

A letter's key is its address, `clicks[0]@17` of a record and `clicks[0]@10:20` of a batch's part:
one that comes twice has the same, and a topic that somebody compacts takes it and keeps all. A note
that a letter was replayed has the letter's key, too, and no value: what is compacted forgets both.

| header                       | what                                                             |
| ---------------------------- | ---------------------------------------------------------------- |
| reason                       | why it is here                                                   |
| job                          | which job could not use it                                       |
| topic, partition, offset     | where the record is, or where the batch's records begin          |
| end                          | of a batch alone: the offset after its last record there         |
| truncated                    | how many bytes the value had, where it is not whole              |
| replayed_to                  | of a note alone: the topic that it was written to anew           |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from common.core.spans import Partition, Span
from common.errors import UnknownTopicError
from common.ports.servers import Log, LogRecord, NewRecord
from common.topics.names import dead_letter_topic
from common.topics.read import records_of
from common.wire import messages as wire

if TYPE_CHECKING:
    from common.core.messages import Quarantined, Skipped

REASON_BYTES = 4_000  # an exception's text may be of any length, and the address must fit beside it
# Of a value that was refused, so much is tried next: nobody says how much the topic would take, and
# a question takes a millisecond. What is left after so many cuts tells nobody anything.
_KEEP = 3 / 4
_LEAST_BYTES = 64


class Letter(NamedTuple):
    """One record of a dead-letter topic, to be written."""

    topic: str
    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    def shortened(self) -> Letter | None:
        """The same with less of its value; None where it has none any more."""
        if not self.value:
            return None
        headers = self.headers
        if "truncated" not in dict(headers):
            headers = (*headers, ("truncated", str(len(self.value)).encode()))
        size = int(len(self.value) * _KEEP)
        value = self.value[:size] if size >= _LEAST_BYTES else b""
        return self._replace(value=value, headers=headers)


def letter_of(job: str, record: Skipped, offset: int, value: bytes | None) -> Letter:
    """The letter of one record that does not decode.

    Args:
        job: Whose workers left it out.
        record: Names it.
        offset: Which of those that it names.
        value: None where there is none, or retention was faster.
    """
    headers = _headers(job, record.reason, record.topic, record.partition, offset)
    return Letter(dead_letter_topic(record.topic), _key(record, offset), value, headers)


def letters_of(job: str, record: Quarantined) -> Iterator[Letter]:
    """The letters of a quarantined batch: one for each span, all with the whole record."""
    value = wire.encode_audit(record)
    for span in record.batch.address:
        headers = _headers(job, record.reason, span.topic, span.partition, span.start)
        end = ("end", str(span.end).encode())
        yield Letter(dead_letter_topic(span.topic), str(span).encode(), value, (*headers, end))


def note_of(span: Span, key: bytes, to: str) -> NewRecord:
    """The note that what a letter is about was written anew."""
    headers = (("replayed_to", to.encode()), *_address(span.topic, span.partition, span.start))
    return NewRecord(dead_letter_topic(span.topic), None, key, headers, 0)


class DeadLetter(NamedTuple):
    """One letter as it is read."""

    job: str  # empty: of a program that did not say it
    key: bytes
    span: Span
    reason: str
    value: bytes | None
    is_batch: bool
    is_whole: bool

    def is_of(self, record: LogRecord | None) -> bool:
        """Whether this is the record that could not be used; a topic may have been made anew."""
        if record is None or None in {record.value, self.value}:
            return record is not None and record.value is self.value
        told = self.value or b""
        return record.value == told if self.is_whole else (record.value or b"").startswith(told)


class LettersRead(NamedTuple):
    """What a dead-letter topic holds."""

    letters: list[DeadLetter]  # in order; of each job one for each address
    replayed: set[bytes]  # keys of those that were written anew


def read_letters(log: Log, stream: str) -> LettersRead:
    """Read the dead letters of a datastream; what is no letter is left out.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    found, replayed = dict[tuple[str, bytes], DeadLetter](), set[bytes]()
    try:
        for record in records_of(log, Partition(dead_letter_topic(stream), 0)):
            headers = {name: value.decode(errors="replace") for name, value in record.headers}
            if "replayed_to" in headers and record.key is not None:
                replayed.add(record.key)
            elif (letter := _letter(record, headers)) is not None:
                found[letter.job, letter.key] = letter
    except UnknownTopicError:  # nothing ever failed there
        return LettersRead([], set())
    return LettersRead(list(found.values()), replayed)


class LettersOfReason(NamedTuple):
    """The dead letters of one job and one reason."""

    job: str
    reason: str
    letters: list[DeadLetter]  # in order
    batches: int  # of them; the others are records
    replayed: int


def by_reason(read: LettersRead) -> list[LettersOfReason]:
    """Dead letters by job and reason, the commonest first."""
    found = dict[tuple[str, str], list[DeadLetter]]()
    for letter in read.letters:
        found.setdefault((letter.job, letter.reason), []).append(letter)
    return [
        LettersOfReason(
            job,
            reason,
            letters,
            sum(each.is_batch for each in letters),
            sum(each.key in read.replayed for each in letters),
        )
        for (job, reason), letters in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def _letter(record: LogRecord, headers: dict[str, str]) -> DeadLetter | None:
    try:
        start = int(headers["offset"])
        end = int(headers.get("end", start + 1))
        span = Span(headers["topic"], int(headers["partition"]), start, end)
        return DeadLetter(
            headers.get("job", ""),
            record.key or str(span).encode(),
            span,
            headers["reason"],
            record.value,
            is_batch="end" in headers,
            is_whole="truncated" not in headers,
        )
    except (KeyError, ValueError):
        return None


def _key(record: Skipped, offset: int) -> bytes:
    return f"{Partition(record.topic, record.partition)}@{offset}".encode()


def _headers(
    job: str, reason: str, topic: str, partition: int, offset: int
) -> tuple[tuple[str, bytes], ...]:
    why = reason.encode(errors="replace")[:REASON_BYTES]
    return (("reason", why), ("job", job.encode()), *_address(topic, partition, offset))


def _address(topic: str, partition: int, offset: int) -> tuple[tuple[str, bytes], ...]:
    return (
        ("topic", topic.encode()),
        ("partition", str(partition).encode()),
        ("offset", str(offset).encode()),
    )
