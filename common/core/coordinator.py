"""The coordinator of one job: who leads, by compare-and-set in the updates topic.

    standby ──lease──▶ candidate ──own Lead read back as valid──▶ leading ──▶ finished
       ▲                   │ somebody was faster                     │ a later valid Lead counts,
       └───────────────────┴─────────────────────────────────────────┘ or the lease went to another

The lease in Redis only says who may try. What a leader decides is in `leader`; this file never
learns of batches or gradients. The shell carries out commands in order and reports back by events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.leader import Leader
from common.core.messages import Lead
from common.core.snapshots import Snapshot, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent, Wanted
    from common.core.history import History
    from common.core.messages import AuditRecord
    from common.core.settings import CoordinatorSettings

CANDIDACY_S = 5.0  # a Lead that is not read back by then will not be: Kafka is away, try afresh
RENEWALS = 3  # lease renewals per lifetime: two may fail


class Coordinator:
    """One replica's state for one job; `on` takes events, `due` says when it wants a `Tick`.

    Args:
        name: Of this process, unique among all that ever live: it marks own Lead records.
        settings: The job's.
    """

    def __init__(self, name: str, settings: CoordinatorSettings) -> None:
        self._name = name
        self._settings = settings
        self._wanted: Wanted = "running"
        self._candidacies = 0
        self._lease_at = float("-inf")
        self._alive_at = float("-inf")
        self._candidate: tuple[Snapshot, str, float] | None = None  # base, mark, since when
        self._searching_since: float | None = None
        self._history: History | None = None
        self._leader: Leader | None = None
        self.finished = False

    @property
    def leader(self) -> Leader | None:
        """What it decides as a leader, None while it does not lead."""
        return self._leader

    def on(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorCommand, ...]:
        """Take in an event; returns what to do, in order."""
        if self.finished:
            return ()
        commands = list(self._on(event, now))
        if any(isinstance(command, do.Finish) for command in commands):
            self._reset()
            self.finished = True
            commands.append(do.ReleaseLease())
        return tuple(commands)

    def due(self) -> float:
        """When it wants a `Tick` at the latest."""
        if self.finished:
            return float("inf")
        times = [self._lease_at + self._settings.lease_ttl_s / RENEWALS]
        if self._leader is not None:
            times += [self._leader.due(), self._alive_at + self._settings.alive_s]
        return min(times)

    def _on(  # noqa: C901 -- one case per event, each a line
        self, event: CoordinatorEvent, now: float
    ) -> Iterator[CoordinatorCommand]:
        leader = self._leader
        match event:
            case events.Tick():
                yield from self._tick(now)
            case events.LeaseAnswered(held):
                yield from self._lease_answered(now, held=held)
            case events.SnapshotsFound():
                yield from self._stand(event, now)
            case events.UpdatesRead(records):
                for offset, record in records:
                    yield from self._update_read(offset, record, now)
            case events.WantedChanged(wanted):
                self._wanted = wanted
                if leader is not None:
                    yield from leader.want(wanted, now)
            case events.ControlRead(claims) if leader is not None:
                yield from leader.control_read(claims, now)
            case events.RepliesRead(replies) if leader is not None:
                yield from leader.replies_read(replies, now)
            case events.WorkersSeen(statuses) if leader is not None:
                yield from leader.workers_seen(statuses, now)
            case events.Trouble(reason) if leader is not None:
                yield from leader.hold(reason)
            case _:
                pass  # meant for the leader that this process was

    def _tick(self, now: float) -> Iterator[CoordinatorCommand]:
        if self._candidate is not None and now - self._candidate[2] > CANDIDACY_S:
            yield from self._step_down("its Lead record did not come back")
        if now >= self._lease_at + self._settings.lease_ttl_s / RENEWALS:
            self._lease_at = now
            yield do.AskLease()
        if self._leader is not None:
            if now >= self._alive_at + self._settings.alive_s:
                self._alive_at = now
                yield do.LookForWorkers()
            yield from self._leader.tick(now)

    def _lease_answered(self, now: float, *, held: bool) -> Iterator[CoordinatorCommand]:
        if not held:
            if self._leader is not None or self._candidate is not None:
                yield from self._step_down("the lease is held by another")
            self._searching_since = None
        elif self._leader is None and self._candidate is None:
            since = self._searching_since
            if since is None or now - since > CANDIDACY_S:  # the answer may have got lost
                self._searching_since = now
                yield do.FindSnapshots()

    def _stand(self, found: events.SnapshotsFound, now: float) -> Iterator[CoordinatorCommand]:
        """Stand as a candidate, on the best snapshot there is."""
        if self._searching_since is None:
            return
        self._searching_since = None
        snapshot, self._history = choose(found.snapshots, found.updates)
        self._candidacies += 1
        mark = f"{self._name}#{self._candidacies}"
        self._candidate = (snapshot, mark, now)
        yield do.AppendAudit(Lead(self._history.epoch, snapshot.made, mark))

    def _update_read(
        self, offset: int, record: AuditRecord | None, now: float
    ) -> Iterator[CoordinatorCommand]:
        history = self._history
        if history is None or offset < history.position:
            return
        counts = history.feed(offset, record)
        if isinstance(record, Lead):
            if self._leader is not None:
                if counts:
                    yield from self._step_down(f"{record.candidate} leads from offset {offset}")
            elif self._candidate is not None and record.candidate == self._candidate[1]:
                if counts:
                    yield from self._lead(offset, now)
                else:
                    yield from self._step_down("somebody was faster")
        elif counts and self._leader is not None and record is not None:
            history.forget_before(history.head.version)  # a Lead that goes back ends it all anyway
            yield from self._leader.audit_read(offset, record, now)

    def _lead(self, epoch: int, now: float) -> Iterator[CoordinatorCommand]:
        if self._candidate is None or self._history is None:
            raise AssertionError("only a candidate begins to lead")
        snapshot = self._candidate[0]
        self._candidate = None
        quarantined = self._history.quarantined
        self._leader = Leader(epoch, snapshot, quarantined, self._settings, now)
        self._alive_at = now
        yield do.Begin(epoch, snapshot)
        yield from self._leader.begin(quarantined.values(), now)
        yield from self._leader.want(self._wanted, now)

    def _step_down(self, reason: str) -> Iterator[CoordinatorCommand]:
        self._reset()
        yield do.StepDown(reason)
        yield do.ReleaseLease()

    def _reset(self) -> None:
        self._leader = self._candidate = self._history = None
        self._searching_since = None
