"""Kafka as the `Log` port: topics and their bounds, and the makers of readers and writers."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import closing, suppress
from functools import cached_property
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from common.adapters.kafka_log.client import Complaints, as_ours, cause_of, made
from common.adapters.kafka_log.settings import client_properties, reader_properties
from common.adapters.kafka_log.spans import KafkaSpanReader
from common.adapters.kafka_log.stream import KafkaStreamReader
from common.adapters.kafka_log.tail import KafkaTail
from common.adapters.kafka_log.writer import KafkaWriter
from common.core.spans import Partition, Span
from common.errors import ExpiredError, UnavailableError, UnknownTopicError
from common.ports import Bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka.admin._metadata import TopicMetadata

    from common.adapters.kafka_log.settings import KafkaSettings

_METADATA_RETRY_S = 0.02
# Waits of the first questions: brokers that do not let us in say so within half a second or, where
# all are busy, two.
_FIRST_WAITS_S = (1.0, 2.0)


class KafkaLog:
    """The `Log` port; connects at the first question."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # two threads must not both make the client
        self._complaints = Complaints()
        self._let_in = False  # a broker has answered

    def create_topic(
        self, topic: str, partitions: int, *, kept_forever: bool = False, compacted: bool = False
    ) -> None:
        """See the port.

        Raises:
            UnavailableError: If the broker is away.
            OutsideError: If the broker refuses, or does not let us in.
        """
        if self._settings.topic_maker is not None:
            self._settings.topic_maker(topic, partitions)
        else:
            if not self._let_in:
                self._metadata(topic, f"creating topic {topic}")  # the client below would only wait
            self._create_by_admin(topic, partitions, kept_forever=kept_forever, compacted=compacted)
        self._await_topic(topic)

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """See the port.

        Raises:
            UnknownTopicError: If there is no such topic. It is never created by asking.
            UnavailableError: If the broker is away.
        """
        doing = f"partitions of {topic}"
        found = self._metadata(topic, doing)
        if found.error is not None:
            raise as_ours(found.error, doing)
        return tuple(Partition(topic, index) for index in sorted(found.partitions))

    def bounds(self, partition: Partition) -> Bounds:
        """See the port.

        Raises:
            UnknownTopicError: If there is no such partition.
            UnavailableError: If the broker is away.
        """
        # The client only knows partitions of topics that it has asked about lately.
        if partition not in self.partitions(partition.topic):
            raise UnknownTopicError(f"there is no {partition}")
        try:
            return Bounds(
                *self._client.get_watermark_offsets(
                    TopicPartition(*partition), timeout=self._settings.request_timeout_s
                )
            )
        except KafkaException as raised:
            raise as_ours(cause_of(raised), f"bounds of {partition}") from raised

    def position_at(self, partition: Partition, timestamp_s: float) -> int:
        """See the port.

        Raises:
            UnknownTopicError: If there is no such partition.
            UnavailableError: If the broker is away.
        """
        bounds = self.bounds(partition)
        if not self._settings.time_index:
            return self._search_time(partition, bounds, timestamp_s)
        wanted = TopicPartition(*partition, int(timestamp_s * 1e3))
        try:
            [found] = self._client.offsets_for_times(
                [wanted], timeout=self._settings.request_timeout_s
            )
        except KafkaException as raised:
            raise as_ours(cause_of(raised), f"position in {partition} by time") from raised
        if found.error is not None:
            raise as_ours(found.error, f"position in {partition} by time")
        return found.offset if found.offset >= 0 else bounds.end

    def stream(
        self, group: str, topics: Sequence[str], member: str, *, hold: bool = False
    ) -> KafkaStreamReader:
        """See the port."""
        return KafkaStreamReader(self._settings, group, topics, member, hold=hold)

    def spans(self) -> KafkaSpanReader:
        """See the port."""
        return KafkaSpanReader(self._settings)

    def tail(self, partition: Partition, position: int) -> KafkaTail:
        """See the port."""
        return KafkaTail(self._settings, partition, position)

    def writer(self) -> KafkaWriter:
        """See the port."""
        return KafkaWriter(self._settings, self.partitions)

    @property
    def _client(self) -> Consumer:
        with self._lock:
            return self._made_client

    @cached_property
    def _made_client(self) -> Consumer:
        # A consumer, because a producer's questions may create topics.
        properties = reader_properties(self._settings) | {"error_cb": self._complaints}
        return made(Consumer, properties)

    def _metadata(self, topic: str, doing: str) -> TopicMetadata:
        """Ask about a topic; at first not for long, to hear early who does not let us in."""
        timeout_s = self._settings.request_timeout_s
        for wait_s in () if self._let_in else _FIRST_WAITS_S:
            with suppress(UnavailableError):
                return self._asked(topic, doing, min(wait_s, timeout_s))
        return self._asked(topic, doing, timeout_s)

    def _asked(self, topic: str, doing: str, timeout_s: float) -> TopicMetadata:
        try:
            metadata = self._client.list_topics(topic, timeout=timeout_s)
        except KafkaException as raised:
            self._client.poll(0)  # for its complaints, which say more than that nobody answered
            if not self._let_in:
                self._complaints.raise_shut_out(doing)
            self._complaints.raise_away(doing)
            raise as_ours(cause_of(raised), doing) from raised
        self._client.poll(0)  # what it complained of meanwhile is over
        self._let_in = True
        found: TopicMetadata = metadata.topics[topic]
        return found

    def _create_by_admin(
        self, topic: str, partitions: int, *, kept_forever: bool, compacted: bool
    ) -> None:
        config = {
            **({"retention.ms": "-1"} if kept_forever else {}),
            **({"cleanup.policy": "compact"} if compacted else {}),
        }
        admin = made(AdminClient, client_properties(self._settings))
        wanted = NewTopic(
            topic,
            num_partitions=partitions,
            replication_factor=self._settings.replication_factor,
            config=config,
        )
        answers = admin.create_topics([wanted], request_timeout=self._settings.request_timeout_s)
        try:
            answers[topic].result()
        except KafkaException as raised:
            error = cause_of(raised)
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise as_ours(error, f"creating topic {topic}") from raised

    def _await_topic(self, topic: str) -> None:
        """Wait until every partition of a topic can be asked for its bounds."""
        deadline = time.monotonic() + self._settings.request_timeout_s
        while True:
            try:
                for partition in self.partitions(topic):
                    self.bounds(partition)
            except (UnknownTopicError, UnavailableError) as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"topic {topic} was made but is not usable") from error
                time.sleep(_METADATA_RETRY_S)
            else:
                return

    def _search_time(self, partition: Partition, bounds: Bounds, timestamp_s: float) -> int:
        """Find a position by reading single records; their timestamps must not go back."""
        with closing(self.spans()) as spans:

            def arrival_s(offset: int) -> float:
                span = Span(*partition, offset, offset + 1)
                try:
                    return spans.read(span, self._settings.request_timeout_s).first_arrival_s
                except ExpiredError:
                    return float("-inf")

            return bounds.start + bisect_left(
                range(bounds.start, bounds.end), timestamp_s, key=arrival_s
            )
