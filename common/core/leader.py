"""Decisions of one leader, from its Lead record to the next one: ledger, rounds and quarantine.

After every event, one pass of `_advance` applies complete rounds, assigns work and begins new
rounds. `Rounds` decides how many rounds are in flight: with s = 0, the paper's synchronous rule,
there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from common.core import commands as do
from common.core import losses
from common.core.aggregation import BoardAggregation
from common.core.batch_assignment import GradientTimes
from common.core.gradient_counting import Rounds, judge
from common.core.grouping import Grouper
from common.core.job_completion import Completion
from common.core.ledger import Ledger
from common.core.liveness import Liveness
from common.core.losses import Divergence, Recovery
from common.core.members.leading import GroupAggregation
from common.core.messages import (
    GENESIS,
    Assignment,
    AuditRecord,
    Batch,
    BatchReady,
    Broken,
    ControlRecord,
    Failed,
    Gradient,
    GradientReady,
    GroupReply,
    LeaderStatus,
    ModelId,
    Opened,
    Quarantined,
    Reply,
    Requeued,
    TriggerId,
    Unsettled,
    UpdateApplied,
    UpdateTrigger,
    WorkerId,
    WorkerLeaving,
)
from common.core.modes import ModeSelector
from common.core.poison import PoisonLimits, Suspects
from common.core.replay import ReplayFilter
from common.core.scores import ScoreWindow
from common.core.snapshot_publishing import SnapshotSchedule
from common.core.snapshots import Snapshot
from common.core.spans import LogPosition, Partition

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.events import StreamsSeen, Summed
    from common.core.history import History
    from common.core.liveness import Heartbeat
    from common.core.messages import Wanted
    from common.core.rounds import Round
    from common.core.settings import CoordinatorSettings, Mode


NO_RECOVERY = Recovery()
NO_FAILURES: Mapping[int, int] = {}
STOPPED = "stopped by its owner"
OVER = "its round is over"
DIED = "poison: its workers died while they computed it"
# A tuple, because a union would be built again for each reply.
_ANSWERS = (Gradient, GradientReady, Failed)
# Longest plausible time of a gradient that was begun under an earlier leader. A worker that reports
# a longer time is wrong, and its report would inflate deadlines.
BEFORE_S = 600.0
# Maximum length of a quarantine's reason. The text of an exception may not fit into a record.
REASON_CHARACTERS = 2_000


class StatusSchedule:
    """Schedule of the leader's status: at intervals, and soon after each decision."""

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        self._settings = settings
        self._put_at = now
        # Time at which the status must report the decisions made since the last one.
        self._decided_due = inf

    def put(self, now: float) -> None:
        """Record that the status reports everything decided up to now."""
        self._put_at, self._decided_due = now, inf

    def decided(self, now: float, *, idle: bool) -> bool:
        """Return True if the status should report a decision immediately."""
        if idle or now >= self._put_at + self._settings.leader_status_news_s:
            return True
        self._decided_due = self._put_at + self._settings.leader_status_news_s
        return False

    def is_due(self, now: float, *, idle: bool) -> bool:
        """Return True if the next status is due."""
        settings = self._settings
        every_s = settings.idle_s if idle else settings.leader_status_s
        return now >= min(self._put_at + every_s, self._decided_due)

    def due(self, *, idle: bool) -> float:
        """Return the time of the next status. An idle leader relies on the ticks of its owner."""
        every_s = inf if idle else self._settings.leader_status_s
        return min(self._put_at + every_s, self._decided_due)


@dataclass(slots=True)
class HandOver:
    """Progress of a hand-over of the weights from members to the coordinator, or back.

    A job change requests it. The leader takes care that the newest version is stored, and publishes
    a snapshot that says so. Then its coordinator stands for election again with the new layout.
    """

    requested: bool = False
    # The version to be stored.
    version: ModelId | None = None
    snapshot_taken: bool = False
    done: bool = False


class Leader:
    """State of one leadership.

    Args:
        epoch: Epoch of its Lead record.
        snapshot: The snapshot that it starts from.
        history: Fold of the updates topic since that snapshot. The owner feeds it.
        settings: Settings of the job.
        now: Start of the leadership.
        recovery: Kinds of data loss that the job's owner has accepted. Applies to the losses found
            by the first probe of the streams.
        failure_counts: Failures per batch carried over from before the rollback, so that a batch
            that crashes workers is not retried from zero.
        digest: Digest of the layout of the model in memory. Empty if members hold the weights.
    """

    def __init__(  # noqa: PLR0913 -- each is an independent input
        self,
        epoch: int,
        snapshot: Snapshot,
        history: History,
        settings: CoordinatorSettings,
        now: float,
        recovery: Recovery = NO_RECOVERY,
        failure_counts: Mapping[int, int] = NO_FAILURES,
        *,
        digest: str = "",
    ) -> None:
        self._epoch = epoch
        self._began = now
        self._recovery = recovery
        self._settings = settings
        # Changed settings, which apply from the next update on.
        self._changed: CoordinatorSettings | None = None
        self._made = snapshot.made
        # Public, but read-only for others, like `rounds`.
        self.ledger = Ledger.of(snapshot)
        self._control = snapshot.control
        self._replay = ReplayFilter(snapshot, history)
        self._grouper = Grouper(self._replay.waiting(snapshot))
        self._returned = set(snapshot.returned)
        self._suspects = Suspects(settings.max_failures, snapshot.failure_counts)
        self._suspects.clear(self._replay.settled)
        self._suspects.restore(failure_counts)
        self._poison = PoisonLimits(settings.poison_in_a_row, settings.poison_share)
        self.rounds = Rounds(self._suspects, GradientTimes(settings.deadline_floor_s))
        self._scores = ScoreWindow()
        self._modes = ModeSelector(settings, snapshot.synchrony)
        self._liveness = Liveness(settings.heartbeats_grace_s, digest or snapshot.digest)
        self._publisher = SnapshotSchedule(settings, snapshot, history, now)
        grace_s = settings.heartbeats_grace_s
        self._aggregation = (
            BoardAggregation(settings)
            if settings.aggregation is None
            else GroupAggregation(epoch, snapshot, history, settings.aggregation, grace_s)
        )
        self._triggers = 0
        self._completion = Completion(settings, snapshot)
        self._wanted: Wanted = "running"
        self.handover = HandOver()
        # Time of the last accepted batch or update, which the group linger counts from.
        self._moved_at = now
        self._status = StatusSchedule(settings, now)

    @property
    def model(self) -> ModelId:
        """Id of the current weights under this leader's epoch."""
        return ModelId(self._epoch, self._made.version)

    @property
    def error(self) -> str:
        """Reason why only a person can resume the job. Usually empty."""
        return self._replay.error

    @property
    def fallback(self) -> ModelId | None:
        """Version to roll back to if no member holds the newest one any more. Usually None."""
        return self._aggregation.fallback

    @property
    def failure_counts(self) -> dict[int, int]:
        """Failures of each batch that may be poison, by control offset."""
        return self._suspects.failure_counts

    @property
    def returned(self) -> frozenset[int]:
        """Batches that `on_missing: proceed` has put back once. The next round waits for them."""
        return frozenset(self._returned)

    @property
    def stored(self) -> tuple[ModelId, ...]:
        """Versions that members can load from storage."""
        return self._aggregation.stored

    @property
    def slices(self) -> int | UnsetType:
        """Layout of the weights under this leader, as in `Lead.slices`."""
        return self._settings.slices

    @property
    def idle(self) -> bool:
        """True if no worker is alive and no round is in flight; polling can slow down."""
        return not (len(self.rounds) or self._liveness.live or self._completion.reason)

    @property
    def awaited(self) -> int:
        """Number of outstanding gradients before the leader has a decision to make.

        Until they arrive, claims and audit records can wait, at most until the next poll of the
        heartbeats: no round may begin, and the batches of the next one have been claimed. 0 if the
        leader may have a decision to make now, and always if workers hold the weights, since these
        wait for audit records.
        """
        rounds, synchrony = self.rounds, self.mode.synchrony(len(self._liveness.live))
        if self._settings.aggregation is not None or not len(rounds):
            return 0
        if len(self._grouper) < synchrony.group_size or any(each.missing > 0 for each in rounds):
            return 0
        if rounds.may_begin(synchrony.staleness, self._made.version):
            return 0
        return rounds.assigner.awaited

    @property
    def unheard(self) -> bool:
        """True if Kafka does not return an own record: the leader must step down and read again."""
        return self._publisher.lost

    @property
    def mode(self) -> Mode:
        """Mode of a round that would begin now."""
        return self._modes.mode(len(self._liveness.live))

    @property
    def busy(self) -> float:
        """Share of recent time that workers spent computing."""
        return self._modes.busy

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Unsettled batches, in flight or not, oldest first."""
        unsettled = self._grouper.batches + self.rounds.batches
        return tuple(sorted(unsettled, key=lambda batch: batch.offset))

    @property
    def unsettled(self) -> Unsettled:
        """Summary of the unsettled batches that is sent to workers."""
        position, waiting = self.ledger.position, len(self._grouper) + self.rounds.size
        oldest = position
        for each in (self.rounds.oldest, self._grouper.oldest):
            oldest = oldest if each is None else min(oldest, each)
        return Unsettled(position, oldest, waiting, len(self._liveness.live))

    def begin(self, history: History, now: float) -> Iterator[CoordinatorCommand]:
        """Yield the first commands. Dead letters of earlier leaders are written again."""
        yield from self._aggregation.publish(self.model)
        yield self._leader_status(now)
        yield do.ReadHeartbeats()
        for record in history.quarantined.values():
            yield self._dead_letter(record)
        yield from self._expire_gone()
        # A successor then finds a snapshot of this leader on the board, unless Redis was wiped.
        yield from self._take_snapshot(now, checkpoint=False)

    # --- events ------------------------------------------------------------------------------

    def control_read(
        self, records: Sequence[tuple[int, ControlRecord | None]], epoch: int, now: float
    ) -> Iterator[CoordinatorCommand]:
        """Decide claims and openings. All of them have this Kafka leader epoch."""
        for offset, record in records:
            decision = self.ledger.decide(offset, record)
            batch = decision.batch
            admitted = self._replay.admits(offset, batch)
            if not decision.accepted:
                continue
            self._moved_at = now
            if isinstance(record, BatchReady) and record.skipped:
                topic_ids = self.ledger.topic_ids(record.address)
                yield do.DeadLetterRecords(record.skipped, topic_ids)
            if admitted and batch is not None:
                self._grouper.add(batch)
            if isinstance(record, Opened):
                yield from self._expire_gone()
        if records:
            self._control = LogPosition(self.ledger.position, self._control.topic_id, epoch)
        if self._status.decided(now, idle=self.idle):
            yield self._leader_status(now)
        yield from self._advance(now)

    def why_lost(self, seen: StreamsSeen) -> str:
        """Return why the state of the streams forces the job to be held. Empty if it does not."""
        if reason := self._replay.why_lost(self.ledger.position, seen.control_end):
            return reason
        lost = self._lost(seen)
        if all(self._recovery.opening(place, lost[place], seen.number) for place in lost):
            return ""
        known, claimed = self.ledger.known, self.ledger.claimed
        return losses.reason(
            lost,
            lambda place: known[place].offset if place in known else claimed[place],
            self.batches,
        )

    def streams_seen(self, seen: StreamsSeen) -> Iterator[CoordinatorCommand]:
        """Open new partitions, and diverged ones if the recovery policy accepts their loss.

        An opening may be in the topic already but unread. The ledger ignores the second one.
        """
        for partition in sorted(seen.partitions):
            if self.ledger.generation(partition) is None:
                topic_id = seen.partitions[partition]
                yield do.OpenPartition(Opened(partition, None, seen.number, topic_id, 0, -1))
        lost = self._lost(seen)
        for partition in sorted(lost):
            opened = self._recovery.opening(partition, lost[partition], seen.number)
            if opened is not None:
                yield do.OpenPartition(opened)
        self._publisher.look()
        if seen.sure and not lost and self.ledger.position >= seen.control_end:
            # The owner has not accepted any later loss.
            self._recovery = NO_RECOVERY

    def _lost(self, seen: StreamsSeen) -> dict[Partition, Divergence]:
        """Return partitions whose log has diverged, once all their claims are decided."""
        if self._completion.reason or self.ledger.position < seen.control_end:
            return {}
        return {
            place: divergence
            for place, divergence in seen.diverged.items()
            if divergence.generation == self.ledger.generation(place)
        }

    def replies_read(self, replies: Iterable[Reply], now: float) -> Iterator[CoordinatorCommand]:
        """Count gradients and process failures, departures and reports."""
        for reply in replies:
            if isinstance(reply, WorkerLeaving):
                self._liveness.leave(reply.worker)
                self.rounds.assigner.release(reply.worker, reply.finishing)
                continue
            self._liveness.clear(reply.worker)
            if not isinstance(reply, _ANSWERS):
                yield from self._receive(reply, now)
                continue
            self.rounds.assigner.receive(reply, now)
            if self._is_over(reply):
                yield do.Drop(reply, OVER)
            elif isinstance(reply, Failed):
                yield from self._failed(reply)
            # The process that the leader believes has the same order, so the order stays.
            elif self._aggregation.is_rival(reply):
                yield do.Drop(reply, "the leader accepts another process with the same worker name")
            elif reason := self._aggregation.why_not(reply):
                self.rounds.requeue(reply.worker, reply.batches, reply.model.version)
                yield do.Drop(reply, reason)
            else:
                if reply.seconds > (longest_s := now - self._began + BEFORE_S):
                    reply = msgspec.structs.replace(reply, seconds=longest_s)  # noqa: PLW2901
                round_, reason = self.rounds.count(reply, self._made.version)
                if round_ is None:
                    yield do.Drop(reply, reason)
                else:
                    self._modes.computed(reply.seconds)
                    yield do.AddGradient(round_.number, reply)
        yield from self._advance(now)

    def summed(self, event: Summed, now: float) -> Iterator[CoordinatorCommand]:
        """Process the squared norm of an update's sum, which may change K."""
        if event.model.epoch != self._epoch:
            return
        if self._modes.observe(event.model.version, event.square):
            yield from self._advance(now)

    def state_stored(self, made: ModelId, now: float) -> Iterator[CoordinatorCommand]:
        """Record that members can load this version from storage."""
        self._aggregation.keep(made)
        yield from self._advance(now)

    def _receive(self, reply: GroupReply, now: float) -> Iterator[CoordinatorCommand]:
        """Process a member's report."""
        if reply.model.epoch != self._epoch:
            yield do.Drop(reply, OVER)
            return
        yield from self._seen(self._aggregation.receive(reply, now))
        if isinstance(reply, Broken) and reply.unreachable:
            # The unreachable member has probably died. Find out now instead of at the next poll.
            yield do.ReadHeartbeats()
        for worker in self._aggregation.take_restarted():
            for batch in self.rounds.worker_lost(worker):
                yield from self._quarantine(batch, DIED)

    def workers_seen(
        self, beats: Mapping[WorkerId, Heartbeat], now: float
    ) -> Iterator[CoordinatorCommand]:
        """Evaluate heartbeats and reassign the batches of dead workers."""
        left_out = self._liveness.left_out
        departures = self._liveness.observe(beats, now)
        if self._settings.aggregation is not None and self._made == GENESIS:
            self._liveness.choose()
        if self._liveness.left_out != left_out:
            for worker in sorted(self._liveness.left_out.keys() - left_out.keys()):
                # Its process was restarted with other code.
                self.rounds.assigner.release(worker)
            yield self._leader_status(now)
        for worker in sorted(departures.left):
            self.rounds.assigner.release(worker)
        for worker in sorted(departures.lost):
            for batch in self.rounds.worker_lost(worker):
                yield from self._quarantine(batch, DIED)
        yield from self._advance(now)

    def audit_read(self, record: AuditRecord, now: float) -> Iterator[CoordinatorCommand]:
        """Process a record of the updates topic that counts: this leader's or an operator's."""
        if isinstance(record, Requeued):
            yield from self._requeue(record.batch, now)
        elif isinstance(record, UpdateApplied | Quarantined):
            if isinstance(record, Quarantined):
                yield self._dead_letter(record)
            elif (square := self._aggregation.read_back(record)) is not UNSET:
                self._modes.observe(record.version, square)
            yield from self._published(self._publisher.publish())
        yield from self._advance(now)

    def board_wiped(self, now: float) -> Iterator[CoordinatorCommand]:
        """Restore the content of the board from memory, because it was found empty.

        Orders and gradients in transit are lost too, so they are requested again.
        """
        self._liveness.wiped(now)
        yield from self.orders_lost(now)
        if not self._completion.reason:
            yield from self._take_snapshot(now, checkpoint=False)

    def orders_lost(self, now: float) -> Iterator[CoordinatorCommand]:
        """Send all orders again now that the board accepts them.

        Deadlines grew with each lost order, so this does not wait for them.
        """
        yield from self._aggregation.publish(self.model)
        if len(self.rounds):
            self.rounds.assigner.recall()
            yield from self._advance(now)

    def want(self, wanted: Wanted, now: float) -> Iterator[CoordinatorCommand]:
        """Process the owner's request to run, pause or stop the job."""
        if wanted != self._wanted:
            # A resumed job starts with a clean poison count.
            self._poison.forget()
        self._wanted = wanted
        if wanted == "stopped":
            yield from self._finish_job(STOPPED, now)
        yield from self._advance(now)

    def change(self, settings: CoordinatorSettings, now: float) -> Iterator[CoordinatorCommand]:
        """Process a job change. It applies to rounds that begin after the next update."""
        self._changed = settings
        self._completion.put_off(settings.stop_at)
        yield from self._advance(now)

    def hold(self, reason: str, detail: str = "") -> Iterator[CoordinatorCommand]:
        """Hold the job until a person resumes it. No data is thrown away."""
        self._wanted = "paused"
        yield from self._abandon(self.rounds)
        yield do.Hold(reason, detail)

    def tick(self, now: float) -> Iterator[CoordinatorCommand]:
        """Process what is due: late orders, the status, the stop condition."""
        late, rounds = self.rounds.assigner.overdue(now)
        if late:
            self._liveness.suspect(late, now)
            yield from self._proceed(rounds, now)
        if self._status.is_due(now, idle=self.idle):
            yield self._leader_status(now)
        if reason := self._completion.reached(now):
            yield from self._finish_job(reason, now)
        yield from self._advance(now)

    def due(self) -> float:
        """Return when `tick` has something to do. While idle, the owner's own ticks suffice."""
        stop_at = float("inf") if self._completion.stop_at is None else self._completion.stop_at
        status_due = self._status.due(idle=self.idle)
        if self.idle:
            return min(stop_at, status_due)
        times = [status_due, self._aggregation.due()]
        if self._completion.reason:
            # Only an audit record or a stored checkpoint is outstanding.
            return min(times)
        if len(self.rounds):
            times.append(self.rounds.assigner.due() or status_due)
        linger_s = self._settings.group_linger_s
        if linger_s is not None and (len(self.rounds) or len(self._grouper)):
            times.append(max(self._moved_at + linger_s, status_due))
        snapshot_due = self._publisher.due()
        times += [stop_at, *([] if snapshot_due is None else [snapshot_due])]
        return min(times)

    # --- rounds ------------------------------------------------------------------------------

    def _advance(self, now: float) -> Iterator[CoordinatorCommand]:
        self._aggregation.look(self._liveness.there, self._liveness.live, self.rounds, now)
        if self._aggregation.holder is not None:
            self._liveness.expect(self._aggregation.holder)
        if self._aggregation.error:
            yield from self.hold(self._aggregation.error)
        yield from self._decide(now)
        if self._aggregation.news:
            yield self._trigger(())

    def _decide(  # noqa: C901 -- one thing after the other, and each may end it
        self, now: float
    ) -> Iterator[CoordinatorCommand]:
        self._modes.pass_time(now, len(self._liveness.live) if len(self.rounds) else 0)
        if self._changed is not None and self._changed.slices != self._settings.slices:
            # The rounds in flight may be stuck for the reason that made the owner change the
            # layout, so the leader does not wait for them.
            yield from self._abandon(self.rounds)
        if self._changed is not None and not len(self.rounds) and not self._completion.reason:
            yield from self._take_change(self._changed, now)
        if self._completion.reason:
            yield from self._end()
            return
        if not self.rounds.wait_for_gradients:
            self._fill()
            while not self._completion.reason and (round_ := self._ripe(now)) is not None:
                yield from self._apply(round_, now)
                # If rounds overlap, there may never be a moment without one.
                if self._changed is not None and not self._completion.reason:
                    yield from self._take_change(self._changed, now)
            if self._completion.reason:
                return
            if giving_way := self._giving_way():
                yield from self._abandon(giving_way)
                yield from self._advance(now)
                return
        yield from self._order(now)
        kind = self._publisher.consider(now, self._completion.progress, self.ledger.position)
        last = self._aggregation.wants_checkpoint and not self._checkpoint_waits
        if last or kind is not None:
            yield from self._take_snapshot(now, checkpoint=last or kind == "checkpoint")
        if self.handover.requested:
            yield from self._hand_over(self.handover, now)

    def _hand_over(self, handover: HandOver, now: float) -> Iterator[CoordinatorCommand]:
        """Store the newest version and publish that, so that others can take over the weights."""
        if self._publisher.unread or self._publisher.pending:
            return
        if self._made == GENESIS:
            handover.done = True
        elif self._made not in self._aggregation.stored:
            if handover.version != self._made:
                handover.version, handover.snapshot_taken = self._made, False
                yield from self._take_snapshot(now, checkpoint=True)
        elif handover.snapshot_taken:
            handover.done = True
        else:
            handover.snapshot_taken = True
            yield from self._take_snapshot(now, checkpoint=False)
            handover.done = not self._publisher.pending

    @property
    def _checkpoint_waits(self) -> bool:
        return self._publisher.pending or self._aggregation.storing

    def _end(self) -> Iterator[CoordinatorCommand]:
        """Report that the job is finished, once its last checkpoint is taken."""
        if self._completion.announced or self._checkpoint_waits:
            return
        self._completion.announced = True
        self._aggregation.dismiss()
        if self._aggregation.news:
            yield self._trigger(())
        stopped = self._completion.reason == STOPPED
        yield do.Finish(self._completion.reason, self._settings.revision, stopped=stopped)

    def _take_change(
        self, settings: CoordinatorSettings, now: float
    ) -> Iterator[CoordinatorCommand]:
        """Apply the changed settings from the next round on."""
        self._modes.change(settings)
        among, own = settings.aggregation, self._settings.aggregation
        parts = settings.slices != self._settings.slices
        self.handover = HandOver(requested=parts)
        self._aggregation.change(among, parts=parts)
        # The layout of the weights stays as it is until the hand-over.
        if parts:
            settings = replace(settings, aggregation=own)
        self._settings, self._changed = settings, None
        self._completion.change(settings)
        if reason := self._completion.reached(now):
            yield from self._finish_job(reason, now)

    def _fill(self) -> None:
        """Refill rounds that lost batches to quarantine, and end rounds that have no batch left."""
        for round_ in self.rounds:
            if round_.missing > 0 and not round_.short and len(self._grouper):
                round_.fill(self._grouper.take(round_.missing, round_.batches))
            if not len(round_):
                self.rounds.end(round_)

    def _ripe(self, now: float) -> Round | None:
        """Return the oldest round that can be applied now."""
        for round_ in self.rounds:
            if round_.todo:
                continue
            if round_.missing > 0 and not round_.short:
                round_.short = self._why_short(round_, now)
            whole = round_.missing <= 0 or round_.short
            if whole and self.rounds.may_apply(round_, self._made.version):
                done = self._aggregation.finished(round_, partial(self._draft, round_), now)
                return round_ if done else None
        return None

    def _why_short(self, round_: Round, now: float) -> str:
        """Return why a round need not wait for its missing batches. Empty if it must."""
        others = len(self.rounds) > 1
        if self._lingered(now) or (others and round_.lingered):
            return "linger"
        # Other rounds may have to wait for this one, and they may hold all batches that their
        # workers can have.
        return "quarantined" if others else ""

    def _giving_way(self) -> list[Round]:
        """Return rounds that lack batches and might wait for them for ever.

        After a job change, workers may follow a new bound and claim no more batches. If another
        rule applies now, the batches that are there may be enough for an update.
        """
        lacking = [r for r in self.rounds if not (r.todo or r.short) and r.missing > 0]
        if not lacking:
            return lacking
        revision = self._settings.revision if self._changed is None else self._changed.revision
        return [r for r in lacking if r.settings.revision != revision or r.mode != self.mode]

    def _order(self, now: float) -> Iterator[CoordinatorCommand]:
        """Assign batches that no worker has, and begin rounds if possible."""
        able, version = self._aggregation.able(self._liveness.live), self._made.version
        trusted = self._liveness.trusted(now)
        # The same object means that all workers are trusted.
        if trusted is not able:
            trusted = (able & trusted) or able
        orders = self.rounds.assigner.orders(now, trusted, version)
        while self._begin(now, trusted):
            orders += self.rounds.assigner.orders(now, trusted, version)
        orders += self.rounds.assigner.relieve(now, trusted, version)
        if not orders:
            return
        if any(r.asked_again and r.waits_for(orders) for r in self.rounds):
            yield from self._aggregation.publish(self.model)
        yield self._trigger(orders)

    def _trigger(self, orders: tuple[Assignment, ...]) -> do.PostTrigger:
        self._triggers += 1
        number, version = TriggerId(self._epoch, self._triggers), self._made.version
        life = self._liveness.life
        orders = tuple(msgspec.structs.replace(order, life=life(order.worker)) for order in orders)
        awaits, group = self.rounds.assigner.awaits(version), self._aggregation.orders(number)
        model = self.model if group is UNSET else ModelId(self._epoch, group.made.version)
        moves, self.rounds.assigner.unanswered = self.rounds.assigner.unanswered, False
        return do.PostTrigger(
            UpdateTrigger(
                number,
                model,
                orders,
                unsettled=self.unsettled,
                awaits=UNSET if awaits == version else awaits,
                group=group,
            ),
            moves,
        )

    def _begin(self, now: float, live: frozenset[WorkerId]) -> bool:
        """Begin a round if enough batches wait, the audit keeps up and all rounds stay in time.

        Returns:
            True if a round began.
        """
        waiting = len(self._grouper)
        if not waiting or self.handover.requested or self._wanted != "running":
            return False
        # The claim of a used batch may be lost if it is not replayed yet. Its records are in the
        # weights, and workers may have claimed them again.
        replayed = self.ledger.position > self._replay.last_used
        if not replayed or self._publisher.unread > self._aggregation.unread_audits:
            return False
        settings, workers, mode = self._settings, len(self._liveness.live), self.mode
        if waiting < mode.group_size and not self._lingered(now):
            return False
        synchrony = mode.synchrony(workers)
        if not self.rounds.may_begin(synchrony.staleness, self._made.version):
            return False
        idle, worker = self.rounds.assigner.idle(live), None
        if len(self.rounds) and not (
            idle if synchrony.single_worker else self._grouper.is_for(idle, live)
        ):
            # A round that makes gradients stale must at least occupy an idle worker.
            return False
        if synchrony.single_worker and idle:
            worker = max(sorted(idle), key=self._grouper.waiting_of)
            overtaken = self._overtaken(synchrony.staleness)
            group = self._grouper.take_for(worker, live, synchrony.group_size, overtaken)
        else:
            group = self._grouper.take(synchrony.group_size, loads=self.rounds.assigner.loads())
        self.rounds.begin(mode, workers, settings, group, worker)
        self._modes.begin(workers)
        return True

    def _overtaken(self, staleness: int) -> int | None:
        """Return the oldest waiting batch if more than `staleness` updates have passed it."""
        oldest, since = self._grouper.see_oldest(self._made.version)
        return oldest if self._made.version + len(self.rounds) - since > staleness else None

    def _draft(self, round_: Round) -> UpdateApplied:
        """Return the next update as this round would make it."""
        progress, noise_scale = self._completion.progress, self._modes.noise_scale
        return round_.update(self._epoch, self._made.version + 1, progress, noise_scale)

    def _apply(self, round_: Round, now: float) -> Iterator[CoordinatorCommand]:
        self.rounds.end(round_)
        self._moved_at = now
        update = self._aggregation.sign(self._draft(round_))
        update = msgspec.structs.replace(update, moved=self.rounds.traffic.take())
        if round_.scores is not None:
            update.metrics.update(self._scores.add(round_.scores, now))
        self._made = ModelId(update.epoch, update.version)
        # Other rounds may be applied before the next one begins.
        self._grouper.see_oldest(self._made.version)
        self._modes.last = update.synchrony or None
        if self._returned:
            self._returned.difference_update(batch.offset for batch in update.batches)
        self._completion.applied(update, round_.share)
        self._poison.applied(len(update.batches))
        measured = self._modes.measures(len(self._liveness.live))
        if measured:
            self._modes.expect(update.version, round_.scatter)
        yield from self._aggregation.apply(round_, update, measured=measured)
        yield self._publisher.append(update)
        yield from self._aggregation.publish(self.model, whole=False)
        if reason := self._completion.reached(now):
            yield from self._finish_job(reason, now)

    def _lingered(self, now: float) -> bool:
        linger_s = self._settings.group_linger_s
        return linger_s is not None and now - self._moved_at >= linger_s

    # --- failures and quarantine -------------------------------------------------------------

    def _is_over(self, reply: Gradient | GradientReady | Failed) -> bool:
        """True if the reply is no longer awaited, or is of weights that this leader never had."""
        version, newest = reply.model.version, self._made.version
        if reply.model.epoch != self._epoch or version > newest or not len(self.rounds):
            return True
        return isinstance(reply, Failed) and version < self.rounds.assigner.oldest_asked(newest)

    def _failed(self, failed: Failed) -> Iterator[CoordinatorCommand]:
        yield do.Drop(
            failed, f"{failed.reason}: {failed.detail}" if failed.detail else failed.reason
        )
        verdict = judge(failed, self.rounds, self._liveness.live)
        if failed.reason == "model_missing":
            yield from self._aggregation.publish(self.model)
        if verdict.hold:
            yield from self.hold(verdict.hold, failed.traceback)
            return
        for batch in verdict.hopeless:
            yield from self._quarantine(batch, verdict.reason, failed.traceback)

    def _quarantine(
        self, batch: Batch, reason: str, traceback: str = ""
    ) -> Iterator[CoordinatorCommand]:
        if self.rounds.settle(batch.offset) is None:
            # The batch has its gradient by now, or the job is held.
            return
        self._returned.discard(batch.offset)
        record = Quarantined(self._epoch, batch, reason[:REASON_CHARACTERS])
        yield self._publisher.append(record)
        too_many = "" if record.expired else self._poison.quarantined()
        if too_many:
            yield from self.hold(
                f"{too_many} are {record.reason}; correct the task or the data, run `doll job"
                " requeue` for the batches, and resume the job",
                traceback,
            )

    def _dead_letter(self, record: Quarantined) -> do.DeadLetterBatch:
        return do.DeadLetterBatch(record, self.ledger.topic_ids(record.batch.address))

    def _expire_gone(self) -> Iterator[CoordinatorCommand]:
        """Settle waiting batches whose records were lost: no worker can read them again.

        A batch that has its gradient stays in its round. If the round is put back, it is checked
        again.
        """
        for batch in self.batches:
            if not any(map(self.ledger.is_gone, batch.address)):
                continue
            waited = self._grouper.remove(batch.offset) is not None
            if waited or self.rounds.settle(batch.offset) is not None:
                self._suspects.clear([batch.offset])
                self._returned.discard(batch.offset)
                yield self._publisher.append(Quarantined(self._epoch, batch, "expired"))

    def _requeue(self, batch: Batch, now: float) -> Iterator[CoordinatorCommand]:
        """Queue a batch that an operator took back, now or when its claim is replayed."""
        self._replay.requeue(batch.offset)
        self._publisher.requeue(batch)
        if batch.offset < self.ledger.position:
            self._grouper.add(batch)
            self._moved_at = now
            yield from self._expire_gone()
            yield self._leader_status(now)

    def _proceed(self, rounds: Iterable[Round], now: float) -> Iterator[CoordinatorCommand]:
        """Apply incomplete rounds (`on_missing: proceed`), but put each batch back only once."""
        if self._settings.on_missing != "proceed":
            return
        for round_ in rounds:
            if round_.counted and self._returned.isdisjoint(round_.todo):
                self._returned.update(round_.todo)
                for batch in self.rounds.give_up(round_):
                    self._grouper.add(batch)
                round_.short = "missing"
                yield from self._advance(now)

    # --- status, snapshots, the end ----------------------------------------------------------

    def _leader_status(self, now: float) -> do.PutLeaderStatus:
        self._status.put(now)
        unsettled = self.unsettled
        return do.PutLeaderStatus(
            LeaderStatus(
                epoch=self._epoch,
                control_position=unsettled.control_position,
                claimed=self.ledger.claimed,
                oldest_unsettled=unsettled.oldest_unsettled,
                waiting=unsettled.waiting,
                live=unsettled.live,
                settled=self._publisher.settled,
                opened=self.ledger.opened,
                known=self.ledger.known,
                group=self._aggregation.status,
                left_out=self._liveness.left_out,
            )
        )

    def _snapshot(self) -> Snapshot:
        progress = self._completion.progress
        snapshot = Snapshot(
            by=self._epoch,
            made=self._made,
            # Set on publication, as are `number` and `poison`.
            updates_position=-1,
            control_position=self._control.offset,
            control_topic_id=self._control.topic_id,
            control_epoch=self._control.epoch,
            claimed=self.ledger.claimed,
            waiting=self.batches,
            failure_counts=self._suspects.failure_counts,
            returned=tuple(sorted(self._returned)),
            samples=self._completion.samples,
            losses=self._completion.losses,
            quarantined=self._replay.quarantined(self.ledger.position),
            used=self._replay.used(self.ledger.position) or UNSET,
            opened=self.ledger.opened,
            known=self.ledger.known,
            synchrony=self._modes.last,
            equivalent=None if progress == self._made.version else progress,
            digest=self._liveness.digest,
        )
        return self._aggregation.marked(snapshot)

    def _finish_job(self, reason: str, now: float) -> Iterator[CoordinatorCommand]:
        """Put the rounds in flight back and take the last checkpoint."""
        if self._completion.reason:
            return
        self._completion.reason = reason
        yield from self._abandon(self.rounds)
        yield from self._take_snapshot(now, checkpoint=True)

    def _abandon(self, rounds: Rounds | list[Round]) -> Iterator[CoordinatorCommand]:
        """Put rounds back into the queue."""
        if not len(rounds):
            return
        for round_ in rounds:
            self.rounds.end(round_)
            for batch in round_.batches:
                self._grouper.add(batch)
            yield from self._aggregation.discard(round_)
        yield from self._expire_gone()

    def _take_snapshot(self, now: float, *, checkpoint: bool) -> Iterator[CoordinatorCommand]:
        taken = self._publisher.take(self._snapshot(), now, checkpoint=checkpoint)
        yield from self._published(taken)

    def _published(
        self, commands: Iterable[do.CopyWeights | do.PublishSnapshot]
    ) -> Iterator[CoordinatorCommand]:
        yield from self._seen(self._aggregation.snapshots(commands))

    def _seen(self, commands: Iterable[CoordinatorCommand]) -> Iterator[CoordinatorCommand]:
        """Pass the commands on. A published checkpoint moves the settled frontier of the status."""
        for command in commands:
            if isinstance(command, do.PublishSnapshot) and command.checkpoint:
                self._publisher.settled = command.snapshot.settled
            yield command
