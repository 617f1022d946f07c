"""A job's test set: the first records of a Kafka topic, read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.spans import Span
from common.errors import ExpiredError, UnknownTopicError
from common.learning.fields import Columns, concatenate
from common.telemetry.logging import Changes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.core.spans import Partition
    from common.learning.codecs import Codec
    from common.ports.servers import Bounds, Log, SpanReader
    from common.telemetry.logging import EventLogger

READ_S = 30.0  # for one partition's part of it


class HeldOut:
    """Records that no version has learned from.

    Args:
        log: Where the topic is.
        spans: Reads them.
        codec: Of the job's records.
        topic: Its name; empty: there is no test set.
        most: Records.
        logger: Bound to the job.
    """

    def __init__(
        self,
        log: Log,
        spans: SpanReader,
        codec: Codec,
        topic: str,
        most: int,
        logger: EventLogger,
    ) -> None:
        self._source = log
        self._spans = spans
        self._codec = codec
        self._topic = topic
        self._most = most
        self._log = logger
        self._told = Changes()
        self._read = list[Span]()  # what `_columns` was made of
        self._columns: Columns | None = None

    def columns(self) -> Columns | None:
        """The records; None while there are none.

        Until there are as many as asked for, each call looks whether more have come.

        Raises:
            UnavailableError: If Kafka is away.
        """
        if self._topic and sum(span.end - span.start for span in self._read) < self._most:
            self._look()
        return self._columns

    def _look(self) -> None:
        try:
            places = self._source.partitions(self._topic)
            found = first_spans({place: self._source.bounds(place) for place in places}, self._most)
            if found != self._read:
                self._take(found)
        except (UnknownTopicError, ExpiredError) as error:
            self._tell(str(error))
        else:
            self._tell("" if self._columns is not None else f"{self._topic} holds no records")

    def _take(self, spans: list[Span]) -> None:
        parts, left_out = list[Columns](), 0
        for span in spans:
            decoded = self._codec.decode(self._spans.read(span, READ_S).values)
            left_out += len(decoded.skipped)
            if len(decoded.kept):
                parts.append(decoded.records)
        self._read = spans
        self._columns = concatenate(parts) if parts else None
        count = 0 if self._columns is None else len(next(iter(self._columns.values())))
        self._log.info("test_set_read", topic=self._topic, records=count, left_out=left_out)

    def _tell(self, missing: str) -> None:
        if self._told("missing", missing) and missing:
            self._log.warning("test_set_missing", reason=missing)


def first_spans(bounds: Mapping[Partition, Bounds], most: int) -> list[Span]:
    """The first records of a topic: as many of each partition, as far as it has them."""
    spans = list[Span]()
    by_size = sorted(bounds.items(), key=lambda item: (item[1].end - item[1].start, item[0]))
    for index, (place, (start, end)) in enumerate(by_size):
        count = min(end - start, most // (len(by_size) - index))
        most -= count
        if count:
            spans.append(Span(*place, start, start + count))
    return sorted(spans)
