"""The coordinator of one job: leader election by compare-and-set in the updates topic.

    standby ──lease──▶ searching ──weights in hand──▶ candidate ──own Lead read back──▶ leading
       ▲                   │                              │ another was faster             │ a later
       └───────────────────┴──────────────────────────────┴────────────────────────────────┘ Lead
                                                         counts, or another gets the lease

The lease in Redis only decides which replica may try. `SnapshotSearch` finds a candidate's start,
and `Leader` makes the decisions of a leader. This file handles no batches or gradients. The shell
executes the commands in order and reports the results as events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from common.core import commands as do
from common.core import events
from common.core.leader import STOPPED, Leader
from common.core.losses import Recovery
from common.core.messages import (
    CHANCES,
    AuditRecord,
    CheckpointStored,
    Lead,
    ModelId,
    Quarantined,
    UpdateApplied,
)
from common.core.settings import AggregationSettings, CoordinatorSettings, slices_of
from common.core.snapshot_search import SEARCH_AGAIN_S, Chosen, Lost, Missing, SnapshotSearch, Wait
from common.core.snapshots import Snapshot, roll_forward

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.history import History

# Time after which an unanswered request for snapshots is sent again.
SEARCH_S = 5.0
# Delay after a failed attempt, which usually means that a server is down. It is short because each
# attempt asks only that server, and the job stands still until an attempt succeeds.
AGAIN_S = 0.5
# Time since the last step of a candidacy (snapshot found, weights in hand, Lead delivered) after
# which the candidate gives up. It is long because no other replica leads meanwhile, and giving up
# early costs another search. A failed step reports itself at once by an event.
CANDIDACY_S = 60.0
# Updates kept for members that missed triggers. A member that is further behind is of no use.
MOST_BEHIND = 100
# Lease renewals per lifetime: two may fail.
RENEWALS = 3
# Maximum factor on the lifetime of the lease. It doubles each time that this process is deposed as
# a leader, because the process was then too slow for its lease.
LONGEST_LEASE = 4


@dataclass(slots=True)
class _Candidacy:
    """A candidate's base, and the progress of the candidacy."""

    chosen: Chosen
    # Time of its last step.
    since: float
    # Settings of the future holders of the weights, see `_who_holds`.
    among: AggregationSettings | None
    exact: bool
    # Candidate name in its Lead record. Empty until the record is appended.
    candidacy_id: str = ""
    # Digest of the restored model. Empty if members hold the weights.
    digest: str = ""


class Coordinator:
    """State of one replica for one job. `on` processes events; `due` is when it needs a `Tick`.

    Args:
        name: Name of this process, unique for all time. It marks the replica's own Lead records.
    """

    def __init__(self, name: str, settings: CoordinatorSettings) -> None:
        self._name = name
        self._settings = settings
        self._request = events.WantedChanged("running")
        self._candidacies = 0
        self._lease_at = float("-inf")
        # Number of `lease_ttl_s` to request as the lifetime of the lease.
        self._lifetimes = 1
        self._alive_at = float("-inf")
        self._search = self._new_search()
        self._searching_since: float | None = None
        self._candidacy: _Candidacy | None = None
        self._history: History | None = None
        # The leader's state, if this replica leads.
        self.leader: Leader | None = None
        # Upper limit of the candidacy's base, see `SnapshotSearch`.
        self._limit: ModelId | None = None
        # The leader in force when the limit was set. A later leader makes the limit obsolete.
        self._limit_of = -1
        # Failures of batches, known from before the fallback.
        self._failures = dict[int, int]()
        # Batches that were put back once before the fallback.
        self._returned = frozenset[int]()
        # Versions in storage, known from before the fallback.
        self._stored = tuple["ModelId", ...]()
        # True if the job is held until a person resumes it.
        self._held = False
        # True if a named checkpoint was not found.
        self._awaits = False
        self.finished = False

    def on(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorCommand, ...]:
        """Process an event and return the resulting commands in order."""
        if self.finished:
            return ()
        leader = self.leader
        # The most frequent event: one for each gradient.
        if leader is not None and isinstance(event, events.RepliesRead):
            commands = list(leader.replies_read(event.replies, now))
        else:
            commands = list(self._on(event, now))
        if self.leader is not None and self.leader.error:
            commands += self._hold(self.leader.error, "")
        if self.leader is not None and self.leader.fallback is not None:
            commands += self._fall_back(self.leader.fallback, now)
        if self.leader is not None and self.leader.handover.done:
            commands += self._hand_over(now)
        if do.Finish in map(type, commands):
            self._reset()
            self.finished = True
            commands.append(do.ReleaseLease())
        return tuple(commands)

    def due(self) -> float:
        """Return the latest time of the next `Tick`.

        If the leader is idle, that is usually the renewal of the lease. Polls of the heartbeats and
        the leader's status wait for that tick, so that an idle job rarely wakes up.
        """
        if self.finished or self._held:
            return float("inf")
        times = [self._lease_at + self._settings.lease_ttl_s / RENEWALS]
        if self.leader is not None:
            times.append(self.leader.due())
            if not self.leader.idle:
                times.append(self._alive_at + self._settings.alive_s)
        return min(times)

    def _on(  # noqa: C901, PLR0912, PLR0915 -- one case per event, each a line or two
        self, event: CoordinatorEvent, now: float
    ) -> Iterator[CoordinatorCommand]:
        leader = self.leader
        match event:
            case events.ControlRead(claims, epoch) if leader is not None:
                yield from leader.control_read(claims, epoch, now)
            case events.Tick():
                yield from self._tick(now)
            case events.LeaseAnswered(held):
                yield from self._lease_answered(now, held=held)
            case events.SnapshotsFound():
                yield from self._found(event, now)
            case events.SnapshotRestored(number, digest):
                yield from self._stand(number, digest, now)
            case events.LeadDelivered(candidate):
                if self._candidacy is not None and self._candidacy.candidacy_id == candidate:
                    self._candidacy.since = now
            case events.AttemptFailed(reason):
                stood = leader is not None or self._candidacy is not None
                if stood:
                    yield from self._step_down(reason)
                if stood or self._searching_since is not None:
                    self._searching_since = now + AGAIN_S - SEARCH_S
            case events.SnapshotTorn(snapshot):
                yield from self._torn(snapshot, now)
            case events.UpdatesRead(records, epoch):
                for offset, record in records:
                    yield from self._update_read(offset, record, epoch, now)
            case events.WantedChanged(wanted):
                self._request = event
                self._held = self._held and wanted == "paused"
                # The owner may have decided to continue without the checkpoint.
                if self._awaits:
                    self._lease_at = float("-inf")
                if leader is not None:
                    yield from leader.want(wanted, now)
            case events.SettingsChanged(settings):
                self._settings = settings
                self._search.rolls = settings.aggregation is not None
                if leader is not None:
                    yield from leader.change(settings, now)
            case events.HoldRequired(reason, detail):
                yield from self._hold(reason, detail)
            case events.StreamsSeen() if leader is not None:
                reason = leader.why_lost(event)
                yield from self._hold(reason, "") if reason else leader.streams_seen(event)
                if leader.unheard and self.leader is leader:
                    yield from self._step_down(
                        "Kafka does not return the records that this leader wrote"
                    )
            case events.CheckpointVerified(name) if leader is not None:
                if name.epoch == leader.model.epoch:
                    yield do.AppendAudit(CheckpointStored(*name))
            case events.StateStored(made) if leader is not None:
                yield from leader.state_stored(made, now)
            case events.Summed() if leader is not None:
                yield from leader.summed(event, now)
            case events.WorkersSeen(beats) if leader is not None:
                yield from leader.workers_seen(beats, now)
            case events.BoardWiped() if leader is not None:
                yield from leader.board_wiped(now)
            case events.OrdersLost() if leader is not None:
                yield from leader.orders_lost(now)
            case _:
                # The event was meant for a former leader of this process.
                pass

    def _tick(self, now: float) -> Iterator[CoordinatorCommand]:
        if self._held:
            return
        if self._candidacy is not None and now - self._candidacy.since > CANDIDACY_S:
            yield from self._step_down(
                "this coordinator stood for election and was not elected in time"
            )
        if now >= self._lease_at + self._settings.lease_ttl_s / RENEWALS:
            self._lease_at = now
            yield do.AskLease(self._lifetimes * self._settings.lease_ttl_s)
        if self.leader is not None:
            settings = self._settings
            every_s = settings.idle_s if self.leader.idle else settings.alive_s
            if now >= self._alive_at + every_s:
                self._alive_at = now
                yield do.ReadHeartbeats()
            yield from self.leader.tick(now)

    def _lease_answered(self, now: float, *, held: bool) -> Iterator[CoordinatorCommand]:
        if not held:
            if self.leader is not None:
                yield from self._deposed("another coordinator has the lease")
            elif self._candidacy is not None:
                yield from self._step_down("another coordinator has the lease")
            self._searching_since = None
        elif self.leader is None and self._candidacy is None and not self._held:
            since = self._searching_since
            if since is None or now - since > SEARCH_S:
                self._searching_since = now
                self._limit = None
                self._failures, self._returned, self._stored = {}, frozenset(), ()
                yield self._search.begin()

    # --- from the lease to the Lead record ---------------------------------------------------

    def _found(self, found: events.SnapshotsFound, now: float) -> Iterator[CoordinatorCommand]:
        if self._searching_since is None or found.source != self._search.source:
            return
        self._awaits = False
        match self._search.found(found, self._request, now):
            case Chosen(_, history) if self._limit is not None and history.epoch != self._limit_of:
                yield from self._step_down("another coordinator has led meanwhile")
            case Chosen(snapshot, history) as chosen:
                self._searching_since = None
                self._history = history
                if history.slices is not UNSET:
                    if self._limit is None and self._request.after_loss > history.after_loss:
                        # The owner reports a loss, so the claims of later updates may be lost.
                        self._limit, self._limit_of = snapshot.made, history.epoch
                    rolled = roll_forward(snapshot, history, found.updates, self._limit)
                    # Without this, `on_missing: proceed` could put the same batches back again
                    # after each fallback.
                    returned = tuple(sorted({*rolled.returned, *self._returned}))
                    stored = {*(rolled.stored or ()), *self._stored}
                    ordered = tuple(sorted(stored, key=lambda made: made.version))
                    rolled = replace(rolled, returned=returned, stored=ordered or UNSET)
                    chosen = chosen._replace(snapshot=rolled)
                among = self._who_holds(chosen, snapshot)
                exact = {history.slices, slices_of(among)} != {UNSET} and self._limit is None
                self._candidacy = _Candidacy(chosen, now, among, exact)
                yield do.RestoreSnapshot(snapshot, members=among is not None)
            case Lost(reason):
                yield from self._hold(reason, "")
            case Missing(reason) if self._request.wanted == "stopped":
                yield from self._hold(reason, "")
            case Missing(reason):
                self._awaits, self._searching_since = True, None
                self._lease_at = now + SEARCH_AGAIN_S - self._settings.lease_ttl_s / RENEWALS
                yield do.AwaitCheckpoint(reason)
                yield do.ReleaseLease()
            case Wait():
                self._searching_since = None
                # Request the lease again one lifetime from now.
                self._lease_at = now + self._settings.lease_ttl_s * (1 - 1 / RENEWALS)
                yield do.ReleaseLease()
            case further:
                yield further

    def _who_holds(self, chosen: Chosen, found: Snapshot) -> AggregationSettings | None:
        """Return the requested holders of the weights, or the current ones if these must continue.

        New holders start from storage. If the newest update is not there, the current holders
        continue and store it first, see `HandOver`. Members start from the rolled-forward version,
        a coordinator from the weights of the snapshot that was found.
        """
        snapshot, history = chosen.snapshot, chosen.history
        newest = snapshot.made == history.head or self._limit is not None
        wanted, known = self._settings.slices, history.slices
        begins = found if wanted is UNSET else snapshot
        there = begins.in_storage and begins.made == snapshot.made
        if wanted == known or (there and newest):
            return self._settings.aggregation
        return AggregationSettings.of(known)

    def _torn(self, snapshot: Snapshot, now: float) -> Iterator[CoordinatorCommand]:
        if self._candidacy is not None and not self._candidacy.candidacy_id:
            self._search.leave_out(snapshot)
            self._candidacy = self._history = None
            self._searching_since = now
            yield self._search.begin(self._limit)

    def _stand(self, number: int, digest: str, now: float) -> Iterator[CoordinatorCommand]:
        """Append a Lead record, because the weights are in hand."""
        if self._candidacy is None or self._candidacy.candidacy_id or self._history is None:
            return
        self._candidacies += 1
        self._candidacy.since, self._candidacy.digest = now, digest
        self._candidacy.candidacy_id = f"{self._name}#{self._candidacies}"
        chosen, after = self._candidacy.chosen, self._history.epoch
        yield do.AppendAudit(
            Lead(
                after=after,
                base=chosen.snapshot.made,
                candidate=self._candidacy.candidacy_id,
                # Higher than all earlier epochs, even if the clock is behind. The random part
                # avoids a number that a log has lost.
                epoch=max(number, max(after, chosen.above) + 1 + number % CHANCES),
                after_loss=max(self._request.after_loss, self._history.after_loss),
                loss=chosen.loss,
                exact=self._candidacy.exact or UNSET,
                slices=slices_of(self._candidacy.among),
            )
        )

    def _update_read(
        self, offset: int, record: AuditRecord | None, epoch: int, now: float
    ) -> Iterator[CoordinatorCommand]:
        history = self._history
        if history is None or offset < history.position:
            return
        counts = history.feed(offset, record, epoch)
        if isinstance(record, Lead):
            yield from self._lead_read(history, record, now, counts=counts)
        elif isinstance(record, UpdateApplied | Quarantined) and self._is_void(history, record):
            yield from self._hold(
                "the updates topic lost a record: of the records that this leader wrote, number"
                f" {history.number + 1} is missing and number {record.number} is there; `doll job"
                " resume` continues from the last snapshot and trains on the records since then"
                " again",
                "",
            )
        elif counts and self.leader is not None and record is not None:
            # A Lead with an older base ends this leadership anyway, so older updates are not
            # needed. But members may be a few versions behind.
            behind = 0 if history.slices is UNSET else MOST_BEHIND
            history.forget_before(history.head.version - behind)
            yield from self.leader.audit_read(record, now)

    def _is_void(self, history: History, record: UpdateApplied | Quarantined) -> bool:
        """True if this leader wrote the record after one that was lost."""
        own = self.leader is not None and record.epoch == self.leader.model.epoch
        return own and record.epoch == history.epoch and record.number > history.number

    def _lead_read(
        self, history: History, lead: Lead, now: float, *, counts: bool
    ) -> Iterator[CoordinatorCommand]:
        candidacy = self._candidacy
        own = candidacy is not None and lead.candidate == candidacy.candidacy_id
        if self.leader is not None and counts:
            yield from self._deposed(f"{lead.candidate} leads with epoch {history.epoch}")
        elif candidacy is not None and own and counts:
            yield from self._lead(candidacy, now)
        # An update of the previous leader arrived before the Lead.
        elif own and lead.after == history.epoch:
            self._candidacy = self._history = None
            self._searching_since = now
            yield self._search.begin(self._limit)
        elif candidacy is not None and (own or (counts and not candidacy.candidacy_id)):
            yield from self._step_down("another coordinator was elected")

    def _lead(self, candidacy: _Candidacy, now: float) -> Iterator[CoordinatorCommand]:
        if self._history is None:
            raise AssertionError("only a candidate begins to lead")
        snapshot, self._candidacy = candidacy.chosen.snapshot, None
        settings = dataclasses.replace(self._settings, aggregation=candidacy.among)
        epoch = self._history.epoch
        # A recovery policy applies to one Lead: to the losses found by this leader's first poll.
        recovery = Recovery(self._history.judged == epoch, self._request.read_from)
        parts = epoch, snapshot, self._history, settings, now, recovery, self._failures
        self.leader = Leader(*parts, digest=candidacy.digest)
        self._alive_at = now
        yield do.Begin(epoch, snapshot)
        yield from self.leader.begin(self._history, now)
        if settings.slices != self._settings.slices:
            yield from self.leader.change(self._settings, now)
        yield from self.leader.want(self._request.wanted, now)

    def _new_search(self) -> SnapshotSearch:
        settings = self._settings
        return SnapshotSearch(settings.lease_ttl_s, rolls=settings.aggregation is not None)

    # --- holding and stepping down -----------------------------------------------------------

    def _hold(self, reason: str, detail: str) -> Iterator[CoordinatorCommand]:
        """Hold the job until a person resumes it, because no program may decide this."""
        if self._held:
            return
        if self._request.wanted == "stopped":
            yield do.Finish(f"{STOPPED}; {reason}", self._settings.revision, stopped=True)
            return
        yield do.Hold(reason, detail)
        yield from self._step_down(reason)
        # A torn snapshot may be repaired meanwhile.
        self._search = self._new_search()
        self._held = True

    def _fall_back(self, base: ModelId, now: float) -> Iterator[CoordinatorCommand]:
        """Stand for election from an older version, because no member holds the newest update."""
        if self.leader is not None:
            self._failures, self._returned = self.leader.failure_counts, self.leader.returned
            self._stored, self._limit_of = self.leader.stored, self.leader.model.epoch
        self._reset()
        yield do.StepDown(
            f"no worker holds the newest update, so training goes back to version {base.version}",
            base.version,
        )
        self._searching_since, self._limit = now, base
        yield self._search.begin(base)

    def _hand_over(self, now: float) -> Iterator[CoordinatorCommand]:
        """Stand for election again, because the newest update is in storage for its new holders."""
        self._reset()
        yield do.StepDown("the weights move to other holders")
        self._searching_since = now
        self._limit = None
        self._failures, self._returned, self._stored = {}, frozenset(), ()
        yield self._search.begin()

    def _deposed(self, reason: str) -> Iterator[CoordinatorCommand]:
        self._lifetimes = min(2 * self._lifetimes, LONGEST_LEASE)
        yield from self._step_down(reason)

    def _step_down(self, reason: str) -> Iterator[CoordinatorCommand]:
        self._reset()
        yield do.StepDown(reason)
        yield do.ReleaseLease()

    def _reset(self) -> None:
        self.leader = self._candidacy = self._history = None
        self._searching_since = None
