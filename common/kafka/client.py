"""Parts that all readers and writers share: waiting for messages, and the client's errors."""

from __future__ import annotations

import re
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, Message

from common.errors import (
    ForbiddenError,
    OutsideError,
    UnavailableError,
    UnknownTopicError,
    UserError,
)
from common.kafka.port import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from confluent_kafka import Consumer

    from common.core.spans import Partition

T = TypeVar("T")

# A rebalance does not end a wait for records, so waits are divided into slices of this length.
_SLICE_S = 0.02
# The client counts whole milliseconds. Below one, it spins instead of waiting.
_SHORTEST_S = 0.001

# Code of the message that says that a fetch has reached the log's end. Its offset is that end.
AT_END = KafkaError._PARTITION_EOF  # noqa: SLF001 -- the library's name for its own errors
OUT_OF_RANGE = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 -- as above
        KafkaError._LOG_TRUNCATION,  # noqa: SLF001 -- as above
        KafkaError.OFFSET_OUT_OF_RANGE,
    }
)
# A broker reports these errors for a partition, or the client after a request to a broker.
UNKNOWN = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 -- as above
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 -- as above
    }
)
# The client's error if it finds no leader for any partition of a request: the partitions do not
# exist, or have no leader now.
NO_LEADERS = KafkaError._NOENT  # noqa: SLF001 -- as above
# The client's error for a partition that its metadata of the topic lacks. No broker was asked.
ADDED = KafkaError._UNKNOWN_PARTITION  # noqa: SLF001 -- as above
# A leader was elected since the client's last metadata request. A client that only requests offsets
# keeps its outdated leader for minutes, until it requests the topic's metadata.
STALE_LEADER = KafkaError.FENCED_LEADER_EPOCH
# Kind of resource to which access was refused, by the error's code.
FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
    # Reported to a producer that may write to no topic, and for topics that we may not create.
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "topic",
}
# Code of the error if Kafka refuses access to `ALONE`, the group of readers outside a job's group.
# They can read nevertheless.
GROUP_REFUSED = KafkaError.GROUP_AUTHORIZATION_FAILED
_ALL_DOWN = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 -- as above
# Errors of a refused connection, and what to do about each.
_SHUT_OUT = {
    KafkaError._AUTHENTICATION: (  # noqa: SLF001 -- as above
        "check DOLL_KAFKA_SASL_MECHANISM, DOLL_KAFKA_SASL_USERNAME and DOLL_KAFKA_SASL_PASSWORD,"
        " or with tokens DOLL_KAFKA_SASL_OAUTHBEARER_*"
    ),
    KafkaError._SSL: (  # noqa: SLF001 -- as above
        "check DOLL_KAFKA_SECURITY_PROTOCOL and, with certificates, DOLL_KAFKA_SSL_CA_LOCATION"
    ),
}
# Part of a message that differs each time. It is removed, or repeated messages would look new.
_TIMES = re.compile(r" \(after \d+ms in state .*\)")
# The client quotes a setting that it refuses. The value may be a password in the wrong variable.
_QUOTED_VALUE = re.compile(r'value ".*?"(?= for configuration property)', re.DOTALL)


# An unbound method, to be mapped over records.
_Method: TypeAlias = "Callable[[ClientMessage], T]"
_TOPIC = cast("_Method[str]", Message.topic)
_PARTITION = cast("_Method[int]", Message.partition)
_OFFSET = cast("_Method[int]", Message.offset)
_VALUE = cast("_Method[bytes | None]", Message.value)
_EPOCH = cast("_Method[int | None]", Message.leader_epoch)
_ERROR = cast("_Method[KafkaError | None]", Message.error)


class ClientMessage(Protocol):
    """A message of the client, whose own stubs say that every part of a message may be missing."""

    def topic(self) -> str:
        """Topic of the message."""

    def partition(self) -> int:
        """Partition of the topic."""

    def offset(self) -> int:
        """Offset in the partition; for an error, the position that it concerns."""

    def key(self) -> bytes | None:
        """Key, if there is one."""

    def value(self) -> bytes | None:
        """Value; None is a tombstone."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Headers, if there are any."""

    def timestamp(self) -> tuple[int, int]:
        """Kind of timestamp, and milliseconds since 1970."""

    def leader_epoch(self) -> int | None:
        """Kafka's leader epoch of the record; None if the broker has no epochs."""

    def error(self) -> KafkaError | None:
        """Error in place of a record; None for a record."""

    def __len__(self) -> int:
        """Bytes of the value."""


def arrival_s(record: ClientMessage) -> float:
    """Return the record's timestamp in Kafka."""
    return record.timestamp()[1] / 1e3


def epoch_of(record: ClientMessage) -> int:
    """Return the record's leader epoch; -1 if the broker has no epochs."""
    epoch = record.leader_epoch()
    return -1 if epoch is None else epoch


def place_of(record: ClientMessage) -> tuple[str, int]:
    """Return topic and partition of a record or an error."""
    return record.topic(), record.partition()


# Functions for many records at once. Mapping a method takes a third of the time of a call per
# record, and a small model's worker spends as much time on these calls as on its gradients.


def runs_of(
    messages: Sequence[ClientMessage],
) -> Iterator[tuple[tuple[str, int], list[ClientMessage]]]:
    """Yield runs of messages of the same partition, each with its topic and partition number."""
    begin = 0
    for place, run in groupby(zip(map(_TOPIC, messages), map(_PARTITION, messages), strict=True)):
        end = begin + len(list(run))
        yield place, list(messages[begin:end])
        begin = end


def are_records(run: Sequence[ClientMessage]) -> bool:
    """Return True if all messages are records."""
    return not any(map(_ERROR, run))


def offsets_of(run: Sequence[ClientMessage]) -> list[int]:
    """Return the offsets of records."""
    return list(map(_OFFSET, run))


def epochs_of(run: Sequence[ClientMessage]) -> list[int]:
    """Return the leader epochs of records; -1 if the broker has no epochs."""
    epochs = list(map(_EPOCH, run))
    if None in epochs:
        return [-1 if epoch is None else epoch for epoch in epochs]
    return cast("list[int]", epochs)


def fetched(partition: Partition, run: Sequence[ClientMessage]) -> Fetched:
    """Return the records of one partition as a `Fetched`."""
    first_s, last_s = (arrival_s(run[0]), arrival_s(run[-1])) if run else (0.0, 0.0)
    values = list(map(_VALUE, run))
    return Fetched(partition, offsets_of(run), values, first_s, last_s, epochs_of(run))


def end_in(run: Sequence[ClientMessage]) -> int | None:
    """Return the log's end if one partition's messages reached it; None otherwise."""
    error = run[-1].error()
    return run[-1].offset() if error is not None and error.code() == AT_END else None


def forbidden(error: KafkaError, *rights: str) -> str:
    """Return a text with the refused right: the one of `rights` on the error's kind of resource."""
    kind = FORBIDDEN[error.code()]
    right = next((each for each in rights if f" on {kind} " in each), f"a right on a {kind}")
    return f"Kafka refuses {right}: grant it as in docs/howto/security.md ({error.name()})"


def as_ours(error: KafkaError, doing: str, *rights: str) -> OutsideError:
    """Convert a client's error into one of our errors.

    Args:
        error: The client's error.
        doing: The action that failed.
        rights: Rights that the action needs, from `KafkaSettings.right`.
    """
    if error.code() in FORBIDDEN:
        return ForbiddenError(forbidden(error, *rights), "kafka")
    text = f"{doing}: {error.str()} ({error.name()})"
    # The client's own _UNKNOWN_TOPIC and _UNKNOWN_PARTITION prove nothing: it also reports
    # them after losing sight of the brokers.
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return UnknownTopicError(text)
    if _is_fatal(error) or error.code() == KafkaError.TOPIC_EXCEPTION:
        return OutsideError(text, "kafka")
    return UnavailableError(text, "kafka")


def _is_fatal(error: KafkaError) -> bool:
    return error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001 -- as above


def made(make: Callable[[dict[str, Any]], T], properties: dict[str, Any]) -> T:
    """Make a client with these properties.

    Raises:
        UserError: If the client refuses a property. Its value is not shown.
    """
    try:
        return make(properties)
    except KafkaException as raised:
        text = _QUOTED_VALUE.sub("value", cause_of(raised).str())
        raise UserError(f"DOLL_KAFKA_*: {text}") from None


def cause_of(raised: KafkaException) -> KafkaError:
    """Return the error inside an exception of the client."""
    error = raised.args[0]
    assert isinstance(error, KafkaError)  # noqa: S101 -- the client documents it
    return error


class Complaints:
    """Collects errors of the client's threads, and raises them between two calls."""

    def __init__(self) -> None:
        self._fatal: KafkaError | None = None
        # Set by the first broker that refuses us.
        self._refused: KafkaError | None = None
        # Set while the last error was a refusal.
        self._shut_out: KafkaError | None = None
        self._away: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Remember an error."""
        if _is_fatal(error):
            self._fatal = error
        elif error.code() in _SHUT_OUT:
            self._refused = self._refused or error
            self._shut_out = self._away = error
        elif error.code() == _ALL_DOWN:
            # The client reports brokers that refuse it as down.
            self._away = self._shut_out or error
        else:
            self._shut_out = None

    def raise_fatal(self, doing: str, *rights: str) -> None:
        """Raise an error that this client cannot recover from, if there was such an error.

        Raises:
            OutsideError: Now and at every later call.
        """
        if self._fatal is not None:
            raise as_ours(self._fatal, doing, *rights)

    def raise_shut_out(self, doing: str) -> None:
        """Raise if any broker has ever refused us.

        Raises:
            OutsideError: Names the remedy. A broker that has forgotten us for a moment looks like a
                broker that never knew us, so a caller that was accepted before may wait instead.
        """
        if self._refused is not None:
            raise OutsideError(_message(self._refused, doing), "kafka")

    def raise_away(self, doing: str) -> None:
        """Raise once each time that all brokers have become unavailable.

        Raises:
            UnavailableError: The client reconnects by itself, so call again.
        """
        error, self._away = self._away, None
        if error is not None and error.code() in _SHUT_OUT:
            raise UnavailableError(_message(error, doing), "kafka")
        if error is not None:
            raise as_ours(error, doing)


def _message(error: KafkaError, doing: str) -> str:
    said = _TIMES.sub("", error.str())
    return f"{doing}: Kafka refuses the connection: {said} ({_SHUT_OUT[error.code()]})"


def consume(
    client: Consumer,
    max_records: int,
    timeout_s: float,
    happened: Callable[[], bool] | None = None,
) -> list[ClientMessage]:
    """Wait for the first message, then take everything available.

    The library's own call waits until `max_records` have arrived.

    Args:
        client: The consumer.
        max_records: Maximum number of messages, at least 1.
        timeout_s: Longest wait for the first message.
        happened: Returns True if a callback has an event, which ends the wait.
    """
    messages = client.consume(max_records, 0)
    deadline = time.monotonic() + timeout_s
    while not messages and not (happened and happened()):
        left_s = deadline - time.monotonic()
        if left_s < _SHORTEST_S:
            break
        messages = client.consume(1, min(left_s, _SLICE_S) if happened else left_s)
        if messages and max_records > 1:
            messages += client.consume(max_records - 1, 0)
    return cast("list[ClientMessage]", messages)
