"""Publishes a leader's models, triggers and status in Redis, for workers and evaluators."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from common.core import events
from common.core.messages import Gradient, ModelId, reached_mask
from common.core.snapshot_publishing import is_offered
from common.learning.significance import Compression, KnownWeights
from common.wire.vectors import encode_sparse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core import commands as do
    from common.core.liveness import Heartbeat
    from common.core.messages import LeaderStatus, UpdateTrigger, WorkerId
    from common.core.snapshots import Snapshot
    from services.coordinator.replica import JobContext

# Models up to this size travel in their trigger, which saves workers a round trip.
INLINE_BYTES = 64 << 10
# Log lines about members in one leadership. The limit keeps forged names from filling the disk.
MOST_MEMBER_LINES = 200
_UNCHANGED: tuple[ModelId | UnsetType, bytes | UnsetType] = (UNSET, UNSET)


class ModelPublisher:
    """Applies a leader's updates, and publishes each model."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        # Weights as workers know them, if the leader sends changes only.
        self.view: KnownWeights | None = None
        # Version that `view` belongs to.
        self._viewed: ModelId | None = None
        # The base and the changes of the next trigger.
        self._changed = _UNCHANGED
        self._offered: ModelId | None = None
        # Progress of the previous version, and of the version in hand.
        self._progress = -1.0, 0.0

    def begin(self, snapshot: Snapshot) -> None:
        """Start a leadership with a snapshot's weights."""
        self.view = None
        self._progress = snapshot.progress - 1, snapshot.progress
        if not self._job.members:
            self._compress()

    def add(self, command: do.AddGradient) -> None:
        """Add a gradient to its sum."""
        gradient = command.gradient
        if isinstance(gradient, Gradient):
            reached = reached_mask(gradient.reached)
            self._job.trainer.add(command.round, gradient.vector, gradient.samples, reached)

    def apply(self, command: do.Apply) -> Iterator[events.CoordinatorEvent]:
        """Take the optimizer step of an update."""
        number, update = command.round, command.update
        if command.measured:
            model = ModelId(update.epoch, update.version)
            yield events.Summed(model, self._job.trainer.square(number))
        self._job.trainer.apply(number, command.learning_rate, update.scale or 1.0)
        self._progress = self._progress[1], update.progress

    def discard(self, command: do.DiscardSum) -> None:
        """Discard a sum."""
        self._job.trainer.discard(command.round)

    def publish(self, command: do.PublishModel) -> None:
        """Publish the weights in hand for workers, and for evaluators if the version is offered."""
        self._job.in_hand = command.model
        if self.view is None or command.whole:
            self._put_whole(command.model)
        evaluation = self._job.record.spec.evaluation
        if evaluation and is_offered(*self._progress, evaluation.every_updates):
            self.offer()

    def offer(self) -> None:
        """Offer the weights in hand to evaluators, once per version."""
        model = self._job.in_hand
        if model is not None and model != self._offered:
            self._job.board.offer_model(model, self._job.trainer.snapshot(optimizer=False))
            self._offered = model

    def complete(self, trigger: UpdateTrigger) -> UpdateTrigger:
        """Return a trigger with the weights, or with their changes since the last trigger."""
        members = self._job.members
        trigger = replace(
            trigger,
            weights=bytes(self._job.trainer.weights()) if self._travels_inside else None,
            reply_to=self._job.replica.name,
            digest=UNSET if members else self._job.trainer.digest,
        )
        if self.view is None:
            return trigger
        self._follow(self.view, trigger.model)
        (since, changes), self._changed = self._changed, _UNCHANGED
        # A worker that misses this trigger fetches the whole model.
        return replace(trigger, since=since, changes=changes)

    def change(self) -> None:
        """Follow a changed job. Its compression takes effect with the next version."""
        if self._job.role == "leader" and not self._job.members:
            self._compress()

    def _put_whole(self, model: ModelId) -> None:
        """Put a complete model in Redis for workers that do not have it."""
        if self.view is not None:
            self._follow(self.view, model)
        if self.view is not None:
            self._job.board.put_model(model, self.view.weights.data.cast("B"))
        elif not self._travels_inside:
            self._job.board.put_model(model, self._job.trainer.weights())

    def _follow(self, view: KnownWeights, model: ModelId) -> None:
        """Move the view to this model, and put a complete model if most of it has changed."""
        if self._viewed == model:
            return
        since, self._viewed, self._changed = self._viewed, model, _UNCHANGED
        # Compression was removed from the job: from this model on, all weights are sent.
        if self._job.spec.compression is None:
            self.view = None
            self._put_whole(model)
            return
        weights = np.frombuffer(self._job.trainer.weights(), np.float32)
        changes = view.follow(weights, model.version)
        if changes is None:
            self._job.board.put_model(model, view.weights.data.cast("B"))
        elif since is not None:
            self._changed = since, encode_sparse(changes)

    def _compress(self) -> None:
        """Begin to send changes only, starting from the weights in hand, if the job compresses.

        The view begins with exactly these weights, because they may be published under their id
        already, and everybody must have the same bits of one id.
        """
        if self._job.spec.compression is None or self._travels_inside:
            return
        compression = Compression(**self._job.spec.compression.model_dump())
        if self.view is None:
            trainer = self._job.trainer
            weights = np.frombuffer(trainer.weights(), np.float32)
            self.view = KnownWeights(weights, trainer.parameter_count, compression)
            self._viewed = self._job.in_hand
        else:
            self.view.compression = compression

    @property
    def _travels_inside(self) -> bool:
        """True if each trigger carries the model, so that nobody needs to fetch it."""
        return not self._job.members and len(self._job.trainer.weights()) <= INLINE_BYTES


class OrderPublisher:
    """Posts triggers, puts the leader's status and requests heartbeats."""

    def __init__(self, job: JobContext, models: ModelPublisher) -> None:
        self._job = job
        self._models = models
        # True if a model or a trigger of this leader could not be put.
        self.lost = False
        # True if this leader has put its status.
        self._stated = False
        # The newest status.
        self._status: LeaderStatus | None = None
        # Stream of this leader's triggers.
        self._triggers = ""
        # Last known stage of AgileML in this leadership; 0 if unknown.
        self._stage = 0
        # Kind, worker and reason of the log lines about members that were written.
        self._reported_members = set[tuple[str, str, str]]()
        # Leadership and heartbeats of the last answer to `read_heartbeats`. Used only by the thread
        # that receives answers.
        self._seen: tuple[int, dict[WorkerId, Heartbeat]] | None = None

    def begin(self) -> None:
        """Start a leadership without observations."""
        self.lost = self._stated = False
        self._status, self._triggers, self._stage = None, "", 0
        self._reported_members.clear()

    def post(self, command: do.PostTrigger) -> None:
        """Post a trigger, in a new stream if so ordered or if the old stream rejects it."""
        job, moves = self._job, command.moves
        trigger = self._models.complete(command.trigger)
        if not moves and job.board.post_trigger(trigger, self._triggers):
            return
        self._triggers = token_hex(8)
        kept_out = "the previous stream contains triggers of a later leader or forged ones"
        reason = "a worker does not answer" if moves else kept_out
        job.log.warning("triggers_moved", to=self._triggers, reason=reason)
        job.board.post_trigger(trigger, self._triggers)
        if self._status is not None:
            self._put(self._status)

    def put_status(self, command: do.PutLeaderStatus) -> None:
        """Put the leader's status, and log what it says of members."""
        self._status = command.leader_status
        self._log_members(self._status)
        self._put(self._status)

    def read_heartbeats(self, _: do.ReadHeartbeats) -> None:
        """Request workers' heartbeats. The actor is woken if they have changed."""
        job, leadership = self._job, self._job.inbox.leadership

        def are_news(beats: dict[WorkerId, Heartbeat]) -> bool:
            before, self._seen = self._seen, (leadership, beats)
            return before != self._seen

        seen = job.inbox.answer(lambda beats: (events.WorkersSeen(beats),), wakes=are_news)
        job.replica.exchange.alive(job.id, seen, soon=not job.idle)

    def _put(self, leader_status: LeaderStatus) -> None:
        # If orders were lost, the answer wakes the actor, which puts them again.
        job, lost = self._job, self.lost
        said = replace(leader_status, triggers=self._triggers)
        answered = job.inbox.answer(self._put_answered, wakes=lambda stood: lost or not stood)
        job.replica.exchange.put_leader_status(job.id, said, answered, soon=not job.idle)

    def _put_answered(self, stood: bool) -> Iterator[events.CoordinatorEvent]:  # noqa: FBT001 -- an answer
        """Note that the status was put. If there was none before, Redis came back empty."""
        if not stood and self._stated:
            self._job.log.warning("board_wiped")
            yield events.BoardWiped()
        elif self.lost:
            yield events.OrdersLost()
        self._stated, self.lost = True, False

    def _log_members(self, leader_status: LeaderStatus) -> None:
        """Log new owners of slices, workers left out, and workers that delay updates, once each."""
        group, log = leader_status.group, self._job.log
        if group is UNSET:
            return
        if group.stage:
            before, self._stage = self._stage, group.stage
            if before not in {0, group.stage}:
                log.info("stage_switched", before=before, stage=group.stage)
        lines = [("left_out", worker, why) for worker, why in group.left_out.items()]
        for worker, most_s in group.waits.items():
            lines.append(
                (
                    "updates_wait",
                    worker,
                    f"the worker copies the weights; updates wait at most {most_s:g} s",
                )
            )
        for event, worker, why in lines:
            if (event, worker, why) not in self._reported_members and len(
                self._reported_members
            ) < MOST_MEMBER_LINES:
                self._reported_members.add((event, worker, why))
                say = log.warning if event == "left_out" else log.info
                say(event, worker=worker, reason=why)
