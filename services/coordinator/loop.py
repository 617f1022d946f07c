"""One replica's part in one job, as an actor: events in, decisions out, one at a time."""

from __future__ import annotations

import dataclasses
from collections import deque
from math import ceil, inf
from time import monotonic, time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from common.core import events
from common.core.coordinator import Coordinator
from common.core.settings import CoordinatorSettings
from common.errors import DeliveryError, OutsideError
from common.jobs.notes import window_note
from common.telemetry.logging import Changes
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.outages import Outage
from services.coordinator.effects.dispatch import Effects
from services.coordinator.inbox import CoordinatorInbox
from services.coordinator.metrics_observer import MetricsObserver
from services.coordinator.replica import JobContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.core.commands import CoordinatorCommand
    from common.core.messages import Wanted
    from common.jobs.store import JobRecord
    from common.runtime.supervisor import PreviousFault
    from services.coordinator.replica import CoordinatorReplica

# Inbox reads per turn. A replay may have a hundred thousand records, and other jobs need their
# turns, too.
PASSES = 4
# Turns of idle jobs fall on multiples of this, so that a thread wakes up once for many of them and
# their requests to Redis share a packet.
GRID_S = 0.1
# Consecutive failed deliveries after which a further attempt is expected to fail, too.
DELIVERIES = 3
# The same for other consecutive faults, except those that a server caused.
FAULTS = 5


def begins(record: JobRecord, new: bool) -> bool:  # noqa: ARG001, FBT001 -- as `Jobs` asks it
    """Return True if this process takes part in the job."""
    return record.wanted != "stopped"


class JobCoordinator:
    """One replica's part in one job, until the job ends or an exception ends the part.

    Args:
        replica: Everything that all jobs of the replica share.
        record: Returns the newest record of the job; None if the job was deleted.
        wake: Makes the supervisor call `turn` soon.
        fault: The fault that ended the previous part, if any.
    """

    def __init__(
        self,
        replica: CoordinatorReplica,
        record: Callable[[], JobRecord | None],
        wake: Callable[[], None],
        fault: PreviousFault | None = None,
    ) -> None:
        first = record()
        if first is None:
            raise AssertionError("the job does not exist any more")
        self._newest = record
        self.job = first.spec.name
        self._replica = replica
        self._log = replica.logger.bind(job=self.job)
        protocol = protocol_settings(first)
        self._machine = Coordinator(replica.name, protocol)
        self._request = request_of(first)
        # True if this actor must end: the job is gone, or it was resumed and gets a new actor.
        self._stopping = False
        # True after repeated faults. A resumed job starts with a new actor.
        self._gave_up = False
        metrics = CoordinatorMetrics(self._checkpoint_age_s)
        self._measuring = MetricsObserver(first.spec, metrics, replica.tracer)
        self._inbox = CoordinatorInbox(wake, Outage(self._log, "redis"))
        self._context = JobContext(
            replica,
            first,
            replica.boards.board(first.id),
            self._inbox,
            self._measuring,
            self._log,
            self._inbox.outage,
        )
        self._effects = Effects(self._context, protocol.lease_ttl_s)
        self._begun = False
        self._changes = Changes()
        self._fault = fault
        replica.metrics.follow(self.job, metrics)

    @property
    def leads(self) -> bool:
        """True if this replica leads the job."""
        return self._machine.leader is not None

    def turn(self) -> float | None:
        """Process the events that arrived, then do what is due."""
        machine, effects = self._machine, self._effects
        self._begin()
        self._see_hold()
        self._follow(self._newest())
        left = True
        for _ in range(PASSES):
            left = left and self.take_in()
        # Everything known by now is decided first.
        if not left and monotonic() >= machine.due():
            self.decide(events.Tick())
        effects.poll()
        self._see_hold()
        self._see_workers()
        is_led = self.leads or self._context.ends
        if effects.ending.finished or (self._stopping and not is_led):
            return None
        stands_by = self._context.role == "standby"
        if self._request.wanted == "stopped" and stands_by and effects.lease.unable:
            return None
        leader = self._machine.leader
        missed = self._inbox.await_gradients(0 if leader is None else leader.awaited)
        return monotonic() if missed or left else self._due()

    def close(self) -> None:
        """Release the lease and all resources."""
        try:
            self._effects.close()
        finally:
            self._replica.metrics.forget(self._measuring.metrics)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self.decide(self._request)
        if self._fault is not None and _is_hopeless(self._fault):
            self._gave_up = True
            self.decide(events.HoldRequired(_given_up(self.job, self._fault), self._fault.detail))

    def _see_hold(self) -> None:
        """Pause the core after the job's record says that the job is held.

        This is called before the newest record is read, so that a later resume is not missed.
        """
        ending = self._effects.ending
        record, ending.hold_written = ending.hold_written, None
        if record is not None:
            self._want("paused")
            if record.wanted == "running":
                self._want("running")

    def _see_workers(self) -> None:
        """Report workers' utilization and K; log a warning if the mode has too few workers."""
        leader = self._machine.leader
        if leader is not None:
            self._measuring.saw(busy=leader.busy, group_size=leader.mode.group_size)
        leader_status = self._measuring.leader_status
        live = None if leader_status is None else leader_status.live
        left_out = {} if leader_status is None else leader_status.left_out
        if self._changes("left out", left_out):
            for worker, reason in sorted(left_out.items()):
                self._log.warning("worker_left_out", worker=worker, reason=reason)
        job = self._context.record
        if self._changes("live", (live, job.revision)):
            note = window_note(job.spec, live)
            if self._changes("window", note) and note:
                self._log.warning("window_too_small", reason=note)

    def take_in(self) -> bool:
        """Process the inbox; return False if it was empty."""
        some = False
        for event in self._inbox.read():
            some = True
            self.decide(event)
        return some

    def _due(self) -> float:
        """Return the latest time of the next turn."""
        due = self._machine.due()
        leader_status = self._measuring.leader_status
        idle = leader_status is not None and not leader_status.live and not leader_status.waiting
        self._context.idle = idle and not self._machine.finished
        if (idle or self._context.role == "standby") and due < inf:
            due = ceil(due / GRID_S) * GRID_S
        return min(due, self._effects.ending.due())

    def _follow(self, record: JobRecord | None) -> None:
        """Follow changes of the job's record."""
        known = self._context.record
        if record is known:
            return
        if record is None or record.submitted_s != known.submitted_s:
            # A job with another submission time is another job.
            self._stopping = True
            self._want("stopped")
            return
        self._context.record, self._measuring.spec = record, record.spec
        if record.revision != known.revision:
            self._log.info("job_changed", revision=record.revision)
            self._effects.models.change()
            self.decide(events.SettingsChanged(protocol_settings(record)))
            if self.leads and (reason := self._effects.leadership.lacking):
                self.decide(events.HoldRequired(reason))
        self._want(record.wanted)

    def _want(self, wanted: Wanted) -> None:
        if self._gave_up and (self._request.wanted, wanted) == ("paused", "running"):
            # The job was resumed: `Jobs` starts a new actor, without faults.
            self._stopping = True
        request = replace(request_of(self._context.record), wanted=wanted)
        if request != self._request:
            self._request = request
            self.decide(request)

    def decide(self, event: events.CoordinatorEvent) -> None:
        """Decide about an event, and carry the decisions out."""
        measuring, waiting = self._measuring, deque([event])
        while waiting:
            event = waiting.popleft()
            measuring.observe(event, time())
            for command in self._machine.on(event, monotonic()):
                waiting += self.carry_out(command)
            if isinstance(event, events.ControlRead) and self._machine.leader is not None:
                measuring.decided(self._machine.leader.ledger)

    def carry_out(self, command: CoordinatorCommand) -> list[events.CoordinatorEvent]:
        """Carry out a decision, and return the events that it causes at once."""
        begin_s = time()
        made = list(self._effects.carry_out(command))
        self._measuring.done(command, begin_s, time())
        return made

    def _checkpoint_age_s(self) -> float | None:
        """Return the age of the newest checkpoint if this replica leads, for the scrape thread."""
        return self._effects.snapshots.store.age_s() if self.leads else None


def _is_hopeless(fault: PreviousFault) -> bool:
    """Return True if a fault keeps recurring and the servers are not its cause."""
    if isinstance(fault.error, DeliveryError):
        return fault.alike >= DELIVERIES
    return fault.in_a_row >= FAULTS and not isinstance(fault.error, OutsideError)


def _given_up(job: str, fault: PreviousFault) -> str:
    error = fault.error
    why = (
        f"its coordinator failed {fault.in_a_row} times in a row, the last time with"
        f" {type(error).__name__}"
    )
    if isinstance(error, DeliveryError):
        why = "Kafka repeatedly refuses a record of this job"
    return f"{why}: {error}; correct the cause, then run `doll job resume {job}`"


def request_of(record: JobRecord) -> events.WantedChanged:
    """Return the state that a job's owner wants."""
    return events.WantedChanged(
        record.wanted, record.after_loss, record.from_start, record.read_from
    )


def protocol_settings(record: JobRecord) -> CoordinatorSettings:
    """Return the protocol's part of a job's specification."""
    spec, deadline_s = record.spec, record.spec.stop.deadline_s
    among = spec.among
    if among is not None and spec.evaluation is not None:
        among = dataclasses.replace(among, offer_every_updates=spec.evaluation.every_updates)
    return CoordinatorSettings(
        spec.synchronised.core_mode(spec.group_size, spec.optimizer.learning_rate),
        bound=spec.waiting_bound,
        revision=record.revision,
        rules=spec.synchronised.core_rules(spec.group_size),
        reduction=spec.reduction,
        rate_by_group=spec.rate_by_group,
        schedule=spec.optimizer.scheduled,
        group_sizes=spec.group_sizes,
        group_linger_s=spec.group_linger_s,
        on_missing=spec.on_missing,
        max_failures=spec.max_failures,
        stop_updates=spec.stop.updates,
        stop_loss=spec.stop.loss,
        stop_at=None
        if deadline_s is None
        else monotonic() + record.submitted_s + deadline_s - time(),
        hot_every_s=spec.hot_snapshot.every_s,
        checkpoint_every_s=spec.checkpoint.every_s,
        checkpoint_every_updates=spec.checkpoint_every_updates,
        aggregation=among,
    )
