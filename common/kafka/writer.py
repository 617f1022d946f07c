"""Appends records: idempotent, in order, retried forever, and never wrong about delivery.

All writers of a process share one producer. Its thread runs the client's callbacks, which only
record deliveries; each writer runs its own callbacks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from confluent_kafka import KafkaError, KafkaException, Producer

from common.errors import (
    BrokenWriterError,
    DeliveryError,
    OutsideError,
    RecordTooLargeError,
    UnavailableError,
)
from common.kafka.client import FORBIDDEN, UNKNOWN, as_ours, cause_of, forbidden, made
from common.kafka.settings import writer_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import Message

    from common.kafka.settings import KafkaSettings

_LOGGER = logging.getLogger(__name__)

# The client's number for "let the partitioner choose".
_ANY_PARTITION = -1
# How late the thread notices its end while records are under way.
_SERVE_S = 0.05
# Interval of an idle client's checks of its token and of its writers.
_IDLE_S = 0.5
# Time that a producer without writers is kept, so that occasional writers connect once.
_LINGER_S = 10.0
# Memory of a record in the client besides its key, value and headers.
_RECORD_BYTES = 200


# Broker and client disagree on the producer's next sequence number, or the broker has forgotten the
# producer. A new producer recovers from either.
_BROKEN = frozenset(
    {
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError._INCONSISTENT,  # noqa: SLF001 -- the library's name for its own errors
        # The producer's thread reports the cause.
        KafkaError._FATAL,  # noqa: SLF001 -- as above
    }
)


class SharedProducer:
    """One producer and its thread.

    It ends when nobody writes any more, by `close`, or by a fault that it cannot recover from.

    Args:
        settings: Settings of Kafka.
        producer: Makes a client that writes.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        producer: Callable[[dict[str, Any]], Producer] = Producer,
    ) -> None:
        # Fault that all of its writers raise.
        self.fault: DeliveryError | None = None
        self.settings = settings
        self._close_timeout_s = settings.close_timeout_s
        self.client = made(producer, writer_properties(settings))
        # Writers with reports since the last turn.
        self._moved = set[KafkaWriter]()
        # Weak, because a writer without owner writes nothing.
        self._writers = WeakSet[KafkaWriter]()
        # Guards the set of writers and `_ending`.
        self._lock = threading.Lock()
        self._ending = False
        # Set if there are records to report or the end has come.
        self._wanted = threading.Event()
        self._idle_since_s = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="kafka-producer", daemon=True)
        self._thread.start()

    def add(self, writer: KafkaWriter) -> bool:
        """Add a writer, which then receives faults; return False if this producer has ended."""
        with self._lock:
            if self._ending or self.fault is not None:
                return False
            self._writers.add(writer)
            return True

    def drop(self, writer: KafkaWriter) -> None:
        """Stop notifying this writer."""
        with self._lock:
            self._writers.discard(writer)

    def reported(self, writer: KafkaWriter) -> None:
        """Note a report for this writer. Called by the client, in the producer's thread."""
        self._moved.add(writer)

    def appended(self) -> None:
        """Wake the thread for a new record."""
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        """Flush, abandon records that do not arrive soon, and end the thread."""
        left: int = self.client.flush(self._close_timeout_s)
        if left:
            _LOGGER.warning("producer_closed_with_undelivered_records count=%d", left)
            self.client.purge()
        with self._lock:
            self._ending = True
        self._wanted.set()
        self._thread.join()
        self._fail(DeliveryError("the log was closed while a writer used it"))

    def _serve(self) -> None:
        moved = set[KafkaWriter]()
        while self.fault is None and not self._is_over():
            self._wanted.clear()
            # The thread waits for reports inside the client while records follow each other.
            # Waking it for each record would take the interpreter's lock from the writing thread.
            # Later records set the event again.
            if not (len(self.client) or moved or self._ending):
                self._wanted.wait(_IDLE_S)
            try:
                self.client.poll(_SERVE_S if len(self.client) or moved else 0)
            # This client cannot recover from the error.
            except KafkaException as raised:
                # Otherwise its records would be kept until the process ends.
                self.client.purge()
                self._fail(refusal_of("doll.", cause_of(raised), self.settings))
            moved, self._moved = self._moved, set()
            for writer in moved:
                writer.notify()

    def _is_over(self) -> bool:
        """Return True if it was closed, or has had no writers and records for `_LINGER_S`."""
        with self._lock:
            if self._writers or len(self.client):
                self._idle_since_s = time.monotonic()
            elif time.monotonic() >= self._idle_since_s + _LINGER_S:
                self._ending = True
            return self._ending

    def _fail(self, fault: DeliveryError) -> None:
        self.fault = fault
        with self._lock:
            writers = tuple(self._writers)
        for writer in writers:
            writer.notify()


class KafkaWriter:
    """The `Writer` port: its own counts, callbacks and failure, on a shared producer.

    Args:
        producer: The shared producer.
        settings: Has the timeouts.
        check_topic: Raises if a topic does not exist, because a producer would ask the broker to
            create it. Called once per topic.
        waits: True if `append` waits for room.
        max_bytes: Limit of undelivered records.
        on_ready: Called by the producer's thread when `poll` has something to do.
    """

    def __init__(
        self,
        producer: SharedProducer,
        settings: KafkaSettings,
        check_topic: Callable[[str], object],
        *,
        waits: bool,
        max_bytes: int,
        on_ready: Callable[[], None] | None,
    ) -> None:
        self._producer = producer
        self._close_timeout_s = settings.close_timeout_s
        self._request_timeout_s = settings.request_timeout_s
        self._check_topic = check_topic
        self._waits = waits
        self._max_bytes = max_bytes
        self._on_ready = on_ready
        self._checked: set[str] = set()
        # Only this writer's thread changes the first of each pair, only the producer's thread the
        # second.
        self._appended = self._reported = 0
        self._appended_bytes = self._reported_bytes = 0
        # Time of the last delivery, or of the first waiting record.
        self._moved_s = 0.0
        self._due = deque["Callable[[], None]"]()
        self._failure: DeliveryError | None = None
        self._news = threading.Event()

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        partition: int | None = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivered: Callable[[int | None], None] | None = None,
        on_failed: Callable[[DeliveryError], None] | None = None,
    ) -> None:
        """See the port."""
        self._raise_failure()
        if topic not in self._checked:
            self._check_topic(topic)
            self._checked.add(topic)
        size = _RECORD_BYTES + len(value or b"") + len(key or b"")
        size += sum(len(name) + len(content) for name, content in headers)
        self._await_room(topic, size)
        if self._appended == self._reported:
            self._moved_s = time.monotonic()
        # Counted first, because the report may arrive before `produce` returns.
        self._appended += 1
        self._appended_bytes += size
        produce = partial(
            self._producer.client.produce,
            topic,
            value,
            key,
            _ANY_PARTITION if partition is None else partition,
            partial(self._report, size, on_delivered, on_failed),
            headers=list(headers) or None,
        )
        try:
            self._produce(topic, produce)
        except OutsideError:
            self._appended -= 1
            self._appended_bytes -= size
            raise
        self._producer.appended()

    @property
    def waiting_s(self) -> float:
        """See the port."""
        waits = self._appended != self._reported
        return time.monotonic() - self._moved_s if waits else 0.0

    def poll(self) -> None:
        """See the port."""
        while self._due:
            self._due.popleft()()
        self._raise_failure()

    def flush(self, timeout_s: float) -> bool:
        """See the port."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            appended = self._appended
            reported = appended == self._reported
            # Its callbacks may append records.
            self.poll()
            if reported and appended == self._appended:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._news.wait(left_s)

    def close(self) -> None:
        """See the port. Records that are not delivered within the settings' time are logged."""
        with suppress(DeliveryError):
            self.flush(self._close_timeout_s)
        left = self._appended - self._reported
        if left:
            _LOGGER.warning("writer_closed_with_undelivered_records count=%d", left)
        self._producer.drop(self)

    def notify(self) -> None:
        """Wake threads that wait for reports. Called by the producer's thread."""
        self._news.set()
        if self._on_ready is not None and (self._due or self._failure or self._producer.fault):
            self._on_ready()

    def _produce(self, topic: str, produce: Callable[[], object]) -> None:
        """Pass a record to the client, even for a topic that was deleted and created again.

        Raises:
            DeliveryError: If the client refuses it.
            UnknownTopicError: If the topic does not exist.
            UnavailableError: If the topic's existence is unknown now.
        """
        try:
            try:
                produce()
            except KafkaException as raised:
                if cause_of(raised).code() not in UNKNOWN | FORBIDDEN.keys():
                    raise
                # The client by itself would not look for the topic again for five minutes.
                self._check_topic(topic)
                self._look_again(topic)
                produce()
        except KafkaException as raised:
            raise self._refusal(topic, cause_of(raised)) from raised

    def _look_again(self, topic: str) -> None:
        try:
            self._producer.client.list_topics(topic, timeout=self._request_timeout_s)
        except KafkaException as raised:
            raise as_ours(cause_of(raised), f"writing to {topic}") from raised

    def _await_room(self, topic: str, size: int) -> None:
        while True:
            self._news.clear()
            queued = self._appended_bytes - self._reported_bytes
            if queued == 0 or queued + size <= self._max_bytes:
                return
            if not self._waits:
                raise UnavailableError(
                    f"{topic}: Kafka has not confirmed {queued} bytes that were written before",
                    "kafka",
                )
            self._news.wait()
            self._raise_failure()

    def _report(
        self,
        size: int,
        on_delivered: Callable[[int | None], None] | None,
        on_failed: Callable[[DeliveryError], None] | None,
        error: KafkaError | None,
        message: Message,
    ) -> None:
        """Note a record's delivery or failure. Called by the client, in the producer's thread."""
        if error is None:
            if on_delivered is not None:
                self._due.append(partial(on_delivered, message.offset()))
        elif on_failed is not None:
            self._due.append(partial(on_failed, self._refusal(str(message.topic()), error)))
        elif self._failure is None:
            self._failure = self._refusal(str(message.topic()), error)
        self._moved_s = time.monotonic()
        self._reported += 1
        self._reported_bytes += size
        self._producer.reported(self)

    def _refusal(self, topic: str, error: KafkaError) -> DeliveryError:
        return refusal_of(topic, error, self._producer.settings)

    def _raise_failure(self) -> None:
        failure = self._producer.fault or self._failure
        if failure is not None:
            raise failure


def refusal_of(topic: str, error: KafkaError, settings: KafkaSettings) -> DeliveryError:
    """Return the error that says why a record was refused."""
    # The record did not arrive. Another writer may succeed once it has the right.
    if error.code() in FORBIDDEN:
        right = forbidden(error, settings.right("write", f"topic {topic}"))
        return BrokenWriterError(right)
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return RecordTooLargeError(f"{topic}: the record is too large: {error.str()}")
    message = f"{topic}: Kafka refused a record, which is lost: {error.str()} ({error.name()})"
    if error.code() == KafkaError.INVALID_RECORD:
        message += "; a compacted topic accepts no record without a key"
    return (BrokenWriterError if error.code() in _BROKEN else DeliveryError)(message)
