"""The coordinator of one job: who leads, by compare-and-set in the updates topic.

    standby ──lease──▶ searching ──weights in hand──▶ candidate ──own Lead read back──▶ leading
       ▲                   │                              │ somebody was faster            │ a later
       └───────────────────┴──────────────────────────────┴────────────────────────────────┘ Lead
                                                          counts, or the lease went to another

The lease in Redis only says who may try. Where a candidate starts is found by `search`, what a
leader decides is in `leader`; this file never learns of batches or gradients. The shell carries out
commands in order and reports back by events.
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

SEARCH_S = 5.0  # an answer about snapshots that has not come by then got lost: ask again
# So soon after an attempt that failed, mostly since a server is away: each attempt asks that server
# only, and a job stands still for as long as nobody finds that it is back.
AGAIN_S = 0.5
# After the last step of a candidacy (snapshot found, weights in hand, Lead delivered): a next one
# that has not come by then will not, so try afresh. Long, because nobody else may lead meanwhile,
# and giving up what is only late costs a search more; what fails says so by an event, at once.
CANDIDACY_S = 60.0
MOST_BEHIND = 100  # updates that a member may be that has heard nothing, and still be of use
RENEWALS = 3  # lease renewals per lifetime: two may fail
# Times its lifetime that a lease is asked for, at most, by a process that was deposed as a leader,
# and so was slow: each time twice as long, so that it is not deposed again for the same reason.
LONGEST_LEASE = 4


@dataclass(slots=True)
class _Candidacy:
    """A candidate's base, and how far it is."""

    chosen: Chosen
    since: float  # its last step
    among: AggregationSettings | None  # who is to hold the weights: see `_who_holds`
    exact: bool
    candidacy_id: str = ""  # of its Lead record, once that is appended
    digest: str = ""  # of the model in hand, if it has one


class Coordinator:
    """One replica's state for one job; `on` takes events, `due` says when it wants a `Tick`.

    Args:
        name: Of this process, unique among all that ever live: it marks own Lead records.
    """

    def __init__(self, name: str, settings: CoordinatorSettings) -> None:
        self._name = name
        self._settings = settings
        self._request = events.WantedChanged("running")
        self._candidacies = 0
        self._lease_at = float("-inf")
        self._lifetimes = 1  # that it asks for the lease
        self._alive_at = float("-inf")
        self._search = self._new_search()
        self._searching_since: float | None = None
        self._candidacy: _Candidacy | None = None
        self._history: History | None = None
        self.leader: Leader | None = None  # what it decides as a leader, while it leads
        self._limit: ModelId | None = None  # of its candidacy: see `SnapshotSearch`
        self._limit_of = -1  # the leader in force as that was found: a later one may know better
        self._failures = dict[int, int]()  # that it knew of as a leader, before it fell back
        self._returned = frozenset[int]()  # likewise, batches that it had put back once
        self._stored = tuple["ModelId", ...]()  # likewise, versions in storage
        self._held = False  # it met trouble, and waits for a person
        self._awaits = False  # a checkpoint that was not found
        self.finished = False

    def on(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorCommand, ...]:
        """Take in an event; returns what to do, in order."""
        if self.finished:
            return ()
        leader = self.leader
        if leader is not None and isinstance(event, events.RepliesRead):  # for each gradient
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
        """When it wants a `Tick` at the latest.

        While its leader is calm that is mostly when the lease is renewed: looks at the workers and
        leaders' statuses wait for such a tick, so that a job with nothing to do wakes up seldom.
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
                if self._awaits:  # the owner may have decided to go on without the checkpoint
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
                    yield from self._step_down("Kafka does not give back what it wrote")
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
                pass  # meant for the leader that this process was

    def _tick(self, now: float) -> Iterator[CoordinatorCommand]:
        if self._held:
            return
        if self._candidacy is not None and now - self._candidacy.since > CANDIDACY_S:
            yield from self._step_down("its candidacy came to nothing")
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
                yield from self._deposed("the lease is held by another")
            elif self._candidacy is not None:
                yield from self._step_down("the lease is held by another")
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
                yield from self._step_down("another has led since")
            case Chosen(snapshot, history) as chosen:
                self._searching_since = None
                self._history = history
                if history.slices is not UNSET:
                    if self._limit is None and self._request.after_loss > history.after_loss:
                        # Of what came after it, the claims may be lost.
                        self._limit, self._limit_of = snapshot.made, history.epoch
                    rolled = roll_forward(snapshot, history, found.updates, self._limit)
                    # Else it would be put back again, by each who falls back.
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
                # Asks again one lifetime from now.
                self._lease_at = now + self._settings.lease_ttl_s * (1 - 1 / RENEWALS)
                yield do.ReleaseLease()
            case further:
                yield further

    def _who_holds(self, chosen: Chosen, found: Snapshot) -> AggregationSettings | None:
        """Who holds the weights while this candidate leads: whom its owner wants, or who does now.

        Others begin with what is in storage. Where the newest update is not there, who holds it
        goes on, and stores it first: see `HandOver`. Members begin with the version that was
        rolled forward to, a coordinator with the weights of the snapshot that was found.
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
        """Stand as a candidate: the weights are in hand."""
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
                # Whatever the clock says; by chance, since a log may lose who took the next one.
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
                f"the updates topic lost a record: number {history.number + 1} of those that this"
                f" leader wrote is missing, number {record.number} is there; `doll job resume` goes"
                " on from the last snapshot: what was learned since is learned again",
                "",
            )
        elif counts and self.leader is not None and record is not None:
            # A Lead that goes back ends it all anyway; where members hold the weights, a few of
            # them may be behind.
            behind = 0 if history.slices is UNSET else MOST_BEHIND
            history.forget_before(history.head.version - behind)
            yield from self.leader.audit_read(record, now)

    def _is_void(self, history: History, record: UpdateApplied | Quarantined) -> bool:
        """Whether it is this leader's own, and written after one that was lost."""
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
        elif own and lead.after == history.epoch:  # of the leader before an update came between
            self._candidacy = self._history = None
            self._searching_since = now
            yield self._search.begin(self._limit)
        elif candidacy is not None and (own or (counts and not candidacy.candidacy_id)):
            yield from self._step_down("somebody was faster")

    def _lead(self, candidacy: _Candidacy, now: float) -> Iterator[CoordinatorCommand]:
        if self._history is None:
            raise AssertionError("only a candidate begins to lead")
        snapshot, self._candidacy = candidacy.chosen.snapshot, None
        settings = dataclasses.replace(self._settings, aggregation=candidacy.among)
        epoch = self._history.epoch
        # A wish counts for one Lead: for what this leader finds lost when it looks first.
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

    # --- and back ----------------------------------------------------------------------------

    def _hold(self, reason: str, detail: str) -> Iterator[CoordinatorCommand]:
        """What no machine may decide alone: leave everything as it is, until a person resumes."""
        if self._held:
            return
        if self._request.wanted == "stopped":
            yield do.Finish(f"{STOPPED}; {reason}", self._settings.revision, stopped=True)
            return
        yield do.Hold(reason, detail)
        yield from self._step_down(reason)
        self._search = self._new_search()  # what was torn may be mended till then
        self._held = True

    def _fall_back(self, base: ModelId, now: float) -> Iterator[CoordinatorCommand]:
        """Nobody holds the newest update any more: stand again, from an older one."""
        if self.leader is not None:
            self._failures, self._returned = self.leader.failure_counts, self.leader.returned
            self._stored, self._limit_of = self.leader.stored, self.leader.model.epoch
        self._reset()
        yield do.StepDown(f"nobody holds the newest update: back to version {base.version}")
        self._searching_since, self._limit = now, base
        yield self._search.begin(base)

    def _hand_over(self, now: float) -> Iterator[CoordinatorCommand]:
        """The newest update is in storage: stand again, so that others hold the weights."""
        self._reset()
        yield do.StepDown("others are to hold the weights from now on")
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
