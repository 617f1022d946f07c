"""How a replica comes to lead: what it finds, takes in hand, and listens to.

Carries out the commands of `common.core.coordinator` that are about leading itself. What is heard
of an earlier leadership is no longer believed.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from secrets import randbits
from time import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from common.core import events
from common.core.messages import GENESIS, Gradient, Reply, unused_number
from common.core.spans import LogPosition, Partition
from common.core.vectors import numbers_in
from common.errors import (
    CorruptError,
    DollError,
    ExpiredError,
    FutureFormatError,
    OtherModelError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
)
from common.kafka.names import (
    control_topic,
    dead_letter_topic,
    differences,
    remedy,
    updates_topic,
)
from common.ports.servers import NewTopic
from common.storage.snapshot_file import FoundSnapshot
from services.coordinator.replies import SoundReplies
from services.coordinator.tails import (
    TopicTail,
    decoded_claims,
    decoded_updates,
    deleted,
    missing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from common.core.snapshots import Snapshot
    from common.jobs.store import JobRecord
    from common.learning.trainer import Trainer
    from common.ports.servers import FoundTopic
    from common.telemetry.logging import EventLogger
    from services.coordinator.metrics_observer import MetricsObserver
    from services.coordinator.replica import Replica
    from services.coordinator.snapshots import Lasting, SnapshotStore
    from services.coordinator.tails import RawRecords


class Stood(NamedTuple):
    """A leader's status was put on the board."""

    replaced: bool  # an earlier one


# Of a gradient: to add it takes less than to wake the actor for it; larger ones are added while
# others are computed.
SMALL_BYTES = 64 << 10

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
        self._replies = deque[tuple[int, list[Reply]]]()
        self._sound: SoundReplies | None = None
        self.number = 0  # what was heard for another one is not believed
        # Of how many batches gradients wake the actor, which then reads what came besides; 0: it is
        # woken by whatever comes.
        self._awaited = 0
        # Batches of replies: the first is changed by who hears them only, the second by the actor.
        self._heard_batches = self._read_batches = 0
        self._record = record
        self._job = record.id
        self._replica = replica
        self._source = replica.log
        self._store = store
        self._measuring = measuring
        self._log = logger
        self._wake = wake
        self._updates = Partition(updates_topic(self._job), 0)
        self._control = Partition(control_topic(self._job), 0)
        self._tails = list[TopicTail]()
        # Of the control topic, and where it began; read once this replica leads.
        self._claims: tuple[LogPosition, TopicTail] | None = None
        self._found = dict[tuple[int, int, int], FoundSnapshot]()  # by rank
        self._hot = frozenset[tuple[int, int, int]]()  # those that are only on the board, by rank
        # A trained hot snapshot that is not of this process's model, and why. Version 0 must not
        # take its place.
        self._other_model = ""

    # --- what is heard -----------------------------------------------------------------------

    def hear(self, leadership: int, news: News, *, wakes: bool = True) -> None:
        """Take in news, from any thread.

        Args:
            leadership: For which they are; 0: for whatever this replica is by then.
            news: What was heard.
            wakes: Whether the actor is woken for them; else its next turn takes them in.
        """
        self._heard.append(Heard(leadership, news))
        if wakes:
            self._wake()

    def news(self) -> Iterator[News]:
        """What was heard since it was asked last, and still concerns this leadership."""
        while self._heard:
            heard = self._heard.popleft()
            if heard.leadership in (0, self.number):
                yield heard.news
        replies = list[Reply]()
        while self._replies:
            leadership, came = self._replies.popleft()
            self._read_batches += _batches_of(came)
            if self._sound and leadership == self.number:
                replies += [sound for reply in came if (sound := self._sound(reply)) is not None]
        if replies:
            yield events.RepliesRead(tuple(replies))
        number = self.number
        for tail in tuple(self._tails):
            for read in tail.read() if number == self.number else ():
                if number == self.number:
                    yield read

    def _stream_lost(self, leadership: int, reason: str) -> None:
        self.hear(leadership, events.Trouble(reason))

    def await_gradients(self, batches: int) -> bool:
        """Wake the actor for gradients of so many batches; see `Leader.awaited`.

        Returns:
            Whether to look at once at what may have come while it was not woken.
        """
        before, self._awaited = self._awaited, batches
        return before > 0 and self._heard_batches - self._read_batches >= batches

    def _hear_replies(self, leadership: int, replies: list[Reply]) -> None:
        self._replies.append((leadership, replies))
        self._heard_batches += _batches_of(replies)
        some_are_to_come = self._heard_batches - self._read_batches < self._awaited
        if not (some_are_to_come and all(map(_can_wait, replies))):
            self._wake()

    def _hear_of_records(self) -> None:
        """There is something to read in one of the job's topics."""
        if not self._awaited:
            self._wake()

    # --- from what is found to what is listened to ---------------------------------------------

    def find(self, source: events.Source) -> events.CoordinatorEvent:
        """Read a source's snapshots and the audit from the lowest of them on; follow it on."""
        self.end()
        found: events.CoordinatorEvent | None = None
        try:
            found = self._find(source)
        except UnknownTopicError as error:
            return events.Trouble(self._missing(str(error)))
        except (ExpiredError, TruncatedError) as error:  # in this moment
            return events.Trouble(
                f"{error}; `doll job resume {self._record.spec.name}` looks again"
            )
        except (CorruptError, FutureFormatError) as error:
            return events.Trouble(str(error))
        finally:
            if not isinstance(found, events.SnapshotsFound):
                self.end()
        return found

    def _find(self, source: events.Source) -> events.CoordinatorEvent:
        """Ask at the same time what needs no other answer: Kafka may be far away."""
        with ThreadPoolExecutor(1) as pool:
            lossy = pool.submit(self._look_at_settings)
            lasting = self._store.lasting() if source == "all" else None
            found = self._snapshots(source, lasting)
            begin = _begin(source, [stored.snapshot for stored in found])
            tail = self._follow_updates(begin) if begin else None
            if found and source != "genesis":  # which has no claims to be replayed
                self._fetch_claims(max((each.snapshot for each in found), key=_rank).control)
            topics = self._source.describe([self._updates.topic, self._control.topic])
            # After the snapshots: of what they contain, nothing may be above the ends.
            ends = self._ends(topics)
            lost = self._lost(found, topics, ends)
            if reason := lossy.result():
                return events.Trouble(reason)
        ids = {topic: each.topic_id for topic, each in topics.items()}
        covered = [stored.snapshot for stored in found if stored.snapshot.rank not in lost]
        updates_id, end = ids.get(self._updates.topic, ""), ends[self._updates].offset
        read_from = _begin(source, covered) or LogPosition(end)
        read_from = read_from._replace(topic_id=updates_id or read_from.topic_id)
        if tail is None or read_from != begin:  # which is seldom
            self._close_tails()
            tail = self._follow_updates(read_from)
        updates = decoded_updates(tail.read_up_to(end)).records
        self._found = {stored.snapshot.rank: stored for stored in found}
        kept_too = (each.snapshot.rank for each in lasting.found) if lasting else ()
        self._hot = frozenset(self._found if source != "genesis" else ()) - frozenset(kept_too)
        kept = covered if source != "hot" else [max(covered, key=_rank)] if covered else []
        return events.SnapshotsFound(
            source,
            (*(each.snapshot for each in found if each.snapshot.rank in lost), *kept),
            updates,
            max([end, *(offset + 1 for offset, _ in updates[-1:])]),
            lost,
            control_topic_id=ids.get(self._control.topic, ""),
            updates_topic_id=updates_id,
            unreadable=(self._store.unreadable or self._other_model) if source == "genesis" else "",
            storage=lasting.said if lasting else "",
            storage_failed=lasting is not None and lasting.failed,
            torn=lasting.torn if lasting else {},
        )

    def _snapshots(self, source: events.Source, lasting: Lasting | None) -> list[FoundSnapshot]:
        """Return the snapshots of a source; if two are the same, storage's is the last."""
        if source == "genesis":
            return [self._store.first(self._record.first)]
        return [*self._store.hot(), *(lasting.found if lasting else ())]

    def _look_at_settings(self) -> str:
        """Why the settings of the job's topics must hold it; what else differs is logged."""
        own = [NewTopic(place.topic, kept_forever=True) for place in (self._control, self._updates)]
        letters = [
            NewTopic(dead_letter_topic(stream), kept_forever=True)
            for stream in self._record.spec.streams
        ]
        wanted = [*own, *letters]
        refused = list[str]()
        found = self._source.settings([topic.name for topic in wanted], refused)
        if refused:
            self._log.warning("topic_settings_unknown", reason="; ".join(refused))
        lossy = [each for each in differences(own, found) if each.loses]
        if lossy:
            return (
                f"Kafka would lose records of the job: {'; '.join(map(str, lossy))};"
                f" set that right: {remedy(lossy)}; then `doll job resume {self._record.spec.name}`"
            )
        if differing := differences(wanted, found):
            reason = "; ".join(map(str, differing))
            self._log.warning("topic_settings_differ", reason=reason, remedy=remedy(differing))
        return ""

    def _ends(self, topics: Mapping[str, FoundTopic]) -> dict[Partition, LogPosition]:
        """Where the control and the updates topic end.

        Raises:
            UnknownTopicError: If there is no such topic any more.
            UnavailableError: If nobody can tell now.
        """
        known = {self._updates, self._control}
        ends = self._source.end_positions(known, topics)
        for partition in known - ends.keys():
            self._source.partitions(partition.topic)  # or it is not there
            raise UnavailableError(f"nobody can tell now where {partition} ends")
        return ends

    def _lost(
        self,
        found: Iterable[FoundSnapshot],
        topics: Mapping[str, FoundTopic],
        ends: Mapping[Partition, LogPosition],
    ) -> dict[tuple[int, int, int], str]:
        """Of which snapshots the control or the updates topic lost records, and which, by rank.

        Raises:
            UnavailableError: If nobody can tell now.
        """
        agreed = self._agreed(found, ends)
        lost = dict[tuple[int, int, int], str]()
        for title, snapshot, *_ in found:
            for name, own, held in self._own_logs(snapshot):
                reached = agreed[own, held.topic_id, held.epoch]
                if reached < held.offset:
                    topic_id = topics[own.topic].topic_id if own.topic in topics else held.topic_id
                    anew = topic_id != held.topic_id != ""
                    what = _what_happened(reached, ends[own].offset, anew=anew)
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

    def _agreed(
        self, found: Iterable[FoundSnapshot], ends: Mapping[Partition, LogPosition]
    ) -> dict[tuple[Partition, str, int], int]:
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
            parted = self._source.agrees({own: highest[log] for own, log in asked.items()}, ends)
            for own, log in asked.items():
                agreed[log] = parted.get(own, highest[log].offset)
                left.remove(log)
        return agreed

    def restore(self, snapshot: Snapshot, trainer: Trainer | None) -> events.CoordinatorEvent:
        """Take a snapshot's weights in hand, before anybody is told that it is the base.

        Args:
            snapshot: One of those that were found.
            trainer: A new one, with the weights of the genesis; None where workers hold them.
        """
        if trainer is None:
            return self._restored("")
        stored = self._found[snapshot.rank]
        try:
            weights = stored.trainer()
        except CorruptError:  # the store has told why
            return events.SnapshotTorn(snapshot)
        except DollError as error:
            return events.AttemptFailed(f"{stored.title} cannot be read now: {error}")
        try:
            if weights:
                trainer.restore(weights)
        except CorruptError as error:
            if snapshot.rank in self._hot:  # anybody can write to the board
                if isinstance(error, OtherModelError) and snapshot.made != GENESIS:
                    self._other_model = f"{stored.title}: {error}"
                self._log.warning("hot_snapshot_unreadable", reason=str(error))
                return events.SnapshotTorn(snapshot)
            return events.Trouble(f"{stored.title}: {error}")
        return self._restored(trainer.digest)

    def _restored(self, digest: str) -> events.CoordinatorEvent:
        self._found, self._other_model = {}, ""
        return events.SnapshotRestored(unused_number(time(), randbits(12)), digest)

    def begin(self, epoch: int, snapshot: Snapshot, length: int) -> None:
        """Listen to workers: claims from the snapshot on, and replies to this epoch; watch streams.

        Args:
            epoch: The leader's.
            snapshot: What it starts from.
            length: P + B, numbers in a well-formed vector.
        """
        self._tails.append(self._fetch_claims(snapshot.control))
        self._sound = SoundReplies(length, self._measuring.metrics, self._log)
        self._replica.replies.follow(self._job, epoch, partial(self._hear_replies, self.number))
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
        self._close_tails()
        self._sound = None

    def _follow_updates(self, position: LogPosition) -> TopicTail:
        tail = self._tail(self._updates, position, decoded_updates)
        self._tails.append(tail)
        return tail

    def _fetch_claims(self, position: LogPosition) -> TopicTail:
        """Have claims fetched, or go on with what is fetched from there already.

        A candidate does so with its first request: what is opened beside a reader that waits for
        news waits for it, for some 0.2 s, and members are given no order until the claims of what
        updates used are replayed.
        """
        if self._claims is None or self._claims[0] != position:
            if self._claims is not None:
                self._claims[1].close()
            self._claims = position, self._tail(self._control, position, decoded_claims)
        return self._claims[1]

    def _tail(
        self,
        topic: Partition,
        position: LogPosition,
        decode: Callable[[RawRecords, int], events.CoordinatorEvent],
    ) -> TopicTail:
        return TopicTail(self._source, topic, position, decode, self._hear_of_records, self._log)

    def _close_tails(self) -> None:
        for tail in self._tails:
            tail.close()
        self._tails = []
        if self._claims is not None:
            self._claims[1].close()
            self._claims = None

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


def _batches_of(replies: Iterable[Reply]) -> int:
    return sum(len(reply.batches) for reply in replies if isinstance(reply, Gradient))


def _can_wait(reply: Reply) -> bool:
    """Whether it says nothing to act upon, and is soon added once the others are there."""
    if not isinstance(reply, Gradient):
        return False
    return reply.vector is None or numbers_in(reply.vector).nbytes <= SMALL_BYTES


def _rank(snapshot: Snapshot) -> tuple[int, int, int]:
    return snapshot.rank


def _begin(source: events.Source, snapshots: Collection[Snapshot]) -> LogPosition | None:
    """From where on the updates topic must be read; None without snapshots.

    Of hot ones only the best may do, which is the leader's in force, so however long that led, the
    others' time is not read again.
    """
    if source == "hot" and snapshots:
        return max(snapshots, key=_rank).updates
    return min((snapshot.updates for snapshot in snapshots), default=None)


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
