"""Readers of positions and writers of the log in memory."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from common.errors import (
    BrokenWriterError,
    DeliveryError,
    ExpiredError,
    RecordTooLargeError,
    RecreatedError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.ports import Fetched, LogRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.core.spans import LogPosition, Partition, Span
    from common.testing.log import MemoryLog, Stored


MAX_RECORD_BYTES = 1_000_000  # Kafka's default
_SLICE_S = 0.02  # between looks at a queue that is full


def fetched(partition: Partition, run: list[Stored]) -> Fetched:
    """A run of stored records as readers hand it out."""
    return Fetched(
        partition,
        [each.offset for each in run],
        [each.value for each in run],
        run[0].arrival_s if run else 0.0,
        run[-1].arrival_s if run else 0.0,
        [each.epoch for each in run],
    )


def moved(position: LogPosition, run: Sequence[Stored], offset: int) -> LogPosition:
    """A position after a run of records was read, which no others follow below an offset."""
    return position._replace(offset=offset, epoch=run[-1].epoch if run else position.epoch)


class MemorySpanReader:
    """The `SpanReader` port."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """See the port.

        Raises:
            ExpiredError: If the log starts above `span.start`.
            UnavailableError: If the records did not come within `timeout_s`.
        """
        with self._log.here():
            stored = self._log.stored(span.place)
            self._log.wait_until(lambda: stored.end >= span.end, timeout_s)
            if stored.start > span.start:
                raise ExpiredError(f"{span} has expired: its partition starts at {stored.start}")
            if stored.end < span.end:
                raise UnavailableError(f"{span} is not there: its partition ends at {stored.end}")
            run = stored.read(span.start, span.end - span.start)
            return fetched(span.place, [each for each in run if each.offset < span.end])

    def close(self) -> None:
        """See the port."""


class MemoryTail:
    """The `Tail` port."""

    def __init__(
        self,
        log: MemoryLog,
        partition: Partition,
        position: LogPosition,
        on_ready: Callable[[], None] | None,
    ) -> None:
        self._log = log
        self._partition = partition
        self._position = position
        self._on_ready = on_ready

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """See the port.

        Raises:
            ExpiredError: If the position is below the log's start.
            TruncatedError: If the log lost records below the position.
            RecreatedError: If it is another topic's.
            UnknownTopicError: If there is no such partition.
        """
        with self._log.here():
            self._log.wait_until(self._is_ready, timeout_s)
            at, stored = self._position, self._log.stored(self._partition)
            if loss := self._log.loss(self._partition, at):
                if loss.recreated:
                    raise RecreatedError(f"{self._partition} is another topic's")
                raise TruncatedError(f"{self._partition} was cut", loss.divergent_offset)
            if at.offset < stored.start:
                raise ExpiredError(f"{self._partition} starts at {stored.start}")
            run = stored.read(at.offset, max_records)
            whole = len(run) < max_records  # then nothing but holes is left
            self._position = moved(at, run, stored.end if whole else run[-1].offset + 1)
            return [
                LogRecord(each.offset, each.key, each.value, each.arrival_s, each.epoch)
                for each in run
            ]

    def position(self) -> int:
        """See the port."""
        return self._position.offset

    def close(self) -> None:
        """See the port."""
        self._log.forget(self)

    def tell_if_ready(self, *, away: bool) -> None:
        """Call whoever wants to know, if there is something; the log's lock must be held."""
        if self._on_ready is not None and (away or self._is_ready()):
            self._on_ready()

    def _is_ready(self) -> bool:
        at = self._position
        try:
            end = self._log.stored(self._partition).end
            return at.offset != end or self._log.loss(self._partition, at) is not None
        except UnknownTopicError:
            return True


class _Queued(NamedTuple):
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    on_delivered: Callable[[int | None], None] | None
    on_failed: Callable[[DeliveryError], None] | None

    def size(self) -> int:
        return len(self.value or b"") + len(self.key or b"")


class MemoryWriter:
    """The `Writer` port: records stay in its queue while the broker is away."""

    def __init__(
        self,
        log: MemoryLog,
        *,
        waits: bool,
        max_bytes: int,
        on_ready: Callable[[], None] | None,
    ) -> None:
        self._log = log
        self._waits = waits
        self._max_bytes = max_bytes
        self._on_ready = on_ready
        self._queue: deque[_Queued] = deque()
        self._due: deque[Callable[[], None]] = deque()  # delivery callbacks
        self._failure: DeliveryError | None = None

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        partition: int | None = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),  # noqa: ARG002 -- no port reads them back
        on_delivered: Callable[[int | None], None] | None = None,
        on_failed: Callable[[DeliveryError], None] | None = None,
    ) -> None:
        """See the port.

        Raises:
            RecordTooLargeError: If no topic takes so large a record.
            DeliveryError: If an earlier record can not be delivered.
            UnknownTopicError: If there is no such topic.
            UnavailableError: If the queue is full, and this writer does not wait.
        """
        self._raise_failure()
        if value is not None and len(value) > MAX_RECORD_BYTES:
            raise RecordTooLargeError(f"{topic} refuses a record of {len(value)} bytes")
        with suppress(UnavailableError):  # then it waits in the queue, known or not
            self._log.partitions(topic)
        record = _Queued(topic, partition, key, value, on_delivered, on_failed)
        while self._queue and self._queued_bytes() + record.size() > self._max_bytes:
            if not self._waits:
                raise UnavailableError(f"{topic}: {self._queued_bytes()} bytes wait to be sent")
            self._log.await_here(_SLICE_S)
            self._send()
            self._raise_failure()
        self._queue.append(record)
        self._send()

    def poll(self) -> None:
        """See the port.

        Raises:
            DeliveryError: If a record could not be delivered.
        """
        self._send()
        while self._due:
            self._due.popleft()()
        self._raise_failure()

    def flush(self, timeout_s: float) -> bool:
        """See the port.

        Raises:
            DeliveryError: If a record could not be delivered.
        """
        self._log.await_here(timeout_s)
        self.poll()
        return not self._queue

    def close(self) -> None:
        """See the port."""
        with suppress(DeliveryError):
            self.flush(0.0)

    def lose_place(self) -> None:
        """Do what a broker does that knows nothing of this writer any more."""
        self._failure = BrokenWriterError("writing: the sequence of its records is broken")
        self._tell()

    def _queued_bytes(self) -> int:
        return sum(map(_Queued.size, self._queue))

    def _send(self) -> None:
        while self._queue:
            record = self._queue[0]
            try:
                with self._log.here():
                    offset = self._log.append(
                        record.topic, record.partition, record.key, record.value
                    )
            except UnavailableError:
                return
            except DeliveryError as error:
                self._refuse(record, error)
            except UnknownTopicError as error:
                self._refuse(record, DeliveryError(str(error)))
            else:
                if record.on_delivered is not None:
                    known = None if self._log.tells_no_offsets else offset
                    self._due.append(partial(record.on_delivered, known))
            self._queue.popleft()
            self._tell()

    def _refuse(self, record: _Queued, error: DeliveryError) -> None:
        if record.on_failed is None:
            self._failure = self._failure or error
        else:
            self._due.append(partial(record.on_failed, error))

    def _tell(self) -> None:
        if self._on_ready is not None and (self._due or self._failure):
            self._on_ready()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
