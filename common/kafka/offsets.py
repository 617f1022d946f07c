"""What partitions hold, asked of all at once, and without waiting where one must not."""

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


# The end is the last stable offset. Records of open transactions lie above it, up to the high
# watermark.
Which: TypeAlias = Literal["start", "end", "high watermark"]


class Offset(NamedTuple):
    """An end of a log."""

    offset: int
    epoch: int  # of its record; of the log's end, the leader epoch now; -1: the broker has none


class OffsetsQuestion:
    """One request about where some partitions start or end.

    Args:
        admin: The client to ask.
        partitions: At least one.
        which: The first retained offset, the one after the last that a reader may see, or the one
            after the last.
        timeout_s: After which every answer is that none came.
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
        """Whether `answers` need not wait."""
        return all(answer.done() for answer in self._answers.values())

    def answers(self) -> dict[Partition, Offset | KafkaError]:
        """Offsets, or why there is none, by partition."""
        return {
            Partition(place.topic, place.partition): _offset_of(answer)
            for place, answer in self._answers.items()
        }


class BoundsQuestion:
    """Two such requests, about both ends."""

    def __init__(
        self, admin: AdminClient, partitions: Iterable[Partition], timeout_s: float
    ) -> None:
        wanted = tuple(partitions)
        self._starts = OffsetsQuestion(admin, wanted, "start", timeout_s)
        self._ends = OffsetsQuestion(admin, wanted, "end", timeout_s)

    def is_answered(self) -> bool:
        """Whether `answers` need not wait."""
        return self._starts.is_answered() and self._ends.is_answered()

    def answers(self) -> dict[Partition, Bounds | KafkaError]:
        """Bounds, or why there are none, by partition."""
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
        if found.offset < 0:  # the client's number for none: this partition's leader did not answer
            return KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 -- the library's own name
        return Offset(found.offset, -1 if found.leader_epoch is None else found.leader_epoch)
    except KafkaException as raised:
        return cause_of(raised)
