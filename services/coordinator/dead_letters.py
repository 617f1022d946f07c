"""Write dead letters: records that did not decode, and the addresses of quarantined batches.

At least once, identified by topic, partition and offset. A thread apart reads bad records back, so
that each dead letter holds the bytes themselves. A snapshot is published only after the letters
ordered before it are delivered, because a leader that starts from it will not write them again.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from common import wire
from common.core.messages import Quarantined, Skipped
from common.core.spans import Span
from common.errors import ExpiredError, UnavailableError
from common.telemetry import Outage
from common.topics import dead_letter_topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.metrics.leading import JobMetrics
    from common.ports import Log, SpanReader, Writer
    from common.telemetry import EventLogger

READ_S = 5.0
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
        while not self._closed.is_set():
            try:
                if isinstance(letters, Quarantined):
                    self._write_batch(letters, writer)
                    count = len(letters.batch.address)
                else:
                    self._write_records(letters, spans, writer)
                    count = len(letters)
                if writer.flush(FLUSH_S):
                    self._metrics.dead_lettered(count)
                    self._outage.over()
                    return
            except UnavailableError as error:
                self._outage.met(error)
                self._closed.wait(RETRY_S)

    def _write_records(self, bad: tuple[Skipped, ...], spans: SpanReader, writer: Writer) -> None:
        self._log.info("dead_letters", records=len(bad), topic=bad[0].topic, reason=bad[0].reason)
        for place in sorted({(record.topic, record.partition) for record in bad}):
            here = [record for record in bad if (record.topic, record.partition) == place]
            span = Span(*place, here[0].offset, here[-1].offset + 1)
            try:
                fetched = spans.read(span, READ_S)
                values = dict(zip(fetched.offsets, fetched.values, strict=True))
            except ExpiredError:
                values = {}  # retention was faster: the letters still say which records they were
            for record in here:
                writer.append(
                    dead_letter_topic(record.topic),
                    values.get(record.offset),
                    headers=_headers(record.reason, *place, record.offset),
                )

    def _write_batch(self, record: Quarantined, writer: Writer) -> None:
        self._log.error(
            "batch_quarantined",
            epoch=record.epoch,
            batch=record.batch.offset,
            reason=record.reason,
        )
        for span in record.batch.address:
            headers = _headers(record.reason, span.topic, span.partition, span.start)
            writer.append(
                dead_letter_topic(span.topic),
                wire.encode_audit(record),
                headers=(*headers, ("end", str(span.end).encode())),
            )


def _headers(reason: str, topic: str, partition: int, offset: int) -> tuple[tuple[str, bytes], ...]:
    return (
        ("reason", reason.encode()),
        ("topic", topic.encode()),
        ("partition", str(partition).encode()),
        ("offset", str(offset).encode()),
    )
