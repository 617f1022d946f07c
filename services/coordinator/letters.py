"""What a dead letter says, and how it is cut down to what Kafka takes.

A record that a producer could write may be too large to be written again: clients refuse what is
above their own limit, and a dead-letter topic may take less than its stream. Then its letter has
the beginning of the record, as much as is taken, and says so; the address is always whole.

Its key is the address, `clicks[0]@17` of a record and `clicks[0]@10:20` of a batch's part: one that
comes twice has the same, and a topic that somebody compacts takes it and keeps all.

| header                       | what                                                             |
| ---------------------------- | ---------------------------------------------------------------- |
| reason                       | why it is here                                                   |
| topic, partition, offset     | where the record is, or where the batch's records begin          |
| end                          | of a batch alone: the offset after its last record there         |
| truncated                    | how many bytes the value had, where it is not whole              |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from common.core.spans import Partition
from common.errors import DeliveryError, RecordTooLargeError
from common.topics.names import dead_letter_topic
from common.wire import messages as wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from common.core.messages import Quarantined, Skipped
    from common.ports.servers import Writer

REASON_BYTES = 4_000  # an exception's text may be of any length, and the address must fit beside it
# Of a value that was refused, so much is tried next: nobody says how much the topic would take, and
# a question takes a millisecond. What is left after so many cuts tells nobody anything.
_KEEP = 3 / 4
_LEAST_BYTES = 64

_Refused: TypeAlias = "list[tuple[Letter, DeliveryError]]"


class Letter(NamedTuple):
    """One record of a dead-letter topic."""

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


def letter_of(record: Skipped, offset: int, value: bytes | None) -> Letter:
    """The letter of one record that does not decode.

    Args:
        record: Names it.
        offset: Which of those that it names.
        value: None where there is none, or retention was faster.
    """
    headers = _headers(record.reason, record.topic, record.partition, offset)
    key = f"{Partition(record.topic, record.partition)}@{offset}".encode()
    return Letter(dead_letter_topic(record.topic), key, value, headers)


def letters_of(record: Quarantined) -> Iterator[Letter]:
    """The letters of a quarantined batch: one for each span, all with the whole record."""
    value = wire.encode_audit(record)
    for span in record.batch.address:
        headers = _headers(record.reason, span.topic, span.partition, span.start)
        end = ("end", str(span.end).encode())
        yield Letter(dead_letter_topic(span.topic), str(span).encode(), value, (*headers, end))


def write(letters: Iterable[Letter], writer: Writer, timeout_s: float) -> bool:
    """Write letters, each with as much of its value as Kafka takes; wait until it has them.

    Returns:
        False where it took longer than `timeout_s`: which of them arrived is not known then.

    Raises:
        DeliveryError: If a letter cannot be delivered, not even its address.
        UnknownTopicError: If its topic does not exist.
        UnavailableError: If the broker is unavailable.
    """
    waiting = letters
    while True:
        refused: _Refused = []
        for letter in waiting:
            _append(letter, writer, refused)
        if not writer.flush(timeout_s):
            return False
        if not refused:
            return True
        waiting = [_shortened(letter, error) for letter, error in refused]


def _append(letter: Letter, writer: Writer, refused: _Refused) -> None:
    note = partial(_note, refused, letter)
    try:
        writer.append(
            letter.topic, letter.value, key=letter.key, headers=letter.headers, on_failed=note
        )
    except RecordTooLargeError as error:
        note(error)


def _note(refused: _Refused, letter: Letter, error: DeliveryError) -> None:
    refused.append((letter, error))


def _shortened(letter: Letter, error: DeliveryError) -> Letter:
    shorter = letter.shortened() if isinstance(error, RecordTooLargeError) else None
    if shorter is None:
        raise error
    return shorter


def _headers(reason: str, topic: str, partition: int, offset: int) -> tuple[tuple[str, bytes], ...]:
    return (
        ("reason", reason.encode(errors="replace")[:REASON_BYTES]),
        ("topic", topic.encode()),
        ("partition", str(partition).encode()),
        ("offset", str(offset).encode()),
    )
