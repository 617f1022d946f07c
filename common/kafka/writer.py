"""Appends records: idempotent, in order, retried for ever, and never wrong about what arrived.

All writers of a process share one producer. Its thread runs the client's callbacks, which only put
down whose record arrived where; each writer runs what is due of its own.
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

_ANY_PARTITION = -1  # the client's number for "let the partitioner choose"
_SERVE_S = 0.05  # how late the thread notices that it shall end, while records are on their way
_IDLE_S = 0.5  # between looks of an idle client: at its token, at whether anybody still writes
_LINGER_S = 10.0  # without writers: who writes now and then connects once
_RECORD_BYTES = 200  # that the client keeps of a record besides its key, value and headers


# The broker and the client do not agree any more which of a producer's records come next; or it has
# forgotten the producer. Another one begins anew with both.
_BROKEN = frozenset(
    {
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError._INCONSISTENT,  # noqa: SLF001 -- the library's name for its own errors
        KafkaError._FATAL,  # noqa: SLF001 -- likewise: what was wrong is told by the thread
    }
)


class SharedProducer:
    """One producer and its thread.

    It is over once nobody writes any more, by `close`, or by a fault that it cannot recover from.

    Args:
        settings: Where Kafka is.
        producer: Makes a client that writes.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        producer: Callable[[dict[str, Any]], Producer] = Producer,
    ) -> None:
        self.fault: DeliveryError | None = None  # of all of its writers
        self.settings = settings
        self._close_timeout_s = settings.close_timeout_s
        self.client = made(producer, writer_properties(settings))
        self._moved = set[KafkaWriter]()  # whose records were reported since the last look
        self._writers = WeakSet[KafkaWriter]()  # one that nobody holds any more writes nothing
        self._lock = threading.Lock()  # guards the set of writers, and whether there may be more
        self._ending = False
        self._wanted = threading.Event()  # there are records to report, or the end has come
        self._idle_since_s = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="kafka-producer", daemon=True)
        self._thread.start()

    def add(self, writer: KafkaWriter) -> bool:
        """Write for it, and tell it of a fault; False if this producer is over."""
        with self._lock:
            if self._ending or self.fault is not None:
                return False
            self._writers.add(writer)
            return True

    def drop(self, writer: KafkaWriter) -> None:
        """Tell this writer nothing more."""
        with self._lock:
            self._writers.discard(writer)

    def reported(self, writer: KafkaWriter) -> None:
        """One of this writer's records has been reported; called by the client, in the thread."""
        self._moved.add(writer)

    def appended(self) -> None:
        """A record is on its way."""
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        """Give up what does not arrive soon, and end the thread."""
        left: int = self.client.flush(self._close_timeout_s)
        if left:
            _LOGGER.warning("producer_closed_with_undelivered_records count=%d", left)
            self.client.purge()
        with self._lock:
            self._ending = True
        self._wanted.set()
        self._thread.join()
        self._fail(DeliveryError("the log was closed while somebody wrote to it"))

    def _serve(self) -> None:
        moved = set[KafkaWriter]()
        while self.fault is None and not self._is_over():
            self._wanted.clear()
            # Where records follow each other it waits for the next report inside the client: woken
            # for each record, too, it would take the interpreter's lock from who has just written.
            if not (len(self.client) or moved or self._ending):  # what comes now sets it again
                self._wanted.wait(_IDLE_S)
            try:
                self.client.poll(_SERVE_S if len(self.client) or moved else 0)
            except KafkaException as raised:  # nothing that this client can recover from
                self.client.purge()  # or its records would be kept until the end of the process
                self._fail(refusal_of("doll.", cause_of(raised), self.settings))
            moved, self._moved = self._moved, set()
            for writer in moved:
                writer.notify()

    def _is_over(self) -> bool:
        """Whether it was closed, or nobody has written and nothing was on its way for a while."""
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
    """The `Writer` port: its own count, callbacks and failure, on a producer that others share.

    Args:
        producer: The shared one.
        settings: How patient to be.
        check_topic: Raises where a topic does not exist; a producer would ask the broker to create
            it. Called once per topic.
        waits: Whether `append` waits for room.
        max_bytes: Room for undelivered records.
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
        # The first of each pair is changed by this writer's thread only, the second by the
        # producer's.
        self._appended = self._reported = 0
        self._appended_bytes = self._reported_bytes = 0
        self._moved_s = 0.0  # when a record was taken last, or the first of those that wait came
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
        self._appended += 1  # before the report of it may come
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
            self.poll()  # whose callbacks may append
            if reported and appended == self._appended:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._news.wait(left_s)

    def close(self) -> None:
        """See the port; what is not delivered within the settings' time is given up and logged."""
        with suppress(DeliveryError):
            self.flush(self._close_timeout_s)
        left = self._appended - self._reported
        if left:
            _LOGGER.warning("writer_closed_with_undelivered_records count=%d", left)
        self._producer.drop(self)

    def notify(self) -> None:
        """Wake whoever waits for reports; called by the producer's thread."""
        self._news.set()
        if self._on_ready is not None and (self._due or self._failure or self._producer.fault):
            self._on_ready()

    def _produce(self, topic: str, produce: Callable[[], object]) -> None:
        """Hand a record to the client, also to a topic that was deleted and made again.

        Raises:
            DeliveryError: If the client does not take it.
            UnknownTopicError: If there is no such topic.
            UnavailableError: If nobody can say now whether there is.
        """
        try:
            try:
                produce()
            except KafkaException as raised:
                if cause_of(raised).code() not in UNKNOWN | FORBIDDEN.keys():
                    raise
                # The client would not look for five minutes whether it is there again.
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
                    f"{topic}: Kafka has not taken {queued} bytes that were written before",
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
        """What became of a record; called by the client, in the producer's thread."""
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
    """Return the error of ours that says why a record was not taken."""
    if error.code() in FORBIDDEN:  # it did not arrive: another writer may, once it has the right
        right = forbidden(error, settings.right("write", f"topic {topic}"))
        return BrokenWriterError(right)
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return RecordTooLargeError(f"{topic} does not take so large a record: {error.str()}")
    message = f"{topic} has not taken a record, which is lost: {error.str()} ({error.name()})"
    if error.code() == KafkaError.INVALID_RECORD:
        message += "; a topic that is compacted takes no record without a key"
    return (BrokenWriterError if error.code() in _BROKEN else DeliveryError)(message)
