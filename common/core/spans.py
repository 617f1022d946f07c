"""Addresses of records: which offsets of which partitions, and nothing about what is in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from common.core.field_types import Count, KafkaEpoch, NonEmpty, OrNone


class Partition(NamedTuple):
    """One partition of one datastream's topic."""

    topic: NonEmpty[str]
    index: Count  # type: ignore[assignment]  # nobody searches a partition as a tuple

    def __str__(self) -> str:
        return f"{self.topic}[{self.index}]"


class LogPosition(NamedTuple):
    """Where a reader of a partition stands, and what it knows of the log below.

    A topic that was deleted and created anew has another id; a log that lost its tail goes on under
    a new leader epoch. So a position alone does not say that the log below is still the same.
    """

    offset: Count  # of the next record
    topic_id: str = ""  # Kafka's, in its text form; empty: not known
    epoch: KafkaEpoch = -1  # of the last record below `offset`; -1: not known

    @classmethod
    def of(cls, position: int | LogPosition) -> LogPosition:
        """A position of which perhaps no more is known than its offset."""
        return cls(position) if isinstance(position, int) else position


class Span(NamedTuple):
    """Positions `start` to `end` of one partition, half-open.

    Every offset between them belongs to the span, also those that hold no record (compaction,
    transaction markers), so that spans tile a partition without gaps.

    What the log was when they were read: offsets alone do not say it, since a log that lost its
    tail, or a topic that was created anew, gives the same ones to other records.
    """

    topic: NonEmpty[str]
    partition: Count
    start: Count
    end: Count
    generation: Count = 0  # of the partition: see `common.core.ledger`
    before: KafkaEpoch = -1  # of the last record below `start`; -1: not known
    known: OrNone = -1  # the offset after the last record below `end`; -1: not known
    epoch: KafkaEpoch = -1  # and that record's leader epoch; -1: not known

    @property
    def place(self) -> Partition:
        """The partition that it lies in."""
        return tuple.__new__(Partition, self[:2])  # which is called so often that this counts

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.start}:{self.end}"


# A batch's content: sorted, at most one span per partition.
Address: TypeAlias = NonEmpty[tuple[Span, ...]]


def address_of(spans: Iterable[Span]) -> Address:
    """Put spans into the one order that an address has, and check that they can be one.

    Raises:
        ValueError: If a span is empty or backwards, or two lie in one partition, or there is none.
    """
    address = tuple(sorted(spans))
    if not address:
        raise ValueError("an address has at least one span")
    for span in address:
        if not 0 <= span.start < span.end:
            raise ValueError(f"span {span} is empty or backwards")
    if len({span.place for span in address}) != len(address):
        raise ValueError(f"two spans of {address} lie in one partition")
    return address


@dataclass(frozen=True, slots=True)
class Assigned:
    """The group gave these partitions to this member; they stay silent until placed."""

    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class Revoked:
    """The group took these partitions away, with or without asking."""

    partitions: tuple[Partition, ...]
