"""Carries out a coordinator's commands: one handler per type of command.

`common.core.coordinator` decides; `loop` passes each command to `Effects`, in order, in the job's
turn. Slow work runs in separate actors. Frequent requests to Redis go through the exchange that all
jobs share, and its answers come to the inbox.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from common.core import commands as do
from common.core import events
from common.core.messages import CheckpointStored
from common.core.snapshot_search import SEARCH_AGAIN_S
from common.errors import UnavailableError
from common.telemetry.logging import StageTimes
from common.telemetry.outages import OutageNotifier
from services.coordinator.effects.ending import JobEnding
from services.coordinator.effects.lease import Lease
from services.coordinator.effects.publishing import ModelPublisher, OrderPublisher
from services.coordinator.effects.records import RecordWriter
from services.coordinator.effects.snapshots import SnapshotPublisher
from services.coordinator.leadership import Leadership

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.core.commands import CoordinatorCommand
    from services.coordinator.replica import JobContext

# Lifetime in Redis of the reason why a checkpoint is awaited.
AWAITED_TTL_S = 3 * SEARCH_AGAIN_S


class Effects:
    """Carries out the commands of one job's coordinator.

    Args:
        job: State that the effects share.
        lease_ttl_s: Lifetime of the lease.
    """

    def __init__(self, job: JobContext, lease_ttl_s: float) -> None:
        self._job = job
        self.lease = lease = Lease(job, lease_ttl_s)
        self.models = models = ModelPublisher(job)
        self._orders = orders = OrderPublisher(job, models)
        self.snapshots = snapshots = SnapshotPublisher(job)
        self._records = records = RecordWriter(job)
        self.leadership = leadership = Leadership(job, lease, snapshots.store)
        self.ending = ending = JobEnding(job, lease, models, snapshots, records, leadership)
        self._notifier = OutageNotifier(job.board, job.replica.name, job.record.spec.name)
        self._times = StageTimes()
        self._handlers: dict[type, Callable[[Any], Iterable[events.CoordinatorEvent] | None]] = {
            do.AskLease: lease.ask,
            do.ReleaseLease: lease.release,
            do.FindSnapshots: leadership.find,
            do.RestoreSnapshot: leadership.restore,
            do.Begin: self._begin,
            do.StepDown: self._step_down,
            do.AwaitCheckpoint: self._await_checkpoint,
            do.AddGradient: models.add,
            do.Apply: models.apply,
            do.DiscardSum: models.discard,
            do.PublishModel: models.publish,
            do.PostTrigger: orders.post,
            do.PutLeaderStatus: orders.put_status,
            do.ReadHeartbeats: orders.read_heartbeats,
            do.AppendAudit: self._append,
            do.OpenPartition: records.open_partition,
            do.CopyWeights: snapshots.copy,
            do.PublishSnapshot: snapshots.take,
            do.DeadLetterRecords: snapshots.dead_letters.add,
            do.DeadLetterBatch: snapshots.dead_letters.add,
            do.Drop: self._drop,
            do.Hold: ending.hold,
            do.Finish: ending.finish,
        }

    def carry_out(self, command: CoordinatorCommand) -> Iterator[events.CoordinatorEvent]:
        """Carry out a command, and yield the events that it causes at once."""
        started = perf_counter()
        try:
            yield from self._handlers[type(command)](command) or ()
        except UnavailableError as error:
            # Requests lost in Redis are repeated: by a tick, by a lease request, or by
            # `OrdersLost`.
            self._job.outage.met(error)
            match command:
                case do.PostTrigger() | do.PublishModel():
                    self._orders.lost = True
                case do.FindSnapshots():
                    yield events.AttemptFailed(str(error))
        self._times.add(type(command).__name__, started)

    def poll(self) -> None:
        """Run delivery reports, and continue work that waited for Kafka or for other jobs.

        Raises:
            BaseException: The fault that ended slow work, or a DeliveryError if an audit record was
                not delivered. The actor must end.
        """
        if self._job.fault is not None:
            raise self._job.fault
        self._records.poll()
        self.snapshots.publish()
        try:
            self._notifier.notify()
        except UnavailableError as error:
            self._job.outage.met(error)
        self.leadership.initial_weights.poll()
        self.lease.poll()
        self.ending.poll()

    def close(self) -> None:
        """End everything, and deliver the appended records."""
        self.leadership.end()
        self.leadership.initial_weights.drop()
        self.snapshots.close()
        self._job.replica.candidates.leave(self._job.id)
        self.lease.close()
        try:
            self._records.close()
        finally:
            self._job.board.close()
            self._times.log(self._job.log)

    def _begin(self, command: do.Begin) -> None:
        job = self._job
        job.log = job.log.bind(epoch=command.epoch)
        job.log.info("leader_elected", version=command.snapshot.made.version)
        job.role = "leader"
        self._orders.begin()
        self.models.begin(command.snapshot)
        self.snapshots.begin(command.snapshot)
        self.leadership.begin(command)

    def _append(self, command: do.AppendAudit) -> Iterator[events.CoordinatorEvent]:
        record, snapshots = command.record, self.snapshots
        if isinstance(record, CheckpointStored) and record.name == snapshots.unnamed:
            snapshots.unnamed = None
        yield from self._records.append(record)

    def _drop(self, command: do.Drop) -> None:
        reply = command.reply
        self._job.log.debug(
            "reply_dropped",
            epoch=reply.model.epoch,
            version=reply.model.version,
            worker=reply.worker,
            reason=command.reason,
        )

    def _step_down(self, command: do.StepDown) -> None:
        job = self._job
        job.log.warning("leadership_lost", reason=command.reason)
        job.log = job.log.try_unbind("epoch")
        self.snapshots.end_leadership()
        self.models.view = None
        self.leadership.stand_by()

    def _await_checkpoint(self, command: do.AwaitCheckpoint) -> None:
        """Leave the job to other replicas until the next search, and report why."""
        reason = self.ending.named(command.reason)
        if self._job.changes("awaited", reason):
            self._job.log.warning("checkpoint_awaited", reason=reason)
        self.leadership.stand_by()
        self._job.board.put_unable(self._job.replica.name, reason, AWAITED_TTL_S)
