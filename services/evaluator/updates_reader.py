"""Reads a job's updates topic from its first record on, repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from common.core.spans import Partition
from common.errors import ExpiredError, TruncatedError
from common.kafka.names import updates_topic
from common.kafka.read import decoded, identified
from common.wire.messages import decode_audit

if TYPE_CHECKING:
    from common.core.messages import AuditRecord
    from common.kafka.port import Log, Tail
    from common.telemetry.logging import EventLogger

READ_RECORDS = 1000


class UpdatesReader:
    """The updates topic as it grows; reads never wait. For one thread.

    Attributes:
        partition: The topic's only partition.
        end: End of the topic when reading started.

    Args:
        job: Id of the job.
        begins: Called with the offset of the first record each time reading starts.
    """

    def __init__(
        self, log: Log, job: str, begins: Callable[[int], None], logger: EventLogger
    ) -> None:
        self.partition = Partition(updates_topic(job), 0)
        self.end = 0
        self._source = log
        self._begins = begins
        self._log = logger
        self._tail: Tail | None = None

    @property
    def position(self) -> int:
        """Offset of the next record, or -1 if reading starts again."""
        return -1 if self._tail is None else self._tail.position()

    @property
    def at_end(self) -> bool:
        """True if there are no more records at the moment.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        return self.position >= self._source.bounds(self.partition).end

    def read(self) -> list[tuple[int, float, AuditRecord | None]]:
        """Return new records: offset, seconds since 1970, record; malformed records are None.

        If Kafka has deleted or lost records, reading starts again with the first record that
        exists.

        Raises:
            UnavailableError: If Kafka is unavailable.
            FutureFormatError: If a newer program wrote a record.
        """
        if self._tail is None:
            bounds = self._source.bounds(self.partition)
            begin = identified(self._source, self.partition, bounds.start)
            self._tail, self.end = self._source.tail(self.partition, begin), bounds.end
            self._begins(bounds.start)
        try:
            records = self._tail.read(READ_RECORDS, 0.0)
        except (ExpiredError, TruncatedError) as error:
            self._log.warning("updates_read_anew", reason=str(error))
            self.close()
            return []
        return [(each.offset, each.timestamp_s, decoded(decode_audit, each)) for each in records]

    def close(self) -> None:
        """Close the connection; the next `read` starts again."""
        if self._tail is not None:
            self._tail.close()
        self._tail = None
