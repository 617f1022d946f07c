"""Appends records: idempotent, in order, retried for ever, and never wrong about what arrived."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from confluent_kafka import KafkaException, Producer

from common.adapters.kafka_log.client import Complaints, cause_of, made
from common.adapters.kafka_log.settings import writer_properties
from common.errors import DeliveryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import KafkaError, Message

    from common.adapters.kafka_log.settings import KafkaSettings

_LOGGER = logging.getLogger(__name__)

_ANY_PARTITION = -1  # the client's number for "let the partitioner choose"
_FULL_QUEUE_WAIT_S = 0.1


class KafkaWriter:
    """The `Writer` port on a producer.

    Args:
        settings: Where Kafka is.
        check_topic: Raises where a topic does not exist; a producer would ask the broker to create
            it. Called once per topic.
    """

    def __init__(self, settings: KafkaSettings, check_topic: Callable[[str], object]) -> None:
        self._close_timeout_s = settings.close_timeout_s
        self._check_topic = check_topic
        self._checked: set[str] = set()
        self._failure: DeliveryError | None = None
        self._complaints = Complaints()
        properties = writer_properties(settings) | {"error_cb": self._complaints}
        self._client = made(Producer, properties)

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        partition: int | None = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivered: Callable[[int], None] | None = None,
    ) -> None:
        """See the port.

        Raises:
            DeliveryError: If this record or an earlier one can not be delivered.
            UnknownTopicError: If there is no such topic.
            UnavailableError: If the broker is away and the topic has never been seen.
        """
        self._raise_failure()
        if topic not in self._checked:
            self._check_topic(topic)
            self._checked.add(topic)
        while True:
            try:
                self._client.produce(
                    topic,
                    value,
                    key,
                    _ANY_PARTITION if partition is None else partition,
                    self._reporter(on_delivered),
                    headers=list(headers) or None,
                )
            except BufferError:
                self._client.poll(_FULL_QUEUE_WAIT_S)
                self._raise_failure()
            except KafkaException as raised:
                raise DeliveryError(f"{topic} refuses a record: {cause_of(raised)}") from raised
            else:
                return

    def poll(self) -> None:
        """See the port."""
        self._client.poll(0)
        self._raise_failure()

    def flush(self, timeout_s: float) -> bool:
        """See the port.

        Raises:
            DeliveryError: If a record's delivery failed for good.
        """
        left: int = self._client.flush(timeout_s)
        self._raise_failure()
        return left == 0

    def close(self) -> None:
        """See the port; what is not delivered within the settings' time is given up and logged."""
        left: int = self._client.flush(self._close_timeout_s)
        if left:
            _LOGGER.warning("writer_closed_with_undelivered_records count=%d", left)
            self._client.purge()
            self._client.flush(self._close_timeout_s)

    def _reporter(
        self, on_delivered: Callable[[int], None] | None
    ) -> Callable[[KafkaError | None, Message], None]:
        if on_delivered is None:
            return self._report

        def report(error: KafkaError | None, message: Message) -> None:
            self._report(error, message)
            if error is None:
                on_delivered(cast("int", message.offset()))  # a delivered message has one

        return report

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._failure is None:
            self._failure = DeliveryError(f"a record for {message.topic()} is lost: {error}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._complaints.raise_fatal("writing")
