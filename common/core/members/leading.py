"""The leader's side of aggregation by members that hold the weights. It computes no numbers.

    all K gradients ready ──Reduce──▶ members enter ──Reduced──▶ UpdateApplied, naming the attempt
          ▲                              │ Broken, silence              │ read back
          └── without lost members ◀─────┘                              ▼
                                              the next trigger names the attempt: members apply it

Members apply a result only after its audit record was read back, so a takeover undoes nothing: the
next leader finds members at the newest update, or one before it with the result prepared. A member
in any other state copies from one of these. The leader falls back to an older update only if no
living member holds the newest one, all members have answered, and no other member has appeared for
the grace period.

If slices of the weights have owners, only the owners of a slice hold its optimizer state, so an
update with an ownerless slice is incomplete. The preferred owners change with the set of workers
(`common.core.members.stages`). A member copies a slice before it becomes an owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from common.core import commands as do
from common.core.members.attempts import Attempt, AttemptTimes
from common.core.members.backups import Backups
from common.core.members.membership import (
    Accusations,
    memory_shortage,
    why_apart,
    why_double,
    why_odd,
)
from common.core.members.stages import servers_of, stage_of, wanted_owners
from common.core.members.state_reports import LIFETIME_S, StateReports
from common.core.messages import (
    GENESIS,
    AttemptId,
    Broken,
    Copy,
    Gradient,
    GradientReady,
    GroupOrders,
    GroupStatus,
    Member,
    Membership,
    ModelId,
    Reduce,
    Reduced,
    StateReport,
    Stored,
    reached_bits,
)
from common.core.snapshot_publishing import is_offered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from msgspec import UnsetType

    from common.core.commands import CoordinatorCommand
    from common.core.gradient_counting import Rounds
    from common.core.history import History
    from common.core.messages import GroupReply, TriggerId, UpdateApplied, WorkerId
    from common.core.rounds import Round
    from common.core.settings import AggregationSettings, Stage
    from common.core.snapshots import Snapshot

# Expected time between polls. A longer gap means that the leader itself was delayed.
STILL_S = 1.0
# Interval of report requests while some member has not reported.
REPORT_S = 0.2
# Time after which an unconfirmed copy is ordered again.
COPY_S = 1.0
# Longest time that an update waits for a copy, for any size that members report. 600 s are
# enough for 15 billion numbers.
MOST_HEAL_S = 600.0
# Time that the status shows a refused report or a silent member.
REFUSED_S = 60.0
# Maximum number of such workers in the status.
MOST_REFUSED = 20
# Consecutive attempts with different or non-finite results before the job is held. The same batches
# give the same result again, but a single forged report does not.
CONFIRMED = 3
# Number of `LIFETIME_S` for which a member may be silent if it alone holds the weights or a slice.
SOLE = 3
SILENT = "the worker does not answer: its process is frozen, or a message in its name was forged"
RIVAL = "the leader accepts another process with the same worker name"
# Members that must have the whole update if others broke off, so that no single death loses it.
COPIES = 2
# Multiple of `heal_s` after which an update waits for the same member again.
AGAIN = 10
# Defaults for a copy and for the first attempt if the job sets no times: setup time in seconds, and
# numbers per second that any network can transfer.
HEAL_S, HEALED_PER_S = 1.0, 25_000_000
FORM_S, ADDED_PER_S = 2.5, 5_000_000
# The stage in which reliable machines compute no gradients.
LAST: Stage = 3

DIVERGED = (
    "diverged: a sum of finite gradients is not finite; lower the learning rate and submit the job"
    " again"
)
DIFFERENT = (
    "workers hold different weights of one version, because their processors compute differently"
    " or one of them is broken; run workers on machines of one kind, stop the others, and resume"
    " the job"
)


@dataclass(slots=True)
class _Tries:
    """Attempts at the next update."""

    current: Attempt | None = None
    verdict: str = "open"
    times: AttemptTimes = field(default_factory=AttemptTimes)
    # An attempt whose audit record is not read back yet.
    pending: Attempt | None = None
    # Consecutive attempts whose results differ or are not finite.
    doubtful: int = 0


@dataclass(slots=True)
class _NextOrders:
    """Content of the next trigger."""

    report: bool = True
    copies: dict[Member, Copy] = field(default_factory=dict)
    stores: tuple[Member, ...] = ()
    # Version of the newest hot snapshot.
    hot: ModelId | None = None
    # True if this version is for evaluators.
    offered: bool = False


@dataclass(slots=True)
class _Owned:
    """Ownership of the slices of the weights."""

    stage: Stage | None = None
    # Holders of each slice's optimizer state, among the members with the current weights.
    holders: tuple[tuple[Member, ...], ...] = ()
    # True if the memory of all staying members together is too small for some slices.
    lacks_memory: bool = False
    # True if some slice has no owner, because none of the members holds it.
    stranded: bool = False


@dataclass(slots=True)
class _Since:
    """Start times of requests and of unclear situations."""

    asked_at: float = float("-inf")
    looked_at: float = float("-inf")
    # Time since which no visible member holds the newest update.
    lost: float = float("inf")
    # Time since which some member lacks the weights.
    unclear: float = float("inf")
    # Time until which the leader collects reports before it chooses the first members.
    patient: float = float("inf")


class GroupAggregation:
    """State of a leader's members.

    Args:
        epoch: Epoch of the leader.
        snapshot: The snapshot that the leader starts from, rolled forward.
        history: Fold of the updates topic. The owner feeds it.
        settings: Settings of the job.
        grace_s: Time that the holder of the newest update may be unreachable before the leader
            rolls back.
    """

    # Members compute the next gradient on the update that was read back.
    unread_audits = 0

    def __init__(
        self,
        epoch: int,
        snapshot: Snapshot,
        history: History,
        settings: AggregationSettings,
        grace_s: float,
    ) -> None:
        self._epoch = epoch
        self._settings = settings
        self._count = 0 if settings.slices is None else settings.slices.count
        self._grace_s = grace_s
        self._history = history
        # The newest version that was read back, so that members may apply it, and its attempt.
        self._made = snapshot.made
        self._by = snapshot.attempt or None
        self._origin = 0
        # Stored versions that this leader does not take back. The history may no longer contain old
        # ones.
        path, newest = history.path, snapshot.made.version
        self._backups = Backups(
            made
            for made in snapshot.stored or ()
            if made.version <= newest and (made in path or made.version < path[0].version)
        )
        self._reports = StateReports()
        self._accusations = Accusations()
        self._membership = Membership(0)
        self._tries = _Tries()
        self._next = _NextOrders()
        self._owned = _Owned()
        self._since = _Since()
        # Start of each copy, and the time it was last ordered.
        self._copying = dict[Member, tuple[float, float]]()
        # True if all holders of the version, or of a slice of it, leave before it is in storage.
        self._expiring = False
        self._live = frozenset["WorkerId"]()
        self._there = frozenset["WorkerId"]()
        # True if the next trigger has something to say.
        self.news = True
        self._progress = snapshot.progress
        # A worker that holds the newest version, if one is known.
        self.holder: WorkerId | None = None
        # Reason shown in the status for each worker, and the time until which it is shown.
        self._refused = dict["WorkerId", tuple[float, str]]()
        # The version to roll back to if the newest is lost.
        self.fallback: ModelId | None = None

    @property
    def _heal_s(self) -> float:
        given, numbers = self._settings.heal_s, self._reports.numbers
        return min(HEAL_S + numbers / HEALED_PER_S, MOST_HEAL_S) if given is None else given

    @property
    def _first_attempt_s(self) -> float:
        given, numbers = self._settings.first_attempt_s, self._reports.numbers
        return FORM_S + numbers / ADDED_PER_S if given is None else given

    @property
    def stored(self) -> tuple[ModelId, ...]:
        """Versions known to be in storage."""
        return self._backups.stored

    @property
    def storing(self) -> bool:
        """True if a checkpoint waits for a member to store its version."""
        return self._backups.waits

    @property
    def wants_checkpoint(self) -> bool:
        """True if a checkpoint must be taken now, regardless of the schedule."""
        return self._expiring or self._backups.overdue

    # --- messages -----------------------------------------------------------------------------

    def orders(self, trigger: TriggerId) -> GroupOrders:
        """Return the group's part of the next trigger."""
        self._reports.posted(trigger)
        copies = tuple(self._next.copies.values())
        named = {*self._membership.members, *(copy.member for copy in copies)}
        named |= {copy.source for copy in copies if copy.source is not None}
        whole = self._reports.whole(self._live, self._made, self._origin)
        holder = min(whole, default=None)
        orders = GroupOrders(
            self._made,
            self._membership,
            self._by,
            self._origin,
            None if self._tries.current is None else self._tries.current.reduce,
            copies,
            self._next.report,
            holder if self._next.hot == self._made else None,
            holder if self._next.offered else None,
            self._next.stores,
            self._backups.made if self._next.stores and self._backups.made != self._made else UNSET,
            self._reports.addresses(sorted(named)),
            self._count,
        )
        self.news = self._next.report = False
        self._next.copies, self._next.stores = {}, ()
        if holder is not None:
            self._next.hot, self._next.offered = None, False
        return orders

    def publish(self, model: ModelId, *, whole: bool = True) -> tuple[CoordinatorCommand, ...]:  # noqa: ARG002
        """Send the state to all members again, because one of them lacks something."""
        self.news = True
        return ()

    def receive(self, reply: GroupReply, now: float) -> tuple[CoordinatorCommand, ...]:
        """Process a member's message, which may complete a checkpoint."""
        self._stand_still(now)
        if why := self._why_unbelieved(reply, now):
            return (do.Drop(reply, why),)
        member = Member(reply.worker, reply.life)
        attempt = self._tries.current
        match reply:
            case StateReport():
                self._accuse(member, reply.unreachable, now)
                self._reports.receive(reply)
                if member in self._copying:
                    self._copying[member] = (self._copying[member][0], float("-inf"))
            case Reduced() if attempt is not None and reply.attempt == attempt.reduce.attempt:
                attempt.finish(member, reply)
            case Broken() if attempt is not None and reply.attempt == attempt.reduce.attempt:
                attempt.break_off(member, reply, now)
                self._accuse(member, reply.unreachable, now)
                if reply.reason == "lacks":
                    self._reports.forget([reply.worker])
            case Stored():
                if reply.made == self._made and reply.slices == ():
                    self._reports.forget([reply.worker])
                return tuple(self._backups.receive(reply))
            case _:
                return (do.Drop(reply, "the attempt of this message is over"),)
        return ()

    def _why_unbelieved(self, reply: GroupReply, now: float) -> str:
        """Return why a message is ignored. Empty if its sender is believed."""
        if isinstance(reply, StateReport):
            wrong = self._reports.why_wrong(reply, self._made, self._count)
            if wrong:
                self._refuse(
                    reply.worker, f"a report in the worker's name was rejected: {wrong}", now
                )
                return wrong
        if not self._reports.believes(Member(reply.worker, reply.life), now):
            return RIVAL
        if self._refused.get(reply.worker, (0.0, ""))[1] == SILENT:
            del self._refused[reply.worker]
        return ""

    def is_rival(self, gradient: Gradient | GradientReady) -> bool:
        """True if another process of its worker's name is believed."""
        if not isinstance(gradient, GradientReady):
            return False
        return self._reports.is_rival(Member(gradient.worker, gradient.life))

    def _accuse(self, member: Member, unreachable: Iterable[Member], now: float) -> None:
        known = self._reports.members(self._there)
        self._accusations.add(member, known.intersection(unreachable), now)

    def _refuse(self, worker: WorkerId, reason: str, now: float) -> None:
        """Show for a while in the status why a worker is not believed."""
        self._refused = {w: each for w, each in self._refused.items() if each[0] > now}
        if worker in self._refused or len(self._refused) < MOST_REFUSED:
            self._refused[worker] = now + REFUSED_S, reason

    def _stand_still(self, now: float) -> None:
        """Shift deadlines by the time that the leader itself was delayed."""
        pause_s = max(now - self._since.looked_at - STILL_S, 0.0) if self._there else 0.0
        self._since.lost += pause_s
        self._since.unclear += pause_s
        self._reports.stood_still(pause_s)
        self._since.looked_at = now

    def take_restarted(self) -> frozenset[WorkerId]:
        """Return workers that another process of the same name replaced since the last call."""
        return self._reports.take_restarted()

    # --- eligibility --------------------------------------------------------------------------

    def look(
        self, there: frozenset[WorkerId], live: frozenset[WorkerId], rounds: Rounds, now: float
    ) -> None:
        """Evaluate the current attempt, choose members and order copies.

        Args:
            there: Living workers.
            live: The living workers that are not about to leave.
            rounds: Rounds in flight.
            now: Current time.
        """
        self._stand_still(now)
        self._there, self._live = there, live
        if there:
            self._since.patient = min(self._since.patient, now + REPORT_S)
        if gone := self._reports.known - there:
            self._reports.gone(gone)
        if now >= self._since.asked_at + self._question_s(now):
            self._since.asked_at, self._next.report, self.news = now, True, True
        if self._tries.pending is not None:
            return
        if self._tries.current is not None:
            self._judge(self._tries.current, now)
        if self._tries.current is not None:
            return
        whole = self._reports.whole(there, self._made, self._origin)
        self._owned.holders = self._reports.holders(whole, self._count)
        lost = tuple(number for number, held in enumerate(self._owned.holders) if not held)
        found = bool(whole) and not lost
        if found:
            self._since.lost = float("inf")
            every = (whole, *self._owned.holders)
            stay = all(any(m.worker in live for m in each) for each in every)
            self._expiring = not (stay or self._made in {GENESIS, *self._backups.stored})
        else:
            self._seek(whole, lost, now)
            whole = self._reports.whole(there, self._made, self._origin)
            self._owned.holders = self._reports.holders(whole, self._count)
        self.holder = min(whole).worker if whole else self.holder
        members = self._candidates(whole, rounds, now)
        wanted = self._wanted(members)
        if found:
            self._heal(whole, wanted, now)
            self._ask_to_store(min(whole), now)
        self._doubt(whole, now)
        if self._membership.number or not self._reports.unknown(there) or now > self._since.patient:
            self._choose(members, wanted, rounds)

    def _question_s(self, now: float) -> float:
        """Return the interval between report requests. Infinite if nothing is unclear."""
        unknown = self._reports.unknown(self._there)
        silent = {worker for worker, (_, why) in self._refused.items() if why == SILENT}
        if unknown - silent:
            return REPORT_S
        unclear = unknown or self._reports.rivals(now) or self._since.unclear < float("inf")
        return STILL_S if unclear else float("inf")

    def _doubt(self, whole: frozenset[Member], now: float) -> None:
        """Forget silent members while something is unclear, since their reports may be forged."""
        unclear = bool(self._reports.members(self._live) - whole)
        self._since.unclear = min(self._since.unclear, now) if unclear else float("inf")
        if now < self._since.unclear + LIFETIME_S:
            return
        # Losing these members would take an update back, so they get more time.
        needed = self._sole_holders() | (whole if len(whole) == 1 else frozenset())
        for member in sorted(self._reports.members(self._there)):
            patience = SOLE if member in needed and self._made != GENESIS else 1
            last_seen_s = max(self._since.unclear, self._reports.last_seen_s(member))
            if now >= last_seen_s + patience * LIFETIME_S:
                self._reports.forget([member.worker])
                self._copying.pop(member, None)
                self._refuse(member.worker, SILENT, now)

    def _judge(self, attempt: Attempt, now: float) -> None:
        there = self._reports.members(self._there)
        self._tries.verdict = attempt.judge(there, COPIES, now)
        if self._tries.verdict in {"diverged", "different"}:
            self._tries.doubtful += 1
            if self._tries.doubtful < CONFIRMED:
                self._end_attempt()
        elif self._tries.verdict == "whole":
            self._tries.doubtful = 0
            self._tries.times.observe(now - attempt.begun)
        elif self._tries.verdict == "over":
            # An attempt that ends earlier has not waited for its silent members.
            if now >= attempt.due:
                self._reports.forget(member.worker for member in attempt.silent(there))
            self._end_attempt()

    def _end_attempt(self) -> None:
        """End the attempt by a new membership, so that its messages never match a later attempt."""
        self._tries.current, self._tries.verdict = None, "open"
        self._membership = replace(self._membership, number=self._membership.number + 1)
        self.news = True

    def _candidates(
        self, whole: frozenset[Member], rounds: Rounds, now: float
    ) -> tuple[Member, ...]:
        """Return workers that can be members: they hold the weights and reach each other."""
        needed = {Member(g.worker, g.life) for round_ in rounds for g in round_.ready}
        needed |= self._sole_holders()
        idle = rounds.assigner.idle(self._there)
        stays = self._live | (self._there - idle)
        wanted = [m for m in whole if self._expiring or m.worker in stays or m in needed]
        return tuple(sorted(self._accusations.clique(wanted, needed, now)))

    def _choose(
        self,
        members: tuple[Member, ...],
        wanted: tuple[tuple[Member, ...], ...],
        rounds: Rounds,
    ) -> None:
        """Begin a new membership if the eligible members or the owners have changed.

        Gradients of excluded members are lost with them.
        """
        owners: tuple[tuple[int, ...], ...] | UnsetType = UNSET
        if self._settings.slices is not None:
            ranks = {member: rank for rank, member in enumerate(members)}
            owners = tuple(
                tuple(ranks[member] for member in self._owners(number, wanted) if member in ranks)
                for number in range(self._count)
            )
            owners = tuple(each[: self._settings.slices.owners] for each in owners)
            self._owned.stranded = bool(members) and () in owners
        if (members, owners) != (self._membership.members, self._membership.owners):
            self._membership = Membership(self._membership.number + 1, members, owners)
            self.news = True
        for round_ in rounds:
            round_.uncount(lambda gradient: Member(gradient.worker, gradient.life) not in members)

    def able(self, workers: frozenset[WorkerId]) -> frozenset[WorkerId]:
        """Return those of `workers` that can compute: they hold the weights and are reachable."""
        members = self._membership.members
        if self._owned.stage == LAST:
            machines = self._reports.machines(members)
            members = tuple(m.member for m in machines if m.tier == "spot") or members
        return workers & {member.worker for member in members}

    # --- slices ---------------------------------------------------------------------------------

    def _sole_holders(self) -> set[Member]:
        """Return staying members that are the only holder of a slice."""
        found = set[Member]()
        for holders in self._owned.holders:
            staying = [member for member in holders if member.worker in self._live]
            if len(staying) <= 1:
                found.update(staying or holders)
        return found

    def _wanted(self, members: tuple[Member, ...]) -> tuple[tuple[Member, ...], ...]:
        """Return the preferred owners of each slice, chosen from the members that stay."""
        settings = self._settings.slices
        if settings is None or not members:
            return ()
        staying = tuple(member for member in members if member.worker in self._live)
        machines = self._reports.machines(staying or members)
        self._owned.stage = settings.stage or stage_of(machines, self._owned.stage)
        rooms = {each.member: each.room for each in machines}
        servers = servers_of(machines, self._owned.stage, settings)
        wanted = wanted_owners(servers, settings, tuple(rooms[each] for each in servers))
        self._owned.lacks_memory = () in wanted
        return wanted

    def _owners(self, number: int, wanted: tuple[tuple[Member, ...], ...]) -> list[Member]:
        """Return the holders of a slice, preferred owners first."""
        should, holders = wanted[number] if wanted else (), self._owned.holders[number]
        first = [member for member in should if member in holders]
        settings = self._settings.slices
        if first and settings is not None and len(should) < settings.owners:
            # The other members lack the memory.
            return first
        return first + [member for member in holders if member not in first]

    @property
    def status(self) -> GroupStatus:
        """Members, excluded workers with reasons, and the copies that updates wait for."""
        members, now = self._membership.members, self._since.looked_at
        inside = {member.worker for member in members}
        left_out = {w: why for w, (until, why) in self._refused.items() if until > now}
        for member in self._reports.odd(self._live):
            left_out[member.worker] = why_odd(
                self._reports.numbers_of(member), self._reports.numbers
            )
        for worker in self._reports.rivals(now):
            left_out[worker] = why_double(worker)
        for member in self._reports.members(self._live - inside):
            apart = [m for m in members if self._accusations.between(member, m, now)]
            if apart:
                addresses = self._reports.addresses([member, *apart])
                left_out[member.worker] = why_apart(
                    member.worker, [m.worker for m in apart], addresses
                )
        for machine in self._reports.machines(members) if self._owned.lacks_memory else ():
            left_out[machine.member.worker] = memory_shortage(machine.room or 0, self._count)
        ranks = sorted({rank for each in self._membership.owners or () for rank in each})
        owners = tuple(members[rank].worker for rank in ranks)
        workers = tuple(member.worker for member in members)
        waits = {
            member.worker: round(self._heal_s, 1)
            for member, (since, _) in sorted(self._copying.items())
            if now < since + self._heal_s
        }
        return GroupStatus(workers, left_out, self._owned.stage or 0, owners, waits)

    # --- copies of the weights ----------------------------------------------------------------

    def _heal(
        self, whole: frozenset[Member], wanted: tuple[tuple[Member, ...], ...], now: float
    ) -> None:
        lacking = self._lacking(whole, wanted)
        self._copying = {m: at for m, at in self._copying.items() if m in lacking}
        busy = {copy.source for copy in self._next.copies.values()}
        for member in sorted(lacking):
            since, ordered = self._copying.get(member, (now, float("-inf")))
            if now < ordered + COPY_S:
                continue
            slices = lacking[member]
            have = {m for n in slices for m in self._owned.holders[n]} if slices else whole
            sources = [m for m in have if not self._accusations.between(member, m, now)]
            if not sources and self._made not in self._backups.stored:
                continue
            source = min(sorted(sources), key=lambda m: m in busy, default=None)
            busy.add(source)
            if now > since + AGAIN * self._heal_s:
                since = now
            self._copying[member] = (since, now)
            if source is not None:
                slices &= self._reports.slices(source, self._count)
            self._next.copies[member] = Copy(
                member, source, UNSET if self._settings.slices is None else tuple(sorted(slices))
            )
            self.news = True

    def _lacking(
        self, whole: frozenset[Member], wanted: tuple[tuple[Member, ...], ...]
    ) -> dict[Member, frozenset[int]]:
        """Return the members that lack the weights, or slices that they should own."""
        there = self._reports.members(self._live)
        lacking = dict.fromkeys(there - whole, frozenset[int]())
        for number, members in enumerate(wanted):
            for member in members:
                if member in there and member not in self._owned.holders[number]:
                    lacking[member] = lacking.get(member, frozenset()) | {number}
        return lacking

    def _waits(self, now: float) -> bool:
        """True if the next update waits for a copy."""
        return any(now < since + self._heal_s for since, _ in self._copying.values())

    def _seek(self, whole: frozenset[Member], lost: tuple[int, ...], now: float) -> None:
        """Restore the newest update, which no visible member holds whole, or fall back.

        Args:
            whole: Members that hold its weights.
            lost: Slices whose optimizer state no member holds.
            now: Current time.
        """
        answered = sorted(self._reports.members(self._live))
        unknown = self._reports.unknown(self._there)
        if not answered:
            self._since.lost = float("inf")
            return
        self._since.lost = min(self._since.lost, now)
        patient = now < self._since.lost + self._grace_s * (2 if unknown else 1)
        if self._made == GENESIS:
            origins = self._reports.origins(self._there)
            if origins:
                self._origin, self.news = min(origins), True
                return
            self._origin = 0
        elif self._made not in self._backups.stored:
            if not patient:
                held = self._reports.versions(self._there, self._count) & {*self._history.path}
                versions = [GENESIS, *held, *self._backups.stored]
                self.fallback = max(versions, key=lambda made: made.version)
            return
        if patient and unknown:
            return
        member = min(answered, key=lambda each: each not in whole)
        _, ordered = self._copying.get(member, (now, float("-inf")))
        if now >= ordered + COPY_S:
            self._copying = {member: (now, now)}
            self._next.copies = {member: Copy(member, slices=lost if member in whole else UNSET)}
            self.news = True

    def dismiss(self) -> None:
        """Dissolve the membership, because the job is finished."""
        self._membership, self.news = Membership(self._membership.number + 1), True

    # --- updates ------------------------------------------------------------------------------

    def why_not(self, gradient: Gradient | GradientReady) -> str:
        """Return why a gradient does not count. Its member must take part in the reduction."""
        if isinstance(gradient, Gradient):
            return (
                "the gradient contains its vector, but members of this job sum gradients themselves"
            )
        known = Member(gradient.worker, gradient.life) in self._membership.members
        return "" if known else "the sender is no longer a member"

    def finished(self, round_: Round, draft_of: Callable[[], UpdateApplied], now: float) -> bool:
        """Start the reduction of a round if possible, and report if its result is ready.

        Args:
            round_: A round whose gradients are all ready.
            draft_of: Builds the update that the round would make.
            now: Current time.

        Returns:
            True if enough members have the result.
        """
        if self._tries.current is not None:
            return self._tries.verdict == "whole"
        members = self._membership.members
        if self._tries.pending is not None or not members or self._owned.lacks_memory:
            return False
        if self._owned.stranded or self._waits(now):
            return False
        draft = draft_of()
        attempt = AttemptId(self._epoch, self._membership.number, draft.version)
        parts = tuple(
            tuple(g.batches for g in round_.ready if Member(g.worker, g.life) == member)
            for member in members
        )
        scale = 1.0 if draft.scale is UNSET else draft.scale
        reduce = Reduce(
            *(attempt, parts, draft.samples, round_.synchrony.local_rate),
            *(round_.learning_rate, scale, round_.settings.group_sizes is not None),
            reached_bits(round_.reached),
        )
        allowed_s = self._tries.times.allowed_s(self._first_attempt_s)
        self._tries.current = Attempt(reduce, round_.number, self._membership, now, allowed_s)
        self._tries.verdict, self.news = "open", True
        return False

    @property
    def error(self) -> str:
        """Reason why the job must be held. Usually empty."""
        return {"diverged": DIVERGED, "different": DIFFERENT}.get(self._tries.verdict, "")

    def sign(self, draft: UpdateApplied) -> UpdateApplied:
        """Return the update with the attempt that made it."""
        attempt = self._tries.current
        if attempt is None:
            raise AssertionError("the attempt was finished")
        digest = next(iter(attempt.finished.values()))
        return replace(
            draft, by=attempt.reduce.attempt, digest=digest, copies=len(attempt.finished)
        )

    def apply(
        self,
        round_: Round,  # noqa: ARG002 -- used by BoardAggregation
        update: UpdateApplied,  # noqa: ARG002
        *,
        measured: bool,  # noqa: ARG002
    ) -> tuple[CoordinatorCommand, ...]:
        """Wait for the audit record. Members apply the update after it was read back."""
        self._tries.pending, self._tries.current = self._tries.current, None
        self._tries.verdict = "open"
        return ()

    def read_back(self, update: UpdateApplied) -> float | UnsetType:
        """Commit an attempt: members that finished it may apply it, the others copy.

        Returns:
            Squared norm of the sum, if it was requested.
        """
        attempt, self._tries.pending = self._tries.pending, None
        if attempt is None:
            return UNSET
        self._made = ModelId(update.epoch, update.version)
        self._by = attempt.reduce.attempt
        self._reports.commit(attempt.finished, self._made, attempt.membership.owned)
        self._next.report = bool(self._reports.unknown(self._there))
        self._copying, self.news = {}, True
        before, self._progress = self._progress, update.progress
        every = self._settings.offer_every_updates
        self._next.offered = every is not None and is_offered(before, self._progress, every)
        return attempt.square

    def discard(self, round_: Round) -> tuple[CoordinatorCommand, ...]:
        """End the attempt of a round that is put back."""
        if self._tries.current is not None and self._tries.current.round == round_.number:
            self._end_attempt()
        return ()

    # --- snapshots ----------------------------------------------------------------------------

    def snapshots(
        self, commands: Iterable[do.CopyWeights | do.PublishSnapshot]
    ) -> Iterator[do.CopyWeights | do.PublishSnapshot]:
        """Publish the protocol's part at once, and a checkpoint when its version is in storage."""
        for command in commands:
            if isinstance(command, do.PublishSnapshot):
                yield replace(command, checkpoint=False)
                # A member adds the weights of this version.
                self._next.hot, self.news = command.snapshot.made, True
                if command.checkpoint:
                    yield from self._backups.take(command.snapshot)

    def marked(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the state of the members added."""
        by = self._by if self._tries.pending is None else self._tries.pending.reduce.attempt
        attempt, stored = by or UNSET, self._backups.stored or UNSET
        return replace(snapshot, attempt=attempt, stored=stored, slices=self._count)

    def change(self, settings: AggregationSettings | None, *, parts: bool) -> None:
        """Apply changed settings, unless the weights are about to be handed over."""
        if settings is not None and not parts:
            self._settings = settings

    def keep(self, made: ModelId) -> None:
        """Do nothing. Members report stored versions themselves, see `receive`."""

    def _ask_to_store(self, member: Member, now: float) -> None:
        """Request that members store a version: for a checkpoint, or so that others can copy it."""
        stores = self._backups.ask(
            self._made,
            lambda: [holders[0] for holders in self._owned.holders] or [member],
            self._reports.is_gone(self._there),
            now,
            needed=self._owned.stranded,
        )
        if stores:
            self._next.stores, self.news = tuple(stores), True

    def due(self) -> float:
        """Return the time of the next poll."""
        times = list[float]()
        if self._tries.current is not None:
            times.append(self._tries.current.due)
        times.append(self._since.asked_at + self._question_s(self._since.looked_at))
        times += [at + COPY_S for _, at in self._copying.values()]
        times += [since + self._heal_s for since, _ in self._copying.values()]
        if self._since.lost < float("inf"):
            times += [self._since.lost + self._grace_s, self._since.lost + 2 * self._grace_s]
        times.append(self._backups.due())
        return min((time for time in times if time > self._since.looked_at), default=float("inf"))
