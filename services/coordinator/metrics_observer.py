"""Numbers and traces of a job's coordinator, derived from what it hears and what it does.

The loop shows each event before it is decided on, and each command once it is carried out, with the
times at which that began and ended. They are seconds since 1970, as Kafka's and the workers' are:
where the clock is set meanwhile, a length is off, or 0, and nothing else depends on it.

       update           trigger        last gradient      model published
    ─────┼─────────────────┼──────────────────┼─────┬───────────┼─────▶
         │      wait       │    gradients     │     │   apply   │

Where workers hold the weights, a collective lies between gradients and `apply`, and the model is
published by the trigger that says that its record was read back.
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

# Batches whose arrival is remembered: a few times what 100 workers may have waiting at K = 20, some
# 10 MB. Of those that are forgotten, no age and no trace is told.
MOST_CLAIMS = 65_536
RECENT_UPDATES = 32  # whose gradient times are averaged: enough for a mean, few enough to follow


@dataclass(slots=True)
class _Claimed:
    """What is remembered of a batch until its update is applied."""

    first_s: float  # arrival of its first record, 0 where it is not known
    last_s: float
    received_s: float
    trace: BatchTrace | None
    waits: bool = True  # in no trigger yet


@dataclass(frozen=True, slots=True)
class _Applying:
    """An update from its optimizer step until its model is published."""

    update: UpdateApplied
    begin_s: float
    triggered_s: float
    gradient_s: float


class MetricsObserver:
    """Follows one job's coordinator; belongs to its deciding thread, but for what it says."""

    def __init__(self, spec: JobSpec, metrics: CoordinatorMetrics, tracer: Tracer) -> None:
        self.spec = spec  # as it is now
        self.leader_status: LeaderStatus | None = None  # the newest
        self.gradient_s: float | None = None  # mu_C, mean of recent updates
        self.metrics = metrics
        self._tracer = tracer
        self._claims = OrderedDict[int, _Claimed]()  # by control offset, ascending
        self._accepted = self._refused = 0  # of this leadership, as counted so far
        self._asked = dict[int, float]()  # batches in flight: when they were ordered first
        self._gradient_at = dict[int, float]()  # when the last gradient of a round came
        self._applying: _Applying | None = None
        self._updated_s: float | None = None
        self._members: tuple[Member, ...] | None = None  # None: none were named yet
        self._attempt: tuple[AttemptId, float] | None = None  # under way, and since when
        self._broke_s: float | None = None  # when the first attempt at the next update did
        self._gradients_s = deque[float](maxlen=RECENT_UPDATES)

    def observe(self, event: CoordinatorEvent, now_s: float) -> None:
        """An event, before it is decided on."""
        if isinstance(event, events.ControlRead):
            for offset, claim in event.records:
                if isinstance(claim, BatchReady) and claim.samples:
                    self._remember(offset, claim, now_s)
        elif isinstance(event, events.WantedChanged):
            self.metrics.paused = event.wanted == "paused"
            self.metrics.held = self.metrics.held and event.wanted == "paused"

    def decided(self, ledger: Ledger) -> None:
        """What the leader's ledger has decided by now."""
        self.metrics.claims_accepted.inc(ledger.accepted - self._accepted)
        self.metrics.claims_refused.inc(ledger.refused - self._refused)
        self._accepted, self._refused = ledger.accepted, ledger.refused

    def saw_streams(self, epoch: int, figures: StreamFigures | None) -> bool:
        """What a watch of the streams saw, None if nothing; for any thread.

        Args:
            epoch: Of the leader for which it watches; another's are none of our business.
            figures: What it saw.

        Returns:
            Whether that leader leads.
        """
        leading = self.metrics.leading  # once: it may end meanwhile
        if leading is None or leading.epoch != epoch:
            return False
        self.metrics.streams = epoch, figures
        return True

    def saw(self, *, busy: float, group_size: int) -> None:
        """Note how busy workers are, and K of an update that would begin now."""
        leading = self.metrics.leading
        if leading is not None and (leading.busy, leading.group_size) != (busy, group_size):
            self.metrics.leading = replace(leading, busy=busy, group_size=group_size)

    def done(self, command: CoordinatorCommand, begin_s: float, end_s: float) -> None:  # noqa: C901, PLR0912 -- one case per command
        """A command was carried out, or what it needed was away."""
        leading = self.metrics.leading
        match command:
            case do.Begin(epoch, snapshot):
                self._begin(epoch, snapshot)
            case do.Hold():
                self.metrics.held = True
            case do.StepDown() | do.Finish():
                self._end()
            case _ if leading is None:
                pass  # a candidate's
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
                kind = reason.partition(":")[0]  # "expired", or "poison: ..." with what happened
                known = kind if kind in QUARANTINED else "poison"
                self.metrics.quarantined.labels(known).inc()
            case do.Drop(reply, reason):
                self._dropped(reply, reason, leading)
            case do.DiscardSum(number):
                self._asked.clear()  # of other rounds, too: they are mostly discarded together
                self._gradient_at.pop(number, None)
                self._updated_s = None
            case _:
                pass  # says nothing that is measured

    # --- a leadership ------------------------------------------------------------------------

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
        """Keep when it came, whether it is accepted or not: what is refused is never asked for."""
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

    # --- a group -----------------------------------------------------------------------------

    def _grouped(self, orders: GroupOrders, now_s: float) -> None:
        """What members are told."""
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
        """Members have the next update."""
        if self._attempt is not None:
            self.metrics.group.collective_s.observe(max(now_s - self._attempt[1], 0.0))
            if self._broke_s is not None:
                self.metrics.group.repair_s.observe(max(now_s - self._broke_s, 0.0))
        self._attempt = self._broke_s = None

    # --- a round -----------------------------------------------------------------------------

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
        """The new model is published."""
        self._applying, self._updated_s = None, end_s
        gradients_s = applying.gradient_s - applying.triggered_s
        self.metrics.stage_s.labels("gradients").observe(max(gradients_s, 0.0))
        self.metrics.stage_s.labels("apply").observe(max(end_s - applying.begin_s, 0.0))
        update = applying.update
        for batch in update.batches:
            claimed = self._claims.pop(batch.offset, None)
            if claimed is None:
                continue  # accepted by an earlier leader
            if claimed.last_s > 0:
                self.metrics.record_age_s.observe(max(end_s - claimed.last_s, 0.0))
            if claimed.trace is not None:
                self._trace(claimed, claimed.trace, batch, applying, end_s)
        self.updated(update)

    def updated(self, update: UpdateApplied) -> None:
        """Count an update that was applied."""
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
        """The batch has come to its end."""
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
        elif reason == OVER:  # else it was heeded
            kind = "failed" if isinstance(reply, Failed) else "leaving"
            self.metrics.replies_refused.labels(kind).inc()


def _age(gradient: Gradient | GradientReady, leading: LeaderFigures) -> int:
    """How many updates older than the model a gradient is."""
    return max(leading.version - gradient.model.version, 0)
