"""Write dead letters: records that did not decode, and the addresses of quarantined batches.

At least once: a letter that is written twice has the same key. Bad records are read back, so that
each dead letter holds the bytes themselves; this takes its time, so it is an actor apart. A leader
publishes a snapshot only after the letters ordered before it are delivered, because a leader that
starts from the snapshot will not write them again.

A record that a producer could write may be too large to be written again: clients refuse what is
above their own limit, and a dead-letter topic may take less than its stream. Then its letter has
the beginning of the record, as much as is taken, and says so; the address is always whole.
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
    """Write letters, each with as much of its value as Kafka takes; wait until it has them.

    Returns:
        False where it took longer than `timeout_s`: which of them arrived is not known then.

    Raises:
        DeliveryError: If a letter cannot be delivered, not even its address.
        UnknownTopicError: If its topic does not exist.
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
READ_RECORDS = 100  # at once: Kafka's records are of a megabyte at most, good ones between them too
RETRY_S = 0.5
FLUSH_S = 5.0

DeadLetterCommand: TypeAlias = DeadLetterRecords | DeadLetterBatch  # of one claim, or one batch


class SharedSpans:
    """One reader of addresses for all jobs of a process; may be shared between threads."""

    def __init__(self, log: Log) -> None:
        self._source = log
        self._lock = threading.Lock()
        self._reader: SpanReader | None = None

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """As any reader; one at a time."""
        with self._lock:
            if self._reader is None:
                self._reader = self._source.spans()
            return self._reader.read(span, timeout_s)

    def close(self) -> None:
        """Let go of the connection."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()


class DeadLetters:
    """One job's dead letters.

    Args:
        spans: Reads bad records back.
        steps: Runs what takes its time.
        wake: Told when some have been delivered.
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
        self._logged = 0  # of those ordered, how many the log has named
        self._running: Supervised | None = None  # from the first letter on
        self._again_at = 0.0
        self._writer: Writer | None = None

    @property
    def all_delivered(self) -> bool:
        """Whether Kafka has everything that was ordered."""
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
        """Write no more: whoever leads next writes again what was not delivered."""
        if self._running is not None:
            self._running.end()

    # --- its turns ---------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Write what is ordered; what comes twice is known by its offset."""
        if monotonic() < self._again_at:  # orders wake it, too
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
        """Let go of the writer; for the supervisor."""
        if self._writer is not None:
            self._writer.close()

    def _deliver(self, dead_letters: DeadLetterCommand) -> bool:
        """Write one order; False where Kafka has not taken all of it for now."""
        if self._logged == self._delivered:
            self._logged += 1
            self._log_command(dead_letters)
        try:
            if self._writer is None:
                self._writer = self._source.writer()
            if not write(written(self._job, dead_letters, self._spans), self._writer, FLUSH_S):
                self._outage.watch(self._writer)
                return False
        except BrokenWriterError as error:  # what comes twice is known by its offset
            self._outage.met(error)
            self.close()
            self._writer = None
            return False
        except UnavailableError as error:
            self._outage.met(error)
            return False
        except (UnknownTopicError, DeliveryError):  # a writer asks about a topic once
            if not self._make_topics(dead_letters):
                raise
            return False
        self._metrics.dead_letters.inc(_count(dead_letters))
        self._outage.over()
        return True

    def _make_topics(self, dead_letters: DeadLetterCommand) -> bool:
        """Where one was deleted its letters are lost, but those to come need not be.

        Returns:
            Whether to try again: one was not there, or nobody can say so now.
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
    """The letters themselves, with what Kafka still has of the records.

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
            values = {}  # they are gone: the letters still say which records they were
        for offset in range(span.start, span.end):
            record = named.get((*span.place, offset))
            if record is not None:
                topic_id = dead_letters.topic_ids.get(span.place, "")
                yield encode_dead_letter(job, record, offset, values.get(offset), topic_id)


def _spans_over(bad: Sequence[tuple[str, int, int]]) -> Iterator[Span]:
    """Few spans that hold all these records, given in order; each is read at once."""
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
