"""Follows a job's control and updates topics: turns records and errors into events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from common.core import events
from common.errors import (
    ExpiredError,
    FutureFormatError,
    RecreatedError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
    WireError,
)
from common.telemetry.outages import Outage
from common.wire import messages as wire

if TYPE_CHECKING:
    from common.core.events import CoordinatorEvent
    from common.core.spans import LogPosition, Partition
    from common.kafka.port import Log
    from common.telemetry.logging import EventLogger

T = TypeVar("T")
# Offsets and values.
RawRecords: TypeAlias = tuple[tuple[int, bytes | None], ...]

READ_RECORDS = 2000
READ_S = 0.5


class TopicTail:
    """Follows one of the two topics from a position on.

    Args:
        position: Where to begin, and what is known of the log below.
        decode: Makes an event from records of one Kafka leader epoch, which is its second argument.
        wake: Called when there are records to read.
    """

    def __init__(
        self,
        log: Log,
        partition: Partition,
        position: LogPosition,
        decode: Callable[[RawRecords, int], CoordinatorEvent],
        wake: Callable[[], None],
        logger: EventLogger,
    ) -> None:
        self._topic = partition.topic
        self._decode = decode
        self._outage = Outage(logger, "kafka")
        self._given_up = False
        self._tail = log.tail(partition, position, wake, prompt=True)

    def read(self) -> Iterator[CoordinatorEvent]:
        """Yield events for the available records, without waiting."""
        if self._given_up:
            return
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
            if not records:
                self._outage.quiet()
                return
            self._outage.over()
            for epoch, run in groupby(records, key=attrgetter("epoch")):
                yield self._decode(tuple((each.offset, each.value) for each in run), epoch)
        except UnavailableError as error:
            self._outage.met(error)
        except (ExpiredError, TruncatedError) as error:
            again = isinstance(error, RecreatedError)
            what = f"the topic {self._topic} was deleted and recreated" if again else str(error)
            yield self._hold_required(
                f"acknowledged records were lost: {what}; `doll job resume --after-loss` continues"
                " from the best snapshot that the control and the updates topic still cover, and"
                " trains on the records since then again"
            )
        except FutureFormatError as error:
            yield self._hold_required(
                f"{self._topic}: {error}; start a newer version of the coordinator, then run `doll"
                " job resume`"
            )
        except UnknownTopicError:
            yield self._hold_required(deleted(self._topic))

    def read_up_to(self, end: int) -> RawRecords:
        """Wait for all records below an offset; the result may include later ones.

        Raises:
            ExpiredError, TruncatedError, UnknownTopicError, UnavailableError: As `Tail.read`.
        """
        records = list[tuple[int, bytes | None]]()
        while self._tail.position() < end:
            read = self._tail.read(READ_RECORDS, READ_S)
            records += ((record.offset, record.value) for record in read)
        return tuple(records)

    def close(self) -> None:
        """Stop reading."""
        self._tail.close()

    def _hold_required(self, reason: str) -> events.HoldRequired:
        self._given_up = True
        return events.HoldRequired(reason)


def deleted(topic: str) -> str:
    """Return the reason for holding a job whose control or updates topic does not exist."""
    return (
        f"the topic {topic} of this job does not exist (any more), and its records are lost; `doll"
        " job resume --after-loss --from-start` creates it again and starts again from version 0:"
        " all records that the topics still have are trained again"
    )


def missing(topic: str) -> str:
    """Return the reason for holding a job one of whose streams does not exist."""
    return (
        f"the topic {topic} of this job does not exist (any more); if it was deleted, its records"
        " are lost; create it again, then `doll job resume --from earliest` continues with its new"
        " records"
    )


def decoded_updates(records: RawRecords, epoch: int = -1) -> events.UpdatesRead:
    """Parse records of the updates topic.

    Raises:
        FutureFormatError: If a newer program wrote one of them.
    """
    return events.UpdatesRead(
        tuple((o, _parsed(wire.decode_audit, o, value)) for o, value in records), epoch
    )


def decoded_claims(records: RawRecords, epoch: int = -1) -> events.ControlRead:
    """Parse records of the control topic.

    Raises:
        FutureFormatError: If a newer program wrote one of them.
    """
    return events.ControlRead(
        tuple((o, _parsed(wire.decode_claim, o, value)) for o, value in records), epoch
    )


def _parsed(decode: Callable[[bytes], T], offset: int, value: bytes | None) -> T | None:
    try:
        return None if value is None else decode(value)
    except FutureFormatError as error:
        raise FutureFormatError(f"the record at offset {offset} is {error}") from error
    except WireError:
        return None
