"""What all readers and writers share: waiting for messages, and what the client complains about."""

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

# A rebalance that happens while the client waits for records ends no wait: so wait in slices.
_SLICE_S = 0.02
_SHORTEST_S = 0.001  # the client counts whole milliseconds: below one it does not wait but spins

# A fetch has come to the end of what there is to read; the message's offset says where that is.
AT_END = KafkaError._PARTITION_EOF  # noqa: SLF001 -- the library's name for its own errors
OUT_OF_RANGE = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 -- likewise
        KafkaError._LOG_TRUNCATION,  # noqa: SLF001 -- likewise
        KafkaError.OFFSET_OUT_OF_RANGE,
    }
)
UNKNOWN = frozenset(  # said of a partition by a broker, or by the client after it has asked one
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 -- likewise
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 -- likewise
    }
)
# What the client says instead where it finds no leader for any partition of a question: none of
# them exists, or none has a leader now.
NO_LEADERS = KafkaError._NOENT  # noqa: SLF001 -- likewise
# What the client says, without asking, of one that is not among those that it knows of a topic.
ADDED = KafkaError._UNKNOWN_PARTITION  # noqa: SLF001 -- likewise
# A partition's leader was elected since the client asked. A client that asks about offsets only
# goes on with what it knew, for minutes, until it asks about the topic.
STALE_LEADER = KafkaError.FENCED_LEADER_EPOCH
# Kind of resource that a refused right is on, by the error's code.
FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
    # Of a producer that may write to no topic at all, and of topics that may not be created.
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "topic",
}
# Said of the group that readers outside a job's group are in. They read without it.
GROUP_REFUSED = KafkaError.GROUP_AUTHORIZATION_FAILED
_ALL_DOWN = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001 -- likewise
_SHUT_OUT = {  # and what to do about it
    KafkaError._AUTHENTICATION: (  # noqa: SLF001 -- likewise
        "check DOLL_KAFKA_SASL_MECHANISM, DOLL_KAFKA_SASL_USERNAME and DOLL_KAFKA_SASL_PASSWORD,"
        " or with tokens DOLL_KAFKA_SASL_OAUTHBEARER_*"
    ),
    KafkaError._SSL: (  # noqa: SLF001 -- likewise
        "check DOLL_KAFKA_SECURITY_PROTOCOL and, with certificates, DOLL_KAFKA_SSL_CA_LOCATION"
    ),
}
_TIMES = re.compile(r" \(after \d+ms in state .*\)")  # never twice alike: each would be news
# How the client quotes a setting that it refuses; somebody may have mixed up a password's.
_QUOTED_VALUE = re.compile(r'value ".*?"(?= for configuration property)', re.DOTALL)


# A method as the class has it, to be mapped over records.
_Method: TypeAlias = "Callable[[ClientMessage], T]"
_TOPIC = cast("_Method[str]", Message.topic)
_PARTITION = cast("_Method[int]", Message.partition)
_OFFSET = cast("_Method[int]", Message.offset)
_VALUE = cast("_Method[bytes | None]", Message.value)
_EPOCH = cast("_Method[int | None]", Message.leader_epoch)
_ERROR = cast("_Method[KafkaError | None]", Message.error)


class ClientMessage(Protocol):
    """A message of the client; its own stubs say that every part of one may be missing."""

    def topic(self) -> str:
        """Topic it is in."""

    def partition(self) -> int:
        """Partition of the topic."""

    def offset(self) -> int:
        """Offset in the partition; for an error, the position it is about."""

    def key(self) -> bytes | None:
        """Key, if it has one."""

    def value(self) -> bytes | None:
        """Value; None is a tombstone."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Its headers, if it has some."""

    def timestamp(self) -> tuple[int, int]:
        """Kind of timestamp, and milliseconds since 1970."""

    def leader_epoch(self) -> int | None:
        """Kafka's leader epoch of the record; None where the broker has none."""

    def error(self) -> KafkaError | None:
        """What this message says instead of being a record."""

    def __len__(self) -> int:
        """Bytes of the value."""


def arrival_s(record: ClientMessage) -> float:
    """The record's timestamp in Kafka."""
    return record.timestamp()[1] / 1e3


def epoch_of(record: ClientMessage) -> int:
    """The record's leader epoch; -1 where the broker has none."""
    epoch = record.leader_epoch()
    return -1 if epoch is None else epoch


def place_of(record: ClientMessage) -> tuple[str, int]:
    """Topic and partition that a message is in, or about."""
    return record.topic(), record.partition()


# Of many records at once: mapped so, a method takes a third of the time of a call for each record,
# and a small model's worker spends as much on those as on its gradients.


def runs_of(
    messages: Sequence[ClientMessage],
) -> Iterator[tuple[tuple[str, int], list[ClientMessage]]]:
    """Neighbours that are in, or about, the same partition; with its topic and number."""
    begin = 0
    for place, run in groupby(zip(map(_TOPIC, messages), map(_PARTITION, messages), strict=True)):
        end = begin + len(list(run))
        yield place, list(messages[begin:end])
        begin = end


def are_records(run: Sequence[ClientMessage]) -> bool:
    """Whether no message of these says something else instead of being a record."""
    return not any(map(_ERROR, run))


def offsets_of(run: Sequence[ClientMessage]) -> list[int]:
    """Offsets of records."""
    return list(map(_OFFSET, run))


def epochs_of(run: Sequence[ClientMessage]) -> list[int]:
    """Leader epochs of records; -1 where the broker has none."""
    epochs = list(map(_EPOCH, run))
    if None in epochs:
        return [-1 if epoch is None else epoch for epoch in epochs]
    return cast("list[int]", epochs)


def fetched(partition: Partition, run: Sequence[ClientMessage]) -> Fetched:
    """Records of one partition, or none."""
    first_s, last_s = (arrival_s(run[0]), arrival_s(run[-1])) if run else (0.0, 0.0)
    values = list(map(_VALUE, run))
    return Fetched(partition, offsets_of(run), values, first_s, last_s, epochs_of(run))


def end_in(run: Sequence[ClientMessage]) -> int | None:
    """The end that messages of one partition came to; None where records follow, or none did."""
    error = run[-1].error()
    return run[-1].offset() if error is not None and error.code() == AT_END else None


def forbidden(error: KafkaError, *rights: str) -> str:
    """Return the text that names the right that Kafka refuses: one of `rights`, by its resource."""
    kind = FORBIDDEN[error.code()]
    right = next((each for each in rights if f" on {kind} " in each), f"a right on a {kind}")
    return f"Kafka refuses {right}: add it as in docs/howto/security.md ({error.name()})"


def as_ours(error: KafkaError, doing: str, *rights: str) -> OutsideError:
    """Return the error of our tree that says what an error of the client means.

    Args:
        error: The client's.
        doing: What failed.
        rights: Rights that this needs, from `KafkaSettings.right`.
    """
    if error.code() in FORBIDDEN:
        return ForbiddenError(forbidden(error, *rights), "kafka")
    text = f"{doing}: {error.str()} ({error.name()})"
    # The client's own _UNKNOWN_TOPIC and _UNKNOWN_PARTITION are not proof: it says so too where it
    # has lost sight of the brokers.
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return UnknownTopicError(text)
    if _is_fatal(error) or error.code() == KafkaError.TOPIC_EXCEPTION:
        return OutsideError(text, "kafka")
    return UnavailableError(text, "kafka")


def _is_fatal(error: KafkaError) -> bool:
    return error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001 -- likewise


def made(make: Callable[[dict[str, Any]], T], properties: dict[str, Any]) -> T:
    """A client with these properties.

    Raises:
        UserError: If the client refuses one of them; no value is shown.
    """
    try:
        return make(properties)
    except KafkaException as raised:
        text = _QUOTED_VALUE.sub("value", cause_of(raised).str())
        raise UserError(f"DOLL_KAFKA_*: {text}") from None


def cause_of(raised: KafkaException) -> KafkaError:
    """The error inside an exception of the client."""
    error = raised.args[0]
    assert isinstance(error, KafkaError)  # noqa: S101 -- the client documents it
    return error


class Complaints:
    """Called by the client with what its threads ran into; asked between two calls."""

    def __init__(self) -> None:
        self._fatal: KafkaError | None = None
        self._refused: KafkaError | None = None  # by the first broker that did not let us in
        self._shut_out: KafkaError | None = None  # likewise, if it is the last that we heard of
        self._away: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Remember an error."""
        if _is_fatal(error):
            self._fatal = error
        elif error.code() in _SHUT_OUT:
            self._refused = self._refused or error
            self._shut_out = self._away = error
        elif error.code() == _ALL_DOWN:
            self._away = self._shut_out or error  # the client calls those down that shut it out
        else:
            self._shut_out = None

    def raise_fatal(self, doing: str, *rights: str) -> None:
        """Raise what this client cannot recover from, if there is such.

        Raises:
            OutsideError: Now and at every later call.
        """
        if self._fatal is not None:
            raise as_ours(self._fatal, doing, *rights)

    def raise_shut_out(self, doing: str) -> None:
        """Raise if a broker was ever found that does not let us in.

        Raises:
            OutsideError: With what to do. A broker that forgot us for a moment cannot be told from
                one that never knew us, so who was let in before may wait instead.
        """
        if self._refused is not None:
            raise OutsideError(_message(self._refused, doing), "kafka")

    def raise_away(self, doing: str) -> None:
        """Raise once for each time that all brokers were found to be away.

        Raises:
            UnavailableError: Call again, the client connects by itself.
        """
        error, self._away = self._away, None
        if error is not None and error.code() in _SHUT_OUT:
            raise UnavailableError(_message(error, doing), "kafka")
        if error is not None:
            raise as_ours(error, doing)


def _message(error: KafkaError, doing: str) -> str:
    said = _TIMES.sub("", error.str())
    return f"{doing}: Kafka does not let us in: {said} ({_SHUT_OUT[error.code()]})"


def consume(
    client: Consumer,
    max_records: int,
    timeout_s: float,
    happened: Callable[[], bool] | None = None,
) -> list[ClientMessage]:
    """Wait for the first message, then take what else is there; the library would wait for all.

    Args:
        client: The consumer.
        max_records: At most so many, at least 1.
        timeout_s: How long to wait for the first.
        happened: Says that a callback has something to tell, so that waiting ends.
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
