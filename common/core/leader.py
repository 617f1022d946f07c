"""What a leader decides between its Lead record and the next one: ledger, rounds, quarantine.

One pass of `_advance` answers "what now?" after every event: apply what is complete, hand out work,
begin what may begin. How many rounds are in flight is `rounds`' to say: with s = 0, the paper's
synchronous rule, there is one.
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
DIED = "poison: its workers died of it"
_ANSWERS = (Gradient, GradientReady, Failed)  # as a union it would be made anew for each reply
# A gradient that was begun under an earlier leader may have taken so much longer than this leader
# leads. One that says it took longer yet is wrong, and would put deadlines off.
BEFORE_S = 600.0
REASON_CHARACTERS = 2_000  # of a quarantine: an exception's text may be longer than a record


class StatusSchedule:
    """Says when a leader's status is due: at intervals, and soon after something was decided."""

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        self._settings = settings
        self._put_at = now
        self._decided_due = inf  # when the status must say what was decided since the last

    def put(self, now: float) -> None:
        """The status says all that is decided by now."""
        self._put_at, self._decided_due = now, inf

    def decided(self, now: float, *, idle: bool) -> bool:
        """Return True if the status is to say at once that something was decided."""
        if idle or now >= self._put_at + self._settings.leader_status_news_s:
            return True
        self._decided_due = self._put_at + self._settings.leader_status_news_s
        return False

    def is_due(self, now: float, *, idle: bool) -> bool:
        """Return True if it is time for the next status."""
        settings = self._settings
        every_s = settings.idle_s if idle else settings.leader_status_s
        return now >= min(self._put_at + every_s, self._decided_due)

    def due(self, *, idle: bool) -> float:
        """Return when the next status is due; the owner of an idle leader ticks often enough."""
        every_s = inf if idle else self._settings.leader_status_s
        return min(self._put_at + every_s, self._decided_due)


@dataclass(slots=True)
class HandOver:
    """How far the weights are on their way from members to the coordinator, or back.

    A change of the job asks for it. The leader has the newest version stored, and says so in a
    snapshot; then its coordinator stands again, so that others hold the weights.
    """

    requested: bool = False
    version: ModelId | None = None  # that was to be stored
    snapshot_taken: bool = False
    done: bool = False


class Leader:
    """A leader's whole state.

    Args:
        epoch: Of its Lead record.
        snapshot: What it starts from.
        history: What the updates topic says since that snapshot; its owner feeds it.
        settings: The job's.
        now: When it begins.
        recovery: What it may go on after, of what its first look at the streams finds lost.
        failure_counts: Failures per batch carried over from before the rollback, so that a batch
                that crashes workers is not retried from zero.
        digest: Digest of the layout of the model in hand. Empty: members hold the weights.
    """

    def __init__(  # noqa: PLR0913 -- what it begins with, each said once
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
        self._changed: CoordinatorSettings | None = None  # from the next update boundary on
        self._made = snapshot.made
        self.ledger = Ledger.of(snapshot)  # of claims; to be read alone, as `rounds`
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
        self._moved_at = now  # last accepted batch or update, for the linger of a group
        self._status = StatusSchedule(settings, now)

    @property
    def model(self) -> ModelId:
        """The current weights, as this leader names them."""
        return ModelId(self._epoch, self._made.version)

    @property
    def error(self) -> str:
        """Why no machine may go on; mostly empty."""
        return self._replay.error

    @property
    def fallback(self) -> ModelId | None:
        """The version to go back to, where nobody holds the newest any more; mostly None."""
        return self._aggregation.fallback

    @property
    def failure_counts(self) -> dict[int, int]:
        """What it knows of batches that may be poison."""
        return self._suspects.failure_counts

    @property
    def returned(self) -> frozenset[int]:
        """Batches that `on_missing: proceed` has put back once, so that they are awaited now."""
        return frozenset(self._returned)

    @property
    def stored(self) -> tuple[ModelId, ...]:
        """Versions that members find in storage."""
        return self._aggregation.stored

    @property
    def slices(self) -> int | UnsetType:
        """Who holds the weights while it leads, as its `Lead` says."""
        return self._settings.slices

    @property
    def idle(self) -> bool:
        """Whether nobody is there to be asked, and nothing under way: it need not look often."""
        return not (len(self.rounds) or self._liveness.live or self._completion.reason)

    @property
    def awaited(self) -> int:
        """Of how many batches gradients are to come before there is something to decide.

        Till then claims and audit records can wait, for the next look at the workers at most: no
        round may begin, and the batches of the next one are here. 0 where something may be decided
        at once. Where workers hold the weights, they wait for audit records.
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
        """Whether a decision that it wrote does not come back: it must be read what is true."""
        return self._publisher.lost

    @property
    def mode(self) -> Mode:
        """Mode of a round that would begin now."""
        return self._modes.mode(len(self._liveness.live))

    @property
    def busy(self) -> float:
        """Share of their time that workers computed lately."""
        return self._modes.busy

    @property
    def batches(self) -> tuple[Batch, ...]:
        """What waits in the job, in flight or not, oldest first."""
        unsettled = self._grouper.batches + self.rounds.batches
        return tuple(sorted(unsettled, key=lambda batch: batch.offset))

    @property
    def unsettled(self) -> Unsettled:
        """How much of it waits, as workers are told."""
        position, waiting = self.ledger.position, len(self._grouper) + self.rounds.size
        oldest = position
        for each in (self.rounds.oldest, self._grouper.oldest):
            oldest = oldest if each is None else min(oldest, each)
        return Unsettled(position, oldest, waiting, len(self._liveness.live))

    def begin(self, history: History, now: float) -> Iterator[CoordinatorCommand]:
        """The first commands; dead letters that an earlier leader owed are written again."""
        yield from self._aggregation.publish(self.model)
        yield self._leader_status(now)
        yield do.ReadHeartbeats()
        for record in history.quarantined.values():
            yield self._dead_letter(record)
        yield from self._expire_gone()
        # At once: a successor then finds one of the leader in force, unless the board was wiped.
        yield from self._take_snapshot(now, checkpoint=False)

    # --- events ------------------------------------------------------------------------------

    def control_read(
        self, records: Sequence[tuple[int, ControlRecord | None]], epoch: int, now: float
    ) -> Iterator[CoordinatorCommand]:
        """Decide claims and openings, all of which have this leader epoch of Kafka's."""
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
        """Why the job must be held, by what is seen of its streams; empty where it goes on."""
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
        """Open partitions that the job does not have yet, and those that its owner lets go on.

        The record may be there already, unread yet; then a second one of it does not count.
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
            self._recovery = NO_RECOVERY  # what is lost later, its owner has to look at

    def _lost(self, seen: StreamsSeen) -> dict[Partition, Divergence]:
        """Partitions that are not the logs that they were, by all that is decided of claims."""
        if self._completion.reason or self.ledger.position < seen.control_end:
            return {}
        return {
            place: divergence
            for place, divergence in seen.diverged.items()
            if divergence.generation == self.ledger.generation(place)
        }

    def replies_read(self, replies: Iterable[Reply], now: float) -> Iterator[CoordinatorCommand]:
        """Count gradients, learn of failures."""
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
            elif self._aggregation.is_rival(reply):  # who is believed computes it, too
                yield do.Drop(reply, "another process of its name is believed")
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
        """Learn how large the sum of an update was: K may be another one from now on."""
        if event.model.epoch != self._epoch:
            return
        if self._modes.observe(event.model.version, event.square):
            yield from self._advance(now)

    def state_stored(self, made: ModelId, now: float) -> Iterator[CoordinatorCommand]:
        """A version is where members copy it from."""
        self._aggregation.keep(made)
        yield from self._advance(now)

    def _receive(self, reply: GroupReply, now: float) -> Iterator[CoordinatorCommand]:
        """Learn what a member holds, or has finished."""
        if reply.model.epoch != self._epoch:
            yield do.Drop(reply, OVER)
            return
        yield from self._seen(self._aggregation.receive(reply, now))
        if isinstance(reply, Broken) and reply.unreachable:
            yield do.ReadHeartbeats()  # it has died, most likely: seen at once, and not a look late
        for worker in self._aggregation.take_reborn():
            for batch in self.rounds.vanish(worker):
                yield from self._quarantine(batch, DIED)

    def workers_seen(
        self, beats: Mapping[WorkerId, Heartbeat], now: float
    ) -> Iterator[CoordinatorCommand]:
        """Judge heartbeats; assign what the dead had in hand to the living."""
        left_out = self._liveness.left_out
        departures = self._liveness.observe(beats, now)
        if self._settings.aggregation is not None and self._made == GENESIS:
            self._liveness.choose()
        if self._liveness.left_out != left_out:
            for worker in sorted(self._liveness.left_out.keys() - left_out.keys()):
                # Its process was started again with other code.
                self.rounds.assigner.release(worker)
            yield self._leader_status(now)
        for worker in sorted(departures.left):
            self.rounds.assigner.release(worker)
        for worker in sorted(departures.lost):
            for batch in self.rounds.vanish(worker):
                yield from self._quarantine(batch, DIED)
        yield from self._advance(now)

    def audit_read(self, record: AuditRecord, now: float) -> Iterator[CoordinatorCommand]:
        """A record of the updates topic counts: an own one, or an operator's."""
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
        """The board was found empty: what it must hold is put there again, from memory.

        Orders and gradients on their way are gone too, and are asked for again.
        """
        self._liveness.wiped(now)
        yield from self.orders_lost(now)
        if not self._completion.reason:
            yield from self._take_snapshot(now, checkpoint=False)

    def orders_lost(self, now: float) -> Iterator[CoordinatorCommand]:
        """The board takes orders again: ask at once, since deadlines grew with each lost one."""
        yield from self._aggregation.publish(self.model)
        if len(self.rounds):
            self.rounds.assigner.recall()
            yield from self._advance(now)

    def want(self, wanted: Wanted, now: float) -> Iterator[CoordinatorCommand]:
        """The owner wants the job running, paused or stopped."""
        if wanted != self._wanted:
            self._poison.forget()  # whoever resumes a job means to see how it does now
        self._wanted = wanted
        if wanted == "stopped":
            yield from self._finish_job(STOPPED, now)
        yield from self._advance(now)

    def change(self, settings: CoordinatorSettings, now: float) -> Iterator[CoordinatorCommand]:
        """The owner changed the job: it counts for rounds that begin after the next update."""
        self._changed = settings
        self._completion.put_off(settings.stop_at)
        yield from self._advance(now)

    def hold(self, reason: str, detail: str = "") -> Iterator[CoordinatorCommand]:
        """Stop until a person resumes the job; no data is thrown away."""
        self._wanted = "paused"
        yield from self._abandon(self.rounds)
        yield do.Hold(reason, detail)

    def tick(self, now: float) -> Iterator[CoordinatorCommand]:
        """Time has passed."""
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
        """When `tick` has something to do; while it is calm, its owner's own ticks will do."""
        stop_at = float("inf") if self._completion.stop_at is None else self._completion.stop_at
        status_due = self._status.due(idle=self.idle)
        if self.idle:
            return min(stop_at, status_due)
        times = [status_due, self._aggregation.due()]
        if self._completion.reason:
            return min(times)  # only the audit is waited for, or a member that stores a checkpoint
        if len(self.rounds):
            times.append(self.rounds.assigner.due() or status_due)
        linger_s = self._settings.group_linger_s
        if linger_s is not None and (len(self.rounds) or len(self._grouper)):
            times.append(max(self._moved_at + linger_s, status_due))
        snapshot_due = self._publisher.due()
        times += [stop_at, *([] if snapshot_due is None else [snapshot_due])]
        return min(times)

    # --- what now? ---------------------------------------------------------------------------

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
            yield from self._abandon(self.rounds)  # what keeps it may be what its owner changes
        if self._changed is not None and not len(self.rounds) and not self._completion.reason:
            yield from self._take_change(self._changed, now)
        if self._completion.reason:
            yield from self._end()
            return
        if not self.rounds.wait_for_gradients:
            self._fill()
            while not self._completion.reason and (round_ := self._ripe(now)) is not None:
                yield from self._apply(round_, now)
                # With further rounds always in flight there would never be a better time.
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
        """Have the newest version stored, and say so: then others can hold the weights."""
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
        """The job is over, once its last checkpoint is taken: say so."""
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
        """Go by the changed settings from the next round on."""
        self._modes.change(settings)
        among, own = settings.aggregation, self._settings.aggregation
        parts = settings.slices != self._settings.slices
        self.handover = HandOver(requested=parts)
        self._aggregation.change(among, parts=parts)
        if parts:  # till then it leads as it began
            settings = replace(settings, aggregation=own)
        self._settings, self._changed = settings, None
        self._completion.change(settings)
        if reason := self._completion.reached(now):
            yield from self._finish_job(reason, now)

    def _fill(self) -> None:
        """Give rounds that lack batches, after a quarantine, others; end those that have none."""
        for round_ in self.rounds:
            if round_.missing > 0 and not round_.short and len(self._grouper):
                round_.fill(self._grouper.take(round_.missing, round_.batches))
            if not len(round_):
                self.rounds.end(round_)

    def _ripe(self, now: float) -> Round | None:
        """The oldest round that can be applied now."""
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
        """Why a round need not wait for the batches that it lacks; empty where it must."""
        others = len(self.rounds) > 1
        if self._lingered(now) or (others and round_.lingered):
            return "linger"
        # Others may have to wait for it, with all the batches that their workers may hold.
        return "quarantined" if others else ""

    def _giving_way(self) -> list[Round]:
        """Rounds that lack batches and may wait for ever.

        Workers go by a new bound already, or others could make an update by another rule.
        """
        lacking = [r for r in self.rounds if not (r.todo or r.short) and r.missing > 0]
        if not lacking:
            return lacking
        revision = self._settings.revision if self._changed is None else self._changed.revision
        return [r for r in lacking if r.settings.revision != revision or r.mode != self.mode]

    def _order(self, now: float) -> Iterator[CoordinatorCommand]:
        """Hand out what is in nobody's hands, beginning what may begin."""
        able, version = self._aggregation.able(self._liveness.live), self._made.version
        trusted = self._liveness.trusted(now)
        if trusted is not able:  # else all are
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
        """Begin a round: where all are in time, audit not too far behind, K wait (or linger)."""
        waiting = len(self._grouper)
        if not waiting or self.handover.requested or self._wanted != "running":
            return False
        # What updates used may be claimed a second time, if that was lost.
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
            return False  # it would make gradients stale, and nobody busy
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
        """The batch that has waited longest, if more updates than so many go before it."""
        oldest, since = self._grouper.see_oldest(self._made.version)
        return oldest if self._made.version + len(self.rounds) - since > staleness else None

    def _draft(self, round_: Round) -> UpdateApplied:
        """The next update, as this round would make it."""
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
        # Several rounds may be applied before the next one begins.
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

    # --- what goes wrong ---------------------------------------------------------------------

    def _is_over(self, reply: Gradient | GradientReady | Failed) -> bool:
        """Whether nobody waits for it any more, or it is of weights that this leader never had."""
        version, newest = reply.model.version, self._made.version
        if reply.model.epoch != self._epoch or version > newest or not len(self.rounds):
            return True
        return isinstance(reply, Failed) and version < self.rounds.assigner.oldest_asked(newest)

    def _failed(self, failed: Failed) -> Iterator[CoordinatorCommand]:
        yield do.Drop(
            failed, f"{failed.reason}: {failed.detail}" if failed.detail else failed.reason
        )
        verdict = judge(failed, self.rounds)
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
            return  # it has its gradient by now, or the job is held
        self._returned.discard(batch.offset)
        record = Quarantined(self._epoch, batch, reason[:REASON_CHARACTERS])
        yield self._publisher.append(record)
        too_many = "" if record.expired else self._poison.quarantined()
        if too_many:
            yield from self.hold(
                f"{too_many} are {record.reason}; mend the task (and start its workers again: they"
                " load it once) or its data, take the batches back with `doll job requeue`, and"
                " resume the job",
                traceback,
            )

    def _dead_letter(self, record: Quarantined) -> do.DeadLetterBatch:
        return do.DeadLetterBatch(record, self.ledger.topic_ids(record.batch.address))

    def _expire_gone(self) -> Iterator[CoordinatorCommand]:
        """Settle batches that waited when their records were lost: nobody can read them again.

        What has its gradient stays in its round; put back, it is looked at once more.
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
        """An operator took a batch back: it waits, or will when its claim is replayed."""
        self._replay.requeue(batch.offset)
        self._publisher.requeue(batch)
        if batch.offset < self.ledger.position:
            self._grouper.add(batch)
            self._moved_at = now
            yield from self._expire_gone()
            yield self._leader_status(now)

    def _proceed(self, rounds: Iterable[Round], now: float) -> Iterator[CoordinatorCommand]:
        """`on_missing: proceed`: apply what came; each batch is put back once, then awaited."""
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
            updates_position=-1,  # known when it is published, as are number and poison
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
        """Put the rounds in flight back, and take the last checkpoint."""
        if self._completion.reason:
            return
        self._completion.reason = reason
        yield from self._abandon(self.rounds)
        yield from self._take_snapshot(now, checkpoint=True)

    def _abandon(self, rounds: Rounds | list[Round]) -> Iterator[CoordinatorCommand]:
        """Put rounds back: their batches wait again."""
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
        """What a checkpoint covers is settled for lag tools, too."""
        for command in commands:
            if isinstance(command, do.PublishSnapshot) and command.checkpoint:
                self._publisher.settled = command.snapshot.settled
            yield command
