"""What a coordinator does about its decisions: Kafka, the board, object storage, the numbers.

`common.core.coordinator` decides; `loop` hands each command here, in order. All of this belongs to
the job's one deciding thread; what it would have to wait for is done by threads of its own.
"""

from __future__ import annotations

from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from common import wire
from common.core import commands as do
from common.core import events
from common.core.messages import AuditRecord, Lead
from common.core.spans import Partition
from common.errors import (
    CorruptError,
    ExpiredError,
    FutureFormatError,
    TruncatedError,
    UnavailableError,
)
from common.saved import Saved, Stored
from common.telemetry import Changes, Outage, StageTimes
from common.topics import control_topic, updates_topic
from services.coordinator.dead_letters import DeadLetters
from services.coordinator.readers import (
    Ear,
    Heard,
    Reader,
    ReplyReader,
    TopicReader,
    decoded_claims,
    decoded_updates,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.core.commands import CoordinatorCommand
    from common.core.messages import UpdateTrigger
    from common.core.snapshots import Snapshot
    from common.jobs import JobBook, JobRecord
    from common.learning.trainer import Trainer
    from common.ports import Board, Log
    from common.telemetry import EventLogger
    from services.coordinator.snapshots import SnapshotStore

Updates: TypeAlias = tuple[tuple[int, AuditRecord | None], ...]  # by offset

INLINE_BYTES = 64 << 10  # a model up to here travels inside its trigger: one round trip less
READ_RECORDS = 2000
READ_S = 0.5
UPLOAD_S = 60.0  # for the last checkpoint of a job that ends
FLUSH_S = 5.0


class Effects:
    """The hands of one job's coordinator.

    Args:
        record: The job.
        trainer: Makes the numbers of a leadership, with the weights of the genesis.
        log: Kafka.
        board: The job's board.
        store: Its snapshots.
        book: The jobs topic, for holding and finishing.
        name: Of this replica.
        lease_ttl_s: Lifetime of the lease.
        logger: Bound to the job.
        fail: Ends the job's loop with a fault of a thread.
    """

    def __init__(  # noqa: PLR0913 -- what a coordinator is made of
        self,
        record: JobRecord,
        trainer: Callable[[], Trainer],
        log: Log,
        board: Board,
        store: SnapshotStore,
        book: JobBook,
        *,
        name: str,
        lease_ttl_s: float,
        logger: EventLogger,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.heard = SimpleQueue[Heard]()
        self.leadership = 0
        self.dropped = 0
        self._record = record
        self._job = record.spec.name
        self._make_trainer = trainer
        self._trainer = trainer()
        self._source = log
        self._board = board
        self._store = store
        self._book = book
        self._name = name
        self._lease_ttl_s = lease_ttl_s
        self._log = logger
        self._fail = fail
        self._writer = log.writer()
        self._updates = Partition(updates_topic(self._job), 0)
        self._control = Partition(control_topic(self._job), 0)
        self._letters = DeadLetters(log, logger, fail)
        self._outage = Outage(logger, "board")
        self._changes = Changes()
        self._times = StageTimes()
        self._readers = list[Reader]()
        self._found = dict[tuple[int, int, int], Stored]()  # by rank
        self._found_in: events.Source = "hot"
        self._stated = False  # whether this leader has put its standing
        self._copy = b""
        self._unpublished: tuple[Saved, bool] | None = None  # and whether it is a checkpoint

    def poll(self) -> None:
        """Run delivery reports, and publish what waited for them.

        Raises:
            DeliveryError: If an audit record was not delivered: this process must not go on.
        """
        self._writer.poll()
        self._publish()

    def close(self) -> None:
        """End all threads; what was appended is delivered."""
        self._stop_readers()
        self._letters.close()
        self._store.close()
        self._writer.flush(FLUSH_S)
        self._writer.close()
        self._times.tell(self._log)

    def do(self, command: CoordinatorCommand) -> Iterator[events.CoordinatorEvent]:
        """Carry out a command; yields what it brings about at once."""
        started = perf_counter()
        try:
            yield from self._do(command)
            self._outage.over()
        except UnavailableError as error:
            # Whatever was lost on the board is asked for again: by a deadline, a tick, a lease.
            self._outage.met(error)
        self._times.add(type(command).__name__, started)

    def _do(self, command: CoordinatorCommand) -> Iterator[events.CoordinatorEvent]:  # noqa: C901, PLR0912, PLR0915 -- one case per command
        match command:
            case do.PostTrigger(trigger):
                self._post(trigger)
            case do.AddGradient(gradient):
                self._trainer.add(gradient.vector, gradient.samples)
            case do.Apply():
                self._trainer.apply()
            case do.DiscardSum():
                self._trainer.discard()
            case do.AppendAudit(record):
                self._writer.append(self._updates.topic, wire.encode_audit(record))
                if isinstance(record, Lead):
                    self._log.info(
                        "stands_to_lead", after=record.after, version=record.base.version
                    )
            case do.PublishModel(model):
                self._board.put_model(model, self._trainer.weights())
            case do.PutStanding(standing):
                there = self._board.put_standing(standing)
                if not there and self._stated:
                    self._log.warning("board_wiped")
                    yield events.BoardWiped()
                self._stated = True
            case do.LookForWorkers():
                yield events.WorkersSeen(self._board.alive())
            case do.AskLease():
                held = self._board.hold_lease(self._name, self._lease_ttl_s)
                if self._changes("lease", held) and not held:
                    self._log.info("stands_by")
                yield events.LeaseAnswered(held)
            case do.ReleaseLease():
                self._board.release_lease(self._name)
            case do.CopyWeights():
                self._copy = self._trainer.snapshot()
            case do.PublishSnapshot(snapshot, checkpoint):
                earlier = self._unpublished is not None and self._unpublished[1]
                self._unpublished = (Saved(snapshot, self._copy), checkpoint or earlier)
                self._publish()
            case do.DeadLetterRecords(skipped):
                self._letters.add(skipped)
            case do.DeadLetterBatch(quarantined):
                self._letters.add(quarantined)
            case do.Drop(reply, reason):
                self.dropped += 1
                self._log.debug("reply_dropped", worker=reply.worker, reason=reason)
            case do.FindSnapshots(source):
                yield self._find_snapshots(source)
            case do.RestoreSnapshot(snapshot):
                yield self._restore(snapshot)
            case do.Begin(epoch, snapshot):
                self._begin(epoch, snapshot)
            case do.StepDown(reason):
                self._log.warning("steps_down", reason=reason)
                self._unpublished = None
                self._stop_readers()
            case do.Hold(reason):
                self._hold(reason)
            case do.Finish(reason):
                self._finish(reason)

    def _post(self, trigger: UpdateTrigger) -> None:
        weights = self._trainer.weights()
        if len(weights) <= INLINE_BYTES:
            trigger = msgspec.structs.replace(trigger, weights=bytes(weights))
        self._board.post_trigger(trigger)

    def _publish(self) -> None:
        """Publish a snapshot, once the dead letters that it leaves behind are delivered."""
        if self._unpublished is None or not self._letters.all_delivered:
            return
        (saved, checkpoint), self._unpublished = self._unpublished, None
        try:
            self._store.put(saved, checkpoint=checkpoint)
        except UnavailableError as error:
            self._outage.met(error)

    def _hold(self, reason: str) -> None:
        self._log.error("job_held", reason=reason)
        if self._book.get(self._job).wanted == "running":
            self._book.want(self._job, "paused", reason)

    # --- leadership ---------------------------------------------------------------------------

    def _find_snapshots(self, source: events.Source) -> events.CoordinatorEvent:
        """Read a source's snapshots and the audit from the lowest of them on; follow it on."""
        self._stop_readers()
        try:
            found = self._snapshots(source)
            self._check_logs(found)
            begin = min((stored.snapshot.updates_position for stored in found), default=None)
            updates, position = self._read_updates(begin)
        except (CorruptError, ExpiredError, FutureFormatError, TruncatedError) as error:
            return events.Trouble(str(error))
        self._found = {stored.snapshot.rank: stored for stored in found}
        self._found_in = source
        ear = self._ear()
        self._start(TopicReader(self._source, self._updates, position, decoded_updates, ear))
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

    def _restore(self, snapshot: Snapshot) -> events.CoordinatorEvent:
        """Take a snapshot's weights in hand, before anybody is told that it is the base."""
        stored, trainer = self._found[snapshot.rank], self._make_trainer()
        try:
            weights = stored.trainer()
        except CorruptError:  # the store has told why
            return events.SnapshotTorn(snapshot)
        try:
            if weights:
                trainer.restore(weights)
        except CorruptError as error:
            if self._found_in == "hot":  # anybody can write to the board
                self._log.warning("hot_snapshot_unreadable", reason=str(error))
                return events.SnapshotTorn(snapshot)
            return events.Trouble(f"{stored.title}: {error}")
        self._trainer, self._found = trainer, {}
        return events.SnapshotRestored()

    def _begin(self, epoch: int, snapshot: Snapshot) -> None:
        self._log.info("leads", epoch=epoch, version=snapshot.made.version)
        self._stated = False
        ear, position = self._ear(), snapshot.control_position
        self._start(TopicReader(self._source, self._control, position, decoded_claims, ear))
        length = len(self._trainer.weights()) // 4
        self._start(ReplyReader(self._board, epoch, length, ear))
        self._board.drop_replies(epoch)  # last: the board may be away

    def _ear(self) -> Ear:
        return Ear(self.heard, self.leadership, self._log, self._fail)

    def _start(self, reader: Reader) -> None:
        self._readers.append(reader)
        reader.start()

    def _stop_readers(self) -> None:
        """Ask all readers to end, and believe nothing that they still have to say."""
        self.leadership += 1
        for reader in self._readers:
            reader.stopped.set()
        self._readers = []

    def _finish(self, reason: str) -> None:
        self._letters.close()
        self._publish()
        self._log.info("job_finished", reason=reason)
        if not self._store.flush(UPLOAD_S):
            self._log.error("last_checkpoint_late", waited_s=UPLOAD_S)
        if self._book.get(self._job).wanted != "stopped":
            self._book.want(self._job, "stopped", reason)
