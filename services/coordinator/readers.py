"""Threads that wait on the outside, so that the one that decides never does.

Each reads one source and puts events on the queue of its job, marked with the leadership for which
it was started: what a reader of an earlier leadership still had in hand is dropped there.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np

from common import wire
from common.core import events
from common.core.messages import Failed, Gradient
from common.errors import (
    ExpiredError,
    FutureFormatError,
    TruncatedError,
    UnavailableError,
    WireError,
)
from common.ports import LogRecord
from common.telemetry import Outage

if TYPE_CHECKING:
    from collections.abc import Callable
    from queue import SimpleQueue

    from common.core.events import CoordinatorEvent
    from common.core.messages import Reply
    from common.core.spans import Partition
    from common.metrics.leading import JobMetrics
    from common.ports import Board, Log
    from common.telemetry import EventLogger

T = TypeVar("T")
RawRecords: TypeAlias = tuple[tuple[int, bytes | None], ...]  # by offset

READ_RECORDS = 2000
WAIT_S = 0.2  # longest wait of one read: how soon a reader notices that it is over
REPLIES = 64  # gradients taken at once


class Heard(NamedTuple):
    """An event, and for which leadership it was read; 0 for those that concern every role."""

    leadership: int
    event: CoordinatorEvent


@dataclass(frozen=True, slots=True)
class Ear:
    """To whom the readers of one leadership speak."""

    heard: SimpleQueue[Heard]
    leadership: int
    logger: EventLogger
    fail: Callable[[BaseException], None]  # ends the job's loop

    def tell(self, event: CoordinatorEvent) -> None:
        """Queue an event."""
        self.heard.put(Heard(self.leadership, event))


class Reader(threading.Thread, ABC):
    """A thread that turns one source into events until it is stopped."""

    def __init__(self, name: str, ear: Ear) -> None:
        super().__init__(name=name, daemon=True)
        self.stopped = threading.Event()
        self._ear = ear
        self._outage = Outage(ear.logger, name)

    def run(self) -> None:
        """Read until stopped; a fault ends the job's loop, not just this thread."""
        try:
            while not self.stopped.is_set():
                try:
                    if self._read():
                        self._outage.over()
                    else:
                        self._outage.quiet()
                except UnavailableError as error:
                    self._outage.met(error)
                    self.stopped.wait(WAIT_S)
        except BaseException as fault:  # noqa: BLE001 -- raised again by the loop of the job
            self._ear.fail(fault)
        finally:
            self._close()

    @abstractmethod
    def _read(self) -> bool:
        """Wait for news and tell them; whether the source has answered for sure."""

    def _close(self) -> None:
        """Let go of connections."""


class TopicReader(Reader):
    """Follows the control or the updates topic from a position on."""

    def __init__(
        self,
        log: Log,
        partition: Partition,
        position: int,
        decode: Callable[[RawRecords], CoordinatorEvent],
        ear: Ear,
    ) -> None:
        super().__init__(partition.topic, ear)
        self._tail = log.tail(partition, position)
        self._decode = decode

    def _read(self) -> bool:
        records = list[LogRecord]()
        try:
            records = self._tail.read(READ_RECORDS, WAIT_S)
            if records:
                self._ear.tell(self._decode(tuple((r.offset, r.value) for r in records)))
        except (ExpiredError, TruncatedError) as error:
            self._give_up(f"acknowledged records were lost: {error}")
        except FutureFormatError as error:
            self._give_up(f"{self.name}: {error}; run a newer coordinator")
        return bool(records)

    def _give_up(self, reason: str) -> None:
        self._ear.tell(events.Trouble(reason))
        self.stopped.set()

    def _close(self) -> None:
        self._tail.close()


class ReplyReader(Reader):
    """Takes what workers sent to one epoch's leader, and turns away what is not well-formed.

    Args:
        board: The job's board.
        epoch: The leader's.
        length: P + B, numbers in a well-formed vector.
        metrics: Where those are counted that are not well-formed.
        ear: Who hears of the others.
    """

    def __init__(
        self, board: Board, epoch: int, length: int, metrics: JobMetrics, ear: Ear
    ) -> None:
        super().__init__("replies", ear)
        self._board = board
        self._epoch = epoch
        self._length = length
        self._metrics = metrics
        self._rejected = board.rejected

    def _read(self) -> bool:
        replies = self._board.pop_replies(self._epoch, REPLIES, WAIT_S)
        if self._board.rejected > self._rejected:
            self._metrics.refused("malformed", self._board.rejected - self._rejected)
            self._rejected = self._board.rejected
        good = tuple(sound for sound in map(self._sound, replies) if sound is not None)
        if good:
            self._ear.tell(events.RepliesRead(good))
        return True

    def _sound(self, reply: Reply) -> Reply | None:
        if not isinstance(reply, Gradient):
            return reply
        if reply.vector is None or reply.vector.shape != (self._length,):
            self._metrics.refused("malformed")
            found = None if reply.vector is None else reply.vector.shape
            self._ear.logger.warning(
                "gradient_malformed",
                epoch=reply.model.epoch,
                version=reply.model.version,
                worker=reply.worker,
                found=found,
                expected=(self._length,),
            )
            return None
        if not np.isfinite(reply.vector).all():
            detail = "the vector received is not finite"
            return Failed(reply.worker, reply.model, reply.batches, "not_finite", detail)
        return reply


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
