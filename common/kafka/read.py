"""Reads complete topics, or their newest records, as of now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from common.core.spans import LogPosition, Partition
from common.errors import FutureFormatError, UnavailableError, WireError

if TYPE_CHECKING:
    from common.kafka.port import Log, LogRecord

T = TypeVar("T")

_READ_RECORDS = 5000
_READ_S = 0.5
# Longest time without a record.
_PATIENCE_S = 30.0


def read_decoded(
    log: Log, topic: str, decode: Callable[[bytes], T], last: int | None = None, start: int = 0
) -> list[tuple[int, T | None]]:
    """Return a topic's messages with their offsets; None stands for a message that does not parse.

    Args:
        log: The log that has the topic.
        topic: Name of the topic. Its first partition is read.
        decode: Raises WireError if a message does not parse.
        last: Number of offsets to go back from the end. If None, the topic is read from its start.
        start: Lowest offset to read.

    Raises:
        FutureFormatError: If a newer program wrote one of the messages.
        UnavailableError: If Kafka stops answering.
        ExpiredError: If retention deletes records while they are read.
    """
    found = list[tuple[int, T | None]]()
    for record in records_of(log, Partition(topic, 0), last, start):
        try:
            found.append((record.offset, decoded(decode, record)))
        except FutureFormatError as error:
            raise FutureFormatError(f"{topic}, {error}") from error
    return found


def decoded(decode: Callable[[bytes], T], record: LogRecord) -> T | None:
    """Return a decoded record; None if it does not parse or is a tombstone.

    Args:
        decode: Raises WireError if a message does not parse.
        record: The record.

    Raises:
        FutureFormatError: If a newer program wrote the record.
    """
    try:
        return None if record.value is None else decode(record.value)
    except FutureFormatError as error:
        raise FutureFormatError(
            f"offset {record.offset}: {error}; run a newer version of doll"
        ) from error
    except WireError:
        return None


def identified(log: Log, partition: Partition, offset: int) -> LogPosition:
    """Return a position with its topic's id, so that its reader notices a recreated topic.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    found = log.describe([partition.topic]).get(partition.topic)
    return LogPosition(offset, "" if found is None else found.topic_id)


def records_of(
    log: Log, partition: Partition, last: int | None = None, start: int = 0
) -> Iterator[LogRecord]:
    """Yield the records that a partition holds now.

    Args:
        log: The log that has the partition.
        partition: The partition.
        last: Number of offsets to go back from the end. If None, it is read from its start.
        start: Lowest offset to read.

    Raises:
        UnavailableError: If Kafka stops answering.
        ExpiredError: If retention deletes records while they are read.
    """
    bounds = log.bounds(partition)
    start = max(bounds.start, start, 0 if last is None else bounds.end - last)
    last_s = monotonic()
    with closing(log.tail(partition, start)) as tail:
        while tail.position() < bounds.end:
            records = tail.read(_READ_RECORDS, _READ_S)
            for record in records:
                if record.offset < bounds.end:
                    yield record
            if records:
                last_s = monotonic()
            elif monotonic() > last_s + _PATIENCE_S:
                raise UnavailableError(f"{partition.topic} cannot be read beyond {tail.position()}")
