"""Starts and ends of partitions, requested for all at once, and without waiting if needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin._listoffsets import OffsetSpec

from common.core.spans import Partition
from common.kafka.client import cause_of
from common.kafka.port import Bounds

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._listoffsets import ListOffsetsResultInfo


# The end is the last stable offset. Records of open transactions are above it, up to the high
# watermark.
Which: TypeAlias = Literal["start", "end", "high watermark"]


class Offset(NamedTuple):
    """The start or the end of a log, with a leader epoch."""

    offset: int
    # Leader epoch of the first record; for an end, the current leader epoch. -1 if the broker has
    # no epochs.
    epoch: int


class OffsetsQuestion:
    """One request for the starts or ends of partitions.

    Args:
        admin: The client to use.
        partitions: At least one partition.
        which: The first retained offset, the offset after the last visible record, or the offset
            after the last record.
        timeout_s: Time after which the request counts as unanswered.
    """

    def __init__(
        self,
        admin: AdminClient,
        partitions: Iterable[Partition],
        which: Which,
        timeout_s: float,
    ) -> None:
        make = OffsetSpec.earliest if which == "start" else OffsetSpec.latest
        spec: OffsetSpec = make()  # type: ignore[no-untyped-call]  # the library's own
        wanted = {TopicPartition(*partition): spec for partition in partitions}
        everything = which == "high watermark"
        level = IsolationLevel.READ_UNCOMMITTED if everything else IsolationLevel.READ_COMMITTED
        self._answers: dict[TopicPartition, Future[ListOffsetsResultInfo]] = admin.list_offsets(
            wanted, isolation_level=level, request_timeout=timeout_s
        )

    def is_answered(self) -> bool:
        """Return True if `answers` does not have to wait."""
        return all(answer.done() for answer in self._answers.values())

    def answers(self) -> dict[Partition, Offset | KafkaError]:
        """Return offsets, or the errors in their place, by partition."""
        return {
            Partition(place.topic, place.partition): _offset_of(answer)
            for place, answer in self._answers.items()
        }


class BoundsQuestion:
    """Two requests, for the starts and the ends of partitions."""

    def __init__(
        self, admin: AdminClient, partitions: Iterable[Partition], timeout_s: float
    ) -> None:
        wanted = tuple(partitions)
        self._starts = OffsetsQuestion(admin, wanted, "start", timeout_s)
        self._ends = OffsetsQuestion(admin, wanted, "end", timeout_s)

    def is_answered(self) -> bool:
        """Return True if `answers` does not have to wait."""
        return self._starts.is_answered() and self._ends.is_answered()

    def answers(self) -> dict[Partition, Bounds | KafkaError]:
        """Return bounds, or the errors in their place, by partition."""
        ends = self._ends.answers()
        return {
            partition: _both(start, ends[partition])
            for partition, start in self._starts.answers().items()
        }


def _both(start: Offset | KafkaError, end: Offset | KafkaError) -> Bounds | KafkaError:
    if isinstance(start, KafkaError):
        return start
    return end if isinstance(end, KafkaError) else Bounds(start.offset, end.offset)


def _offset_of(answer: Future[ListOffsetsResultInfo]) -> Offset | KafkaError:
    try:
        found = answer.result()
        # A negative offset means that the client got none, because the partition's leader did not
        # answer.
        if found.offset < 0:
            return KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 -- the library's own name
        return Offset(found.offset, -1 if found.leader_epoch is None else found.leader_epoch)
    except KafkaException as raised:
        return cause_of(raised)
