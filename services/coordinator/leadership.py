"""How a replica comes to lead: what it finds, takes in hand, and listens to.

Carries out the commands of `common.core.coordinator` that are about leading itself; the readers of
one leadership speak to the job's queue, and those of an earlier one are no longer believed.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from common.core import events
from common.core.messages import AuditRecord
from common.core.spans import Partition
from common.errors import (
    CorruptError,
    ExpiredError,
    FutureFormatError,
    TruncatedError,
    UnavailableError,
)
from common.saved import Stored
from common.topics import control_topic, updates_topic
from services.coordinator.readers import (
    Ear,
    Heard,
    RawRecords,
    Reader,
    ReplyReader,
    TopicReader,
    decoded_claims,
    decoded_updates,
)
from services.coordinator.streams import StreamWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.core.snapshots import Snapshot
    from common.jobs.store import JobRecord
    from common.learning.trainer import Trainer
    from common.ports import Board, Log
    from common.telemetry import EventLogger
    from services.coordinator.measuring import Measuring
    from services.coordinator.snapshots import SnapshotStore

Updates: TypeAlias = tuple[tuple[int, AuditRecord | None], ...]  # by offset

READ_RECORDS = 2000
READ_S = 0.5


class Leadership:
    """One replica's attempts to lead one job, and its leaderships, one after the other.

    Args:
        record: The job.
        log: Kafka.
        board: The job's board.
        store: Its snapshots.
        measuring: Hears of replies that cannot be read, and of streams.
        logger: Bound to the job.
        fail: Ends the job's loop with a fault of a reader.
    """

    def __init__(
        self,
        record: JobRecord,
        log: Log,
        board: Board,
        store: SnapshotStore,
        measuring: Measuring,
        logger: EventLogger,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.heard = SimpleQueue[Heard]()
        self.number = 0  # what was heard for another one is not believed
        self._record = record
        self._source = log
        self._board = board
        self._store = store
        self._measuring = measuring
        self._log = logger
        self._fail = fail
        self._updates = Partition(updates_topic(record.spec.name), 0)
        self._control = Partition(control_topic(record.spec.name), 0)
        self._readers = list[Reader]()
        self._found = dict[tuple[int, int, int], Stored]()  # by rank
        self._found_in: events.Source = "hot"

    def find(self, source: events.Source) -> events.CoordinatorEvent:
        """Read a source's snapshots and the audit from the lowest of them on; follow it on."""
        self.end()
        try:
            found = self._snapshots(source)
            self._check_logs(found)
            begin = min((stored.snapshot.reads_from for stored in found), default=None)
            updates, position = self._read_updates(begin)
        except (CorruptError, ExpiredError, FutureFormatError, TruncatedError) as error:
            return events.Trouble(str(error))
        self._found = {stored.snapshot.rank: stored for stored in found}
        self._found_in = source
        self._follow(self._updates, position, decoded_updates)
        snapshots = tuple(stored.snapshot for stored in found)
        return events.SnapshotsFound(source, snapshots, updates, position)

    def _snapshots(self, source: events.Source) -> list[Stored]:
        match source:
            case "hot":
                return self._store.hot()
            case "all":
                return [*self._store.lasting(), *self._store.hot()]
            case "genesis":
                return [self._store.first(self._record.first)]

    def _check_logs(self, found: Iterable[Stored]) -> None:
        """See that no log ends below what a snapshot has of it.

        Raises:
            TruncatedError: If one does: records that Kafka acknowledged were lost.
        """
        known = dict[Partition, tuple[int, str]]()  # the highest position, and who says so
        for title, snapshot, _ in found:
            own = {
                self._updates: snapshot.updates_position,
                self._control: snapshot.control_position,
            }
            for partition, position in (snapshot.claimed | own).items():
                known[partition] = max(known.get(partition, (0, "")), (position, title))
        for partition, (position, title) in known.items():
            end = self._source.bounds(partition).end
            if end < position:
                raise TruncatedError(
                    f"{partition} ends at {end}, but {title} has it up to {position}:"
                    " acknowledged records were lost"
                )

    def _read_updates(self, begin: int | None) -> tuple[Updates, int]:
        """Read the updates topic from a position to its end; nothing of it without one."""
        end = self._source.bounds(self._updates).end
        if begin is None:
            return (), end
        tail = self._source.tail(self._updates, begin)
        records = list[tuple[int, bytes | None]]()
        try:
            while tail.position() < end:
                read = tail.read(READ_RECORDS, READ_S)
                records += ((record.offset, record.value) for record in read)
            return decoded_updates(tuple(records)).records, tail.position()
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
        return events.SnapshotRestored()

    def begin(self, epoch: int, snapshot: Snapshot, length: int) -> None:
        """Listen to workers: claims from the snapshot on, and replies to this epoch; watch streams.

        Args:
            epoch: The leader's.
            snapshot: What it starts from.
            length: P + B, numbers in a well-formed vector.
        """
        self._follow(self._control, snapshot.control_position, decoded_claims)
        metrics = self._measuring.metrics
        self._start(ReplyReader(self._board, epoch, length, metrics, self._ear()))
        first = self._record.first
        self._start(StreamWatch(self._source, epoch, first, self._measuring, self._ear()))
        self._board.drop_replies(epoch)  # last: the board may be away

    def end(self) -> None:
        """Ask all readers to end, and believe nothing that they still have to say."""
        self.number += 1
        for reader in self._readers:
            reader.stopped.set()
        self._readers = []

    def _follow(
        self,
        topic: Partition,
        position: int,
        decode: Callable[[RawRecords], events.CoordinatorEvent],
    ) -> None:
        self._start(TopicReader(self._source, topic, position, decode, self._ear()))

    def _ear(self) -> Ear:
        return Ear(self.heard, self.number, self._log, self._fail)

    def _start(self, reader: Reader) -> None:
        self._readers.append(reader)
        reader.start()
