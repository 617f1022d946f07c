"""What a coordinator does about its decisions: Kafka, the board, object storage, the numbers.

`common.core.coordinator` decides; `loop` hands each command here, in order. All of this belongs to
the job's one deciding thread; what it would have to wait for is done by threads of its own.
"""

from __future__ import annotations

from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import msgspec

from common import wire
from common.core import commands as do
from common.core import events
from common.core.messages import Lead
from common.errors import ConflictError, UnavailableError
from common.saved import Saved
from common.telemetry import Changes, Outage, StageTimes
from common.topics import updates_topic
from services.coordinator.dead_letters import DeadLetters
from services.coordinator.leadership import Leadership

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.commands import CoordinatorCommand
    from common.core.messages import ModelId, UpdateTrigger
    from common.jobs.store import JobBook, JobRecord
    from common.learning.trainer import Trainer
    from common.ports import Board, Log
    from common.telemetry import EventLogger
    from services.coordinator.measuring import Measuring
    from services.coordinator.snapshots import SnapshotStore

INLINE_BYTES = 64 << 10  # a model up to here travels inside its trigger: one round trip less
UPLOAD_S = 60.0  # for the last checkpoint of a job that ends
FLUSH_S = 5.0
TELL_S = 2.0  # between attempts to write down that a job is held


class Effects:
    """The hands of one job's coordinator.

    Args:
        record: The job.
        trainer: Makes the numbers of a leadership, with the weights of the genesis.
        log: Kafka.
        board: The job's board.
        store: Its snapshots.
        book: The jobs topic, for holding and finishing.
        measuring: Hears of what threads of their own see.
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
        measuring: Measuring,
        *,
        name: str,
        lease_ttl_s: float,
        logger: EventLogger,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.leadership = Leadership(record, log, board, store, measuring, logger, fail)
        self.dropped = 0
        self._job = record.spec.name
        self._submitted_s = record.submitted_s
        self._make_trainer = trainer
        self._trainer = trainer()
        self._evaluation = record.spec.evaluation
        self._in_hand: ModelId | None = None  # what the weights are called
        self._offered: ModelId | None = None
        self._board = board
        self._store = store
        self._book = book
        self._name = name
        self._lease_ttl_s = lease_ttl_s
        self._log = logger
        self._writer = log.writer()
        self._letters = DeadLetters(log, logger, fail, measuring.metrics)
        self._outage = Outage(logger, "board")
        self._changes = Changes()
        self._times = StageTimes()
        self._stated = False  # whether this leader has put its standing
        self._held_for = ""  # why, as long as the jobs topic does not say it
        self._held_detail = ""
        self._tell_at = 0.0
        self._copy = b""
        self._unpublished: tuple[Saved, bool] | None = None  # and whether it is a checkpoint

    def poll(self) -> None:
        """Run delivery reports, and do what waited for them, or for Kafka.

        Raises:
            DeliveryError: If an audit record was not delivered: this process must not go on.
        """
        self._writer.poll()
        self._publish()
        self._tell_held()

    def close(self) -> None:
        """End all threads; what was appended is delivered."""
        self.leadership.end()
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
            case do.SetLearningRate(learning_rate):
                self._trainer.set_learning_rate(learning_rate)
            case do.AddGradient(gradient):
                self._trainer.add(gradient.vector, gradient.samples)
            case do.Apply():
                self._trainer.apply()
            case do.DiscardSum():
                self._trainer.discard()
            case do.AppendAudit(record):
                self._writer.append(updates_topic(self._job), wire.encode_audit(record))
                if isinstance(record, Lead):
                    self._log.info(
                        "stands_to_lead",
                        epoch=record.base.epoch,
                        version=record.base.version,
                        after=record.after,
                    )
            case do.PublishModel(model):
                self._in_hand = model
                self._board.put_model(model, self._trainer.weights())
                every = self._evaluation.every_updates if self._evaluation else 0
                if every and model.version % every == 0:
                    self._offer()
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
                self._log.debug(
                    "reply_dropped",
                    epoch=reply.model.epoch,
                    version=reply.model.version,
                    worker=reply.worker,
                    reason=reason,
                )
            case do.FindSnapshots(source):
                yield self.leadership.find(source)
            case do.RestoreSnapshot(snapshot):
                self._trainer, self._in_hand = self._make_trainer(), None
                yield self.leadership.restore(snapshot, self._trainer)
            case do.Begin(epoch, snapshot):
                self._log = self._log.bind(epoch=epoch)
                self._log.info("leads", version=snapshot.made.version)
                self._stated = False
                self.leadership.begin(epoch, snapshot, len(self._trainer.weights()) // 4)
            case do.StepDown(reason):
                self._log.warning("steps_down", reason=reason)
                self._log = self._log.try_unbind("epoch")
                self._unpublished = None
                self.leadership.end()
            case do.Hold(reason, detail):
                self._hold(reason, detail)
            case do.Finish(reason, revision):
                self._finish(reason, revision)

    def _post(self, trigger: UpdateTrigger) -> None:
        weights = self._trainer.weights()
        if len(weights) <= INLINE_BYTES:
            trigger = msgspec.structs.replace(trigger, weights=bytes(weights))
        self._board.post_trigger(trigger)

    def _offer(self) -> None:
        """Leave the weights in hand for evaluators, once."""
        if self._in_hand is not None and self._in_hand != self._offered:
            self._board.offer_model(self._in_hand, self._trainer.weights())
            self._offered = self._in_hand

    def _publish(self) -> None:
        """Publish a snapshot, once the dead letters that it leaves behind are delivered."""
        if self._unpublished is None or not self._letters.all_delivered:
            return
        (saved, checkpoint), self._unpublished = self._unpublished, None
        try:
            self._store.put(saved, checkpoint=checkpoint)
        except UnavailableError as error:
            self._outage.met(error)

    def _hold(self, reason: str, detail: str) -> None:
        self._log.error("job_held", reason=reason, detail=detail)
        self._held_for, self._held_detail, self._tell_at = reason, detail, 0.0
        self._tell_held()

    def _tell_held(self) -> None:
        """Write down why the job is held, until the jobs topic has it: else nobody would know."""
        if not self._held_for or monotonic() < self._tell_at:
            return
        try:
            record = self._record()
            if record is not None and record.wanted == "running":
                self._book.hold(self._job, self._held_for, self._held_detail)
            self._held_for = ""
        except (UnavailableError, ConflictError) as error:  # or somebody else wrote at that moment
            self._log.warning("hold_not_written", reason=str(error))
            self._tell_at = monotonic() + TELL_S

    def _finish(self, reason: str, revision: int) -> None:
        self._letters.close()
        self._publish()
        self._log.info("job_finished", reason=reason)
        if self._evaluation:
            try:
                self._offer()  # the last version is worth judging, whatever its number
            except UnavailableError as error:
                self._outage.met(error)
        if not self._store.flush(UPLOAD_S):
            self._log.error("last_checkpoint_late", waited_s=UPLOAD_S)
        try:
            record = self._record()
            if record is None or record.wanted == "stopped":
                return
            if record.revision == revision:
                self._book.finish(self._job, reason)
            else:  # its deadline may be another: whoever begins with it anew decides
                self._log.info("job_goes_on", reason="it was changed meanwhile")
        except ConflictError as error:  # likewise
            self._log.warning("end_not_written", reason=str(error))

    def _record(self) -> JobRecord | None:
        """The job as it is wanted now; None where it was deleted, even if its name lives on."""
        record = self._book.read().get(self._job)
        return record if record and record.submitted_s == self._submitted_s else None
