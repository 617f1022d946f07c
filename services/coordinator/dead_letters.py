"""Write dead letters: records that did not decode, and the addresses of quarantined batches.

At least once, identified by topic, partition and offset. A thread apart reads bad records back, so
that each dead letter holds the bytes themselves. A snapshot is published only after the letters
ordered before it are delivered, because a leader that starts from it will not write them again.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from common.core.messages import Quarantined, Skipped
from common.core.spans import Span
from common.errors import ExpiredError, UnavailableError
from common.telemetry import Outage
from services.coordinator.letters import Letter, letter_of, letters_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from common.metrics.leading import JobMetrics
    from common.ports import Log, SpanReader, Writer
    from common.telemetry import EventLogger

READ_S = 5.0
READ_RECORDS = 100  # at once: Kafka's records are of a megabyte at most, good ones between them too
RETRY_S = 0.5
FLUSH_S = 5.0

Letters: TypeAlias = tuple[Skipped, ...] | Quarantined  # of one claim, or one batch


class DeadLetters:
    """One job's dead letters.

    Args:
        log: Kafka.
        logger: Bound to the job.
        fail: Ends the job's loop with a fault of the thread.
        metrics: Where they are counted.
    """

    def __init__(
        self,
        log: Log,
        logger: EventLogger,
        fail: Callable[[BaseException], None],
        metrics: JobMetrics,
    ) -> None:
        self._source = log
        self._log = logger
        self._fail = fail
        self._metrics = metrics
        self._outage = Outage(logger, "dead_letters")
        self._queue = SimpleQueue[Letters | None]()
        self._ordered = 0
        self._delivered = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dead-letters", daemon=True)
        self._thread.start()

    @property
    def all_delivered(self) -> bool:
        """Whether Kafka has everything that was ordered."""
        return self._delivered == self._ordered

    def add(self, letters: Letters) -> None:
        """Order dead letters."""
        self._ordered += 1
        self._queue.put(letters)

    def close(self) -> None:
        """Write what is ordered, for a while, then end."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)
        self._closed.set()

    def _run(self) -> None:
        spans, writer = self._source.spans(), self._source.writer()
        try:
            while (letters := self._queue.get()) is not None:
                self._deliver(letters, spans, writer)
                self._delivered += 1
        except BaseException as fault:  # noqa: BLE001 -- raised again by the loop of the job
            self._fail(fault)
        finally:
            writer.close()
            spans.close()

    def _deliver(self, letters: Letters, spans: SpanReader, writer: Writer) -> None:
        """Write until Kafka has them; what comes twice is known by its offset."""
        self._tell(letters)
        while not self._closed.is_set():
            try:
                if write(written(letters, spans), writer, FLUSH_S):
                    self._metrics.dead_lettered(_count(letters))
                    self._outage.over()
                    return
            except UnavailableError as error:
                self._outage.met(error)
                self._closed.wait(RETRY_S)

    def _tell(self, letters: Letters) -> None:
        if isinstance(letters, Quarantined):
            batch, reason = letters.batch.offset, letters.reason
            self._log.error("batch_quarantined", epoch=letters.epoch, batch=batch, reason=reason)
        else:
            records, first = _count(letters), letters[0]
            self._log.info("dead_letters", records=records, topic=first.topic, reason=first.reason)


def written(letters: Letters, spans: SpanReader) -> Iterator[Letter]:
    """The letters themselves, with what Kafka still has of the records.

    Raises:
        UnavailableError: If the records cannot be read now.
    """
    if isinstance(letters, Quarantined):
        yield from letters_of(letters)
        return
    for record in letters:
        for offsets in _close_together(record.offsets):
            span = Span(record.topic, record.partition, offsets[0], offsets[-1] + 1)
            try:
                fetched = spans.read(span, READ_S)
                values = dict(zip(fetched.offsets, fetched.values, strict=True))
            except ExpiredError:
                values = {}  # retention was faster: the letters still say which records they were
            for offset in offsets:
                yield letter_of(record, offset, values.get(offset))


def _close_together(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Increasing offsets in groups, each of which is read at once, with what lies between them."""
    group = [offsets[0]]
    for offset in offsets[1:]:
        if offset - group[0] >= READ_RECORDS:
            yield group
            group = []
        group.append(offset)
    yield group


def _count(letters: Letters) -> int:
    if isinstance(letters, Quarantined):
        return len(letters.batch.address)
    return sum(record.records for record in letters)
