"""Reads one partition from a position on, by assignment: no group, no rebalance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition

from common.adapters.kafka_log.client import (
    OUT_OF_RANGE,
    Complaints,
    arrival_s,
    as_ours,
    cause_of,
    consume,
    made,
)
from common.adapters.kafka_log.settings import reader_properties
from common.errors import ExpiredError, TruncatedError
from common.ports import LogRecord

if TYPE_CHECKING:
    from common.adapters.kafka_log.client import Record
    from common.adapters.kafka_log.settings import KafkaSettings
    from common.core.spans import Partition


class KafkaTail:
    """The `Tail` port on a consumer with one partition."""

    def __init__(self, settings: KafkaSettings, partition: Partition, position: int) -> None:
        self._settings = settings
        self._partition = partition
        self._position = position
        self._fell_out = False  # the client has stopped reading: the position is out of range
        self._complaints = Complaints()
        properties = reader_properties(settings) | {"error_cb": self._complaints}
        self._client = made(Consumer, properties)
        self._client.assign([TopicPartition(*partition, position)])

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """See the port.

        Raises:
            ExpiredError: If the position is below the log's start.
            TruncatedError: If it is above its end.
            UnavailableError: If the broker is away; call again.
            UnknownTopicError: If there is no such partition.
        """
        doing = f"reading {self._partition}@{self._position}"
        self._complaints.raise_fatal(doing)
        if self._fell_out:
            self._get_back_in()
        messages = consume(self._client, max_records, timeout_s)
        records = self._records(messages, doing)
        if not records:
            if self._fell_out:
                self._get_back_in()
            self._complaints.raise_away(doing)
        return records

    def position(self) -> int:
        """See the port."""
        return self._position

    def close(self) -> None:
        """See the port."""
        self._client.close()

    def _records(self, messages: list[Record], doing: str) -> list[LogRecord]:
        records: list[LogRecord] = []
        for message in messages:
            error = message.error()
            if error is None:
                written_s = max(arrival_s(message), 0.0)  # the client says -1 ms where it has none
                records.append(
                    LogRecord(message.offset(), message.key(), message.value(), written_s)
                )
            elif error.code() in OUT_OF_RANGE:
                self._fell_out = True
            elif not records:
                raise as_ours(error, doing)
            else:
                self._complaints(error)
        if records:
            self._position = records[-1].offset + 1
        return records

    def _get_back_in(self) -> None:
        """Say why the position is out of range; read on from it where it is not (any more)."""
        target = TopicPartition(*self._partition, self._position)
        try:
            start, end = self._client.get_watermark_offsets(
                target, timeout=self._settings.request_timeout_s
            )
            if self._position < start:
                raise ExpiredError(f"{self._partition} starts at {start}, not {self._position}")
            if self._position > end:
                raise TruncatedError(f"{self._partition} ends at {end}, below {self._position}")
        except KafkaException as raised:
            raise as_ours(cause_of(raised), f"bounds of {self._partition}") from raised
        self._client.assign([target])  # the client does not seek in what it has stopped
        self._fell_out = False
