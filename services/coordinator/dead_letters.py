"""Write dead letters: records that did not decode, and the addresses of quarantined batches.

At least once, identified by topic, partition and offset. A thread apart reads each bad record back,
so that its dead letter holds the bytes themselves.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from common import wire
from common.core.messages import Quarantined, Skipped
from common.core.spans import Span
from common.errors import ExpiredError, UnavailableError
from common.topics import dead_letter_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.ports import Log, SpanReader, Writer
    from common.telemetry import EventLogger

READ_S = 5.0
RETRY_S = 1.0
FLUSH_S = 5.0


class DeadLetters:
    """One job's dead letters."""

    def __init__(self, log: Log, logger: EventLogger) -> None:
        self._source = log
        self._log = logger
        self._queue = SimpleQueue[Skipped | Quarantined | None]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dead-letters", daemon=True)
        self._thread.start()

    def add(self, letters: Iterable[Skipped | Quarantined]) -> None:
        """Queue dead letters."""
        for letter in letters:
            self._queue.put(letter)

    def close(self) -> None:
        """Write what is queued, for a while, then end."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)
        self._closed.set()

    def _run(self) -> None:
        spans, writer = self._source.spans(), self._source.writer()
        while (letter := self._queue.get()) is not None and not self._closed.is_set():
            if isinstance(letter, Skipped):
                self._record(letter, spans, writer)
            else:
                self._batch(letter, writer)
        writer.close()
        spans.close()

    def _record(self, bad: Skipped, spans: SpanReader, writer: Writer) -> None:
        span = Span(bad.topic, bad.partition, bad.offset, bad.offset + 1)
        self._log.warning("dead_letter", record=str(span), reason=bad.reason)
        value: bytes | None = None
        while not self._closed.is_set():
            try:
                value = spans.read(span, READ_S).values[0]
                break
            except (ExpiredError, IndexError):
                break  # retention was faster: the letter still says which record it was
            except UnavailableError:
                self._closed.wait(RETRY_S)
        writer.append(
            dead_letter_topic(bad.topic),
            value,
            headers=_headers(bad.reason, bad.topic, bad.partition, bad.offset),
        )
        writer.poll()

    def _batch(self, record: Quarantined, writer: Writer) -> None:
        self._log.error("batch_quarantined", batch=record.batch.offset, reason=record.reason)
        for span in record.batch.address:
            headers = _headers(record.reason, span.topic, span.partition, span.start)
            writer.append(
                dead_letter_topic(span.topic),
                wire.encode_audit(record),
                headers=(*headers, ("end", str(span.end).encode())),
            )
        writer.poll()


def _headers(reason: str, topic: str, partition: int, offset: int) -> tuple[tuple[str, bytes], ...]:
    return (
        ("reason", reason.encode()),
        ("topic", topic.encode()),
        ("partition", str(partition).encode()),
        ("offset", str(offset).encode()),
    )
