"""One member of a consumer group: rebalances become events, positions come from the caller."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from common.core.spans import Assigned, LogPosition, Partition, Revoked
from common.kafka.client import (
    AT_END,
    FORBIDDEN,
    OUT_OF_RANGE,
    Complaints,
    are_records,
    as_ours,
    cause_of,
    consume,
    end_in,
    epoch_of,
    made,
    offsets_of,
    runs_of,
)
from common.kafka.cursor import Cursor
from common.kafka.epochs import TopicWatch, divergent_offset
from common.kafka.log import KafkaLog
from common.kafka.opening import kafka_settings
from common.kafka.port import Bounds, LogTruncated, OutOfRange, StreamEvent, StreamLog
from common.kafka.record_queue import WaitingRecords
from common.kafka.settings import FETCH_BACKOFF_MS, member_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from confluent_kafka.admin import AdminClient

    from common.config.settings import Settings
    from common.errors import OutsideError
    from common.kafka.client import ClientMessage
    from common.kafka.settings import KafkaSettings

_LOGGER = logging.getLogger(__name__)

# The client starts an assigned partition asynchronously, and refuses to seek before that.
_SEEK_RETRY_S = 0.005
# Short, because it waits inside `poll`.
_MEASURE_TIMEOUT_S = 1.0

# Records taken from the client at once; takes some milliseconds.
_FETCH_RECORDS = 2_000
# Size of one fetch of one partition. Smaller fetches cost throughput (64 KB a fifth of it, 16 KB
# half).
_FETCH_BYTES = 256 << 10
# Amount that the client fetches ahead, for the few milliseconds between two polls. It is small
# because a pause drops it.
_AHEAD_KB = 2_048
# Minimum number of fetches held per partition: one is here while the next is under way.
_FETCHES_HELD = 2
# If a topic is recreated and longer than before, the client reads on in the new one without an
# error, but only after a pause at least as long as its backoff. So records after such a pause wait
# for a check of the topic.
_SILENCE_S = FETCH_BACKOFF_MS / 1000


def open_stream_log(settings: Settings, client_id: str = "doll") -> StreamLog:
    """Open Kafka for a user that also joins consumer groups; see `open_log`."""
    return KafkaStreamLog(kafka_settings(settings, client_id))


class KafkaStreamLog(KafkaLog):
    """The `StreamLog` port."""

    def stream(
        self, group: str, topics: Sequence[str], member: str, *, hold: bool = False
    ) -> KafkaStreamReader:
        """See the port."""
        return KafkaStreamReader(
            self._settings, lambda: self._admin, group, topics, member, hold=hold
        )


class KafkaStreamReader:
    """The `StreamReader` port, on a consumer that is paused except for placed partitions.

    An owned partition is in one of three states: silent (no cursor), placed but not sought at the
    client yet (`_unsought`), or flowing. Only messages of flowing partitions count.

    The client returns complete fetches in order of arrival: thousands of records of one partition,
    then of the next. So records wait here, in a queue for each partition, and are returned in turn.
    If a queue is full, its partition is paused at the client. The pause drops fetched records, so
    the partition is sought again when its queue is half empty.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        admin: Callable[[], AdminClient],
        group: str,
        topics: Sequence[str],
        member: str,
        *,
        hold: bool,
    ) -> None:
        self._name = f"member {member} of group {group}"
        # Events of callbacks during the current poll.
        self._events: list[StreamEvent] = []
        self._owned: set[Partition] = set()
        # Offsets of owned partitions that the broker has accepted.
        self._committed: dict[Partition, int] = {}
        self._cursors: dict[Partition, Cursor] = {}
        self._unsought: set[Partition] = set()
        # Partitions that are out of range and whose bounds are unknown.
        self._unmeasured: set[Partition] = set()
        # Out-of-range partitions: the client does not seek in them any more.
        self._halted: set[Partition] = set()
        # Partitions that are not read until their topic's id is compared with their position's.
        self._unidentified: set[Partition] = set()
        # Partitions whose records after a silence wait for such a comparison, with the number of
        # requests that were sent before these records.
        self._unproved: dict[Partition, int] = {}
        # Time at which a partition's records last arrived, or could begin to arrive.
        self._flowed_s: dict[Partition, float] = {}
        # For unmeasured partitions: offset at which the log diverges, if the client reported it.
        self._diverged: dict[Partition, int | None] = {}
        self._watch = TopicWatch(admin, settings)
        # Topic ids as this client first saw them.
        self._met: dict[str, str] = {}
        # True if the caller has paused all partitions.
        self._paused = False
        self._waiting = WaitingRecords()
        # Limit over all partitions.
        self._held_bytes = settings.prefetch_kb << 10
        self._complaints = Complaints()
        # Error about a missing right. The client reports it only once, so it is kept until a record
        # or a partition arrives.
        self._forbidden: OutsideError | None = None
        self._right, self._group = settings.right, group
        self._topics = list(topics)
        self._properties = member_properties(settings, group, member, hold=hold) | {
            # Without this, it is unknown if there is anything to wait for.
            "enable.partition.eof": True,
            "fetch.message.max.bytes": _FETCH_BYTES,
            "queued.max.messages.kbytes": min(_AHEAD_KB, settings.prefetch_kb),
            "error_cb": self._complaints,
            "on_commit": self._on_commit,
        }
        self._client = self._joined()

    def poll(
        self, max_records: int, timeout_s: float, run: int | None = None
    ) -> tuple[StreamEvent, ...]:
        """See the port.

        While records of some partitions arrive and others lack theirs, this may take a fraction of
        a second longer than `timeout_s`: see `WaitingRecords.lacks`.
        """
        self._complaints.raise_fatal(self._name, self._right("read", f"group {self._group}"))
        wanted = 0 if self._paused else max_records
        deadline = time.monotonic() + timeout_s
        # The first fetch takes what is available.
        wait_s = 0.0
        while True:
            came = self._fetch(wait_s)
            if self._events:
                break
            lacking = self._waiting.lacks(self._halted)
            here = self._waiting.filled - self._unproved.keys()
            if wanted > 0 and here and not lacking:
                lags = self._lags(here) if len(here) > 1 else {}
                return tuple(self._waiting.give_out(here, lags, wanted, run or wanted))
            if wanted > 0 and (reached := self._waiting.reached(self._cursors)):
                return tuple(reached)
            left_s = deadline - time.monotonic()
            if left_s <= 0 and not (came and lacking):
                break
            # As long as the client returns records, it may also have some of the lacking
            # partitions.
            wait_s = 0.0 if came else max(left_s, 0.0)
        events, self._events = tuple(self._events), []
        if not events:
            if self._forbidden is not None:
                raise self._forbidden
            self._complaints.raise_away(self._name)
        return events

    def place(self, positions: Mapping[Partition, int | LogPosition]) -> None:
        """See the port. Partitions that this member does not own are left out."""
        if any(self._is_recreated(partition, positions[partition]) for partition in positions):
            self._rejoin()
        for partition in self._owned & positions.keys():
            self._silence(partition)
            cursor = self._cursors[partition] = Cursor(partition, positions[partition])
            self._waiting.place(partition, cursor.position)
            self._unmeasured.discard(partition)
            self._unsought.add(partition)
            if cursor.topic_id and self._watch.is_able:
                self._unidentified.add(partition)
        self._seek_unsought()

    def _is_recreated(self, partition: Partition, position: int | LogPosition) -> bool:
        """Return True if a position's topic id differs from the one that the client has seen."""
        topic_id = LogPosition.of(position).topic_id
        return bool(topic_id) and self._met.get(partition.topic, topic_id) != topic_id

    def pause(self) -> None:
        """See the port."""
        self._paused = True

    def resume(self) -> None:
        """See the port."""
        self._paused = False

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """See the port."""
        offsets = [
            TopicPartition(*partition, at)
            for partition, at in positions.items()
            if partition in self._owned and self._committed.get(partition) != at
        ]
        if not offsets:
            return
        try:
            self._client.commit(offsets=offsets, asynchronous=True)
        except KafkaException as raised:
            self._on_commit(cause_of(raised), offsets)

    def lag(self) -> dict[Partition, int]:
        """See the port. A partition appears with its first fetch; pauses freeze its lag."""
        return self._lags(self._cursors)

    def _lags(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        lags = {}
        for partition in partitions:
            cursor, end = self._cursors[partition], -1
            # The client counts records of open transactions, too.
            if self._waiting.is_at_end(partition):
                end = cursor.position
            else:
                # The client may have forgotten the partition.
                with suppress(KafkaException):
                    place = TopicPartition(*partition)
                    _, end = self._client.get_watermark_offsets(place, cached=True)
            first = self._waiting.first_offset(partition)
            if end >= 0:
                lags[partition] = max(0, end - (cursor.position if first is None else first))
        return lags

    def close(self) -> None:
        """See the port."""
        self._client.close()

    # --- rebalances: called by the client inside `consume` ----------------------------------------

    def _joined(self) -> Consumer:
        """Return a client that joins the group."""
        client = made(Consumer, self._properties)
        client.subscribe(
            self._topics,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_revoke,
        )
        return client

    def _rejoin(self) -> None:
        """Rejoin with a new client, because the old one may never read a recreated topic.

        It reads none whose leader epochs are lower than those that it has seen under that name.
        """
        # This revokes the partitions.
        self._client.close()
        self._on_revoke(self._client, [TopicPartition(*each) for each in self._owned])
        self._met.clear()
        self._client = self._joined()

    def _on_assign(self, client: Consumer, assigned: list[TopicPartition]) -> None:
        partitions = tuple(Partition(each.topic, each.partition) for each in assigned)
        # The number is arbitrary, because nothing is read before `place`. It spares the client a
        # request for committed offsets.
        silent = [TopicPartition(*partition, 0) for partition in partitions]
        client.incremental_assign(silent)
        client.pause(silent)
        self._owned.update(partitions)
        if partitions:
            self._forbidden = None
            self._events.append(Assigned(partitions))

    def _on_commit(self, refused: KafkaError | None, answers: list[TopicPartition]) -> None:
        """Remember accepted offsets. The next commit repeats refused ones."""
        for answer in answers:
            partition, error = Partition(answer.topic, answer.partition), refused or answer.error
            if error is None and partition in self._owned:
                self._committed[partition] = answer.offset
            elif error is not None:
                _LOGGER.debug("commit_refused partition=%s reason=%r", partition, error.str())

    def _on_revoke(self, _client: Consumer, revoked: list[TopicPartition]) -> None:
        partitions = tuple(Partition(each.topic, each.partition) for each in revoked)
        for partition in partitions:
            self._owned.discard(partition)
            self._committed.pop(partition, None)
            self._silence(partition)
            self._unmeasured.discard(partition)
            self._halted.discard(partition)
        if partitions:
            self._events.append(Revoked(partitions))

    # --- positions --------------------------------------------------------------------------------

    def _silence(self, partition: Partition) -> None:
        self._cursors.pop(partition, None)
        self._unidentified.discard(partition)
        self._unproved.pop(partition, None)
        self._flowed_s.pop(partition, None)
        self._diverged.pop(partition, None)
        self._waiting.drop(partition)
        self._unsought.discard(partition)

    def _seek_unsought(self) -> None:
        for partition in self._unsought - self._halted - self._unidentified:
            target = self._cursors[partition].target()
            try:
                self._client.seek(target)
            except KafkaException:
                # The partition has not started yet: retried by the next poll.
                continue
            # This follows the seek, or the client would fetch from the old position.
            self._client.resume([target])
            self._wake(target)
            self._unsought.discard(partition)
            self._flowed_s[partition] = time.monotonic()

    def _regulate(self) -> None:
        """Pause partitions with full queues at the client; resume those with half-empty ones."""
        if not self._cursors:
            return
        full = max(self._held_bytes // len(self._cursors), _FETCHES_HELD * _FETCH_BYTES)
        self._unsought |= self._waiting.emptied(full)
        for partition in self._waiting.overfull(full, self._unsought):
            self._client.pause([TopicPartition(*partition)])

    def _wake(self, target: TopicPartition) -> None:
        """Make the client fetch a resumed partition at once; by itself it may sleep for a second.

        The client's thread wakes for every request, and for a seek that changes the partition's
        state (a seek to 0 does not).
        """
        # After a failure, the thread only wakes later.
        with suppress(KafkaException):
            if target.offset > 0:
                self._client.seek(target)
            else:
                self._client.get_watermark_offsets(target, timeout=_MEASURE_TIMEOUT_S)

    def _revive_halted(self) -> None:
        """Restart, at their new positions, partitions that the client has stopped.

        Only safe right after `consume`, when no rebalance waits for its callback: otherwise the
        client would take these calls for the callback's answer.
        """
        for partition in (self._unsought & self._halted) - self._unidentified:
            target = self._cursors[partition].target()
            try:
                self._client.incremental_unassign([target])
                self._client.incremental_assign([target])
                self._client.pause([target])
            except KafkaException as raised:
                raise as_ours(cause_of(raised), f"{self._name}, {partition}") from raised
            # The partition is sought like others from now on.
            self._halted.discard(partition)

    def _measure_unmeasured(self) -> None:
        """Report bounds of out-of-range partitions; seek again if a position is in range."""
        for partition in self._unmeasured - self._unidentified:
            try:
                low, high = self._client.get_watermark_offsets(
                    TopicPartition(*partition), timeout=_MEASURE_TIMEOUT_S
                )
            except KafkaException:
                # The broker is unavailable: retried by the next poll.
                continue
            self._unmeasured.discard(partition)
            cursor = self._cursors.get(partition)
            if cursor is None:
                continue
            diverged = self._diverged.pop(partition, None)
            if cursor.position < low:
                self._silence(partition)
                self._events.append(OutOfRange(partition, Bounds(low, high)))
            elif diverged is not None or cursor.position > high:
                self._silence(partition)
                at = high if diverged is None else diverged
                self._events.append(LogTruncated(partition, at, recreated=False))
            else:
                # The error was about an earlier position.
                self._unsought.add(partition)

    def _look_at_topics(self) -> None:
        """Compare topics' ids with their positions', and release partitions that wait for this."""
        urgent = {each.topic for each in (*self._unidentified, *self._unproved)}
        found = self._watch.look(self._named, urgent=urgent)
        if not found:
            return
        for partition, cursor in tuple(self._cursors.items()):
            answer = found.get(partition.topic)
            if not cursor.topic_id or not isinstance(answer, str):
                continue
            self._unidentified.discard(partition)
            if self._unproved.get(partition, self._watch.asked) < self._watch.asked:
                del self._unproved[partition]
            self._met.setdefault(partition.topic, answer)
            if answer and answer != cursor.topic_id:
                self._silence(partition)
                self._events.append(LogTruncated(partition, 0, recreated=True))

    def _named(self) -> set[str]:
        """Return the topics whose positions have topic ids."""
        return {place.topic for place, cursor in self._cursors.items() if cursor.topic_id}

    # --- records ----------------------------------------------------------------------------------

    def _fetch(self, wait_s: float) -> bool:
        """Run callbacks and take the client's messages; return True if there were any."""
        self._look_at_topics()
        self._regulate()
        self._seek_unsought()
        if self._unsought or self._unproved:
            wait_s = min(wait_s, _SEEK_RETRY_S)
        messages = consume(self._client, _FETCH_RECORDS, wait_s, lambda: bool(self._events))
        self._revive_halted()
        self._put(messages)
        self._measure_unmeasured()
        return bool(messages)

    def _put(self, messages: list[ClientMessage]) -> None:
        """Queue records of flowing partitions, and drop the others. Callbacks have run before."""
        for place, came in runs_of(messages):
            run, end = came, None
            if not are_records(came):
                end = end_in(came)
                run = self._without_errors(came)
            cursor = self._cursors.get(Partition(*place))
            if cursor is None or cursor.partition in self._unsought:
                continue
            partition = cursor.partition
            again = False
            if run or end is not None:
                self._forbidden = None
            if run:
                first, last, again = cursor.take(offsets_of(run))
                if first < last:
                    cursor.epoch = epoch_of(run[last - 1])
                    self._waiting.put(partition, run[first:last])
                    self._prove(cursor)
            if end is not None and not again:
                again = cursor.reach(end)
            if again:
                self._unsought.add(partition)
            self._waiting.end(partition, reached=end is not None and not again)

    def _prove(self, cursor: Cursor) -> None:
        """Hold records that arrive after a silence until their topic is checked."""
        now, partition = time.monotonic(), cursor.partition
        silent_s = now - self._flowed_s.get(partition, now)
        if cursor.topic_id and self._watch.is_able and silent_s > _SILENCE_S:
            self._unproved.setdefault(partition, self._watch.asked)
        self._flowed_s[partition] = now

    def _without_errors(self, run: list[ClientMessage]) -> list[ClientMessage]:
        good = []
        for message in run:
            error = message.error()
            if error is None:
                good.append(message)
            elif error.code() in OUT_OF_RANGE and message.topic() is not None:
                partition = Partition(message.topic(), message.partition())
                if partition in self._owned:
                    self._halted.add(partition)
                    self._doubt(partition, divergent_offset(error))
            elif error.code() == AT_END:
                continue
            elif error.code() in FORBIDDEN:
                self._forbid(error, message)
            else:
                self._complaints(error)
                _LOGGER.warning("consumer_error group_member=%r error=%s", self._name, error)
        return good

    def _forbid(self, error: KafkaError, message: ClientMessage) -> None:
        """Note a missing right, and seek, so that the end is reported once the right is granted."""
        topics = message.topic() or " or ".join(self._topics)
        group = self._right("read", f"group {self._group}")
        self._forbidden = as_ours(error, self._name, self._right("read", f"topic {topics}"), group)
        partition = Partition(message.topic(), message.partition())
        if partition in self._cursors:
            self._unsought.add(partition)

    def _doubt(self, partition: Partition, diverged: int | None) -> None:
        """Note that a position must be checked, because the client could not find it."""
        self._unmeasured.add(partition)
        cursor = self._cursors.get(partition)
        if cursor is None or partition in self._unsought:
            # The error is about an earlier position.
            return
        self._diverged[partition] = diverged
        if cursor.topic_id and self._watch.is_able:
            self._unidentified.add(partition)
