"""A member: it holds the weights of one version, and the result of an attempt at the next.

    trigger names a version ──▶ it holds it             gradients of it can be computed
                            ──▶ it has prepared it      it applies what it has, and holds it
                            ──▶ else                    it says what it holds, and is told to copy

What a leader has decided alone moves a member from one version to the next; which one a result is
for, it knows by the attempt that the audit names. It enters an attempt only with the version that
is named, and with every gradient that it is to add; else it breaks off at once, so that all know.

Where slices of the weights have owners, it holds all weights, and the optimizer's state of some
slices: those that it owned in the attempt that it applied, and those that it copied since.
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

Gradient: TypeAlias = tuple[tuple[int, ...], float]  # of which batches, walked at which rate


class ReplicaCommand(msgspec.Struct, frozen=True, gc=False):
    """One thing that a member wants done."""


class Enter(ReplicaCommand, frozen=True):
    """Add one's gradients to those of all members; report what came of it."""

    membership: Membership
    reduce: Reduce


class ApplyResult(ReplicaCommand, frozen=True):
    """The result in hand is that of a version: take the step."""

    made: ModelId


class CopyState(ReplicaCommand, frozen=True):
    """Take over all that the source holds, if that is still this version; report."""

    source: Member | None  # None: from storage, or by the specification
    made: ModelId
    ordered: TriggerId  # by which both know each other
    slices: Slices = UNSET  # of whose optimizer state


class OfferState(ReplicaCommand, frozen=True):
    """Let another take over all that is held."""

    to: Member
    ordered: TriggerId
    slices: Slices = UNSET


class StoreState(ReplicaCommand, frozen=True):
    """Put this version into storage, or slices of it; report."""

    made: ModelId
    slices: Slices = UNSET


class ShareWeights(ReplicaCommand, frozen=True):
    """Leave the weights of this version on the board; nobody waits for that."""

    made: ModelId
    by: int  # the leader's epoch
    hot: bool  # beside its hot snapshot
    offered: bool  # for evaluators


class Say(ReplicaCommand, frozen=True):
    """Tell the leader."""

    reply: GroupReply


class WeightReplica:
    """What one process holds, and what it does by each trigger; its shell has the numbers.

    Args:
        member: The worker, and its life.
        address: Where others reach it.
        numbers: P + B, of the weights.
        machine: What it runs on, where slices have owners.
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
        self.made: ModelId | None = None  # the version that it holds
        self.origin = 0  # of version 0: the life of the member that made it
        self.slices: Slices = UNSET  # whose optimizer state it holds at that version
        self.last_trigger = TriggerId(-1, 0)  # the newest trigger taken in
        self._model = GENESIS  # of the newest trigger
        self._orders: GroupOrders | None = None  # likewise
        self._base: ModelId | None = None  # what the result in hand is a step from
        self._prepared: AttemptId | None = None  # whose result it has in hand
        self._owned: Slices = UNSET  # in the attempt that it entered last
        self._attempt: AttemptId | None = None  # that it is in
        self._last: AttemptId | None = None  # that it entered or broke off
        self._broken: tuple[int, int] | None = None  # the membership that it has broken off in
        self._copying: Copy | None = None
        self._is_double = False  # the leader named another process of its worker's name
        self._asked: tuple[ModelId, Slices] | None = None  # to store this, last
        self._stored = False  # that is done
        # At the version that it holds, each with its batches by value.
        self._gradients = dict[Gradient, tuple[GradientReady, tuple[Batch, ...]]]()

    @property
    def held(self) -> tuple[ModelId | None, int]:
        """The version that it holds, and of version 0 whose: there may have been several."""
        return self.made, self.origin

    @property
    def needed(self) -> bool:
        """Whether others may need it: who leaves is a member until the leader lets it go."""
        return self._orders is not None and self._member in self._orders.membership.members

    @property
    def pinned(self) -> bool:
        """Whether it must not go to another job: it owns slices, or nobody else is a member.

        Version 0 can be made again.
        """
        if self._orders is None or not self.needed or self._orders.made == GENESIS:
            return False
        membership = self._orders.membership
        owned = membership.owned(self._member)
        return len(membership.members) == 1 or (owned is not UNSET and bool(owned))

    @property
    def whole(self) -> bool:
        """Whether it holds the version that was named last."""
        orders = self._orders
        return (
            orders is not None
            and self.made == orders.made
            and (self.made != GENESIS or self.origin == orders.origin)
        )

    def listen(self, last_trigger: TriggerId) -> None:
        """Go on after what was heard of the leader's triggers: see `Assignments.listen`."""
        self.last_trigger = min(self.last_trigger, last_trigger)

    def receive(self, trigger: UpdateTrigger) -> tuple[ReplicaCommand, ...]:
        """Take in the next trigger; one that is older than the newest does nothing."""
        if trigger.group is UNSET or trigger.id <= self.last_trigger:
            return ()
        return tuple(self._receive(trigger, trigger.group))

    def _receive(self, trigger: UpdateTrigger, orders: GroupOrders) -> Iterator[ReplicaCommand]:
        first = trigger.id.epoch != self.last_trigger.epoch
        self.last_trigger, self._model, self._orders = trigger.id, trigger.model, orders
        place = (trigger.id.epoch, orders.membership.number)
        if self._last is not None and self._last.epoch > place[0]:
            self._last = None  # of a leader whose record was lost
        if self._attempt is not None and self._attempt[:2] != place:
            yield from self._break_off("left")
        if self._prepared is not None and self._prepared == orders.by and self._base == self.made:
            yield ApplyResult(orders.made)
            self._hold(orders.made, 0, self._owned)
        ours = [each for each in orders.named() if each.worker == self._member.worker]
        # Another process is taken for the one that has the name: said once, and when asked.
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
            # Of version 0 each has all slices, or none: see `_hold`.
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
        """Whether it holds the optimizer's state of these, too."""
        if self.slices is UNSET:
            return True
        return slices is not UNSET and set(slices) <= set(self.slices)

    def _hold(self, made: ModelId | None, origin: int, slices: Slices) -> None:
        if (made, origin) != self.held:
            self._gradients = {}
        self.made, self.origin = made, origin
        # Before the first step an optimizer has no state that somebody could lack.
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
        """The answer to an order that was answered before, perhaps to another leader.

        A control topic that lost records gives their offsets to other batches.
        """
        offsets = tuple(batch.offset for batch in batches)
        ready, answered = self._gradients.get((offsets, local_rate), (None, ()))
        if ready is None or answered != batches or not self.whole:
            return None
        return msgspec.structs.replace(ready, model=self._model)

    def computed(
        self, ready: GradientReady, batches: tuple[Batch, ...], at: tuple[ModelId | None, int]
    ) -> Say:
        """A gradient was computed at what was `held` then; it stays here while that still is."""
        if at == self.held and self.whole:
            self._gradients[ready.batches, ready.local_rate or 0.0] = ready, batches
            return Say(ready)
        return self._report()

    def lacks(self) -> Say:
        """It was asked for a gradient of a version that it does not hold."""
        return self._report()

    # --- attempts -----------------------------------------------------------------------------

    def _enter(self, membership: Membership, reduce: Reduce) -> Iterator[ReplicaCommand]:
        if self._last is not None and reduce.attempt <= self._last:
            return  # it is in it, or was
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
        """It has the whole result of an attempt."""
        if attempt != self._attempt:
            return ()  # it was left meanwhile
        self._attempt, self._prepared, self._base = None, attempt, self.made
        worker, life = self._member
        return (Say(Reduced(worker, self._model_of(attempt), life, attempt, digest, square)),)

    def failed(
        self,
        attempt: AttemptId,
        reason: BrokenReason = "left",
        unreachable: tuple[Member, ...] = (),
    ) -> tuple[Say, ...]:
        """An attempt came to nothing here."""
        return tuple(self._break_off(reason, unreachable)) if attempt == self._attempt else ()

    # --- copies -------------------------------------------------------------------------------

    def copied(
        self, made: ModelId | None, origin: int = 0, unreachable: tuple[Member, ...] = ()
    ) -> tuple[Say, ...]:
        """A copy came to its end.

        Args:
            made: What it is, checked by its digest; None: nothing whole.
            origin: Of version 0: the life of the member that made it.
            unreachable: Whom it could not be had of.
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
        """A version is in storage, or slices of it; none: they are not here."""
        self._stored |= (made, slices) == self._asked
        return (Say(Stored(self._member.worker, self._model, self._member.life, made, slices)),)
