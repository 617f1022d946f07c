"""Write dead letters: undecodable records, and the addresses of quarantined batches.

Delivery is at least once: a dead letter written twice has the same key. Each dead letter holds the
bytes of its record, so the bad records are read back from Kafka. Reading is slow and runs in an
actor of its own. A leader publishes a snapshot only after the dead letters ordered before it are
delivered, because a leader that starts from the snapshot does not write them again.

A record that a producer could write may be too large to write again: a client refuses records above
its own limit, and a dead-letter topic may have a lower limit than its stream. In that case the dead
letter holds as much of the beginning of the record as Kafka accepts, and says that it is cut. The
address is always complete.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from common.core.commands import DeadLetterBatch, DeadLetterRecords
from common.core.spans import Span
from common.errors import (
    BrokenWriterError,
    DeliveryError,
    ExpiredError,
    RecordTooLargeError,
    UnavailableError,
    UnknownTopicError,
)
from common.kafka.dead_letters import EncodedDeadLetter, encode_dead_letter, encode_dead_letters
from common.kafka.names import dead_letter_topic
from common.kafka.port import Fetched, Log, NewTopic, SpanReader, Writer
from common.telemetry.outages import Outage

if TYPE_CHECKING:
    from common.runtime.supervisor import Supervised, Supervisor
    from common.telemetry.logging import EventLogger
    from common.telemetry.metrics.coordinator import CoordinatorMetrics

_Refused: TypeAlias = "list[tuple[EncodedDeadLetter, DeliveryError]]"


def write(dead_letters: Iterable[EncodedDeadLetter], writer: Writer, timeout_s: float) -> bool:
    """Write dead letters and wait until Kafka has them, cutting those that are too large.

    Returns:
        False if delivery took longer than `timeout_s`. Some may have arrived.

    Raises:
        DeliveryError: If a dead letter cannot be delivered, not even with its address alone.
        UnknownTopicError: If the dead-letter topic does not exist.
        UnavailableError: If the broker is unavailable.
    """
    waiting = dead_letters
    while True:
        refused: _Refused = []
        for dead_letter in waiting:
            _append(dead_letter, writer, refused)
        if not writer.flush(timeout_s):
            return False
        if not refused:
            return True
        waiting = [_shortened(dead_letter, error) for dead_letter, error in refused]


def _append(dead_letter: EncodedDeadLetter, writer: Writer, refused: _Refused) -> None:
    note = partial(_note, refused, dead_letter)
    try:
        writer.append(
            dead_letter.topic,
            dead_letter.value,
            key=dead_letter.key,
            headers=dead_letter.headers,
            on_failed=note,
        )
    except RecordTooLargeError as error:
        note(error)


def _note(refused: _Refused, dead_letter: EncodedDeadLetter, error: DeliveryError) -> None:
    refused.append((dead_letter, error))


def _shortened(dead_letter: EncodedDeadLetter, error: DeliveryError) -> EncodedDeadLetter:
    shorter = dead_letter.shortened() if isinstance(error, RecordTooLargeError) else None
    if shorter is None:
        raise error
    return shorter


READ_S = 5.0
# Most offsets that one read covers. The read includes the good records between the bad ones, and a
# Kafka record may have a megabyte.
READ_RECORDS = 100
RETRY_S = 0.5
FLUSH_S = 5.0

# The bad records of one claim, or one quarantined batch.
DeadLetterCommand: TypeAlias = DeadLetterRecords | DeadLetterBatch


class SharedSpans:
    """Shares one span reader among all jobs of a process. Safe to use from several threads."""

    def __init__(self, log: Log) -> None:
        self._source = log
        self._lock = threading.Lock()
        self._reader: SpanReader | None = None

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """Read a span as any `SpanReader` does; calls run one at a time."""
        with self._lock:
            if self._reader is None:
                self._reader = self._source.spans()
            return self._reader.read(span, timeout_s)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()


class DeadLetters:
    """Dead letters of one job.

    Args:
        spans: Reads bad records back.
        steps: Runs the slow work.
        wake: Called after each delivered order.
        fail: Ends the job's part in this process with a fault.
    """

    def __init__(  # noqa: PLR0913 -- what dead letters are made of
        self,
        job: str,
        *,
        log: Log,
        spans: SpanReader,
        steps: Supervisor,
        metrics: CoordinatorMetrics,
        logger: EventLogger,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._job = job
        self._source = log
        self._spans = spans
        self._steps = steps
        self._log = logger
        self._wake = wake
        self._fail = fail
        self._metrics = metrics
        self._outage = Outage(logger, "kafka")
        self._queue = deque[DeadLetterCommand]()
        self._ordered = 0
        self._delivered = 0
        # Number of orders that the service's log has reported.
        self._logged = 0
        # None until the first dead letter.
        self._running: Supervised | None = None
        self._again_at = 0.0
        self._writer: Writer | None = None

    @property
    def all_delivered(self) -> bool:
        """True if Kafka has every dead letter that was ordered."""
        return self._delivered == self._ordered

    def add(self, dead_letters: DeadLetterCommand) -> None:
        """Order dead letters."""
        self._ordered += 1
        self._queue.append(dead_letters)
        if self._running is None:
            name = f"{self._job} (dead letters)"
            self._running = self._steps.begin(name, lambda _wake, _fault: self)
        self._running.wake()

    def end(self) -> None:
        """Stop writing. The next leader writes the dead letters that were not delivered."""
        if self._running is not None:
            self._running.end()

    # --- turns ------------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Write the ordered dead letters. Duplicates are recognized by their offsets."""
        # New orders wake the actor before the pause is over, too.
        if monotonic() < self._again_at:
            return self._again_at
        try:
            while self._queue:
                if not self._deliver(self._queue[0]):
                    self._again_at = monotonic() + RETRY_S
                    return self._again_at
                self._queue.popleft()
                self._delivered += 1
                self._wake()
        except BaseException as fault:  # noqa: BLE001 -- raised again by the job's own actor
            self._fail(fault)
            return None
        return inf

    def close(self) -> None:
        """Close the writer (called by the supervisor)."""
        if self._writer is not None:
            self._writer.close()

    def _deliver(self, dead_letters: DeadLetterCommand) -> bool:
        """Write one order, and return False if Kafka has not accepted all of it yet."""
        if self._logged == self._delivered:
            self._logged += 1
            self._log_command(dead_letters)
        try:
            if self._writer is None:
                self._writer = self._source.writer()
            if not write(written(self._job, dead_letters, self._spans), self._writer, FLUSH_S):
                self._outage.watch(self._writer)
                return False
        # A new writer writes the whole order again.
        except BrokenWriterError as error:
            self._outage.met(error)
            self.close()
            self._writer = None
            return False
        except UnavailableError as error:
            self._outage.met(error)
            return False
        # Perhaps the dead-letter topic was deleted. That may appear as either error, because a
        # writer looks a topic up only once.
        except (UnknownTopicError, DeliveryError):
            if not self._make_topics(dead_letters):
                raise
            return False
        self._metrics.dead_letters.inc(_count(dead_letters))
        self._outage.over()
        return True

    def _make_topics(self, dead_letters: DeadLetterCommand) -> bool:
        """Create dead-letter topics that were deleted. Their old records are lost.

        Returns:
            True to try again: a topic was missing, or Kafka is unavailable.
        """
        if isinstance(dead_letters, DeadLetterBatch):
            topics = {dead_letter_topic(span.topic) for span in dead_letters.record.batch.address}
        else:
            topics = {dead_letter_topic(record.topic) for record in dead_letters.skipped}
        try:
            missing = sorted(topics - self._source.describe(topics).keys())
            if missing:
                self._source.create_topics([NewTopic(each, kept_forever=True) for each in missing])
                self._log.warning("dead_letter_topic_missing", topics=", ".join(missing))
        except UnavailableError as error:
            self._outage.met(error)
            return True
        return bool(missing)

    def _log_command(self, dead_letters: DeadLetterCommand) -> None:
        if isinstance(dead_letters, DeadLetterBatch):
            record = dead_letters.record
            self._log.error(
                "batch_quarantined",
                epoch=record.epoch,
                batch=record.batch.offset,
                reason=record.reason,
            )
        else:
            records, first = _count(dead_letters), dead_letters.skipped[0]
            self._log.info("dead_letters", records=records, topic=first.topic, reason=first.reason)


def written(
    job: str, dead_letters: DeadLetterCommand, spans: SpanReader
) -> Iterator[EncodedDeadLetter]:
    """Yield the encoded dead letters, with the bytes of the records that Kafka still has.

    Raises:
        UnavailableError: If the records cannot be read now.
    """
    if isinstance(dead_letters, DeadLetterBatch):
        yield from encode_dead_letters(job, dead_letters.record, dead_letters.topic_ids)
        return
    named = {
        (record.topic, record.partition, offset): record
        for record in dead_letters.skipped
        for offset in record.offsets
    }
    for span in _spans_over(sorted(named)):
        try:
            fetched = spans.read(span, READ_S)
            values = dict(zip(fetched.offsets, fetched.values, strict=True))
        except (ExpiredError, UnknownTopicError):
            # The records have expired. The dead letters still name them.
            values = {}
        for offset in range(span.start, span.end):
            record = named.get((*span.place, offset))
            if record is not None:
                topic_id = dead_letters.topic_ids.get(span.place, "")
                yield encode_dead_letter(job, record, offset, values.get(offset), topic_id)


def _spans_over(bad: Sequence[tuple[str, int, int]]) -> Iterator[Span]:
    """Yield few spans that contain the given records, which are sorted. Each span is one read."""
    span = Span(*bad[0], bad[0][2] + 1)
    for topic, partition, offset in bad[1:]:
        near = (topic, partition) == span.place and offset < span.start + READ_RECORDS
        if not near:
            yield span
        span = Span(topic, partition, span.start if near else offset, offset + 1)
    yield span


def _count(dead_letters: DeadLetterCommand) -> int:
    if isinstance(dead_letters, DeadLetterBatch):
        return len(dead_letters.record.batch.address)
    return sum(record.records for record in dead_letters.skipped)
