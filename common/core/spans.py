"""Addresses of records: offsets of partitions, independent of the content of the records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from common.core.field_types import Count, KafkaEpoch, NonEmpty, OrNone


class Partition(NamedTuple):
    """One partition of a datastream's topic."""

    topic: NonEmpty[str]
    index: Count  # type: ignore[assignment]  # hides tuple.index, which is not used here

    def __str__(self) -> str:
        return f"{self.topic}[{self.index}]"


class LogPosition(NamedTuple):
    """A reader's position in a partition, and what it knows of the log below.

    A recreated topic has another id, and a log that lost its tail continues under a new leader
    epoch. So an offset alone does not show that the log below is still the same.
    """

    # Offset of the next record.
    offset: Count
    # Kafka's topic id as text. Empty if unknown.
    topic_id: str = ""
    # Leader epoch of the last record below `offset`. -1 if unknown.
    epoch: KafkaEpoch = -1

    @classmethod
    def of(cls, position: int | LogPosition) -> LogPosition:
        """Return the position as a `LogPosition`. Of an integer, only the offset is known."""
        return cls(position) if isinstance(position, int) else position


class Span(NamedTuple):
    """Offsets `start` to `end` of one partition, half-open.

    Every offset between them belongs to the span, even if it holds no record (compaction,
    transaction markers), so that spans tile a partition without gaps.

    The other fields identify the log at the time of reading. Offsets alone do not, because a log
    that lost its tail, or a recreated topic, reuses them for other records.
    """

    topic: NonEmpty[str]
    partition: Count
    start: Count
    end: Count
    # Generation of the partition, see `common.core.ledger`.
    generation: Count = 0
    # Leader epoch of the last record below `start`. -1 if unknown.
    before: KafkaEpoch = -1
    # Offset after the last record below `end`. -1 if unknown.
    known: OrNone = -1
    # Leader epoch of that record. -1 if unknown.
    epoch: KafkaEpoch = -1

    @property
    def place(self) -> Partition:
        """The partition of the span."""
        # This is called often enough that the shortcut is measurable.
        return tuple.__new__(Partition, self[:2])

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.start}:{self.end}"


# Content of a batch: sorted, at most one span per partition.
Address: TypeAlias = NonEmpty[tuple[Span, ...]]


def address_of(spans: Iterable[Span]) -> Address:
    """Sort spans into an address and validate it.

    Raises:
        ValueError: If a span is empty or backwards, two are in one partition, or there is none.
    """
    address = tuple(sorted(spans))
    if not address:
        raise ValueError("an address must have at least one span")
    for span in address:
        if not 0 <= span.start < span.end:
            raise ValueError(f"the span {span} is empty or ends before its start")
    if len({span.place for span in address}) != len(address):
        raise ValueError(f"the address {address} has two spans of one partition")
    return address


@dataclass(frozen=True, slots=True)
class Assigned:
    """The group assigned these partitions to this member. They are not read until placed."""

    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class Revoked:
    """The group revoked these partitions, or this member lost them without notice."""

    partitions: tuple[Partition, ...]
