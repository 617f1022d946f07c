"""Requests of a `TopicWatch` to Kafka, and their times."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from common.kafka import epochs
from common.kafka.epochs import TopicWatch
from common.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from confluent_kafka import TopicCollection


class Admin:
    """Answers at once unless it is slow, with a topic's name as its id."""

    def __init__(self) -> None:
        self.asked = list[set[str]]()
        self.is_slow = False
        self._waiting = dict[str, Future[Any]]()

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[Any]]:
        """Record the requested topics."""
        self.asked.append(set(topics.topic_names))
        self._waiting = {name: Future[Any]() for name in topics.topic_names}
        if not self.is_slow:
            self.answer()
        return self._waiting

    def answer(self) -> None:
        """Complete the last request."""
        for name, future in self._waiting.items():
            future.set_result(SimpleNamespace(topic_id=name, partitions=[0]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(epochs, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_only_urgent_topics_are_queried_between_queries_of_all_topics(clock: list[float]) -> None:
    admin = Admin()
    watch = TopicWatch(lambda: admin, KafkaSettings("nowhere"))  # type: ignore[arg-type, return-value]
    named = {f"t{number}" for number in range(100)}

    def look(*urgent: str) -> dict[str, Any]:
        watch.look(lambda: named, urgent=urgent)
        return watch.look(lambda: named, urgent=urgent)

    assert look().keys() == named
    # Urgent topics, one after the other, do not delay the query of all topics.
    for turn in range(9):
        clock[0] += 0.2
        assert look(f"t{turn}") == {f"t{turn}": f"t{turn}"}
    clock[0] += 0.2
    assert look("t9").keys() == named
    assert look() == {}
    assert admin.asked == [named, *({f"t{turn}"} for turn in range(9)), named]


def test_slow_answer_is_followed_by_the_same_pause_as_a_fast_one(clock: list[float]) -> None:
    admin = Admin()
    admin.is_slow = True
    watch = TopicWatch(lambda: admin, KafkaSettings("nowhere"))  # type: ignore[arg-type, return-value]

    def look() -> dict[str, Any]:
        return watch.look(lambda: {"a"}, urgent=())

    assert look() == {}
    clock[0] += 5.0
    admin.answer()
    assert look() == {"a": "a"}
    clock[0] += 1.9
    assert look() == {}
    assert len(admin.asked) == 1
    clock[0] += 0.2
    assert look() == {}
    assert len(admin.asked) == 2
