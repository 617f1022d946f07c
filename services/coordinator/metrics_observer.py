"""Derives a job's metrics and traces from its coordinator's events and commands.

The loop passes each event before it is decided on, and each command after it is carried out, with
the times at which that began and ended. Times are seconds since 1970, as in Kafka and in workers.
If the clock is set in between, a duration is wrong or 0; nothing else depends on it.

       update           trigger        last gradient      model published
    ─────┼─────────────────┼──────────────────┼─────┬───────────┼─────▶
         │      wait       │    gradients     │     │   apply   │

If members hold the weights, a collective lies between `gradients` and `apply`. The model is then
published by the first trigger after its audit record was read back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import UNSET

from common.core import commands as do
from common.core import events
from common.core.leader import OVER
from common.core.messages import (
    AttemptId,
    Batch,
    BatchReady,
    Failed,
    Gradient,
    GradientReady,
    GroupOrders,
    LeaderStatus,
    Member,
    Quarantined,
    Reply,
    Synchrony,
    UpdateApplied,
    UpdateTrigger,
)
from common.telemetry.metrics.coordinator import (
    QUARANTINED,
    SHORT,
    CoordinatorMetrics,
    LeaderFigures,
    RecentGradient,
    StreamFigures,
)

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.ledger import Ledger
    from common.core.snapshots import Snapshot
    from common.jobs.spec import JobSpec
    from common.telemetry.tracing import BatchTrace, Tracer

# Batches whose arrival is remembered: a few times the number that 100 workers may have waiting
# at K = 20, about 10 MB. Forgotten batches have no age and no trace.
MOST_CLAIMS = 65_536
# Updates over which gradient times are averaged: enough for a mean, few enough to follow changes.
RECENT_UPDATES = 32


@dataclass(slots=True)
class _Claimed:
    """A claimed batch until its update is applied."""

    # Arrival of the first record; 0 if unknown.
    first_s: float
    last_s: float
    received_s: float
    trace: BatchTrace | None
    # True until a trigger orders it.
    waits: bool = True


@dataclass(frozen=True, slots=True)
class _Applying:
    """An update from its optimizer step until its model is published."""

    update: UpdateApplied
    begin_s: float
    triggered_s: float
    gradient_s: float


class MetricsObserver:
    """Follows one job's coordinator. Used by its deciding thread unless a method says otherwise."""

    def __init__(self, spec: JobSpec, metrics: CoordinatorMetrics, tracer: Tracer) -> None:
        # The newest specification.
        self.spec = spec
        # The newest status.
        self.leader_status: LeaderStatus | None = None
        # mu_C, the mean over recent updates.
        self.gradient_s: float | None = None
        self.metrics = metrics
        self._tracer = tracer
        # Claims by control offset, ascending.
        self._claims = OrderedDict[int, _Claimed]()
        # Totals of this leadership that the metrics have counted.
        self._accepted = self._refused = 0
        # When each batch in flight was first ordered.
        self._asked = dict[int, float]()
        # When the last gradient of each round arrived.
        self._gradient_at = dict[int, float]()
        self._applying: _Applying | None = None
        self._updated_s: float | None = None
        # None until members are named.
        self._members: tuple[Member, ...] | None = None
        # The attempt under way and its start.
        self._attempt: tuple[AttemptId, float] | None = None
        # When the first failed attempt at the next update broke off.
        self._broke_s: float | None = None
        self._gradients_s = deque[float](maxlen=RECENT_UPDATES)

    def observe(self, event: CoordinatorEvent, now_s: float) -> None:
        """Observe an event before it is decided on."""
        if isinstance(event, events.ControlRead):
            for offset, claim in event.records:
                if isinstance(claim, BatchReady) and claim.samples:
                    self._remember(offset, claim, now_s)
        elif isinstance(event, events.WantedChanged):
            self.metrics.paused = event.wanted == "paused"
            self.metrics.held = self.metrics.held and event.wanted == "paused"

    def decided(self, ledger: Ledger) -> None:
        """Count the claims that the leader's ledger has decided."""
        self.metrics.claims_accepted.inc(ledger.accepted - self._accepted)
        self.metrics.claims_refused.inc(ledger.refused - self._refused)
        self._accepted, self._refused = ledger.accepted, ledger.refused

    def saw_streams(self, epoch: int, figures: StreamFigures | None) -> bool:
        """Set the figures of the streams; None if they are unknown. Safe to call from any thread.

        Args:
            epoch: Epoch of the leader that the streams are watched for. Others are ignored.
            figures: The figures.

        Returns:
            True if that leader leads.
        """
        # Read once, because the leadership may end meanwhile.
        leading = self.metrics.leading
        if leading is None or leading.epoch != epoch:
            return False
        self.metrics.streams = epoch, figures
        return True

    def saw(self, *, busy: float, group_size: int) -> None:
        """Note workers' utilization, and K of an update that would begin now."""
        leading = self.metrics.leading
        if leading is not None and (leading.busy, leading.group_size) != (busy, group_size):
            self.metrics.leading = replace(leading, busy=busy, group_size=group_size)

    def done(self, command: CoordinatorCommand, begin_s: float, end_s: float) -> None:  # noqa: C901, PLR0912 -- one case per command
        """Observe a command that was carried out, or failed because a server is unavailable."""
        leading = self.metrics.leading
        match command:
            case do.Begin(epoch, snapshot):
                self._begin(epoch, snapshot)
            case do.Hold():
                self.metrics.held = True
            case do.StepDown() | do.Finish():
                self._end()
            case _ if leading is None:
                # A candidate's commands are not measured.
                pass
            case do.AddGradient(number, gradient):
                self.metrics.staleness.labels("yes").observe(_age(gradient, leading))
                self.metrics.gradients.append(
                    RecentGradient(gradient.worker, len(gradient.batches), gradient.seconds)
                )
                self._gradient_at[number] = begin_s
            case do.PutLeaderStatus(leader_status):
                self._stands(leader_status)
            case do.PostTrigger(trigger):
                if trigger.group:
                    self._grouped(trigger.group, end_s)
                self._triggered(trigger, begin_s, end_s)
            case do.Apply(number, update):
                self._apply(number, update, begin_s)
            case do.PublishModel():
                if self._applying is not None:
                    self._applied(self._applying, end_s)
            case do.AppendAudit(UpdateApplied() as update) if update.by is not UNSET:
                self._added_up(end_s)
                self._apply(next(iter(self._gradient_at), -1), update, begin_s)
            case do.AppendAudit(Quarantined(batch=batch, reason=reason)):
                self._asked.pop(batch.offset, None)
                # The reason is "expired", or "poison: ..." with details.
                kind = reason.partition(":")[0]
                known = kind if kind in QUARANTINED else "poison"
                self.metrics.quarantined.labels(known).inc()
            case do.Drop(reply, reason):
                self._dropped(reply, reason, leading)
            case do.DiscardSum(number):
                # This also forgets batches of other rounds, which are usually discarded together.
                self._asked.clear()
                self._gradient_at.pop(number, None)
                self._updated_s = None
            case _:
                # Other commands are not measured.
                pass

    # --- leadership -------------------------------------------------------------------------------

    def _begin(self, epoch: int, snapshot: Snapshot) -> None:
        self._end()
        loss = snapshot.losses[-1] if snapshot.losses else None
        self.metrics.gradients.clear()
        self.metrics.leading = LeaderFigures(epoch, snapshot.made.version, loss)

    def _end(self) -> None:
        self.metrics.leading = None
        self._claims.clear()
        self._gradients_s.clear()
        self._accepted = self._refused = 0
        self.leader_status = self.gradient_s = None
        self._asked.clear()
        self._gradient_at.clear()
        self._applying = self._updated_s = None
        self._members = self._attempt = self._broke_s = None

    def _remember(self, offset: int, claim: BatchReady, now_s: float) -> None:
        """Remember a claim's times before it is decided: a refused batch is never ordered."""
        self._claims[offset] = _Claimed(
            claim.first_arrival_s,
            claim.last_arrival_s,
            now_s,
            self._tracer.trace(self.spec.name, claim.address),
        )
        if len(self._claims) > MOST_CLAIMS:
            self._claims.popitem(last=False)

    def _stands(self, leader_status: LeaderStatus) -> None:
        self.leader_status = leader_status
        if self.metrics.leading is not None:
            self.metrics.leading = replace(self.metrics.leading, status=leader_status)
        while self._claims and next(iter(self._claims)) < leader_status.oldest_unsettled:
            self._claims.popitem(last=False)

    # --- group ------------------------------------------------------------------------------------

    def _grouped(self, orders: GroupOrders, now_s: float) -> None:
        """Follow the membership and the collective that a trigger names."""
        if self._applying is not None and orders.made.version >= self._applying.update.version:
            self._applied(self._applying, now_s)
        members = orders.membership.members
        self.metrics.group.memberships.inc(self._members is not None and members != self._members)
        self._members = members
        attempt = None if orders.reduce is None else orders.reduce.attempt
        if self._attempt is not None and attempt != self._attempt[0]:
            self.metrics.group.attempts_broken.inc()
            self._broke_s, self._attempt = self._broke_s or now_s, None
        if attempt is not None and self._attempt is None:
            self._attempt = attempt, now_s

    def _added_up(self, now_s: float) -> None:
        """Measure the collective of an update that members have finished."""
        if self._attempt is not None:
            self.metrics.group.collective_s.observe(max(now_s - self._attempt[1], 0.0))
            if self._broke_s is not None:
                self.metrics.group.repair_s.observe(max(now_s - self._broke_s, 0.0))
        self._attempt = self._broke_s = None

    # --- rounds -----------------------------------------------------------------------------------

    def _triggered(self, trigger: UpdateTrigger, begin_s: float, end_s: float) -> None:
        if not self._asked and self._updated_s is not None:
            self.metrics.stage_s.labels("wait").observe(max(begin_s - self._updated_s, 0.0))
        asked = [batch.offset for order in trigger.orders for batch in order.batches]
        again = self._asked.keys() & asked
        self.metrics.redispatched.inc(len(again))
        for offset in asked:
            self._asked.setdefault(offset, end_s)
            claimed = self._claims.get(offset)
            if claimed is not None and claimed.trace is not None and claimed.waits:
                claimed.waits = False
                self._tracer.span(
                    claimed.trace,
                    "batch.wait",
                    claimed.received_s,
                    end_s,
                    epoch=trigger.model.epoch,
                    version=trigger.model.version,
                )

    def _apply(self, number: int, update: UpdateApplied, begin_s: float) -> None:
        asked = [self._asked.pop(batch.offset, begin_s) for batch in update.batches]
        triggered_s = min(asked, default=begin_s)
        gradient_s = self._gradient_at.pop(number, begin_s)
        self._applying = _Applying(update, begin_s, triggered_s, gradient_s)
        if update.gradient_s > 0:
            self._gradients_s.append(update.gradient_s)
            self.gradient_s = sum(self._gradients_s) / len(self._gradients_s)

    def _applied(self, applying: _Applying, end_s: float) -> None:
        """Measure an update whose model is published."""
        self._applying, self._updated_s = None, end_s
        gradients_s = applying.gradient_s - applying.triggered_s
        self.metrics.stage_s.labels("gradients").observe(max(gradients_s, 0.0))
        self.metrics.stage_s.labels("apply").observe(max(end_s - applying.begin_s, 0.0))
        update = applying.update
        for batch in update.batches:
            claimed = self._claims.pop(batch.offset, None)
            if claimed is None:
                # An earlier leader received the claim.
                continue
            if claimed.last_s > 0:
                self.metrics.record_age_s.observe(max(end_s - claimed.last_s, 0.0))
            if claimed.trace is not None:
                self._trace(claimed, claimed.trace, batch, applying, end_s)
        self.updated(update)

    def updated(self, update: UpdateApplied) -> None:
        """Count an applied update."""
        metrics, leading = self.metrics, self.metrics.leading
        metrics.updates.inc()
        metrics.update_batches.inc(len(update.batches))
        metrics.update_records.inc(update.samples)
        if update.short in SHORT:
            metrics.short_updates.labels(update.short).inc()
        if leading is not None:
            before, now = leading.synchrony, update.synchrony or Synchrony(self.spec.group_size)
            metrics.switches.inc(before is not None and before.mode != now.mode)
            metrics.leading = replace(
                leading, version=update.version, loss=update.loss, update=update, synchrony=now
            )

    def _trace(
        self, claimed: _Claimed, trace: BatchTrace, batch: Batch, applying: _Applying, end_s: float
    ) -> None:
        """End a batch's trace."""
        epoch, version = applying.update.epoch, applying.update.version
        self._tracer.span(
            trace, "batch.apply", applying.gradient_s, end_s, epoch=epoch, version=version
        )
        self._tracer.span(
            trace,
            "batch",
            claimed.first_s if claimed.first_s > 0 else claimed.received_s,
            end_s,
            root=True,
            job=self.spec.name,
            worker=batch.worker,
            samples=batch.samples,
            offset=batch.offset,
            streams=tuple(sorted({span.topic for span in batch.address})),
            epoch=epoch,
            version=version,
        )

    def _dropped(self, reply: Reply, reason: str, leading: LeaderFigures) -> None:
        if isinstance(reply, Gradient | GradientReady):
            self.metrics.replies_refused.labels("gradient").inc()
            if reply.model.epoch == leading.epoch:
                self.metrics.staleness.labels("no").observe(_age(reply, leading))
        # Other reasons mean that the reply was used.
        elif reason == OVER:
            kind = "failed" if isinstance(reply, Failed) else "leaving"
            self.metrics.replies_refused.labels(kind).inc()


def _age(gradient: Gradient | GradientReady, leading: LeaderFigures) -> int:
    """Age of a gradient in updates of the model."""
    return max(leading.version - gradient.model.version, 0)
