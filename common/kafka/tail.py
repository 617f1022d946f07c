"""Tails: each reads one partition from a position on, over one or two shared consumers.

A broker answers a consumer's requests in turn, and a request may wait for records of other tails. A
new tail waits for that request, or for two if its position must be checked first: 0.2 s. So prompt
tails, for whose first records a caller waits, have a consumer of their own: 0.04 s.

Only a consumer's own thread assigns and unassigns partitions: the client delays such a call from
another thread for minutes. If two tails read the same partition at once, the second one gets
another consumer, because the client has one position per partition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from common.core.spans import Partition
from common.errors import (
    ExpiredError,
    ForbiddenError,
    OutsideError,
    RecreatedError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.kafka.client import (
    AT_END,
    FORBIDDEN,
    GROUP_REFUSED,
    NO_LEADERS,
    OUT_OF_RANGE,
    STALE_LEADER,
    UNKNOWN,
    Complaints,
    are_records,
    arrival_s,
    as_ours,
    cause_of,
    end_in,
    epoch_of,
    forbidden,
    made,
    offsets_of,
    runs_of,
)
from common.kafka.cursor import Cursor
from common.kafka.epochs import TopicsQuestion, TopicWatch, divergent_offset
from common.kafka.offsets import BoundsQuestion
from common.kafka.port import LogRecord
from common.kafka.settings import ALONE, tail_properties

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka.admin import AdminClient

    from common.core.spans import LogPosition
    from common.kafka.client import ClientMessage
    from common.kafka.port import Bounds
    from common.kafka.settings import KafkaSettings

_LOGGER = logging.getLogger(__name__)

# Time that the client waits for records. An order to the thread may wait this long, but no record.
_WAIT_S = 0.01
# Replaces `_WAIT_S` once the thread has had no order for `_QUIET_S`.
_QUIET_WAIT_S = 0.05
_QUIET_S = 1.0
# Maximum number of records of one call to the client.
_MANY_RECORDS = 2000
# Age at which an error is stale. While brokers are unavailable, the client repeats errors at least
# every 5 s.
_STALE_S = 6.0
# Limit of one tail's unread bytes. Above it, nothing is fetched until half of the limit is free.
_HELD_BYTES = 4 << 20
# Memory of a record besides its key and value.
_RECORD_BYTES = 200
# Longest wait for a broker's first answer.
_MEET_S = 1.0
# Time that a consumer without tails is kept, so that reading several topics in turn connects once.
_LINGER_S = 2.0
# How long a broker must report a topic as unknown: a broker that has just started may not know
# it for a moment.
_UNKNOWN_S = 2.0
_ASK_AGAIN_S = 0.5


class KafkaTail:
    """The `Tail` port: receives the records that its consumer's thread puts here."""

    def __init__(
        self,
        consumer: _TailConsumer,
        partition: Partition,
        known: LogPosition,
        on_ready: Callable[[], None] | None,
    ) -> None:
        self.partition = partition
        # Position of the consumer's thread, which alone uses it.
        self.cursor = Cursor(partition, known)
        # True while it is not assigned at the client, until half of it is read.
        self.is_full = False
        self._consumer = consumer
        self._position = known.offset
        self._on_ready = on_ready
        # Runs of consecutive records, with their size in bytes and the position after them.
        self._runs = deque[tuple[list[LogRecord], int, int]]()
        # The run that is being read. Its first `_taken` records have been returned.
        self._run: list[LogRecord] = []
        self._run_end = known.offset
        self._taken = 0
        # Each number is changed by one thread only: the consumer's thread, and the reader's.
        self._put_bytes = self._read_bytes = 0
        # Final error.
        self._fault: OutsideError | None = None
        # Error to raise once. A missing right is raised until it is granted.
        self._error: OutsideError | None = None
        # Time of `_error`.
        self._complained_s = 0.0
        self._news = threading.Event()

    # --- for the reader ---------------------------------------------------------------------------

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """See the port."""
        if timeout_s <= 0 and self._is_idle():
            return []
        deadline = time.monotonic() + timeout_s
        before = self._position
        while True:
            self._news.clear()
            records = self._take(max_records)
            if records or self._position > before:
                return records
            if self._fault is not None:
                raise self._fault
            if (error := self._error) is not None:
                if not isinstance(error, ForbiddenError):
                    self._error = None
                if not isinstance(error, UnavailableError) or not self._is_stale():
                    raise error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return []
            self._news.wait(left_s)

    def _is_idle(self) -> bool:
        """Return True if nothing has arrived since the last read, which left nothing."""
        some = self._runs or self._taken < len(self._run) or self._fault or self._error
        return not (some or self._news.is_set())

    def position(self) -> int:
        """See the port."""
        return self._position

    def close(self) -> None:
        """See the port."""
        self._consumer.drop(self)

    def _take(self, max_records: int) -> list[LogRecord]:
        records = list[LogRecord]()
        while len(records) < max_records and self._has_run():
            until = self._taken + max_records - len(records)
            records += self._run[self._taken : until]
            self._taken = min(until, len(self._run))
        if self._taken == len(self._run):
            self._position = self._run_end
        elif records:
            self._position = records[-1].offset + 1
        if records and self.is_full and self.has_room():
            self._consumer.go_on(self)
        return records

    def _has_run(self) -> bool:
        """Return True if there is a record; take the next run if the last one is read."""
        while self._taken == len(self._run) and self._runs:
            self._run, size, self._run_end = self._runs.popleft()
            self._taken = 0
            self._read_bytes += size
        return self._taken < len(self._run)

    # --- for the consumer's thread ----------------------------------------------------------------

    def put(self, records: list[LogRecord], end: int) -> None:
        """Add consecutive records, perhaps none, up to a position."""
        size = sum(map(_size, records))
        self._put_bytes += size
        self._runs.append((records, size, end))
        self._notify()

    def fail(self, fault: OutsideError) -> None:
        """Raise this at each read, once the records that are here have been read."""
        self._fault = self._fault or fault
        self._notify()

    def complain(self, error: OutsideError) -> None:
        """Raise this at the next read."""
        self._error, self._complained_s = error, time.monotonic()
        self._notify()

    def _is_stale(self) -> bool:
        """Return True if the error is so old that it may be over: the reader reads seldom."""
        return time.monotonic() - self._complained_s > _STALE_S

    def allow(self) -> None:
        """Forget a missing right, because something arrived."""
        if isinstance(self._error, ForbiddenError):
            self._error = None

    def overflows(self) -> bool:
        """Return True if this tail has too many unread bytes to continue."""
        return self._put_bytes - self._read_bytes > _HELD_BYTES

    def has_room(self) -> bool:
        """Return True if this tail has few enough unread bytes to fetch again."""
        return self._put_bytes - self._read_bytes <= _HELD_BYTES // 2

    def _notify(self) -> None:
        self._news.set()
        if self._on_ready is not None:
            self._on_ready()


class Tails:
    """Makes tails on as few consumers as possible.

    Args:
        settings: Settings of Kafka.
        admin: Returns the client for starts and ends of partitions.
        consumer: Makes a client that reads.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        admin: Callable[[], AdminClient],
        consumer: Callable[[dict[str, Any]], Consumer] = Consumer,
    ) -> None:
        self._settings = settings
        self._admin = admin
        self._made_consumer = consumer
        self._lock = threading.Lock()
        self._consumers: list[_TailConsumer] = []

    def open(
        self,
        partition: Partition,
        known: LogPosition,
        on_ready: Callable[[], None] | None,
        *,
        prompt: bool = False,
    ) -> KafkaTail:
        """Open a tail, on the first consumer with this `prompt` that can read the partition."""
        with self._lock:
            for consumer in self._consumers:
                if consumer.prompt == prompt and consumer.is_free(partition):
                    break
            else:
                consumer = _TailConsumer(
                    *(self._settings, self._admin, self._made_consumer),
                    *(self._lock, self._forget),
                    prompt=prompt,
                )
                self._consumers.append(consumer)
            tail = KafkaTail(consumer, partition, known, on_ready)
            consumer.add(tail)
            return tail

    def close(self) -> None:
        """End all consumers. Open tails raise an error."""
        with self._lock:
            consumers = tuple(self._consumers)
        for consumer in consumers:
            consumer.end()

    def _forget(self, consumer: _TailConsumer) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)


class _TailConsumer:
    """One consumer and its thread.

    Args:
        settings: Settings of Kafka.
        admin: Returns the client for starts and ends of partitions.
        consumer: Makes the client that reads.
        lock: Lock of `Tails`; guards the set of taken partitions.
        forget: Removes this consumer from `Tails`; called with the lock held.
        prompt: True if it is for prompt tails.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        admin: Callable[[], AdminClient],
        consumer: Callable[[dict[str, Any]], Consumer],
        lock: threading.Lock,
        forget: Callable[[_TailConsumer], None],
        *,
        prompt: bool,
    ) -> None:
        self.prompt = prompt
        self._admin = admin
        self._lock = lock
        self._forget = forget
        self._settings = settings
        # Partitions of tails that are not closed.
        self._taken = dict[Partition, KafkaTail]()
        # Deleted topics. The client has seen their leader epochs, and would never read a recreated
        # topic of the same name with lower epochs.
        self._gone = set[str]()
        # Orders of other threads to this one.
        self._orders = SimpleQueue["Callable[[], None]"]()
        self._ending = False
        # The fields below belong to the thread.
        self._reading = dict[Partition, KafkaTail]()
        # Topics that the client has requested.
        self._met = set[str]()
        self._assigned = set[Partition]()
        # Assigned partitions without a seek. Their messages do not count before it.
        self._unsought = set[Partition]()
        # Partitions that are not read until their topic's id is compared with their position's.
        self._unidentified = set[Partition]()
        self._watch = TopicWatch(admin, settings)
        # Partitions that the client stopped as out of range, with the offset at which the log
        # diverges, if the client reported it.
        self._stopped = dict[Partition, int | None]()
        # Partitions that may not have their position or may not exist, with the time since which
        # Kafka has reported them as unknown.
        self._suspects = dict[Partition, float | None]()
        # Request about all suspects.
        self._question: BoundsQuestion | None = None
        # Earliest time of the next request.
        self._ask_s = 0.0
        self._empty_since_s = self._busy_s = time.monotonic()
        # True if the client has reported a missing topic.
        self._misses_topics = False
        self._complaints = Complaints()
        self._client = made(consumer, tail_properties(settings) | {"error_cb": self._on_error})
        self._thread = threading.Thread(target=self._run, name="kafka-tails", daemon=True)
        self._thread.start()

    # --- for other threads ------------------------------------------------------------------------

    def is_free(self, partition: Partition) -> bool:
        """Return True if this consumer can take on a partition. The lock must be held."""
        is_taken = partition in self._taken or partition.topic in self._gone
        return not self._ending and not is_taken

    def add(self, tail: KafkaTail) -> None:
        """Start reading. The lock must be held."""
        self._taken[tail.partition] = tail
        self._orders.put(partial(self._begin, tail))

    def drop(self, tail: KafkaTail) -> None:
        """Stop reading for this tail."""
        with self._lock:
            if self._taken.get(tail.partition) is tail:
                del self._taken[tail.partition]
        self._orders.put(partial(self._stop, tail))

    def go_on(self, tail: KafkaTail) -> None:
        """Fetch again for a tail that was full."""
        self._orders.put(partial(self._refill, tail))

    def end(self) -> None:
        """End the thread and wait for it."""
        self._ending = True
        self._thread.join()

    # --- the consumer's thread --------------------------------------------------------------------

    def _run(self) -> None:
        fault: OutsideError = OutsideError("the log was closed while a reader used it")
        try:
            self._read_on()
        # This client cannot recover from the error.
        except KafkaException as raised:
            fault = OutsideError(f"reading: {cause_of(raised)}")
        # No reader may wait forever.
        finally:
            with self._lock:
                self._ending = True
                self._forget(self)
                left = tuple(self._taken.values())
            for tail in left:
                tail.fail(fault)
            self._client.close()

    def _read_on(self) -> None:
        while not self._ending:
            self._carry_out()
            if self._is_done():
                return
            quiet = time.monotonic() >= self._busy_s + _QUIET_S
            messages = self._client.consume(1, _QUIET_WAIT_S if quiet else _WAIT_S)
            if messages:
                messages += self._client.consume(_MANY_RECORDS, 0)
            self._distribute(cast("list[ClientMessage]", messages))
            self._seek_unsought()
            self._report_errors()
            self._look_at_topics()
            self._examine()

    def _carry_out(self) -> None:
        until_s = time.monotonic() + _WAIT_S
        while not self._orders.empty() and self._busy_s < until_s:
            self._orders.get()()
            self._busy_s = time.monotonic()

    def _is_done(self) -> bool:
        if self._reading:
            self._empty_since_s = time.monotonic()
            return False
        if time.monotonic() < self._empty_since_s + _LINGER_S:
            return False
        with self._lock:
            if not self._taken:
                self._ending = True
            return self._ending

    def _begin(self, tail: KafkaTail) -> None:
        if not self._reading or tail.partition.topic not in self._met:
            # The client requests an unknown topic by itself only after a second. If no broker
            # answers, the client retries by itself, too.
            self._met.add(tail.partition.topic)
            with suppress(KafkaException):
                self._client.list_topics(tail.partition.topic, timeout=_MEET_S)
        self._reading[tail.partition] = tail
        if tail.cursor.topic_id and self._watch.is_able:
            self._unidentified.add(tail.partition)
        else:
            self._assign(tail)

    def _stop(self, tail: KafkaTail) -> None:
        if self._reading.get(tail.partition) is tail:
            self._unassign(tail.partition)
            del self._reading[tail.partition]
            self._unidentified.discard(tail.partition)
            self._suspects.pop(tail.partition, None)

    def _refill(self, tail: KafkaTail) -> None:
        if tail.is_full and self._reading.get(tail.partition) is tail:
            tail.is_full = False
            tail.cursor = Cursor(tail.partition, tail.cursor.known)
            self._assign(tail)

    def _assign(self, tail: KafkaTail) -> None:
        """Fetch from the tail's position, and drop what was fetched before."""
        self._unassign(tail.partition)
        self._client.incremental_assign([tail.cursor.target()])
        self._assigned.add(tail.partition)
        # Only a seek makes the client check that the log still has the records that were read.
        if tail.cursor.epoch >= 0 and tail.cursor.position > 0:
            self._unsought.add(tail.partition)
            self._seek_unsought()

    def _seek_unsought(self) -> None:
        for partition in tuple(self._unsought):
            # The partition has not started yet: retried in a moment.
            with suppress(KafkaException):
                self._client.seek(self._reading[partition].cursor.target())
                self._unsought.discard(partition)

    def _unassign(self, partition: Partition) -> None:
        if partition in self._assigned:
            self._client.incremental_unassign([TopicPartition(*partition)])
            self._assigned.discard(partition)
            self._unsought.discard(partition)
            self._stopped.pop(partition, None)

    # --- messages ---------------------------------------------------------------------------------

    def _distribute(self, messages: list[ClientMessage]) -> None:
        for place, all_of in runs_of(messages):
            partition = Partition(*place)
            tail = self._reading.get(partition)
            if tail is None or partition not in self._assigned:
                self._leave_out(all_of[0])
                continue
            run, end = self._that_count(tail, all_of)
            if run or end is not None:
                tail.allow()
            before = tail.cursor.position
            first, last, again = tail.cursor.take(offsets_of(run))
            if end is not None and not again:
                again = tail.cursor.reach(end)
            if tail.cursor.position > before:
                records = [_record(message) for message in run[first:last]]
                if records:
                    tail.cursor.epoch = records[-1].epoch
                tail.put(records, tail.cursor.position)
            if again:
                self._assign(tail)
            elif tail.overflows():
                self._unassign(partition)
                tail.is_full = True
                # The reader has read meanwhile, and did not know that the tail was full.
                if tail.has_room():
                    self._refill(tail)

    def _that_count(
        self, tail: KafkaTail, run: list[ClientMessage]
    ) -> tuple[list[ClientMessage], int | None]:
        """Return the records among the messages, and the log's end if a message has it."""
        end = None
        if not are_records(run):
            end = end_in(run)
            # Errors are handled even before a seek. The client does not seek in a partition that it
            # has stopped, and reports the stop only once.
            run = self._without_errors(tail, run)
        return ([], None) if tail.partition in self._unsought else (run, end)

    def _without_errors(self, tail: KafkaTail, run: list[ClientMessage]) -> list[ClientMessage]:
        for message in run:
            error = message.error()
            if error is None or error.code() == AT_END:
                continue
            if error.code() in OUT_OF_RANGE:
                self._suspects[tail.partition] = None
                if tail.cursor.topic_id and self._watch.is_able:
                    self._unidentified.add(tail.partition)
                self._stopped[tail.partition] = divergent_offset(error)
            elif error.code() in UNKNOWN:
                self._suspects.setdefault(tail.partition, None)
            else:
                right = self._settings.right("read", f"topic {tail.partition.topic}")
                doing = f"reading {tail.partition}@{tail.cursor.position}"
                tail.complain(as_ours(error, doing, right))
                if error.code() in FORBIDDEN and tail.partition in self._assigned:
                    # The end is reported again once the right is granted.
                    self._assign(tail)
        return [message for message in run if message.error() is None]

    def _leave_out(self, message: ClientMessage) -> None:
        """Log if Kafka refuses the readers' group. Only the consumer that is not prompt logs it."""
        error = message.error()
        if error is not None and error.code() == GROUP_REFUSED and not self.prompt:
            right = forbidden(error, self._settings.right("read", f"group {ALONE}"))
            _LOGGER.warning("group_refused reason=%r", right)

    def _on_error(self, error: KafkaError) -> None:
        """Note an error of the client's own threads. Called inside `consume`."""
        if error.code() in UNKNOWN:
            self._misses_topics = True
        else:
            self._complaints(error)

    def _report_errors(self) -> None:
        try:
            self._complaints.raise_away("reading")
        except OutsideError as error:
            for tail in self._reading.values():
                tail.complain(error)

    # --- existence of positions and topics --------------------------------------------------------

    def _look_at_topics(self) -> None:
        """Compare topics' ids with those of the positions, and read the tails that wait for it."""
        urgent = {each.topic for each in self._unidentified}
        found = self._watch.look(self._named, urgent=urgent)
        # Most turns find nothing, and there may be hundreds of tails.
        for partition, tail in tuple(self._reading.items()) if found else ():
            answer = found.get(partition.topic) if tail.cursor.topic_id else None
            if isinstance(answer, KafkaError):
                if answer.code() in UNKNOWN:
                    self._suspects.setdefault(partition, None)
                elif partition in self._unidentified:
                    right = self._settings.right("read or describe", f"topic {partition.topic}")
                    tail.complain(as_ours(answer, f"id of {partition.topic}", right))
            elif answer is not None:
                self._identify(tail, answer)

    def _identify(self, tail: KafkaTail, topic_id: str) -> None:
        self._unidentified.discard(tail.partition)
        if topic_id and topic_id != tail.cursor.topic_id:
            text = f"the topic {tail.partition.topic} was deleted and recreated"
            self._give_up(tail, RecreatedError(f"{text}; its earlier records are lost"))
        elif tail.partition not in self._assigned and not tail.is_full:
            self._assign(tail)

    def _named(self) -> set[str]:
        """Return the topics whose positions have topic ids."""
        return {each.topic for each, tail in self._reading.items() if tail.cursor.topic_id}

    def _examine(self) -> None:
        """Request the bounds of suspects, or evaluate the answers, without waiting."""
        # The client reports missing topics once a second, but names them only in a text. So every
        # partition is suspect.
        if self._misses_topics:
            self._misses_topics = False
            for partition in self._assigned:
                self._suspects.setdefault(partition, None)
        now_s, timeout_s = time.monotonic(), self._settings.request_timeout_s
        if self._question is None:
            if self._suspects and now_s >= self._ask_s:
                self._question = BoundsQuestion(self._admin(), self._suspects, timeout_s)
        elif self._question.is_answered():
            question, self._question = self._question, None
            self._ask_s = now_s + _ASK_AGAIN_S
            stale = set[str]()
            for partition, found in question.answers().items():
                if isinstance(found, KafkaError) and found.code() == STALE_LEADER:
                    stale.add(partition.topic)
                if partition in self._suspects:
                    self._judge(self._reading[partition], found, now_s)
            if stale:
                # The request updates the client's metadata.
                TopicsQuestion(self._admin(), stale, timeout_s)

    def _judge(self, tail: KafkaTail, found: Bounds | KafkaError, now_s: float) -> None:
        partition, position = tail.partition, tail.cursor.position
        if isinstance(found, KafkaError):
            missing = found.code() in UNKNOWN or (
                found.code() == NO_LEADERS and self._is_missing(partition)
            )
            since_s = (self._suspects[partition] or now_s) if missing else None
            self._suspects[partition] = since_s
            if since_s is not None and now_s >= since_s + _UNKNOWN_S:
                self._give_up(tail, UnknownTopicError(f"{partition} does not exist (any more)"))
        elif partition in self._unidentified:
            # The topic's identity is unknown so far.
            return
        elif partition not in self._stopped:
            del self._suspects[partition]
        elif position < found.start:
            self._give_up(
                tail, ExpiredError(f"{partition} starts at {found.start}, not {position}")
            )
        elif (diverged := self._stopped[partition]) is not None or position > found.end:
            at = found.end if diverged is None else diverged
            lost = f"its records from offset {at} on, but was read up to offset {position}"
            self._give_up(tail, TruncatedError(f"{partition} lost {lost}", at))
        else:
            del self._suspects[partition]
            # The client does not seek in a partition that it has stopped.
            self._assign(tail)

    def _is_missing(self, partition: Partition) -> bool:
        try:
            found = self._client.list_topics(partition.topic, timeout=_MEET_S)
        except KafkaException:
            return False
        return partition.index not in found.topics[partition.topic].partitions

    def _give_up(self, tail: KafkaTail, fault: OutsideError) -> None:
        if isinstance(fault, RecreatedError | UnknownTopicError):
            with self._lock:
                self._gone.add(tail.partition.topic)
        self._stop(tail)
        tail.fail(fault)


def _record(message: ClientMessage) -> LogRecord:
    # The client returns -1 ms if there is no timestamp.
    written_s = max(arrival_s(message), 0.0)
    headers: tuple[tuple[str, bytes], ...] = ()
    # Records of this project have no headers.
    if given := message.headers():
        headers = tuple([(name, value or b"") for name, value in given])
    epoch = epoch_of(message)
    return LogRecord(message.offset(), message.key(), message.value(), written_s, epoch, headers)


def _size(record: LogRecord) -> int:
    return _RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
