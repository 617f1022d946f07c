"""Writes records all or none, in Kafka transactions, with a producer of its own."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin._acl import AclOperation

from common.errors import DeliveryError, OutsideError
from common.kafka.client import as_ours, cause_of, made
from common.kafka.log import KafkaLog
from common.kafka.settings import writer_properties
from common.kafka.writer import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

    from common.kafka.port import NewRecord
    from common.kafka.settings import KafkaSettings

# The client's number for "let the partitioner choose".
_ANY_PARTITION = -1
# How long readers wait at the open transaction of a killed process, unless its successor aborts it.
_TIMEOUT_MS = 15_000
_WAIT_S = 30.0


class KafkaTransactionalLog(KafkaLog):
    """The `TransactionalLog` port."""

    def transactions(self, name: str) -> KafkaTransactions:
        """See the port."""
        return KafkaTransactions(self._settings, lambda: self._admin, name, self.partitions)


class KafkaTransactions:
    """The `Transactions` port.

    Args:
        settings: Settings of Kafka.
        admin: Returns the client that knows our rights.
        name: The transactional id.
        check_topic: Raises if a topic does not exist, because a producer would ask the broker to
            create it.

    Raises:
        UnavailableError: If the broker is unavailable.
        OutsideError: If the broker refuses the request or our identity.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        admin: Callable[[], AdminClient],
        name: str,
        check_topic: Callable[[str], object],
    ) -> None:
        self._name = name
        self._admin = admin
        self._settings = settings
        self._check_topic = check_topic
        self._refused: DeliveryError | None = None
        self._client: Producer | None = self._opened()

    def write(self, records: Sequence[NewRecord]) -> None:
        """See the port."""
        for topic in {record.topic for record in records}:
            self._check_topic(topic)
        self._refused = None
        topic = ""
        client = self._client = self._client or self._opened()
        try:
            client.begin_transaction()
            for record in records:
                topic = record.topic
                client.produce(
                    topic,
                    record.value,
                    record.key,
                    _ANY_PARTITION if record.partition is None else record.partition,
                    self._report,
                    headers=list(record.headers) or None,
                )
            client.commit_transaction(_WAIT_S)
        except KafkaException as raised:
            error = cause_of(raised)
            try:
                client.abort_transaction(_WAIT_S)
            except KafkaException as failed:
                # Kafka had begun no transaction, because it refused all topics. The client is then
                # unusable.
                if cause_of(failed).code() == KafkaError.INVALID_TXN_STATE:
                    self._client = None
            if self._refused is not None:
                raise self._refused from raised
            if error.fatal():
                raise DeliveryError(
                    f"writing as {self._name}: another process uses this name now, or this process"
                    f" was frozen for too long: {error.str()}"
                ) from raised
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise refusal_of(topic, error, self._settings) from raised
            topics = {record.topic for record in records}
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                topics = self._forbidden(topics) or topics
            raise self._as_ours(error, " or ".join(sorted(topics))) from raised

    def close(self) -> None:
        """See the port."""
        if self._client is not None:
            self._client.purge()

    def _opened(self) -> Producer:
        """Return a client that owns the transactional id."""
        client = made(
            Producer,
            {
                **writer_properties(self._settings),
                "transactional.id": self._name,
                "transaction.timeout.ms": _TIMEOUT_MS,
                # The client accepts no value above that of the transaction.
                "message.timeout.ms": _TIMEOUT_MS,
            },
        )
        try:
            client.init_transactions(_WAIT_S)
        except KafkaException as raised:
            raise self._as_ours(cause_of(raised)) from raised
        return client

    def _as_ours(self, error: KafkaError, topics: str = "") -> OutsideError:
        right, name = self._settings.right, f"transactional id {self._name}"
        rights = right("write", name), right("write", f"topic {topics}")
        return as_ours(error, f"writing as {self._name}", *rights)

    def _forbidden(self, topics: set[str]) -> set[str]:
        """Return the topics that we may not write to. Kafka's refusal names none of them."""
        answers = self._admin().describe_topics(
            TopicCollection(sorted(topics)),
            include_authorized_operations=True,
            request_timeout=self._settings.request_timeout_s,
        )
        found = set[str]()
        for topic, answer in answers.items():
            with suppress(KafkaException):
                if AclOperation.WRITE not in (answer.result().authorized_operations or ()):
                    found.add(topic)
        return found

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self._refused = refusal_of(str(message.topic()), error, self._settings)
