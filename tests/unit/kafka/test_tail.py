"""Conclusions of a tail from the client's messages, in any order."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from common.core.spans import LogPosition, Partition
from common.errors import ExpiredError, OutsideError, TruncatedError, UnavailableError
from common.kafka import tail
from common.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Consumer

PARTITION, END = Partition("a", 0), 6
PATIENCE_S = 120.0


class Ends(AdminClient):
    """A client that reports `END` as begin and end of the log."""

    def list_offsets(  # type: ignore[override]
        self, wanted: Mapping[TopicPartition, object], **_: object
    ) -> dict[TopicPartition, Future[Any]]:
        """Answer for each partition."""
        answers = {place: Future[Any]() for place in wanted}
        for answer in answers.values():
            answer.set_result(SimpleNamespace(offset=END, leader_epoch=0))
        return answers


class Stopped:
    """A consumer whose first fetch is out of range, before it can seek."""

    def __init__(self, _: object) -> None:
        self._says = list[Message]()
        self._has_stopped = False

    def incremental_assign(self, targets: list[TopicPartition]) -> None:
        """Start to fetch at once."""
        [target] = targets
        error = KafkaError(KafkaError.OFFSET_OUT_OF_RANGE)
        self._says = [Message(target.topic, target.partition, target.offset, error=error)]

    def seek(self, _: TopicPartition) -> None:
        """Fail before the fetch has stopped, and do nothing after it."""
        if not self._has_stopped:
            raise KafkaException(KafkaError(KafkaError._STATE))  # noqa: SLF001 -- the library's name

    def consume(self, *_: object) -> list[Message]:
        """Report the error once."""
        said, self._says = self._says, []
        self._has_stopped |= bool(said)
        return said

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize(("position", "fault"), [(4, ExpiredError), (10, TruncatedError)])
def test_tail_out_of_range_before_its_first_seek_raises(
    position: int, fault: type[OutsideError]
) -> None:
    admin = Ends({"bootstrap.servers": "127.0.0.1:1", "log_level": 2})
    consumer = cast("Callable[[dict[str, Any]], Consumer]", Stopped)
    known, deadline = LogPosition(position, "", 0), time.monotonic() + PATIENCE_S
    with (
        closing(tail.Tails(KafkaSettings("127.0.0.1:1"), lambda: admin, consumer)) as tails,
        closing(tails.open(PARTITION, known, None)) as opened,
    ):
        while not (found := _fault(opened)):
            assert time.monotonic() < deadline, "the fault is never reported"

    assert isinstance(found, fault)


class Silent:
    """A consumer without messages."""

    def __init__(self, _: object) -> None: ...

    def consume(self, *_: object) -> list[Message]:
        """Return nothing."""
        return []

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


def test_stale_outage_is_not_reported_to_a_late_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin = Ends({"bootstrap.servers": "127.0.0.1:1", "log_level": 2})
    consumer = cast("Callable[[dict[str, Any]], Consumer]", Silent)
    known, away = LogPosition(END, "", 0), UnavailableError("all brokers are down")
    with (
        closing(tail.Tails(KafkaSettings("127.0.0.1:1"), lambda: admin, consumer)) as tails,
        closing(tails.open(PARTITION, known, None)) as opened,
    ):
        opened.complain(away)
        assert _fault(opened) is away
        monkeypatch.setattr(tail, "_STALE_S", -1.0)
        opened.complain(away)
        assert _fault(opened) is None
        opened.complain(ExpiredError("records are gone"))
        assert isinstance(_fault(opened), ExpiredError)


def _fault(opened: tail.KafkaTail) -> OutsideError | None:
    try:
        opened.read(1, 0.05)
    except OutsideError as error:
        return error
    return None
