"""Reads spans back: exactly one span, then nothing until the next is requested."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from common.errors import ExpiredError, OutsideError, UnavailableError
from common.kafka.client import (
    AT_END,
    GROUP_REFUSED,
    OUT_OF_RANGE,
    Complaints,
    as_ours,
    cause_of,
    consume,
    fetched,
    made,
)
from common.kafka.cursor import Cursor
from common.kafka.settings import reader_properties

if TYPE_CHECKING:
    from common.core.spans import Span
    from common.kafka.client import ClientMessage
    from common.kafka.port import Fetched
    from common.kafka.settings import KafkaSettings

# A waiting fetch delays the seek to the next span, so it must be short. The records of a span exist
# already.
_FETCH_WAIT_MS = 1
# A fetch returns everything that follows, far beyond the span, and the client parses it before
# returning anything: at its default of 1 MB, 8 small records took 13 ms, with this limit 3 ms.
# Longer spans take several fetches, which cost nothing. A larger record arrives nevertheless.
_FETCH_BYTES = 256 << 10
# Longest check of a topic whose records do not arrive.
_LOOK_S = 1.0
# Limit of one call to the client.
_MAX_RECORDS = 100_000


class KafkaSpanReader:
    """The `SpanReader` port, on a consumer that has one span's partition at a time."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._complaints = Complaints()
        self._properties = reader_properties(settings) | {
            "error_cb": self._complaints,
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            "fetch.message.max.bytes": _FETCH_BYTES,
            # The last offsets of a span may hold no record. Only the end of the log shows that.
            "enable.partition.eof": True,
        }
        self._client = made(Consumer, self._properties)
        # Topics that the client knows.
        self._met = set[str]()

    def read(self, span: Span, timeout_s: float) -> Fetched:
        """See the port."""
        self._complaints.raise_fatal(f"reading {span}")
        deadline = time.monotonic() + timeout_s
        cursor = Cursor(span.place, span.start)
        records: list[ClientMessage] = []
        # By itself, the client would request the topic's metadata only after a second.
        if span.topic not in self._met:
            self._meet(span, timeout_s)
        self._assign(cursor)
        try:
            while cursor.position < span.end:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    # The topic may have been deleted.
                    self._meet(span, _LOOK_S)
                    self._renew()
                    raise UnavailableError(
                        f"{span} was not received within {timeout_s} s; read up to offset"
                        f" {cursor.position}"
                    )
                wanted = min(span.end - cursor.position, _MAX_RECORDS)
                messages = consume(self._client, wanted, left_s)
                records += self._continue(cursor, messages, span)
        finally:
            self._client.unassign()
        return fetched(span.place, [each for each in records if each.offset() < span.end])

    def close(self) -> None:
        """See the port."""
        self._client.close()

    def _renew(self) -> None:
        """Replace the client, which may never read a recreated topic.

        It reads none whose leader epochs are lower than those that it has seen under that name.
        """
        self._client.close()
        self._client = made(Consumer, self._properties)
        self._met.clear()

    def _meet(self, span: Span, timeout_s: float) -> None:
        """Request a topic's metadata."""
        doing = f"reading {span}"
        try:
            topic = self._client.list_topics(span.topic, timeout=timeout_s).topics[span.topic]
        except KafkaException as raised:
            raise as_ours(cause_of(raised), doing) from raised
        if topic.error is not None:
            raise self._as_ours(topic.error, span)
        self._met.add(span.topic)

    def _continue(
        self, cursor: Cursor, messages: list[ClientMessage], span: Span
    ) -> list[ClientMessage]:
        """Return the messages that continue the span; move the cursor past them, or to the end."""
        run = [message for message in messages if message.error() is None]
        if run:
            first, last, again = cursor.take([message.offset() for message in run])
            run = run[first:last]
            if again:
                self._assign(cursor)
                return run
        for message in messages:
            error = message.error()
            if error is None or error.code() == GROUP_REFUSED:
                continue
            if error.code() == AT_END:
                cursor.position = max(cursor.position, message.offset())
            elif error.code() in OUT_OF_RANGE:
                self._explain(span)
                # The client does not seek in a partition that it has stopped.
                self._assign(cursor)
            else:
                # The client reports a missing right only once.
                self._renew()
                raise self._as_ours(error, span)
        return run

    def _as_ours(self, error: KafkaError, span: Span) -> OutsideError:
        return as_ours(
            error, f"reading {span}", self._settings.right("read", f"topic {span.topic}")
        )

    def _assign(self, cursor: Cursor) -> None:
        self._client.assign([TopicPartition(*cursor.partition, cursor.position)])

    def _explain(self, span: Span) -> None:
        """Raise the reason why the span is out of range, unless it is in range now."""
        try:
            start, end = self._client.get_watermark_offsets(
                TopicPartition(span.topic, span.partition),
                timeout=self._settings.request_timeout_s,
            )
        except KafkaException as raised:
            raise self._as_ours(cause_of(raised), span) from raised
        if start > span.start:
            raise ExpiredError(f"{span} has expired: its partition starts at {start}")
        if end < span.end:
            raise UnavailableError(f"{span} does not exist yet: its partition ends at {end}")
