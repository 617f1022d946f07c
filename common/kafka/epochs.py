"""Whether a log is still the one that a reader knew: ids of topics, and ends of leader epochs."""

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
_BEYOND = 1 << 62  # no log reaches so far
_NO_ID = "A" * 22  # of a broker that gives topics none
# How often a reader looks whether its topics are still the same: it is what a topic that is created
# anew may take to be noticed, and a request for all that a process reads.
_LOOK_S = 2.0
_LOOK_AGAIN_S = 0.5  # after no answer
_LOOK_SOON_S = 0.02  # after an answer, at the earliest: records that trickle make each look urgent


def divergent_offset(error: KafkaError) -> int | None:
    """From where on a log is another one than was read; None if that is not what an error says.

    The client finds it out and tells it in words only. Where all epochs of a log are later than the
    one asked for, nothing is left of what was read.
    """
    said = _BROKER_END.search(error.str())
    return None if said is None else max(int(said[1]), 0)


def epoch_ends(
    settings: KafkaSettings, epochs: Mapping[Partition, int], timeout_s: float
) -> dict[Partition, int]:
    """Where records of leader epochs up to one end in each partition's log.

    The client asks the brokers for it where it is told to go on reading after a record of such an
    epoch, and says what they answered if the position is above it; so a position above all is
    given. For each question a new client: one that has known a topic of this name under higher
    epochs, of before it was created anew, gets no answer any more.

    Raises:
        UnavailableError: If some did not come in time.
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
        client.pause(targets)  # no records are wanted
        for target in targets:
            client.seek(target)  # only this surely asks
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
    """Where leader epochs of a partition's log ended, as long as a later one is in force."""

    lasting: tuple[str, int]  # id of the topic, leader epoch in force
    ends: dict[int, int] = field(default_factory=dict)  # by epoch


class TopicsQuestion:
    """One request for what some topics are.

    Args:
        admin: The client to ask.
        topics: At least one.
        timeout_s: After which every answer is that none came.
    """

    def __init__(self, admin: AdminClient, topics: Collection[str], timeout_s: float) -> None:
        self._answers: dict[str, Future[TopicDescription]] = admin.describe_topics(
            TopicCollection(sorted(topics)), request_timeout=timeout_s
        )

    def is_answered(self) -> bool:
        """Whether `answers` need not wait."""
        return all(answer.done() for answer in self._answers.values())

    def answers(self) -> dict[str, FoundTopic | KafkaError]:
        """By topic, what it is, or why nobody knows."""
        return {topic: _found(answer) for topic, answer in self._answers.items()}


def _found(answer: Future[TopicDescription]) -> FoundTopic | KafkaError:
    try:
        topic = answer.result()
    except KafkaException as raised:
        return cause_of(raised)
    topic_id = str(topic.topic_id)
    return FoundTopic("" if topic_id == _NO_ID else topic_id, len(topic.partitions))


class TopicWatch:
    """Looks now and then, without waiting for it, whether topics still have the same ids.

    Args:
        admin: Gives the client to ask.
        settings: How long an answer may take, and whether there are ids at all.
    """

    def __init__(self, admin: Callable[[], AdminClient], settings: KafkaSettings) -> None:
        self._admin = admin
        self._timeout_s = settings.request_timeout_s
        self.is_able = settings.topic_maker is None
        self.asked = 0  # questions
        self._question: TopicsQuestion | None = None
        self._due_s = self._again_s = 0.0

    def look(
        self, topics: Callable[[], Collection[str]], *, urgent: Collection[str]
    ) -> dict[str, str | KafkaError]:
        """Ids that the last question found, by topic, once; asks anew when it is time to.

        Args:
            topics: Which to ask about now and then.
            urgent: Which of them to ask about as soon as there is no other question: somebody
                waits for the answer. The others are not asked about then: there may be hundreds.
        """
        now_s = time.monotonic()
        if self._question is None:
            is_due = now_s >= self._due_s
            asked = topics() if is_due else urgent if now_s >= self._again_s else ()
            if asked:
                if is_due:
                    self._due_s = math.inf  # until there is an answer
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
