"""Checks if a log is still the one that a reader knew, by topic ids and ends of leader epochs."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)

from common.core.spans import Partition
from common.errors import UnavailableError
from common.kafka.client import (
    GROUP_REFUSED,
    OUT_OF_RANGE,
    Complaints,
    as_ours,
    cause_of,
    made,
    place_of,
)
from common.kafka.port import FoundTopic
from common.kafka.settings import reader_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._topic import TopicDescription

    from common.kafka.client import ClientMessage
    from common.kafka.settings import KafkaSettings

_BROKER_END = re.compile(r"broker end offset is (-?\d+)")
# Higher than any log's end.
_BEYOND = 1 << 62
# The id of a topic if the broker has no ids.
_NO_ID = "A" * 22
# Interval of a reader's checks of its topics. A recreated topic is noticed this late. One request
# covers all topics of a process.
_LOOK_S = 2.0
# Pause after a failed request.
_LOOK_AGAIN_S = 0.5
# Minimum pause after an answer. Without it, a slow trickle of records would cause one request after
# the other, because each record makes a check urgent.
_LOOK_SOON_S = 0.02


def divergent_offset(error: KafkaError) -> int | None:
    """Return the offset at which the log diverges from the known one; None if the error has none.

    The client names the offset only in the error's text. The offset is -1 if all epochs of the log
    are later than the requested one. Then nothing is left of what was read, and 0 is returned.
    """
    said = _BROKER_END.search(error.str())
    return None if said is None else max(int(said[1]), 0)


def epoch_ends(
    settings: KafkaSettings, epochs: Mapping[Partition, int], timeout_s: float
) -> dict[Partition, int]:
    """Return the offset after the last record of each partition's given epoch, or an earlier one.

    If the client seeks a position with an epoch, it asks a broker where that epoch ends. It reports
    the answer if the position is above this end. So this function seeks a position above every
    log's end. Each call makes a new client: a client that has seen higher epochs under this topic's
    name, before the topic was recreated, gets no answer.

    Raises:
        UnavailableError: If some answers did not arrive in time.
    """
    doing = f"leader epochs of {len(epochs)} partitions"
    topics = " or ".join(sorted({place.topic for place in epochs}))
    right = settings.right("read", f"topic {topics}")
    complaints, found = Complaints(), dict[Partition, int]()
    client = made(Consumer, reader_properties(settings) | {"error_cb": complaints})
    deadline = time.monotonic() + timeout_s
    try:
        targets = [
            TopicPartition(*place, _BEYOND, leader_epoch=epoch) for place, epoch in epochs.items()
        ]
        client.assign(targets)
        # Records are not needed.
        client.pause(targets)
        # Only a seek makes the client ask in all cases.
        for target in targets:
            client.seek(target)
        while len(found) < len(epochs):
            if (left_s := deadline - time.monotonic()) <= 0:
                complaints.raise_away(doing)
                raise UnavailableError(f"{doing}: no answer within {timeout_s} s", "kafka")
            for message in cast("list[ClientMessage]", client.consume(len(epochs), left_s)):
                _take_end(message, found, doing, right)
    except KafkaException as raised:
        raise as_ours(cause_of(raised), doing, right) from raised
    finally:
        client.close()
    return found


def _take_end(message: ClientMessage, found: dict[Partition, int], doing: str, right: str) -> None:
    error = message.error()
    if error is None or error.code() == GROUP_REFUSED:
        return
    end = divergent_offset(error) if error.code() in OUT_OF_RANGE else None
    if end is None:
        raise as_ours(error, doing, right)
    found[Partition(*place_of(message))] = end


@dataclass(slots=True)
class PastEpochs:
    """The ends of leader epochs in a partition's log, valid while a later epoch is in force."""

    # Id of the topic, and the leader epoch in force.
    lasting: tuple[str, int]
    # Ends by epoch.
    ends: dict[int, int] = field(default_factory=dict)


class TopicsQuestion:
    """One request for the ids and sizes of topics.

    Args:
        admin: The client to use.
        topics: At least one topic.
        timeout_s: Time after which the request counts as unanswered.
    """

    def __init__(self, admin: AdminClient, topics: Collection[str], timeout_s: float) -> None:
        self._answers: dict[str, Future[TopicDescription]] = admin.describe_topics(
            TopicCollection(sorted(topics)), request_timeout=timeout_s
        )

    def is_answered(self) -> bool:
        """Return True if `answers` does not have to wait."""
        return all(answer.done() for answer in self._answers.values())

    def answers(self) -> dict[str, FoundTopic | KafkaError]:
        """Return each topic's description, or the error in its place."""
        return {topic: _found(answer) for topic, answer in self._answers.items()}


def _found(answer: Future[TopicDescription]) -> FoundTopic | KafkaError:
    try:
        topic = answer.result()
    except KafkaException as raised:
        return cause_of(raised)
    topic_id = str(topic.topic_id)
    return FoundTopic("" if topic_id == _NO_ID else topic_id, len(topic.partitions))


class TopicWatch:
    """Checks at intervals, without waiting, if topics still have the same ids.

    Args:
        admin: Returns the client to use.
        settings: Has the timeout, and says if the broker has topic ids.
    """

    def __init__(self, admin: Callable[[], AdminClient], settings: KafkaSettings) -> None:
        self._admin = admin
        self._timeout_s = settings.request_timeout_s
        self.is_able = settings.topic_maker is None
        # Number of requests so far.
        self.asked = 0
        self._question: TopicsQuestion | None = None
        self._due_s = self._again_s = 0.0

    def look(
        self, topics: Callable[[], Collection[str]], *, urgent: Collection[str]
    ) -> dict[str, str | KafkaError]:
        """Return the last request's ids or errors, once; else {}. Send a request when it is due.

        Args:
            topics: Returns the topics to check at intervals.
            urgent: Topics to check as soon as no other request is under way, because a reader waits
                for the answer. Other topics are left out then, since there may be hundreds.
        """
        now_s = time.monotonic()
        if self._question is None:
            is_due = now_s >= self._due_s
            asked = topics() if is_due else urgent if now_s >= self._again_s else ()
            if asked:
                if is_due:
                    # Reset by the answer.
                    self._due_s = math.inf
                self._question = TopicsQuestion(self._admin(), asked, self._timeout_s)
                self.asked += 1
            return {}
        if not self._question.is_answered():
            return {}
        answers, self._question = self._question.answers(), None
        self._due_s = min(self._due_s, now_s + _LOOK_S)
        failed = any(isinstance(answer, KafkaError) for answer in answers.values())
        self._again_s = now_s + (_LOOK_AGAIN_S if failed else _LOOK_SOON_S)
        return {
            topic: answer.topic_id if isinstance(answer, FoundTopic) else answer
            for topic, answer in answers.items()
        }
