"""Makes a replica a leader: finds snapshots, loads weights and follows topics.

Carries out the commands of `common.core.coordinator` about leadership. Events of an earlier
leadership are dropped.
"""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from secrets import randbits
from time import time
from typing import TYPE_CHECKING

from common.core import events
from common.core.messages import GENESIS, unused_number
from common.core.spans import LogPosition, Partition
from common.errors import (
    CorruptError,
    DollError,
    ExpiredError,
    FutureFormatError,
    OtherModelError,
    TaskMissingError,
    TruncatedError,
    UnavailableError,
    UnknownTopicError,
    UserError,
)
from common.jobs.build import trainer_of
from common.kafka.names import (
    control_topic,
    dead_letter_topic,
    differences,
    remedy,
    updates_topic,
)
from common.kafka.port import NewTopic
from common.storage.snapshot_file import FoundSnapshot
from common.storage.store import CheckpointStore
from services.coordinator.initial_weights import InitialWeights
from services.coordinator.replies import SoundReplies
from services.coordinator.streams import WatchedJob
from services.coordinator.tails import (
    TopicTail,
    decoded_claims,
    decoded_updates,
    deleted,
    missing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from common.core import commands as do
    from common.core.snapshots import Snapshot
    from common.kafka.port import FoundTopic
    from common.learning.trainer import Trainer
    from services.coordinator.effects.lease import Lease
    from services.coordinator.effects.snapshots import Lasting, SnapshotStore
    from services.coordinator.replica import JobContext
    from services.coordinator.tails import RawRecords


# Errors that a task's code may raise.
_NO_MODEL = (UserError, CorruptError, MemoryError, SystemExit)
# Lifetime in Redis of the reason why this replica cannot lead: more than the two longest pauses
# between its attempts.
UNABLE_TTL_S = 150.0


class Leadership:
    """One replica's attempts to lead one job, and the leaderships that follow.

    Args:
        job: The job. Its role and weights are changed here.
        lease: Released if this replica does not have the job's task.
        store: The job's snapshots.
    """

    def __init__(self, job: JobContext, lease: Lease, store: SnapshotStore) -> None:
        self._job = job
        self._lease = lease
        self._store = store
        self._source = job.replica.log
        # Set while this replica is a candidate.
        self._make_trainer: Callable[[], Trainer] | None = None
        # Weights of `init` that were stored when the model was built. Another replica may have
        # stored them, and the job's frozen tensors, since then.
        self._init = ""
        self._updates = Partition(updates_topic(job.id), 0)
        self._control = Partition(control_topic(job.id), 0)
        self.initial_weights = InitialWeights(job, self._is_unused)
        # Tail of the control topic and the position where it began. Read once this replica leads.
        self._claims: tuple[LogPosition, TopicTail] | None = None
        # Both are keyed by rank. `_hot` names the snapshots that are only in Redis.
        self._found = dict[tuple[int, int, int], FoundSnapshot]()
        self._hot = frozenset[tuple[int, int, int]]()
        # Describes a trained hot snapshot of another model than this process's. Version 0 must not
        # replace that snapshot.
        self._other_model = ""

    # --- leadership -------------------------------------------------------------------------------

    @property
    def lacking(self) -> str:
        """Reason why this process cannot lead the job; usually empty."""
        if self._job.replica.blobs is not None:
            return ""
        if self._job.spec.init is not None:
            return "init: requires object storage; set DOLL_BLOBS for coordinators and workers"
        if not self._job.spec.grouped:
            return ""
        return (
            "the workers of this job hold its weights and store them in object storage, which this"
            " coordinator cannot use; set DOLL_BLOBS for coordinators and workers, then run `doll"
            " job resume`"
        )

    def find(self, command: do.FindSnapshots) -> Iterator[events.CoordinatorEvent]:
        """Check that the model can be built, then find snapshots."""
        self._job.role = "candidate"
        if reason := self.lacking:
            yield events.HoldRequired(reason)
            return
        try:
            if not self._job.spec.grouped:
                self._learn_to_make()
            if command.source == "genesis":
                self.initial_weights.prepare()
        except TaskMissingError as error:
            self._leave_to_others(str(error))
        except UnavailableError as error:
            yield events.AttemptFailed(str(error))
        except _NO_MODEL as error:
            yield _hold_required(error)
        else:
            yield self._look_for(command.source)

    def _is_unused(self) -> bool:
        """True if the updates topic is empty, so that nobody has led the job.

        Raises:
            UnavailableError: If Kafka cannot say now.
        """
        ends = self._source.ends([self._updates])
        if self._updates not in ends:
            raise UnavailableError(f"Kafka does not return the end of {self._updates} now", "kafka")
        return ends[self._updates] == 0

    def _learn_to_make(self) -> Callable[[], Trainer]:
        """Return the function that builds the model.

        Raises:
            TaskMissingError: If this process does not have the task.
            UserError: If there is no such model.
            CorruptError: If the job has other frozen tensors.
            UnavailableError: If object storage is unavailable.
        """
        replica, spec = self._job.replica, self._job.spec
        store = None if replica.blobs is None else CheckpointStore(replica.blobs, self._job.id)
        init = "" if store is None or spec.init is None else store.init()
        if self._make_trainer is None or init != self._init:
            self._make_trainer, self._init = trainer_of(spec, replica.settings.tasks, store), init
            self._lease.is_able()
        return self._make_trainer

    def _leave_to_others(self, reason: str) -> None:
        """Release the lease and report why: other replicas may have the task."""
        if self._job.changes("unable", reason):
            self._job.log.error("job_left_to_others", reason=reason)
        self.stand_by()
        self._lease.leave_to_others()
        self._job.board.put_unable(self._job.replica.name, reason, UNABLE_TTL_S)

    def _look_for(self, source: events.Source) -> events.CoordinatorEvent:
        """Read a source's snapshots and follow the updates topic from the lowest of them on."""
        self.end()
        found: events.CoordinatorEvent | None = None
        try:
            found = self._find(source)
        except UnknownTopicError as error:
            return events.HoldRequired(self._missing(str(error)))
        # Kafka lost records during this search.
        except (ExpiredError, TruncatedError) as error:
            return events.HoldRequired(
                f"{error}; run `doll job resume {self._job.record.spec.name}` to search again"
            )
        except (CorruptError, FutureFormatError) as error:
            return events.HoldRequired(str(error))
        finally:
            if not isinstance(found, events.SnapshotsFound):
                self.end()
        return found

    def _find(self, source: events.Source) -> events.CoordinatorEvent:
        """Find snapshots. Requests run in parallel, because Kafka may be far away."""
        with ThreadPoolExecutor(1) as pool:
            lossy = pool.submit(self._look_at_settings)
            lasting = self._store.lasting() if source == "all" else None
            found = self._snapshots(source, lasting)
            begin = _begin(source, [stored.snapshot for stored in found])
            tail = self._follow_updates(begin) if begin else None
            # Version 0 has no claims to replay.
            if found and source != "genesis":
                self._fetch_claims(max((each.snapshot for each in found), key=_rank).control)
            topics = self._source.describe([self._updates.topic, self._control.topic])
            # Ends are read after the snapshots, so that no snapshot can be above an end.
            ends = self._ends(topics)
            lost = self._lost(found, topics, ends)
            if reason := lossy.result():
                return events.HoldRequired(reason)
        ids = {topic: each.topic_id for topic, each in topics.items()}
        covered = [stored.snapshot for stored in found if stored.snapshot.rank not in lost]
        updates_id, end = ids.get(self._updates.topic, ""), ends[self._updates].offset
        read_from = _begin(source, covered) or LogPosition(end)
        read_from = read_from._replace(topic_id=updates_id or read_from.topic_id)
        # Usually the tail has begun there. Otherwise there is no snapshot, or Kafka lost records of
        # the snapshot at whose position the tail began.
        if tail is None or read_from != begin:
            self._job.inbox.close_tails()
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
        """Return the snapshots of a source. If one is found twice, its checkpoint comes last."""
        if source == "genesis":
            return [self._store.first(self._job.record.first)]
        return [*self._store.hot(), *(lasting.found if lasting else ())]

    def _look_at_settings(self) -> str:
        """Return a reason to hold the job if settings of its own topics would lose records.

        Other differences from the expected settings are logged.
        """
        own = [NewTopic(place.topic, kept_forever=True) for place in (self._control, self._updates)]
        dead_letters = [
            NewTopic(dead_letter_topic(stream), kept_forever=True)
            for stream in self._job.record.spec.streams
        ]
        wanted = [*own, *dead_letters]
        refused = list[str]()
        found = self._source.settings([topic.name for topic in wanted], refused)
        if refused:
            self._job.log.warning("topic_settings_unknown", reason="; ".join(refused))
        lossy = [each for each in differences(own, found) if each.loses]
        if lossy:
            return (
                f"Kafka would lose records of the job: {'; '.join(map(str, lossy))}; correct the"
                f" settings: {remedy(lossy)}; then run `doll job resume"
                f" {self._job.record.spec.name}`"
            )
        if differing := differences(wanted, found):
            reason = "; ".join(map(str, differing))
            self._job.log.warning("topic_settings_differ", reason=reason, remedy=remedy(differing))
        return ""

    def _ends(self, topics: Mapping[str, FoundTopic]) -> dict[Partition, LogPosition]:
        """Return the ends of the control and the updates topic.

        Raises:
            UnknownTopicError: If one of the topics does not exist any more.
            UnavailableError: If an end is unknown now.
        """
        known = {self._updates, self._control}
        ends = self._source.end_positions(known, topics)
        for partition in known - ends.keys():
            # Raises if the topic does not exist.
            self._source.partitions(partition.topic)
            raise UnavailableError(f"Kafka does not return the end of {partition} now")
        return ends

    def _lost(
        self,
        found: Iterable[FoundSnapshot],
        topics: Mapping[str, FoundTopic],
        ends: Mapping[Partition, LogPosition],
    ) -> dict[tuple[int, int, int], str]:
        """Describe, by rank, the snapshots whose control or update records Kafka lost.

        Raises:
            UnavailableError: If Kafka cannot say now.
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
                        f"the {name} topic {what}, but {title} needs it up to offset"
                        f" {held.offset:,}"
                    )
        return lost

    def _own_logs(self, snapshot: Snapshot) -> tuple[tuple[str, Partition, LogPosition], ...]:
        """Return each of the job's own topics with the snapshot's position in it."""
        return (
            ("updates", self._updates, snapshot.updates),
            ("control", self._control, snapshot.control),
        )

    def _agreed(
        self, found: Iterable[FoundSnapshot], ends: Mapping[Partition, LogPosition]
    ) -> dict[tuple[Partition, str, int], int]:
        """Return how far the job's own topics still match the snapshots, by topic id and epoch.

        If a topic matches the highest position, it matches the lower ones, too. Usually there is
        only one.
        """
        highest = dict[tuple[Partition, str, int], LogPosition]()
        for stored in found:
            for _, own, known in self._own_logs(stored.snapshot):
                log = own, known.topic_id, known.epoch
                highest[log] = max(known, highest.get(log, known))
        agreed = dict[tuple[Partition, str, int], int]()
        left = list(highest)
        while left:
            # Ask for one position of each topic.
            asked = {log[0]: log for log in left}
            diverged = self._source.agrees({own: highest[log] for own, log in asked.items()}, ends)
            for own, log in asked.items():
                agreed[log] = diverged.get(own, highest[log].offset)
                left.remove(log)
        return agreed

    def restore(self, command: do.RestoreSnapshot) -> Iterator[events.CoordinatorEvent]:
        """Load a snapshot's weights, unless members hold them."""
        job = self._job
        job.members, job.weights, job.in_hand = command.members, None, None
        if command.members:
            yield self._restored("")
            return
        # If the job has changed, nobody has checked yet whether its model can be built.
        try:
            job.weights = self._learn_to_make()()
        except TaskMissingError as error:
            self._leave_to_others(str(error))
            yield events.AttemptFailed(str(error))
        except UnavailableError as error:
            yield events.AttemptFailed(str(error))
        except _NO_MODEL as error:
            yield _hold_required(error)
        else:
            yield self._load(command.snapshot, job.weights)

    def _load(self, snapshot: Snapshot, trainer: Trainer) -> events.CoordinatorEvent:
        """Load weights before the snapshot is announced as the base.

        Args:
            snapshot: One of the snapshots that were found.
            trainer: A new trainer with the weights of version 0.
        """
        stored = self._found[snapshot.rank]
        try:
            weights = stored.trainer()
        # The store has logged the reason.
        except CorruptError:
            return events.SnapshotTorn(snapshot)
        except DollError as error:
            return events.AttemptFailed(f"{stored.title} cannot be read now: {error}")
        try:
            if weights:
                trainer.restore(weights)
        except CorruptError as error:
            # Anyone with access to Redis could have written it.
            if snapshot.rank in self._hot:
                if isinstance(error, OtherModelError) and snapshot.made != GENESIS:
                    self._other_model = f"{stored.title}: {error}"
                self._job.log.warning("hot_snapshot_unreadable", reason=str(error))
                return events.SnapshotTorn(snapshot)
            return events.HoldRequired(f"{stored.title}: {error}")
        return self._restored(trainer.digest)

    def _restored(self, digest: str) -> events.CoordinatorEvent:
        self._found, self._other_model = {}, ""
        return events.SnapshotRestored(unused_number(time(), randbits(12)), digest)

    def begin(self, command: do.Begin) -> None:
        """Follow claims (from the snapshot on), workers' replies, and the streams."""
        job, inbox, epoch = self._job, self._job.inbox, command.epoch
        self._make_trainer = None
        job.changes("awaited", "")
        inbox.tails.append(self._fetch_claims(command.snapshot.control))
        length = 0 if job.members else len(job.trainer.weights()) // 4
        inbox.sound = SoundReplies(length, job.observer.metrics, job.log)
        deliver = partial(inbox.put, inbox.leadership)
        replies = partial(inbox.put_replies, inbox.leadership)
        job.replica.replies.follow(job.id, epoch, replies)
        job.replica.streams.follow(
            WatchedJob(
                *(job.id, epoch, job.record.first, job.observer),
                lambda reason: deliver(events.HoldRequired(reason)),
                deliver,
            )
        )

    def stand_by(self) -> None:
        """Stop listening and free the weights: a job that another replica leads needs no memory."""
        self.end()
        self._job.role = "standby"
        self._job.replica.candidates.leave(self._job.id)
        self.initial_weights.drop()
        self._make_trainer = self._job.weights = None

    def end(self) -> None:
        """Stop listening, and drop everything that was received."""
        self._job.replica.replies.forget(self._job.id)
        self._job.replica.streams.forget(self._job.id)
        self._job.inbox.end_leadership()
        if self._claims is not None:
            self._claims[1].close()
            self._claims = None

    def _follow_updates(self, position: LogPosition) -> TopicTail:
        tail = self._tail(self._updates, position, decoded_updates)
        self._job.inbox.tails.append(tail)
        return tail

    def _fetch_claims(self, position: LogPosition) -> TopicTail:
        """Start fetching claims, or continue with those already fetched from this position.

        A candidate calls this early: a tail that is opened while another reader waits for records
        is delayed by about 0.2 s, and members get no orders until the claims of applied updates
        are replayed.
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
        wake = self._job.inbox.wake_for_records
        return TopicTail(self._source, topic, position, decode, wake, self._job.log)

    def _missing(self, reason: str) -> str:
        """Name the job's topic that does not exist; return `reason` if all exist."""
        streams = self._job.record.spec.streams
        own = self._updates.topic, self._control.topic
        for topic in (*own, *streams):
            try:
                self._source.partitions(topic)
            except UnknownTopicError:
                return deleted(topic) if topic in own else missing(topic)
        return reason


def _hold_required(error: BaseException) -> events.HoldRequired:
    reason = str(error) if isinstance(error, DollError) else f"{type(error).__name__}: {error}"
    detail = "".join(traceback.format_exception(error)).rstrip()
    return events.HoldRequired(f"the model cannot be built: {reason}", detail)


def _rank(snapshot: Snapshot) -> tuple[int, int, int]:
    return snapshot.rank


def _begin(source: events.Source, snapshots: Collection[Snapshot]) -> LogPosition | None:
    """Return where to start reading the updates topic; None without snapshots.

    Of hot snapshots only the best one matters, because the leader in force wrote it. So updates
    from before that snapshot are not read again.
    """
    if source == "hot" and snapshots:
        return max(snapshots, key=_rank).updates
    return min((snapshot.updates for snapshot in snapshots), default=None)


def _what_happened(reached: int, end: int, *, anew: bool) -> str:
    """Describe what happened to a topic that no longer matches a snapshot.

    Args:
        reached: Offset up to which the topic still matches.
        end: End of the topic.
        anew: True if it was created again, so that it is another topic.
    """
    if anew:
        return "was deleted and recreated"
    now = (
        f"ends at offset {end:,}"
        if reached == end
        else f"has other records from offset {reached:,} on"
    )
    return f"lost records that Kafka had acknowledged: it {now}"
