"""State machine of a member: the version of the weights it holds, and the result of an attempt.

    trigger names a version ──▶ the member holds it       gradients can be computed
                            ──▶ it has prepared it        it applies it, and holds the version
                            ──▶ otherwise                 it reports its state, and must copy

Only decisions of the leader move a member from one version to the next. The audit record names the
attempt whose result applies. A member enters an attempt only with the named version and with all
gradients that it has to add. Otherwise it breaks off immediately, so that all members know.

If slices of the weights have owners, a member holds all weights, but the optimizer state of only
some slices: those it owned in the attempt that it applied, and those it has copied since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import UNSET

from common.core.messages import (
    GENESIS,
    AttemptId,
    Batch,
    Broken,
    Copy,
    GradientReady,
    Member,
    Membership,
    ModelId,
    Reduce,
    Reduced,
    Slices,
    StateReport,
    Stored,
    TriggerId,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msgspec import UnsetType

    from common.core.members.stages import MemberMachine
    from common.core.messages import BrokenReason, GroupOrders, GroupReply, UpdateTrigger

# Key of a gradient: its batches, and the rate of the local steps.
Gradient: TypeAlias = tuple[tuple[int, ...], float]


class ReplicaCommand(msgspec.Struct, frozen=True, gc=False):
    """Command of a member to its shell."""


class Enter(ReplicaCommand, frozen=True):
    """Add the own gradients to those of all members, and report the outcome."""

    membership: Membership
    reduce: Reduce


class ApplyResult(ReplicaCommand, frozen=True):
    """Take the step with the prepared result, which makes this version."""

    made: ModelId


class CopyState(ReplicaCommand, frozen=True):
    """Copy the source's state if it still is of this version, and report."""

    # None to load from storage, or to build version 0 from the specification.
    source: Member | None
    made: ModelId
    # Trigger that ordered the copy, which both sides use as its id.
    ordered: TriggerId
    # Slices whose optimizer state is copied.
    slices: Slices = UNSET


class OfferState(ReplicaCommand, frozen=True):
    """Let another member copy the state."""

    to: Member
    ordered: TriggerId
    slices: Slices = UNSET


class StoreState(ReplicaCommand, frozen=True):
    """Put this version, or slices of it, into storage, and report."""

    made: ModelId
    slices: Slices = UNSET


class ShareWeights(ReplicaCommand, frozen=True):
    """Publish the weights of this version on the board, in the background."""

    made: ModelId
    # Epoch of the leader.
    by: int
    # True if they complete the leader's hot snapshot.
    hot: bool
    # True if they are for evaluators.
    offered: bool


class Say(ReplicaCommand, frozen=True):
    """Send a message to the leader."""

    reply: GroupReply


class WeightReplica:
    """State of one process, and its reaction to each trigger. The shell has the actual numbers.

    Args:
        member: The worker and its life.
        address: Address for other members.
        numbers: Number of weights and buffers: P + B.
        machine: Machine of the process, if slices have owners.
    """

    def __init__(
        self,
        member: Member,
        address: str = "",
        numbers: int = 0,
        machine: MemberMachine | None = None,
    ) -> None:
        self._member = member
        self._address = address
        self._numbers = numbers
        self._machine = machine
        # The version that the member holds.
        self.made: ModelId | None = None
        # Life of the member that made version 0, if that is held.
        self.origin = 0
        # Slices whose optimizer state is held at that version.
        self.slices: Slices = UNSET
        # The newest trigger received.
        self.last_trigger = TriggerId(-1, 0)
        # Model of the newest trigger.
        self._model = GENESIS
        # Group orders of the newest trigger.
        self._orders: GroupOrders | None = None
        # The version that the prepared result applies to.
        self._base: ModelId | None = None
        # The attempt whose result is prepared.
        self._prepared: AttemptId | None = None
        # Slices owned in the attempt that was entered last.
        self._owned: Slices = UNSET
        # The attempt in progress.
        self._attempt: AttemptId | None = None
        # The attempt that was entered or broken off last.
        self._last: AttemptId | None = None
        # The membership of the attempt that was broken off.
        self._broken: tuple[int, int] | None = None
        self._copying: Copy | None = None
        # True if the leader named another process under this worker's name.
        self._is_double = False
        # The last order to store a version.
        self._asked: tuple[ModelId, Slices] | None = None
        # True if that order is done.
        self._stored = False
        # Gradients at the held version, with their batches by value.
        self._gradients = dict[Gradient, tuple[GradientReady, tuple[Batch, ...]]]()

    @property
    def held(self) -> tuple[ModelId | None, int]:
        """The held version, and the origin of version 0, which several processes may have made."""
        return self.made, self.origin

    @property
    def needed(self) -> bool:
        """True if others may need this member: it must then stay until the leader excludes it."""
        return self._orders is not None and self._member in self._orders.membership.members

    @property
    def pinned(self) -> bool:
        """True if the worker must not move to another job: it owns slices or is the only member.

        Version 0 can be made again, so it does not matter there.
        """
        if self._orders is None or not self.needed or self._orders.made == GENESIS:
            return False
        membership = self._orders.membership
        owned = membership.owned(self._member)
        return len(membership.members) == 1 or (owned is not UNSET and bool(owned))

    @property
    def whole(self) -> bool:
        """True if the version that was named last is held."""
        orders = self._orders
        return (
            orders is not None
            and self.made == orders.made
            and (self.made != GENESIS or self.origin == orders.origin)
        )

    def listen(self, last_trigger: TriggerId) -> None:
        """Continue after this trigger of the leader, see `Assignments.listen`."""
        self.last_trigger = min(self.last_trigger, last_trigger)

    def receive(self, trigger: UpdateTrigger) -> tuple[ReplicaCommand, ...]:
        """Process the next trigger. A trigger older than the newest is ignored."""
        if trigger.group is UNSET or trigger.id <= self.last_trigger:
            return ()
        return tuple(self._receive(trigger, trigger.group))

    def _receive(self, trigger: UpdateTrigger, orders: GroupOrders) -> Iterator[ReplicaCommand]:
        first = trigger.id.epoch != self.last_trigger.epoch
        self.last_trigger, self._model, self._orders = trigger.id, trigger.model, orders
        place = (trigger.id.epoch, orders.membership.number)
        if self._last is not None and self._last.epoch > place[0]:
            # The Lead record of that leader was lost.
            self._last = None
        if self._attempt is not None and self._attempt[:2] != place:
            yield from self._break_off("left")
        if self._prepared is not None and self._prepared == orders.by and self._base == self.made:
            yield ApplyResult(orders.made)
            self._hold(orders.made, 0, self._owned)
        ours = [each for each in orders.named() if each.worker == self._member.worker]
        # The leader believes another process of this name. Reported once, and on request.
        before, self._is_double = self._is_double, ours != [self._member] * len(ours)
        if orders.reduce is not None and self._member in orders.membership.members:
            yield from self._enter(orders.membership, orders.reduce)
        yield from self._handle_copy_orders(trigger.id, orders)
        yield from self._handle_store_orders(orders)
        hot, offered = orders.hot == self._member, orders.offer == self._member
        if (hot or offered) and self.whole:
            yield ShareWeights(orders.made, trigger.id.epoch, hot, offered)
        if orders.report or first or (self._is_double and not before):
            yield self._report()

    def _handle_copy_orders(
        self, ordered: TriggerId, orders: GroupOrders
    ) -> Iterator[ReplicaCommand]:
        for copy in orders.copies:
            # At version 0 a member has all slices or none, see `_hold`.
            slices = UNSET if orders.made == GENESIS else copy.slices
            if copy.member == self._member and self._copying is None:
                if self.whole and self._holds(slices):
                    yield self._report()
                else:
                    self._copying = copy
                    yield CopyState(copy.source, orders.made, ordered, slices)
            elif copy.source == self._member and self.whole and self._holds(slices):
                yield OfferState(copy.member, ordered, slices)

    def _handle_store_orders(self, orders: GroupOrders) -> Iterator[StoreState | Say]:
        mine = tuple(n for n, each in enumerate(orders.stores) if each == self._member)
        if not mine:
            return
        made = orders.made if orders.stores_of is UNSET else orders.stores_of
        slices = UNSET if self._machine is None else mine
        if self._asked == (made, slices):
            if self._stored:
                yield from self.stored(made, slices)
        elif made == orders.made and self.whole and self._holds(slices):
            self._asked, self._stored = (made, slices), False
            yield StoreState(made, slices)
        else:
            yield from self.stored(made, ())

    def _holds(self, slices: Slices) -> bool:
        """True if the optimizer state of these slices is held, too."""
        if self.slices is UNSET:
            return True
        return slices is not UNSET and set(slices) <= set(self.slices)

    def _hold(self, made: ModelId | None, origin: int, slices: Slices) -> None:
        if (made, origin) != self.held:
            self._gradients = {}
        self.made, self.origin = made, origin
        # Before the first step an optimizer has no state.
        self.slices = UNSET if made == GENESIS else slices
        self._prepared = self._base = None

    def _report(self, unreachable: tuple[Member, ...] = ()) -> Say:
        (worker, life), machine = self._member, self._machine
        return Say(
            StateReport(
                *(worker, self._model, life, self.last_trigger, self.made, self.origin),
                *(unreachable, self._address, self._numbers, self.slices),
                *((UNSET, UNSET, UNSET) if machine is None else machine.reported),
            )
        )

    # --- gradients ----------------------------------------------------------------------------

    def known(self, batches: tuple[Batch, ...], local_rate: float) -> GradientReady | None:
        """Return the earlier answer to the same order, perhaps to another leader.

        The batches are compared by value, because a control topic that lost records reuses their
        offsets.
        """
        offsets = tuple(batch.offset for batch in batches)
        ready, answered = self._gradients.get((offsets, local_rate), (None, ()))
        if ready is None or answered != batches or not self.whole:
            return None
        return msgspec.structs.replace(ready, model=self._model)

    def computed(
        self, ready: GradientReady, batches: tuple[Batch, ...], at: tuple[ModelId | None, int]
    ) -> Say:
        """Process a gradient that was computed at `at`. It counts only if that is still `held`."""
        if at == self.held and self.whole:
            self._gradients[ready.batches, ready.local_rate or 0.0] = ready, batches
            return Say(ready)
        return self._report()

    def lacks(self) -> Say:
        """Process an order for a gradient of a version that is not held."""
        return self._report()

    # --- attempts -----------------------------------------------------------------------------

    def _enter(self, membership: Membership, reduce: Reduce) -> Iterator[ReplicaCommand]:
        if self._last is not None and reduce.attempt <= self._last:
            # The attempt was entered before.
            return
        self._last, self._attempt = reduce.attempt, reduce.attempt
        self._prepared = self._base = None
        mine = reduce.parts[membership.members.index(self._member)]
        there = {batches for batches, rate in self._gradients if rate == reduce.local_rate}
        place = reduce.attempt[:2]
        self._owned = membership.owned(self._member)
        able = self.whole and self._holds(self._owned)
        if not able or not there.issuperset(mine) or self._broken == place:
            yield from self._break_off("lacks")
        else:
            yield Enter(membership, reduce)

    def _break_off(
        self, reason: BrokenReason, unreachable: tuple[Member, ...] = ()
    ) -> Iterator[Say]:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._broken = attempt[:2]
            worker, life = self._member
            yield Say(Broken(worker, self._model_of(attempt), life, attempt, reason, unreachable))

    def _model_of(self, attempt: AttemptId) -> ModelId:
        return ModelId(attempt.epoch, attempt.version - 1)

    def finished(
        self, attempt: AttemptId, digest: int, square: float | UnsetType = UNSET
    ) -> tuple[Say, ...]:
        """Process the complete result of an attempt."""
        if attempt != self._attempt:
            # The attempt was left meanwhile.
            return ()
        self._attempt, self._prepared, self._base = None, attempt, self.made
        worker, life = self._member
        return (Say(Reduced(worker, self._model_of(attempt), life, attempt, digest, square)),)

    def failed(
        self,
        attempt: AttemptId,
        reason: BrokenReason = "left",
        unreachable: tuple[Member, ...] = (),
    ) -> tuple[Say, ...]:
        """Process the failure of an attempt."""
        return tuple(self._break_off(reason, unreachable)) if attempt == self._attempt else ()

    # --- copies -------------------------------------------------------------------------------

    def copied(
        self, made: ModelId | None, origin: int = 0, unreachable: tuple[Member, ...] = ()
    ) -> tuple[Say, ...]:
        """Process the end of a copy.

        Args:
            made: The copied version, verified by its digest. None if the copy is incomplete.
            origin: Life of the member that made version 0.
            unreachable: Members that it could not be copied from.
        """
        copy, self._copying = self._copying, None
        slices = UNSET if copy is None else copy.slices
        if made is not None and (made, origin) == self.held:
            if self.slices is not UNSET:
                both = {*self.slices, *slices} if slices is not UNSET else None
                self.slices = UNSET if both is None else tuple(sorted(both))
        elif made is not None and self._attempt is None and not self.whole:
            self._hold(made, origin, slices)
        return (self._report(unreachable),)

    def stored(self, made: ModelId, slices: Slices = UNSET) -> tuple[Say, ...]:
        """Report a version, or slices of it, as stored. Empty slices mean that none are held."""
        self._stored |= (made, slices) == self._asked
        return (Say(Stored(self._member.worker, self._model, self._member.life, made, slices)),)
