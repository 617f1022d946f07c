"""Meaning of the client's answers about the ends of logs."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from common.core.spans import Partition
from common.kafka.offsets import BoundsQuestion, Offset, OffsetsQuestion

if TYPE_CHECKING:
    from collections.abc import Mapping

P, Q = Partition("a", 0), Partition("a", 1)
# The client's code for a partition whose leader is up but does not respond.
NOT_ANSWERED = -1001


class HalfAnswered(AdminClient):
    """A client that gets an answer for the first partition only."""

    def list_offsets(  # type: ignore[override]
        self, wanted: Mapping[TopicPartition, object], **_: object
    ) -> dict[TopicPartition, Future[Any]]:
        """Answer for each partition."""
        answers = dict[TopicPartition, Future[Any]]()
        for place in wanted:
            offset = NOT_ANSWERED if place.partition else 7
            answers[place] = Future()
            answers[place].set_result(SimpleNamespace(offset=offset, leader_epoch=3))
        return answers


@pytest.fixture
def admin() -> HalfAnswered:
    return HalfAnswered({"bootstrap.servers": "127.0.0.1:1", "log_level": 2})


def test_leader_that_does_not_answer_gives_no_end(
    admin: HalfAnswered,
) -> None:
    answers = OffsetsQuestion(admin, [P, Q], "end", 1.0).answers()
    assert answers[P] == Offset(7, 3)
    missing = answers[Q]
    assert isinstance(missing, KafkaError)
    assert missing.code() == KafkaError._TIMED_OUT  # noqa: SLF001 -- the library's own name
    both = BoundsQuestion(admin, [P, Q], 1.0).answers()
    assert isinstance(both[Q], KafkaError)
