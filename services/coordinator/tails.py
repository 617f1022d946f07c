"""Follows the control and the updates topic of a job: records to events, trouble to trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from common import wire
from common.core import events
from common.errors import (
    ExpiredError,
    FutureFormatError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
    WireError,
)
from common.telemetry import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.events import CoordinatorEvent
    from common.core.spans import Partition
    from common.ports import Log
    from common.telemetry import EventLogger

T = TypeVar("T")
RawRecords: TypeAlias = tuple[tuple[int, bytes | None], ...]  # by offset

READ_RECORDS = 2000


class TopicTail:
    """Follows one of the two topics from a position on; never waits.

    Args:
        log: Kafka.
        partition: The topic's only one.
        position: Where to begin.
        decode: Makes an event of records.
        wake: Called when there is something to read.
        logger: Bound to the job.
    """

    def __init__(
        self,
        log: Log,
        partition: Partition,
        position: int,
        decode: Callable[[RawRecords], CoordinatorEvent],
        wake: Callable[[], None],
        logger: EventLogger,
    ) -> None:
        self._topic = partition.topic
        self._decode = decode
        self._outage = Outage(logger, partition.topic)
        self._given_up = False
        self._tail = log.tail(partition, position, wake)

    def read(self) -> CoordinatorEvent | None:
        """What is there now, as one event; None where nothing is."""
        if self._given_up:
            return None
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
            if records:
                self._outage.over()
                return self._decode(tuple((each.offset, each.value) for each in records))
            self._outage.quiet()
        except UnavailableError as error:
            self._outage.met(error)
        except (ExpiredError, TruncatedError) as error:
            return self._trouble(
                f"acknowledged records were lost: {error}; `doll job resume --after-loss` goes on"
                " from the best snapshot that the control and the updates topic still cover: what"
                " was learned since is read and learned again"
            )
        except FutureFormatError as error:
            return self._trouble(f"{self._topic}: {error}; run a newer coordinator")
        except UnknownTopicError:
            return self._trouble(missing(self._topic))
        return None

    def close(self) -> None:
        """Read no more."""
        self._tail.close()

    def _trouble(self, reason: str) -> events.Trouble:
        self._given_up = True
        return events.Trouble(reason)


def missing(topic: str) -> str:
    """Why a job is held one of whose topics is not there."""
    return (
        f"the topic {topic} of this job does not exist (any more): if it was deleted, its records"
        " are lost, and the job cannot go on; submit it anew under another name"
    )


def decoded_updates(records: RawRecords) -> events.UpdatesRead:
    """Parse records of the updates topic.

    Raises:
        FutureFormatError: If a newer program wrote one of them.
    """
    return events.UpdatesRead(
        tuple((o, _parsed(wire.decode_audit, o, value)) for o, value in records)
    )


def decoded_claims(records: RawRecords) -> events.ControlRead:
    """Parse records of the control topic.

    Raises:
        FutureFormatError: If a newer program wrote one of them.
    """
    return events.ControlRead(
        tuple((o, _parsed(wire.decode_claim, o, value)) for o, value in records)
    )


def _parsed(decode: Callable[[bytes], T], offset: int, value: bytes | None) -> T | None:
    try:
        return None if value is None else decode(value)
    except FutureFormatError as error:
        raise FutureFormatError(f"the record at offset {offset} is {error}") from error
    except WireError:
        return None
