"""Kafka as the `Log` port: manages topics, finds their bounds, and makes readers and writers.

A process has one consumer for all tails, one more for prompt tails, one producer for all writers,
one client for metadata, and one that creates topics and requests metadata of many at once.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import closing, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition, cimpl
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from common.core.spans import LogPosition, Partition, Span
from common.errors import (
    DollError,
    ExpiredError,
    ForbiddenError,
    OutsideError,
    UnavailableError,
    UnknownTopicError,
)
from common.kafka.client import (
    ADDED,
    FORBIDDEN,
    NO_LEADERS,
    STALE_LEADER,
    UNKNOWN,
    Complaints,
    as_ours,
    cause_of,
    forbidden,
    made,
)
from common.kafka.epochs import PastEpochs, TopicsQuestion, epoch_ends
from common.kafka.offsets import Offset, OffsetsQuestion, Which
from common.kafka.port import WRITER_BYTES, Bounds, FoundTopic, NewTopic
from common.kafka.settings import client_properties, reader_properties
from common.kafka.spans import KafkaSpanReader
from common.kafka.tail import Tails
from common.kafka.writer import KafkaWriter, SharedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future

    from confluent_kafka.admin._metadata import TopicMetadata

    from common.core.messages import Positions
    from common.kafka.settings import KafkaSettings
    from common.kafka.tail import KafkaTail

_METADATA_RETRY_S = 0.02
# Time for a leader's election: a topic may have been created just now, or a partition may have a
# new leader that the client does not know yet.
_ELECTION_S = 2.0
# Errors that the client returns without a request to a broker. They do not prove that the partition
# is missing, so its existence must be checked.
_NOT_ASKED = frozenset({NO_LEADERS, ADDED})
_ELECTING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        # Reported by a broker that lost records, and epochs with them.
        KafkaError.UNKNOWN_LEADER_EPOCH,
        STALE_LEADER,
        ADDED,
    }
)
_GONE = UNKNOWN | {KafkaError.GROUP_ID_NOT_FOUND}
# Reasons why a cluster refuses to create a topic for us.
_BY_HAND = frozenset(
    {
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_CONFIG,
    }
)
# Waits for the first requests. Brokers that refuse us say so within half a second, or within two if
# all are busy. A broker that has not answered by the end of the last wait counts as missing. So a
# command reports that within 10 s, its own start included.
_FIRST_WAITS_S = (1.0, 2.0, 3.0)
# Longest time that requests wait for a dead broker.
_CONTROLLER_MS = 2_000
# Longest wait for an election, even if only one of many partitions is still missing.
_OFFSETS_S = 0.5


class KafkaLog:
    """The `Log` port. Connects at the first request."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        # Keeps two threads from both making a client.
        self._lock = threading.Lock()
        self._complaints = Complaints()
        # True once a broker has answered.
        self._let_in = False
        # True once a broker has answered the admin client.
        self._admin_met = False
        self._past_epochs = dict[Partition, PastEpochs]()
        self._tails = Tails(settings, lambda: self._admin)
        self._producer: SharedProducer | None = None

    def create_topics(self, wanted: Sequence[NewTopic]) -> None:
        """See the port."""
        # Made first, so that it finds its brokers during the checks below.
        admin = self._admin
        # Existing topics are left out: without the right to create topics, Kafka would refuse
        # these, too.
        made = [topic for topic in wanted if not self._exists(topic.name)]
        if not made:
            return
        if self._settings.topic_maker is None:
            made = self._create(admin, made)
        else:
            for topic in made:
                self._settings.topic_maker(topic.name, topic.partitions)
        self._await_topics({topic.name for topic in made})

    def delete_topics(self, topics: Collection[str]) -> None:
        """See the port."""
        if not topics:
            return
        if self._settings.topic_maker is not None:
            raise OutsideError(
                "the built-in Kafka cannot delete topics; they are deleted when it ends"
            )
        self._meet_admin(topics)
        timeout_s = self._settings.request_timeout_s
        answers = self._admin.delete_topics(
            list(topics), request_timeout=timeout_s, operation_timeout=timeout_s
        )
        _all_deleted("topic", answers, self._settings)

    def delete_groups(self, groups: Collection[str]) -> None:
        """See the port."""
        # The built-in Kafka's groups end with it.
        if not groups or self._settings.topic_maker is not None:
            return
        timeout_s = self._settings.request_timeout_s
        _all_deleted(
            "group",
            self._admin.delete_consumer_groups(list(groups), request_timeout=timeout_s),
            self._settings,
        )

    def topics(self) -> list[str]:
        """See the port."""
        return sorted(self._listed(None, "all topics"))

    def settings(
        self, topics: Collection[str], refused: list[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """See the port."""
        if self._settings.topic_maker is not None or not topics:
            return {}
        self._meet_admin(topics)
        answers = self._admin.describe_configs(
            [ConfigResource(ResourceType.TOPIC, topic) for topic in topics],
            request_timeout=self._settings.request_timeout_s,
        )
        found = dict[str, dict[str, str]]()
        for resource, answer in answers.items():
            try:
                entries = answer.result()
            except KafkaException as raised:
                right = self._settings.right("describe_configs", f"topic {resource.name}")
                error = as_ours(cause_of(raised), f"settings of topic {resource.name}", right)
                if error.retriable and not isinstance(error, ForbiddenError):
                    raise error from raised
                if refused is not None and isinstance(error, ForbiddenError):
                    refused.append(str(error))
                continue
            found[resource.name] = {name: entry.value or "" for name, entry in entries.items()}
        return found

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """See the port."""
        doing = f"partitions of {topic}"
        found = self._listed(topic, doing)[topic]
        if found.error is not None:
            raise as_ours(found.error, doing, self._describe(topic))
        return tuple(Partition(topic, index) for index in sorted(found.partitions))

    def bounds(self, partition: Partition) -> Bounds:
        """See the port."""
        until = time.monotonic() + _ELECTION_S
        while True:
            # The client only knows partitions of topics that it has requested lately.
            if partition not in self.partitions(partition.topic):
                raise UnknownTopicError(f"there is no {partition}")
            try:
                return Bounds(
                    *self._client.get_watermark_offsets(
                        TopicPartition(*partition), timeout=self._settings.request_timeout_s
                    )
                )
            except KafkaException as raised:
                error = cause_of(raised)
                if error.code() not in _ELECTING or time.monotonic() > until:
                    doing, right = f"bounds of {partition}", self._describe(partition.topic)
                    raise as_ours(error, doing, right) from raised
                time.sleep(_METADATA_RETRY_S)

    def position_at(self, partition: Partition, timestamp_s: float) -> int:
        """See the port."""
        bounds = self.bounds(partition)
        if self._settings.topic_maker is not None:
            return self._search_time(partition, bounds, timestamp_s)
        doing, right = f"position in {partition} by time", self._describe(partition.topic)
        wanted = TopicPartition(*partition, int(timestamp_s * 1e3))
        try:
            [found] = self._client.offsets_for_times(
                [wanted], timeout=self._settings.request_timeout_s
            )
        except KafkaException as raised:
            raise as_ours(cause_of(raised), doing, right) from raised
        if found.error is not None:
            raise as_ours(found.error, doing, right)
        return found.offset if found.offset >= 0 else bounds.end

    def ends(self, partitions: Collection[Partition]) -> Positions:
        """See the port."""
        return {place: found.offset for place, found in self._offsets("end", partitions).items()}

    def high_watermarks(self, partitions: Collection[Partition]) -> Positions:
        """See the port."""
        found = self._offsets("high watermark", partitions)
        return {place: each.offset for place, each in found.items()}

    def end_positions(
        self, partitions: Collection[Partition], topics: Mapping[str, FoundTopic] | None = None
    ) -> dict[Partition, LogPosition]:
        """See the port."""
        # Ids come first: if a topic is recreated meanwhile, its ends do not match its old id.
        asked = self.describe({each.topic for each in partitions}) if topics is None else topics
        positions: dict[Partition, LogPosition] = {}
        for place, end in self._offsets("end", partitions).items():
            if (topic := asked.get(place.topic)) is not None:
                positions[place] = LogPosition(end.offset, topic.topic_id, end.epoch)
            elif topics is not None:
                positions[place] = LogPosition(end.offset, "", end.epoch)
        return positions

    def starts(self, partitions: Collection[Partition]) -> Positions:
        """See the port."""
        return {place: found.offset for place, found in self._offsets("start", partitions).items()}

    def describe(self, topics: Collection[str]) -> dict[str, FoundTopic]:
        """See the port."""
        if not topics:
            return {}
        found = dict[str, FoundTopic]()
        if self._settings.topic_maker is not None:
            for topic in topics:
                with suppress(UnknownTopicError):
                    found[topic] = FoundTopic("", len(self.partitions(topic)))
            return found
        self._meet_admin(topics)
        question = TopicsQuestion(self._admin, topics, self._settings.request_timeout_s)
        for topic, answer in question.answers().items():
            if isinstance(answer, FoundTopic):
                found[topic] = answer
            elif answer.code() not in UNKNOWN:
                raise as_ours(answer, f"description of {topic}", self._describe(topic))
        return found

    def agrees(
        self,
        positions: Mapping[Partition, LogPosition],
        ends: Mapping[Partition, LogPosition] | None = None,
    ) -> dict[Partition, int]:
        """See the port."""
        ends = self.end_positions(positions) if ends is None else ends
        diverged, left = dict[Partition, int](), dict[Partition, LogPosition]()
        for place, known in positions.items():
            if place not in ends:
                if place not in self.partitions(place.topic):
                    raise UnknownTopicError(f"there is no {place}")
                raise UnavailableError(f"Kafka does not return the end of {place} now", "kafka")
            if "" != known.topic_id != ends[place].topic_id != "":
                diverged[place] = 0
            else:
                left[place] = known
        reached = self._reached(left, ends)
        diverged |= {place: reached[place] for place in left if reached[place] < left[place].offset}
        return diverged

    def spans(self) -> KafkaSpanReader:
        """See the port."""
        return KafkaSpanReader(self._settings)

    def tail(
        self,
        partition: Partition,
        position: int | LogPosition,
        on_ready: Callable[[], None] | None = None,
        *,
        prompt: bool = False,
    ) -> KafkaTail:
        """See the port."""
        return self._tails.open(partition, LogPosition.of(position), on_ready, prompt=prompt)

    def writer(
        self,
        *,
        waits: bool = True,
        max_bytes: int = WRITER_BYTES,
        on_ready: Callable[[], None] | None = None,
    ) -> KafkaWriter:
        """See the port."""
        with self._lock:
            while True:
                if self._producer is None:
                    self._producer = SharedProducer(self._settings)
                writer = KafkaWriter(
                    self._producer,
                    self._settings,
                    self.partitions,
                    waits=waits,
                    max_bytes=max_bytes,
                    on_ready=on_ready,
                )
                if self._producer.add(writer):
                    return writer
                # The producer has ended.
                self._producer = None

    def close(self) -> None:
        """See the port."""
        self._tails.close()
        with self._lock:
            producer, self._producer = self._producer, None
            # The admin client's thread receives answers. An answer that arrives after the
            # interpreter has ended kills the process. Other threads may still refer to this log
            # then, so the client is dropped here.
            admin = self.__dict__.pop("_made_admin", None)
        del admin
        if producer is not None:
            producer.close()

    @property
    def _client(self) -> Consumer:
        with self._lock:
            return self._made_client

    @cached_property
    def _made_client(self) -> Consumer:
        # A consumer is used because a producer's requests may create topics.
        properties = reader_properties(self._settings) | {"error_cb": self._complaints}
        return made(Consumer, properties)

    @property
    def _admin(self) -> AdminClient:
        with self._lock:
            return self._made_admin

    @cached_property
    def _made_admin(self) -> AdminClient:
        # The client sends these requests to the controller that its metadata names. If that broker
        # is dead, they wait until the client refreshes its metadata, by default up to 5 min.
        properties = {"topic.metadata.refresh.interval.ms": _CONTROLLER_MS}
        return made(AdminClient, client_properties(self._settings) | properties)

    def _describe(self, topic: str) -> str:
        return self._settings.right("read or describe", f"topic {topic}")

    def _exists(self, topic: str) -> bool:
        try:
            return bool(self.partitions(topic))
        except UnknownTopicError:
            return False

    def _meet_admin(self, topics: Collection[str]) -> None:
        """Let the admin client find the brokers; otherwise its first request takes 3 s."""
        if self._admin_met:
            return
        for topic in topics:
            # A request for a missing topic would create it.
            if self._exists(topic):
                with suppress(KafkaException):
                    self._admin.list_topics(topic, timeout=self._settings.request_timeout_s)
                    self._admin_met = True
                return

    def _reached(
        self,
        positions: Mapping[Partition, LogPosition],
        ends: Mapping[Partition, LogPosition],
    ) -> dict[Partition, int]:
        """Return the offset after each log's last record of the position's epoch or an earlier one.

        While a leader epoch is in force, the ends of earlier epochs are final, so each is requested
        once. If several threads request ends, each stores its answer in the table that it looked
        into, even if another thread has replaced the table for a later epoch.
        """
        reached, unknown = dict[Partition, int](), dict[Partition, PastEpochs]()
        for place, known in positions.items():
            end, topic_id, epoch = ends[place]
            if -1 in {known.epoch, epoch} or known.epoch == epoch:
                reached[place] = end
                continue
            past = self._past_epochs.get(place)
            if past is None or past.lasting != (topic_id, epoch):
                past = self._past_epochs[place] = PastEpochs((topic_id, epoch))
            if known.epoch in past.ends:
                reached[place] = past.ends[known.epoch]
            else:
                unknown[place] = past
        if unknown:
            epochs = {place: positions[place].epoch for place in unknown}
            asked = epoch_ends(self._settings, epochs, self._settings.request_timeout_s)
            for place, end in asked.items():
                reached[place] = unknown[place].ends[epochs[place]] = end
        return reached

    def _offsets(self, which: Which, partitions: Collection[Partition]) -> dict[Partition, Offset]:
        found = dict[Partition, Offset]()
        left, until = set(partitions), time.monotonic() + _OFFSETS_S
        self._meet_admin({place.topic for place in left})
        while left:
            why = self._ask_offsets(which, left, found)
            is_late = time.monotonic() > until
            passing = _NOT_ASKED if is_late else _NOT_ASKED | _ELECTING
            if why is not None and not found and why.code() not in passing:
                topics = " or ".join(sorted({place.topic for place in left}))
                doing = f"{which}s of {len(left)} partitions"
                raise as_ours(why, doing, self._describe(topics))
            if why is None or is_late:
                break
            time.sleep(_METADATA_RETRY_S)
        return found

    def _ask_offsets(
        self, which: Which, left: set[Partition], found: dict[Partition, Offset]
    ) -> KafkaError | None:
        """Move known offsets from `left` to `found`, and drop partitions that do not exist.

        Returns:
            An error of a partition that is still left, if any.
        """
        why: KafkaError | None = None
        question = OffsetsQuestion(self._admin, left, which, self._settings.request_timeout_s)
        for partition, answer in question.answers().items():
            if isinstance(answer, Offset):
                found[partition] = answer
            elif not self._is_missing(partition, answer):
                # A leader may have been elected just now.
                why = answer
                continue
            left.discard(partition)
        if why is not None and why.code() == STALE_LEADER:
            topics = {partition.topic for partition in left}
            TopicsQuestion(self._admin, topics, _OFFSETS_S).answers()
        return why

    def _is_missing(self, partition: Partition, error: KafkaError) -> bool:
        if error.code() not in _NOT_ASKED:
            return error.code() in UNKNOWN
        try:
            missing = partition not in self.partitions(partition.topic)
        except UnknownTopicError:
            return True
        # The partition was added after the client's last request, so the client must request again.
        if not missing:
            with suppress(KafkaException):
                self._admin.list_topics(partition.topic, timeout=self._settings.request_timeout_s)
        return missing

    def _listed(self, topic: str | None, doing: str) -> dict[str, TopicMetadata]:
        """Request metadata of one topic or all; the first waits are short, to notice refusals."""
        timeout_s = self._settings.request_timeout_s
        if self._let_in:
            return self._asked(topic, doing, timeout_s)
        for wait_s in _FIRST_WAITS_S:
            with suppress(UnavailableError):
                return self._asked(topic, doing, min(wait_s, timeout_s))
        raise UnavailableError(self._nobody(), "kafka")

    def _nobody(self) -> str:
        """Return the message for a Kafka that was never found."""
        address = f"no Kafka at {self._settings.bootstrap}"
        if self._settings.named:
            return f"{address} (DOLL_KAFKA); start it, or set another address"
        return f'{address} (DOLL_KAFKA is not set); start one with "doll up", or set DOLL_KAFKA'

    def _asked(self, topic: str | None, doing: str, timeout_s: float) -> dict[str, TopicMetadata]:
        try:
            metadata = self._client.list_topics(topic, timeout=timeout_s)
        except KafkaException as raised:
            # This collects the errors of the client's threads, which say more than this exception.
            self._client.poll(0)
            if not self._let_in:
                self._complaints.raise_shut_out(doing)
            self._complaints.raise_away(doing)
            raise as_ours(cause_of(raised), doing) from raised
        # Errors that were reported meanwhile are over.
        self._client.poll(0)
        self._let_in = True
        found: dict[str, TopicMetadata] = metadata.topics
        return found

    def _create(self, admin: AdminClient, wanted: Sequence[NewTopic]) -> list[NewTopic]:
        """Create missing topics, and return those that were created."""
        made = {topic.name: topic for topic in wanted}
        answers = admin.create_topics(
            [
                cimpl.NewTopic(
                    topic.name,
                    num_partitions=topic.partitions,
                    replication_factor=self._settings.replication_factor,
                    config=topic.settings,
                )
                for topic in wanted
            ],
            request_timeout=self._settings.request_timeout_s,
        )
        for topic, answer in answers.items():
            try:
                answer.result()
            except KafkaException as raised:
                error = cause_of(raised)
                if error.code() in FORBIDDEN:
                    right = forbidden(error, self._settings.right("create", f"topic {topic}"))
                    by_hand = _by_hand(made[topic])
                    raise ForbiddenError(f"{right}, or {by_hand}") from raised
                if error.code() in _BY_HAND:
                    raise OutsideError(_refusal(made[topic], error)) from raised
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise as_ours(error, f"creating topic {topic}") from raised
                del made[topic]
        self._admin_met = True
        return list(made.values())

    def _await_topics(self, topics: Collection[str]) -> None:
        """Wait until the ends of all partitions of new topics are available."""
        deadline = time.monotonic() + self._settings.request_timeout_s
        while True:
            try:
                places = {place for topic in topics for place in self.partitions(topic)}
                missing: Collection[object] = places - self.ends(places).keys()
            except (UnknownTopicError, UnavailableError):
                missing = topics
            if not missing:
                return
            if time.monotonic() > deadline:
                names = ", ".join(sorted(map(str, missing)))
                raise UnavailableError(f"topics were created but are not usable yet: {names}")
            time.sleep(_METADATA_RETRY_S)

    def _search_time(self, partition: Partition, bounds: Bounds, timestamp_s: float) -> int:
        """Find a position by reading single records. Their timestamps must not decrease."""
        with closing(self.spans()) as spans:

            def arrival_s(offset: int) -> float:
                span = Span(*partition, offset, offset + 1)
                try:
                    return spans.read(span, self._settings.request_timeout_s).first_arrival_s
                except ExpiredError:
                    return float("-inf")

            return bounds.start + bisect_left(
                range(bounds.start, bounds.end), timestamp_s, key=arrival_s
            )


def _all_deleted(
    what: Literal["topic", "group"], answers: Mapping[str, Future[None]], settings: KafkaSettings
) -> None:
    """Check that all were deleted.

    Raises:
        OutsideError: The reason why one was not deleted.
    """
    refused: DollError | None = None
    for name, answer in answers.items():
        try:
            answer.result()
        except KafkaException as raised:
            if cause_of(raised).code() not in _GONE:
                right = settings.right("delete", f"{what} {name}")
                doing = f"deleting {'consumer ' * (what == 'group')}{what} {name}"
                refused = as_ours(cause_of(raised), doing, right)
    if refused is not None:
        raise refused


def _refusal(topic: NewTopic, error: KafkaError) -> str:
    return (
        f"Kafka refuses to create the topic {topic.name}: {error.str()} ({error.name()});"
        f" {_by_hand(topic)}"
    )


def _by_hand(topic: NewTopic) -> str:
    config = "".join(f" --config {name}={value}" for name, value in topic.settings.items())
    return (
        "create it by hand: kafka-topics.sh --bootstrap-server $DOLL_KAFKA --create --topic"
        f" {topic.name} --partitions {topic.partitions}{config}"
    )
