"""What a coordinator does about its decisions: Kafka, the board, object storage, the numbers.

`common.core.coordinator` decides; `loop` hands each command here, in order, in the job's turn. What
would take long is done by actors apart, and what is asked of the board again and again goes through
the exchange that all jobs share: its answers come as news.
"""

from __future__ import annotations

import re
import traceback
from collections import deque
from contextlib import suppress
from functools import partial
from math import inf
from secrets import token_hex
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from common.core import commands as do
from common.core import events
from common.core.coordinator import RENEWALS
from common.core.messages import GENESIS, CheckpointStored, Gradient, Lead, ModelId
from common.core.snapshot_schedule import is_offered
from common.core.snapshot_search import AGAIN_S
from common.errors import (
    BrokenWriterError,
    ConflictError,
    NotFoundError,
    TaskMissingError,
    UnavailableError,
    UnknownTopicError,
    UserError,
)
from common.jobs.build import trainer_of
from common.kafka.names import control_topic, updates_topic
from common.learning.significance import Compression, View
from common.storage.snapshot_file import SnapshotFile
from common.storage.store import CheckpointStore
from common.telemetry.logging import Changes, StageTimes
from common.telemetry.outages import Outage, OutageNotifier
from common.wire import messages as wire
from common.wire.vectors import encode_sparse
from services.coordinator.dead_letters import DeadLetters
from services.coordinator.leadership import Leadership, Stood
from services.coordinator.snapshots import SnapshotStore
from services.coordinator.tails import deleted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.core.commands import CoordinatorCommand, Finish
    from common.core.liveness import Heartbeat
    from common.core.messages import AuditRecord, LeaderStatus, Opened, UpdateTrigger, WorkerId
    from common.core.snapshots import Snapshot
    from common.jobs.spec import JobSpec
    from common.jobs.store import JobRecord
    from common.learning.trainer import Trainer
    from common.ports.servers import Exchange
    from common.telemetry.logging import EventLogger
    from services.coordinator.leadership import News
    from services.coordinator.metrics_observer import MetricsObserver
    from services.coordinator.replica import Replica

T = TypeVar("T")

_NO_MODEL = (UserError, MemoryError, SystemExit)  # what a task's code may come to
INLINE_BYTES = 64 << 10  # a model up to here travels inside its trigger: one round trip less
UPLOAD_S = 60.0  # for the last checkpoint of a job that ends
MOST_TOLD = 200  # lines of one leadership about members: whoever forges names fills no disk
FLUSH_S = 5.0
TELL_S = 2.0  # between attempts to write down that a job is held, or at its end
# Between attempts to begin with a job whose task is not here: somebody may install it, but an
# attempt keeps the lease from others for a moment.
UNABLE_S = (5.0, 60.0)  # the first, and doubled up to this
_UNCHANGED: tuple[ModelId | UnsetType, bytes | UnsetType] = (UNSET, UNSET)
UNABLE_TTL_S = 150.0  # of what the board says of it: two attempts may be late
AWAITED_TTL_S = 3 * AGAIN_S  # likewise, of a checkpoint that is not found

_UNNAMED = re.compile(r"`doll job resume(?=`| --)")


class _Ending(NamedTuple):
    """A job that has come to its end, until that is written down."""

    reason: str
    revision: int
    stopped: bool  # by its owner
    until: float  # how long the upload of its last checkpoint is waited for


class _Unpublished(NamedTuple):
    """A snapshot that waits for dead letters."""

    saved: SnapshotFile
    checkpoint: bool = False
    state: bool = False  # as members copy it, too


class Effects:
    """The hands of one job's coordinator.

    Args:
        replica: What all jobs share.
        record: The job.
        measuring: Hears of what threads of their own see.
        lease_ttl_s: Lifetime of the lease.
        logger: Bound to the job.
        wake: Wakes the job's actor.
    """

    def __init__(  # noqa: PLR0915 -- all that it has in hand
        self,
        replica: Replica,
        record: JobRecord,
        measuring: MetricsObserver,
        *,
        lease_ttl_s: float,
        logger: EventLogger,
        wake: Callable[[], None],
    ) -> None:
        self.dropped = 0
        self.finished = False  # all that is to be done at the job's end is done
        self.hold_written = False  # the jobs topic says that it is held
        self._replica = replica
        self._spec = record.spec
        self._job = record.id
        self._evaluation = record.spec.evaluation
        self._record = record
        self._make_trainer: Callable[[], Trainer] | None = None  # of a candidate
        self._trainer: Trainer | None = None  # of a candidate, and of a leader
        self._members = False  # hold the weights, while it is one
        self._in_hand: ModelId | None = None  # what the weights are called
        self._view: View | None = None  # of a leader whose workers are told what changes
        self._viewed: ModelId | None = None  # what the view is of
        self._changed = _UNCHANGED  # since when, and how, for the next trigger
        self._offered: ModelId | None = None
        self._progress = -1.0, 0.0  # as the owner counts, before the version in hand, and with it
        self._board = replica.boards.board(self._job)
        self._book = replica.book
        self._log = logger
        self._wake = wake
        self._fault: BaseException | None = None
        self._store = SnapshotStore(
            record,
            replica.name,
            self._board,
            None if replica.blobs is None else CheckpointStore(replica.blobs, self._job),
            logger=logger,
            steps=replica.steps,
            metrics=measuring.metrics,
            wake=wake,
            fail=self._fail,
            stored=self._hear_stored,
            verified=self._hear_verified,
        )
        self.leadership = Leadership(replica, record, self._store, measuring, logger, wake)
        self._writer = replica.log.writer(waits=False, on_ready=wake)
        self._letters = DeadLetters(
            self._job,
            log=replica.log,
            spans=replica.spans,
            steps=replica.steps,
            metrics=measuring.metrics,
            logger=logger,
            wake=wake,
            fail=self._fail,
        )
        self._lease_ttl_s = lease_ttl_s
        self._outage = Outage(logger, "redis")
        self._notifier = OutageNotifier(self._board, replica.name, record.spec.name)
        self._changes = Changes()
        self._times = StageTimes()
        self._stated = False  # whether this leader has put its status
        self._stage = 0  # of those who own slices, in this leadership
        self._told_of = set[tuple[str, str, str]]()  # likewise, what the log says of its members
        self._orders_lost = False  # a model or a trigger of its could not be put
        self._leader_status: LeaderStatus | None = None  # what it says
        self._triggers = ""  # the stream that its triggers are in
        self._asked = False  # for the lease, since it was given back last
        self._may_ask = True  # for the lease; else it waits until there may be another candidate
        self._role: Literal["standby", "candidate", "leader"] = "standby"
        # Workers as told last, and to which leadership; of the thread that tells it.
        self._seen: tuple[int, dict[WorkerId, Heartbeat]] | None = None
        self.calm = False  # nothing happens: what it asks of the board can wait for others
        self._unable_until = 0.0  # when to try again what this replica cannot do
        self._unable_pause_s = UNABLE_S[0]
        self._held_for = ""  # why, as long as the jobs topic does not say it
        self._held_detail = ""
        self._ending: _Ending | None = None
        self._verified: ModelId | None = None  # a checkpoint that the updates topic may not name
        self._tell_at = 0.0
        # Times are seconds since 1970: of the copy of the weights, and of the version of the newest
        # snapshot, which keeps its time in later snapshots of it.
        self._copy, self._copied_at_s, self._version = b"", 0.0, (GENESIS, 0.0)
        self._unpublished: _Unpublished | None = None

    @property
    def unable(self) -> bool:
        """Whether it leaves the job to others for now."""
        return monotonic() < self._unable_until

    @property
    def ends(self) -> bool:
        """True while the end of the job waits for its last checkpoint, or to be written down."""
        return self._ending is not None

    @property
    def stands_by(self) -> bool:
        """Whether it neither leads nor is about to."""
        return self._role == "standby"

    def checkpoint_age_s(self) -> float | None:
        """As the store says; for any thread."""
        return self._store.age_s()

    def due(self) -> float:
        """When `poll` has something to do that nobody would wake it for."""
        if self._ending is not None:
            return monotonic() + self._lease_ttl_s / RENEWALS
        return self._tell_at if self._held_for else inf

    def poll(self) -> None:
        """Run delivery reports, and do what waited for them, for Kafka, or for others.

        Raises:
            BaseException: What ended a step apart; a DeliveryError if an audit record was not
                delivered: this actor must not go on.
        """
        if self._fault is not None:
            raise self._fault
        self._writer.poll()
        self._outage.watch(self._writer)
        self._publish()
        self._tell_held()
        try:
            self._notifier.notify()
        except UnavailableError as error:
            self._outage.met(error)
        if not self._may_ask:
            self._ask_lease()
        if self._ending is not None:
            self._go_on_ending(self._ending)

    def close(self) -> None:
        """End what was begun; what was appended is delivered."""
        self.leadership.end()
        self._letters.end()
        self._store.end()
        self._replica.candidates.leave(self._job)
        if self._asked:  # another replica need not wait for it to run out
            self._replica.exchange.release_lease(self._job, self._replica.name)
        try:
            with suppress(BrokenWriterError):  # `poll` has told: it is what ends this
                self._writer.flush(FLUSH_S)
        finally:
            self._writer.close()
            self._board.close()
            self._times.tell(self._log)

    def heard(self, news: News) -> Iterator[events.CoordinatorEvent]:
        """What news from other threads mean to the machine; what an exception means is raised."""
        match news:
            case UnavailableError():
                self._outage.met(news)
            case Exception():
                raise news
            case Stood(replaced):
                self._outage.quiet()
                if not replaced and self._stated:
                    self._log.warning("board_wiped")
                    yield events.BoardWiped()
                elif self._orders_lost:
                    yield events.OrdersLost()
                self._stated, self._orders_lost = True, False
            case events.LeaseAnswered(held):
                self._outage.quiet()
                yield from self._lease_answered(held=held)
            case _:
                yield news

    def do(self, command: CoordinatorCommand) -> Iterator[events.CoordinatorEvent]:
        """Carry out a command; yields what it brings about at once."""
        started = perf_counter()
        try:
            yield from self._do(command)
        except UnavailableError as error:
            # What was lost on the board is asked for again: once it answers, by a tick, a lease.
            self._outage.met(error)
            match command:
                case do.PostTrigger() | do.PublishModel():
                    self._orders_lost = True
                case do.FindSnapshots():
                    yield events.AttemptFailed(str(error))
        self._times.add(type(command).__name__, started)

    def _do(self, command: CoordinatorCommand) -> Iterator[events.CoordinatorEvent]:  # noqa: C901, PLR0912, PLR0915 -- one case per command
        match command:
            case do.PostTrigger(trigger, moves):
                self._post(trigger, moves=moves)
            case do.AddGradient(number, Gradient() as gradient):
                self.trainer.add(number, gradient.vector, gradient.samples)
            case do.Apply(number, update, learning_rate, measured):
                if measured:
                    model = ModelId(update.epoch, update.version)
                    yield events.Summed(model, self.trainer.square(number))
                self.trainer.apply(number, learning_rate, update.scale or 1.0)
                self._progress = self._progress[1], update.progress
            case do.DiscardSum(number):
                self.trainer.discard(number)
            case do.AppendAudit(record):
                yield from self._append(record)
            case do.OpenPartition(record):
                yield from self._open_partition(record)
            case do.PublishModel(model, whole):
                self._in_hand = model
                if self._view is None or whole:
                    self._put_whole(model)
                every = self._evaluation.every_updates if self._evaluation else 0
                if every and is_offered(*self._progress, every):
                    self._offer()
            case do.PutLeaderStatus(leader_status):
                self._leader_status = leader_status
                self._tell_stage(leader_status)
                self._tell_left_out(leader_status)
                self._put_leader_status(leader_status)
            case do.ReadHeartbeats():
                self._exchange.alive(self._job, self._workers_told(), soon=not self.calm)
            case do.AskLease(ttl_s):
                self._lease_ttl_s = ttl_s
                self._ask_lease()
            case do.ReleaseLease():
                if self._ending is None:  # else others must not begin before that is written down
                    self._release_lease()
            case do.CopyWeights():
                self._copy, self._copied_at_s = self.trainer.snapshot(), time()
            case do.PublishSnapshot(snapshot, checkpoint, state):
                if snapshot.made != self._version[0]:
                    at_s = time() if self._members else self._copied_at_s
                    self._version = snapshot.made, at_s
                snapshot = msgspec.structs.replace(snapshot, made_at_s=self._version[1])
                earlier = self._unpublished or _Unpublished(SnapshotFile(snapshot, b""))
                self._unpublished = _Unpublished(
                    SnapshotFile(snapshot, self._copy),
                    checkpoint or earlier.checkpoint,
                    state or earlier.state,
                )
                self._publish()
            case do.DeadLetterRecords() | do.DeadLetterBatch():
                self._letters.add(command)
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
                yield from self._find(source)
            case do.RestoreSnapshot(snapshot, members):
                yield self._restore(snapshot, members=members)
            case do.Begin(epoch, snapshot):
                self._begin(epoch, snapshot)
            case do.StepDown(reason):
                self._step_down(reason)
            case do.Hold(reason, detail):
                self._hold(reason, detail)
            case do.AwaitCheckpoint(reason):
                self._await_checkpoint(reason)
            case do.Finish():
                self._finish(command)

    def _post(self, trigger: UpdateTrigger, *, moves: bool) -> None:
        """Post a trigger, in a new stream if it moves or if something there keeps it out."""
        weights = bytes(self.trainer.weights()) if self._travels_inside else None
        trigger = msgspec.structs.replace(
            trigger,
            weights=weights,
            reply_to=self._replica.name,
            digest=UNSET if self._members else self.trainer.digest,
        )
        if self._view is not None:
            self._follow(self._view, trigger.model)
            since, changes = self._changed
            trigger = msgspec.structs.replace(trigger, since=since, changes=changes)
            self._changed = _UNCHANGED  # whoever misses this trigger fetches the whole
        if not moves and self._board.post_trigger(trigger, self._triggers):
            return
        self._triggers = token_hex(8)
        kept_out = "in the stream of before are triggers of a later leader, or forged ones"
        self._log.warning(
            "triggers_moved",
            to=self._triggers,
            reason="a worker does not answer" if moves else kept_out,
        )
        self._board.post_trigger(trigger, self._triggers)
        if self._leader_status is not None:
            self._put_leader_status(self._leader_status)

    def _put_whole(self, model: ModelId) -> None:
        """Put a model where whoever does not know it finds it."""
        if self._view is not None:
            self._follow(self._view, model)
        if self._view is not None:
            self._board.put_model(model, self._view.weights.data.cast("B"))
        elif not self._travels_inside:
            self._board.put_model(model, self.trainer.weights())

    def _follow(self, view: View, model: ModelId) -> None:
        """Let the view be one of this model; it is put whole where most of it has changed."""
        if self._viewed == model:
            return
        since, self._viewed, self._changed = self._viewed, model, _UNCHANGED
        if self._spec.compression is None:  # any more: from this model on all is told
            self._view = None
            self._put_whole(model)
            return
        told = view.follow(np.frombuffer(self.trainer.weights(), np.float32), model.version)
        if told is None:
            self._board.put_model(model, view.weights.data.cast("B"))
        elif since is not None:
            self._changed = since, encode_sparse(told)

    def change(self, spec: JobSpec) -> None:
        """Go by a job that was changed; its compression counts from the next version on."""
        self._spec = spec
        if self._role == "leader" and not self._members:
            self._compress()

    def _compress(self) -> None:
        """Let workers know the weights in hand, and of later ones what changes; or what they know.

        A model that has a name stays what it is: who holds it has the same bits.
        """
        if self._spec.compression is None or self._travels_inside:
            return
        compression = Compression(**self._spec.compression.model_dump())
        if self._view is None:
            weights = np.frombuffer(self.trainer.weights(), np.float32)
            self._view = View(weights, self.trainer.parameter_count, compression)
            self._viewed = self._in_hand
        else:
            self._view.compression = compression

    @property
    def _travels_inside(self) -> bool:
        """Whether the model is in each trigger: then nobody asks the board for it."""
        return not self._members and len(self.trainer.weights()) <= INLINE_BYTES

    def _put_leader_status(self, leader_status: LeaderStatus) -> None:
        said = msgspec.structs.replace(leader_status, triggers=self._triggers)
        lost = self._orders_lost  # the actor waits for an answer, to put them again
        told = self._told(Stood, wakes=lambda replaced: lost or not replaced)
        self._exchange.put_leader_status(self._job, said, told, soon=not self.calm)

    def _tell_stage(self, leader_status: LeaderStatus) -> None:
        """Log that other machines are to own slices of the weights than did."""
        group = leader_status.group
        if group is UNSET or group.stage == 0:
            return
        before, self._stage = self._stage, group.stage
        if before not in (0, group.stage):
            self._log.info("stage_switched", before=before, stage=group.stage)

    def _tell_left_out(self, leader_status: LeaderStatus) -> None:
        """Log who takes no part in the group, and for whom updates wait: each reason once."""
        group = leader_status.group
        if group is UNSET:
            return
        told = [("left_out", worker, why) for worker, why in group.left_out.items()]
        for worker, most_s in group.waits.items():
            told.append(("updates_wait", worker, f"it copies the weights, {most_s:g} s at most"))
        for event, worker, why in told:
            if (event, worker, why) not in self._told_of and len(self._told_of) < MOST_TOLD:
                self._told_of.add((event, worker, why))
                log = self._log.warning if event == "left_out" else self._log.info
                log(event, worker=worker, reason=why)

    @property
    def trainer(self) -> Trainer:
        """The numbers of a candidate or a leader."""
        if self._trainer is None:
            raise AssertionError("only who is about to lead has weights in hand")
        return self._trainer

    # --- the lease -----------------------------------------------------------------------------

    def _ask_lease(self) -> None:
        """Take or prolong it, unless that would be of no use now."""
        if self._role == "standby":
            if self.unable:
                return
            self._may_ask = self._replica.candidates.may_enter(self._job, self._wake)
            if not self._may_ask:
                return
        self._asked = True
        self._exchange.hold_lease(
            self._job,
            self._replica.name,
            self._lease_ttl_s,
            self._told(events.LeaseAnswered, any_role=True),
            soon=not self.calm,
        )

    def _lease_answered(self, *, held: bool) -> Iterator[events.CoordinatorEvent]:
        if not self._asked:
            return  # it was given back meanwhile
        if self._ending is not None:
            return  # it only keeps others from beginning before the end is written down
        if self._changes("lease", held) and not held:
            self._log.info("standby")
        if held and self._role == "standby":
            self._may_ask = self._replica.candidates.enter(self._job, self._wake)
            if not self._may_ask:
                self._release_lease()
                return
        yield events.LeaseAnswered(held)
        if self._role == "standby":
            self._replica.candidates.leave(self._job)

    def _release_lease(self) -> None:
        self._asked = False
        self._exchange.release_lease(self._job, self._replica.name)

    def _told(
        self,
        made: Callable[[T], News],
        *,
        any_role: bool = False,
        wakes: Callable[[T], bool] = lambda _: True,
    ) -> Callable[[T | Exception], None]:
        """What takes an answer of the exchange, for this leadership, or for whatever role.

        Args:
            made: Makes news of an answer.
            any_role: Whether it is for whatever role.
            wakes: Whether the actor is woken for an answer: mostly they say what it knows, and its
                next turn, which asks again, is soon enough for that.
        """
        leadership, hear = 0 if any_role else self.leadership.number, self.leadership.hear

        def told(answer: T | Exception) -> None:
            if isinstance(answer, Exception):
                hear(leadership, answer)
            else:
                hear(leadership, made(answer), wakes=wakes(answer))

        return told

    def _workers_told(self) -> Callable[[dict[WorkerId, Heartbeat] | Exception], None]:
        """What takes an answer to who is alive."""
        leadership = self.leadership.number

        def are_news(beats: dict[WorkerId, Heartbeat]) -> bool:
            before, self._seen = self._seen, (leadership, beats)
            return before != self._seen

        return self._told(events.WorkersSeen, wakes=are_news)

    # --- from candidate to leader, and back ------------------------------------------------------

    def _find(self, source: events.Source) -> Iterator[events.CoordinatorEvent]:
        """Make the genesis model, where that was not done, and find snapshots."""
        self._role = "candidate"
        if reason := self.lacking:
            yield events.Trouble(reason)
            return
        try:
            if not self._spec.grouped:
                self._learn_to_make()
        except TaskMissingError as error:
            self._leave_to_others(str(error))
        except _NO_MODEL as error:
            yield _trouble(error)
        else:
            yield self.leadership.find(source)

    @property
    def lacking(self) -> str:
        """What this process lacks to lead the job; mostly nothing."""
        if not self._spec.grouped or self._replica.blobs is not None:
            return ""
        return (
            "the workers of this job hold its weights, and store them in object storage, of"
            " which the coordinator's settings name none: set DOLL_BLOBS there and where"
            " workers run, then `doll job resume`"
        )

    def _learn_to_make(self) -> Callable[[], Trainer]:
        """How the model is made.

        Raises:
            TaskMissingError: If this process has not got the task.
            UserError: If there is no such model.
        """
        if self._make_trainer is None:
            settings = self._replica.settings
            self._make_trainer = trainer_of(self._spec, settings.tasks)
            self._unable_pause_s = UNABLE_S[0]
        return self._make_trainer

    def _leave_to_others(self, reason: str) -> None:
        """Give the lease back, and ask for none for a while: other replicas may have the task."""
        self._unable_until = monotonic() + self._unable_pause_s
        self._unable_pause_s = min(2 * self._unable_pause_s, UNABLE_S[1])
        if self._changes("unable", reason):
            self._log.error("job_left_to_others", reason=reason)
        self._stand_by()
        self._release_lease()
        self._board.put_unable(self._replica.name, reason, UNABLE_TTL_S)

    def _restore(self, snapshot: Snapshot, *, members: bool) -> events.CoordinatorEvent:
        """Take the weights of a snapshot in hand, unless workers have them."""
        self._members, self._trainer, self._in_hand = members, None, None
        if members:
            return self.leadership.restore(snapshot, None)
        try:  # where the job says otherwise, nobody has tried yet whether there is such a model
            self._trainer = self._learn_to_make()()
        except TaskMissingError as error:
            self._leave_to_others(str(error))
            return events.AttemptFailed(str(error))
        except _NO_MODEL as error:
            return _trouble(error)
        return self.leadership.restore(snapshot, self._trainer)

    def _begin(self, epoch: int, snapshot: Snapshot) -> None:
        self._role, self._make_trainer = "leader", None
        self._changes("awaited", "")
        self._log = self._log.bind(epoch=epoch)
        self._log.info("leader_elected", version=snapshot.made.version)
        self._stated, self._leader_status, self._triggers = False, None, ""
        self._stage = 0
        self._told_of.clear()
        self._orders_lost = False
        self._view, self._copy = None, b""
        self._version = snapshot.made, snapshot.made_at_s or time()
        if not self._members:
            self._compress()
        self._progress = snapshot.progress - 1, snapshot.progress
        length = 0 if self._members else len(self.trainer.weights()) // 4
        self.leadership.begin(epoch, snapshot, length)

    def _step_down(self, reason: str) -> None:
        self._log.warning("leadership_lost", reason=reason)
        self._log = self._log.try_unbind("epoch")
        self._unpublished = None
        self._stand_by()

    def _stand_by(self) -> None:
        self.leadership.end()
        self._role = "standby"
        self._replica.candidates.leave(self._job)
        # Models of jobs that others lead take no memory.
        self._make_trainer = self._trainer = self._view = None

    def _open_partition(self, record: Opened) -> Iterator[events.CoordinatorEvent]:
        """Write it; what gets lost is ordered anew after the next look at the streams."""
        topic = control_topic(self._job)
        try:
            self._writer.append(topic, wire.encode_claim(record))
        except UnknownTopicError:
            yield events.Trouble(deleted(topic))
            return
        self._log.info(
            "opens_partition",
            partition=str(record.partition),
            generation=record.generation,
            start=record.start,
        )

    def _append(self, record: AuditRecord) -> Iterator[events.CoordinatorEvent]:
        """Write a decision; one that cannot be written must not be believed."""
        if isinstance(record, CheckpointStored) and record.name == self._verified:
            self._verified = None
        delivered = partial(self._delivered, record) if isinstance(record, Lead) else None
        try:
            self._writer.append(
                updates_topic(self._job), wire.encode_audit(record), on_delivered=delivered
            )
        except UnavailableError as error:
            yield events.AttemptFailed(f"a decision could not be written: {error}")
            return
        except UnknownTopicError:
            yield events.Trouble(deleted(updates_topic(self._job)))
            return
        if isinstance(record, Lead):
            # What costs something is done: until Kafka gives it back, others can go on.
            self._replica.candidates.leave(self._job)
            self._log.info(
                "stands_to_lead",
                epoch=record.base.epoch,
                version=record.base.version,
                after=record.after,
            )

    def _delivered(self, lead: Lead, _offset: int | None) -> None:
        self.leadership.hear(self.leadership.number, events.LeadDelivered(lead.candidate))

    # --- what a leader leaves --------------------------------------------------------------------

    def _offer(self) -> None:
        """Leave the weights in hand for evaluators, once."""
        if self._in_hand is not None and self._in_hand != self._offered:
            self._board.offer_model(self._in_hand, self.trainer.snapshot(optimizer=False))
            self._offered = self._in_hand

    def _publish(self) -> None:
        """Publish a snapshot, once the dead letters that it leaves behind are delivered."""
        if self._unpublished is None or not self._letters.all_delivered:
            return
        waited, self._unpublished = self._unpublished, None
        try:
            self._store.put(waited.saved, checkpoint=waited.checkpoint, state=waited.state)
        except UnavailableError as error:
            self._outage.met(error)

    def _hold(self, reason: str, detail: str) -> None:
        # What decides that a job is held knows its topics at most, and not its name.
        reason = _UNNAMED.sub(f"\\g<0> {self._record.spec.name}", reason)
        self._log.error("job_held", reason=reason, detail=detail)
        self._held_for, self._held_detail, self._tell_at = reason, detail, 0.0
        self._tell_held()

    def _await_checkpoint(self, reason: str) -> None:
        """Leave the job to other replicas until the next search, and say why."""
        reason = _UNNAMED.sub(f"\\g<0> {self._record.spec.name}", reason)
        if self._changes("awaited", reason):
            self._log.warning("checkpoint_awaited", reason=reason)
        self._stand_by()
        self._board.put_unable(self._replica.name, reason, AWAITED_TTL_S)

    def _tell_held(self) -> None:
        """Write down why the job is held, until the jobs topic has it: else nobody would know."""
        if not self._held_for or monotonic() < self._tell_at:
            return
        try:
            if self._newest() is not None:
                with suppress(NotFoundError):  # it was deleted since
                    self._book.hold(self._job, self._held_for, self._held_detail)
            self._held_for = ""
            self.hold_written = True
        except (UnavailableError, ConflictError) as error:
            self._log.warning("hold_not_written", reason=str(error))
            self._tell_at = monotonic() + TELL_S

    def _finish(self, end: Finish) -> None:
        self._log.info("job_ends", reason=end.reason)
        if self._evaluation:
            try:
                self._offer()  # the last version is worth judging, whatever its number
            except UnavailableError as error:
                self._outage.met(error)
        self._ending = _Ending(end.reason, end.revision, end.stopped, monotonic() + UPLOAD_S)
        self._go_on_ending(self._ending)

    def _go_on_ending(self, ending: _Ending) -> None:
        """Wait for the last snapshot and its upload without holding a thread, then write it down.

        Until then the lease is prolonged, or another replica would lead the job once more.
        """
        self._ask_lease()
        now = monotonic()
        if self._unpublished is not None or not self._store.all_uploaded:
            if now < ending.until:
                return
            self._log.error("last_checkpoint_late", waited_s=UPLOAD_S)
        if now < self._tell_at:
            return
        if self._verified is not None:  # the leader that would name it has ended
            deque(self._append(CheckpointStored(*self._verified)), maxlen=0)
        try:
            self._write_end(ending)
        except UnavailableError as error:
            self._outage.met(error)
            self._tell_at = now + TELL_S
            return
        self._ending, self.finished = None, True
        self._stand_by()

    def _write_end(self, ending: _Ending) -> None:
        record = self._newest()
        if record is not None and ending.stopped and record.wanted != "stopped":
            self._log.info("job_goes_on", reason="its owner wants it again")
            return
        if record is not None and not ending.stopped:
            try:
                with suppress(NotFoundError):  # it was deleted since
                    self._book.finish(self._job, ending.reason, ending.revision)
            except ConflictError as error:
                # Its deadline may be another: whoever leads it next decides.
                self._log.info("job_goes_on", reason=str(error))
                return
        self._log.info("job_finished", reason=ending.reason)

    def _newest(self) -> JobRecord | None:
        """The job as it is wanted now; None where it was deleted, even if its name lives on."""
        record = self._book.read().get(self._record.spec.name)
        return record if self._record.is_same_job(record) else None

    @property
    def _exchange(self) -> Exchange:
        return self._replica.exchange

    def _hear_stored(self, made: ModelId) -> None:
        self.leadership.hear(self.leadership.number, events.StateStored(made))

    def _hear_verified(self, name: ModelId) -> None:
        self._verified = name
        self.leadership.hear(0, events.CheckpointVerified(name))

    def _fail(self, fault: BaseException) -> None:
        """A step apart has failed; for any thread."""
        self._fault = fault
        self._wake()


def _trouble(error: BaseException) -> events.Trouble:
    told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    detail = "".join(traceback.format_exception(error)).rstrip()
    return events.Trouble(f"the model cannot be made: {told}", detail)
