"""A member's commits: only of its own partitions, and repeated if the broker refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from common.core.spans import Partition
from common.kafka.settings import KafkaSettings
from common.kafka.stream import KafkaStreamReader

if TYPE_CHECKING:
    from collections.abc import Callable

P, Q = Partition("s", 0), Partition("s", 1)
NOT_NOW = KafkaError(KafkaError.REBALANCE_IN_PROGRESS)
OnCommit: TypeAlias = "Callable[[KafkaError | None, list[TopicPartition]], None]"


class _Client:
    """A consumer that owns P and records what it commits."""

    def __init__(self, properties: dict[str, object]) -> None:
        self.answered: OnCommit = properties["on_commit"]  # type: ignore[assignment]
        self.sent: list[list[TopicPartition]] = []
        self.fails = False

    def subscribe(self, _topics: list[str], *, on_assign: Callable[..., None], **_: object) -> None:
        on_assign(self, [TopicPartition(*P)])

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        if self.fails:
            raise KafkaException(NOT_NOW)
        self.sent.append(offsets)

    def incremental_assign(self, _partitions: list[TopicPartition]) -> None:
        """Do nothing."""

    def pause(self, _partitions: list[TopicPartition]) -> None:
        """Do nothing."""


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> tuple[KafkaStreamReader, _Client]:
    clients = list[_Client]()

    def made(_: type[Consumer], properties: dict[str, object]) -> _Client:
        clients.append(_Client(properties))
        return clients[-1]

    monkeypatch.setattr("common.kafka.stream.made", made)
    settings = KafkaSettings("127.0.0.1:1")
    reader = KafkaStreamReader(settings, pytest.fail, "doll.job", ["s"], "w1", hold=False)
    return reader, clients[0]


def test_accepted_commit_is_not_repeated(
    member: tuple[KafkaStreamReader, _Client],
) -> None:
    reader, client = member
    reader.commit({P: 5, Q: 7})
    assert client.sent == [[TopicPartition(*P, 5)]]  # Q is another member's
    client.answered(None, client.sent[0])
    reader.commit({P: 5})
    # A new leader may move the position back.
    reader.commit({P: 4})
    assert client.sent[1:] == [[TopicPartition(*P, 4)]]


def test_refused_commit_is_repeated_with_the_next(
    member: tuple[KafkaStreamReader, _Client],
) -> None:
    reader, client = member
    reader.commit({P: 5})
    client.answered(NOT_NOW, client.sent[0])
    reader.commit({P: 5})
    client.fails = True
    reader.commit({P: 5})
    client.fails = False
    reader.commit({P: 5})
    assert [[each.offset for each in sent] for sent in client.sent] == [[5], [5], [5]]
