"""How a replica comes to lead: what it finds, takes in hand, and listens to.

Carries out the commands of `common.core.coordinator` that are about leading itself. What is heard
of an earlier leadership is no longer believed.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from secrets import randbits
from time import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from common.checkpoints.snapshot_file import FoundSnapshot
from common.core import events
from common.core.messages import AuditRecord, Reply, unused_number
from common.core.spans import LogPosition, Partition
from common.errors import (
    CorruptError,
    ExpiredError,
    FutureFormatError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.ports.servers import NewTopic
from common.topics.names import (
    control_topic,
    dead_letter_topic,
    differences,
    remedy,
    updates_topic,
)
from services.coordinator.replies import SoundReplies
from services.coordinator.tails import (
    TopicTail,
    decoded_claims,
    decoded_updates,
    deleted,
    missing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from common.core.snapshots import Snapshot
    from common.jobs.store import JobRecord
    from common.learning.trainer import Trainer
    from common.telemetry.logging import EventLogger
    from services.coordinator.metrics_observer import MetricsObserver
    from services.coordinator.replica import Replica
    from services.coordinator.snapshots import SnapshotStore
    from services.coordinator.tails import RawRecords

Updates: TypeAlias = tuple[tuple[int, AuditRecord | None], ...]  # by offset

READ_RECORDS = 2000
READ_S = 0.5


class Stood(NamedTuple):
    """A leader's status was put on the board."""

    replaced: bool  # an earlier one


# What another thread tells a job's actor: what happened, or why nobody knows.
News: TypeAlias = "events.CoordinatorEvent | Stood | Exception"


class Heard(NamedTuple):
    """News, and for which leadership; 0 for those that concern every role."""

    leadership: int
    news: News


class Leadership:
    """One replica's attempts to lead one job, and its leaderships, one after the other.

    Args:
        replica: What all jobs share.
        record: The job.
        store: Its snapshots.
        measuring: Hears of replies that cannot be read, and of streams.
        logger: Bound to the job.
        wake: Wakes the job's actor.
    """

    def __init__(
        self,
        replica: Replica,
        record: JobRecord,
        store: SnapshotStore,
        measuring: MetricsObserver,
        logger: EventLogger,
        wake: Callable[[], None],
    ) -> None:
        self._heard = deque[Heard]()
        self._replies = deque[tuple[int, Reply]]()
        self._sound: SoundReplies | None = None
        self.number = 0  # what was heard for another one is not believed
        self._record = record
        self._job = record.spec.name
        self._replica = replica
        self._source = replica.log
        self._store = store
        self._measuring = measuring
        self._log = logger
        self._wake = wake
        self._updates = Partition(updates_topic(self._job), 0)
        self._control = Partition(control_topic(self._job), 0)
        self._tails = list[TopicTail]()
        self._found = dict[tuple[int, int, int], FoundSnapshot]()  # by rank
        self._found_in: events.Source = "hot"

    # --- what is heard -----------------------------------------------------------------------

    def hear(self, leadership: int, news: News) -> None:
        """Take in news, from any thread; 0: whatever this replica is by then."""
        self._heard.append(Heard(leadership, news))
        self._wake()

    def news(self) -> Iterator[News]:
        """What was heard since it was asked last, and still concerns this leadership."""
        while self._heard:
            heard = self._heard.popleft()
            if heard.leadership in (0, self.number):
                yield heard.news
        replies = list[Reply]()
        while self._replies:
            leadership, reply = self._replies.popleft()
            sound = self._sound(reply) if self._sound and leadership == self.number else None
            if sound is not None:
                replies.append(sound)
        if replies:
            yield events.RepliesRead(tuple(replies))
        number = self.number
        for tail in tuple(self._tails):
            for read in tail.read() if number == self.number else ():
                if number == self.number:
                    yield read

    def _stream_lost(self, leadership: int, reason: str) -> None:
        self.hear(leadership, events.Trouble(reason))

    def _hear_reply(self, leadership: int, reply: Reply) -> None:
        self._replies.append((leadership, reply))
        self._wake()

    # --- from what is found to what is listened to ---------------------------------------------

    def find(self, source: events.Source) -> events.CoordinatorEvent:
        """Read a source's snapshots and the audit from the lowest of them on; follow it on."""
        self.end()
        try:
            lossy = self._look_at_settings()
            if lossy:
                return events.Trouble(lossy)
            topics = self._source.describe([self._updates.topic, self._control.topic])
            ids = {topic: each.topic_id for topic, each in topics.items()}
            found = self._snapshots(source)
            lost = self._lost(found, ids)
            covered = [stored.snapshot for stored in found if stored.snapshot.rank not in lost]
            updates_id = ids.get(self._updates.topic, "")
            begin = min((snapshot.reads_from for snapshot in covered), default=None)
            updates, read_to = self._read_updates(begin, updates_id)
        except UnknownTopicError as error:
            return events.Trouble(self._missing(str(error)))
        except (ExpiredError, TruncatedError) as error:  # in this moment
            return events.Trouble(f"{error}; `doll job resume {self._job}` looks again")
        except (CorruptError, FutureFormatError) as error:
            return events.Trouble(str(error))
        self._found = {stored.snapshot.rank: stored for stored in found}
        self._found_in = source
        self._follow(self._updates, read_to, decoded_updates)
        return events.SnapshotsFound(
            source,
            tuple(stored.snapshot for stored in found),
            updates,
            read_to.offset,
            lost,
            control_topic_id=ids.get(self._control.topic, ""),
            updates_topic_id=updates_id,
            unreadable=self._store.unreadable if source == "genesis" else "",
        )

    def _snapshots(self, source: events.Source) -> list[FoundSnapshot]:
        match source:
            case "hot":
                return self._store.hot()
            case "all":
                return [*self._store.lasting(), *self._store.hot()]
            case "genesis":
                return [self._store.first(self._record.first)]

    def _look_at_settings(self) -> str:
        """Why the settings of the job's topics must hold it; what else differs is logged."""
        own = [NewTopic(place.topic, kept_forever=True) for place in (self._control, self._updates)]
        letters = [
            NewTopic(dead_letter_topic(stream), kept_forever=True)
            for stream in self._record.spec.streams
        ]
        wanted = [*own, *letters]
        found = self._source.settings([topic.name for topic in wanted])
        lossy = [each for each in differences(own, found) if each.loses]
        if lossy:
            return (
                f"Kafka would lose records of the job: {'; '.join(map(str, lossy))};"
                f" set that right: {remedy(lossy)}; then `doll job resume {self._job}`"
            )
        if differing := differences(wanted, found):
            reason = "; ".join(map(str, differing))
            self._log.warning("topic_settings_differ", reason=reason, remedy=remedy(differing))
        return ""

    def _lost(
        self, found: Iterable[FoundSnapshot], ids: Mapping[str, str]
    ) -> dict[tuple[int, int, int], str]:
        """Of which snapshots the control or the updates topic lost records, and which, by rank.

        Args:
            found: The snapshots.
            ids: Of topics that are there, as far as they are known.

        Raises:
            UnknownTopicError: If there is no such topic any more.
            UnavailableError: If nobody can tell now.
        """
        known = {self._updates, self._control}
        ends = self._source.ends(known)
        for partition in known - ends.keys():
            self._source.partitions(partition.topic)  # or it is not there
            raise UnavailableError(f"nobody can tell now where {partition} ends")
        agreed = self._agreed(found)
        lost = dict[tuple[int, int, int], str]()
        for title, snapshot, _ in found:
            for name, own, held in self._own_logs(snapshot):
                reached = agreed[own, held.topic_id, held.epoch]
                if reached < held.offset:
                    anew = ids.get(own.topic, held.topic_id) != held.topic_id != ""
                    what = _what_happened(reached, ends[own], anew=anew)
                    lost[snapshot.rank] = (
                        f"the {name} topic {what}, and {title} has it up to {held.offset:,}"
                    )
        return lost

    def _own_logs(self, snapshot: Snapshot) -> tuple[tuple[str, Partition, LogPosition], ...]:
        """What a snapshot has of each of the job's own topics."""
        return (
            ("updates", self._updates, snapshot.updates),
            ("control", self._control, snapshot.control),
        )

    def _agreed(self, found: Iterable[FoundSnapshot]) -> dict[tuple[Partition, str, int], int]:
        """How far the job's own topics are what snapshots know of them, by topic id and epoch.

        The highest position of each says it of the lower ones, too, and mostly there is but one.
        """
        highest = dict[tuple[Partition, str, int], LogPosition]()
        for stored in found:
            for _, own, known in self._own_logs(stored.snapshot):
                log = own, known.topic_id, known.epoch
                highest[log] = max(known, highest.get(log, known))
        agreed = dict[tuple[Partition, str, int], int]()
        left = list(highest)
        while left:
            asked = {log[0]: log for log in left}  # one of each topic
            parted = self._source.agrees({own: highest[log] for own, log in asked.items()})
            for own, log in asked.items():
                agreed[log] = parted.get(own, highest[log].offset)
                left.remove(log)
        return agreed

    def _read_updates(
        self, begin: LogPosition | None, topic_id: str
    ) -> tuple[Updates, LogPosition]:
        """Read the updates topic from a position to its end; nothing of it without one.

        Returns:
            What was read, and where to read on.
        """
        end = self._source.bounds(self._updates).end
        if begin is None:
            return (), LogPosition(end, topic_id)
        read_to = begin._replace(topic_id=topic_id or begin.topic_id)
        tail = self._source.tail(self._updates, read_to)
        records = list[tuple[int, bytes | None]]()
        try:
            while tail.position() < end:
                read = tail.read(READ_RECORDS, READ_S)
                records += ((record.offset, record.value) for record in read)
                if read:
                    last = read[-1]
                    read_to = read_to._replace(offset=last.offset + 1, epoch=last.epoch)
            return decoded_updates(tuple(records)).records, read_to
        finally:
            tail.close()

    def restore(self, snapshot: Snapshot, trainer: Trainer) -> events.CoordinatorEvent:
        """Take a snapshot's weights in hand, before anybody is told that it is the base.

        Args:
            snapshot: One of those that were found.
            trainer: A new one, with the weights of the genesis.
        """
        stored = self._found[snapshot.rank]
        try:
            weights = stored.trainer()
        except CorruptError:  # the store has told why
            return events.SnapshotTorn(snapshot)
        except UnavailableError as error:
            return events.AttemptFailed(f"{stored.title} cannot be read now: {error}")
        try:
            if weights:
                trainer.restore(weights)
        except CorruptError as error:
            if self._found_in == "hot":  # anybody can write to the board
                self._log.warning("hot_snapshot_unreadable", reason=str(error))
                return events.SnapshotTorn(snapshot)
            return events.Trouble(f"{stored.title}: {error}")
        self._found = {}
        return events.SnapshotRestored(unused_number(time(), randbits(12)))

    def begin(self, epoch: int, snapshot: Snapshot, length: int) -> None:
        """Listen to workers: claims from the snapshot on, and replies to this epoch; watch streams.

        Args:
            epoch: The leader's.
            snapshot: What it starts from.
            length: P + B, numbers in a well-formed vector.
        """
        self._follow(self._control, snapshot.control, decoded_claims)
        self._sound = SoundReplies(length, self._measuring.metrics, self._log)
        self._replica.replies.follow(self._job, epoch, partial(self._hear_reply, self.number))
        self._replica.streams.follow(
            self._job,
            epoch,
            self._record.first,
            self._measuring,
            partial(self._stream_lost, self.number),
            partial(self.hear, self.number),
        )

    def end(self) -> None:
        """Listen no more, and believe nothing of what was heard."""
        self.number += 1
        self._replica.replies.forget(self._job)
        self._replica.streams.forget(self._job)
        for tail in self._tails:
            tail.close()
        self._tails = []
        self._sound = None

    def _follow(
        self,
        topic: Partition,
        position: LogPosition,
        decode: Callable[[RawRecords, int], events.CoordinatorEvent],
    ) -> None:
        tail = TopicTail(self._source, topic, position, decode, self._wake, self._log)
        self._tails.append(tail)

    def _missing(self, told: str) -> str:
        """Which topic of the job is not there; what was told, where all are."""
        streams = self._record.spec.streams
        own = self._updates.topic, self._control.topic
        for topic in (*own, *streams):
            try:
                self._source.partitions(topic)
            except UnknownTopicError:
                return deleted(topic) if topic in own else missing(topic)
        return told


def _what_happened(reached: int, end: int, *, anew: bool) -> str:
    """What became of a topic that is not any more what a snapshot has of it.

    Args:
        reached: Up to where it still is.
        end: Its end.
        anew: Whether it is another topic of the same name.
    """
    if anew:
        return "was deleted and created anew"
    lost = "lost records that Kafka had acknowledged"
    return (
        f"{lost}: it {f'ends at {end:,}' if reached == end else f'has others from {reached:,} on'}"
    )
