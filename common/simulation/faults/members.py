"""Simulated members: workers that hold state, and the collectives between them.

A state is a token, which one collective made from one state and some gradients. So two states have
the same numbers only if they are the same token. As in a process group, calls of members are
matched by their order, even if the members mean different calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from common.core.members.replica import (
    ApplyResult,
    CopyState,
    Enter,
    OfferState,
    ReplicaCommand,
    Say,
    ShareWeights,
    StoreState,
    WeightReplica,
)
from common.core.members.stages import MemberMachine
from common.core.messages import (
    GENESIS,
    AttemptId,
    Broken,
    GradientReady,
    Member,
    ModelId,
    Slices,
    WorkerId,
)
from common.core.order_queue import Assignments, Compute
from common.simulation.faults.checks import Violation
from common.simulation.faults.workers import SimulatedWorker
from common.simulation.faults.world import (
    Collectives,
    Entry,
    Found,
    GradientPart,
    Node,
    TrueGradient,
)

if TYPE_CHECKING:
    from common.core.messages import Membership, Reduce, Tier, UpdateTrigger
    from common.simulation.faults.world import Token, World

# Mean time between a member's checks of a collective.
STEP_S = 0.01
# Mean time to copy half of a state.
COPY_S = 0.1
STORE_S = 0.2
# Probability that a check of a collective shows that a member has closed it.
NOTICED = 0.4
# Probability that a member has all data when another closes the collective.
FINISHES = 0.5
# Share of attempts to store slices that fail.
FAILS = 0.3
# Share of sums that are not finite, in worlds with overflows.
OVERFLOWS = 0.02


class SimulatedMember(SimulatedWorker):
    """One process of a group."""

    def __init__(self, world: World, number: int, on_death: Callable[[], None]) -> None:
        self._name = WorkerId(f"w{number}")
        self._tier: Tier = "spot" if number % 3 else "reliable"
        slices = world.scenario.slices
        self._slices = 1 if slices is None else slices.count
        self._begin_with(world, world.revisions[world.revision].slices)
        super().__init__(world, number, on_death)

    def _begin_with(self, world: World, layout: int | None) -> None:
        """Hold nothing, and follow leaders of a layout; None if the coordinator has the weights."""
        self._layout = layout
        self.member = Member(self._name, next(world.serial))
        machine = MemberMachine(self.member, self._tier, world.now)
        self.replica = WeightReplica(self.member, machine=machine if layout else None)
        self.state: Token | None = None
        # Keyed by slice: the state whose optimizer part this member has.
        self.moments = dict[int, "Token"]()
        self.prepared: Token | None = None
        # Slices that it owns in the attempt that it entered last.
        self._owned: Slices = UNSET
        self._taken = dict[tuple[tuple[int, ...], float], TrueGradient]()
        self._to_store: tuple[ModelId, dict[int, Token]] | None = None
        self._entered: AttemptId | None = None
        self._computes_at = self.replica.held
        world.group.members[self.member] = self._offer

    def _look(self) -> None:
        """Read the leader's status. If it names another stream, read the triggers there."""
        before = self.machine.triggers
        super()._look()
        if self.machine.triggers != before:
            self.receive()

    def _receive(self, triggers: Sequence[UpdateTrigger]) -> None:
        """Process triggers. If their leader has another layout, start over with that layout."""
        if self._layout is not None:
            triggers = self.orders.believed(triggers, self._layout)
        if not triggers or triggers[-1].slices == self._slices_of_leader:
            super()._receive(triggers)
        elif not self._busy:
            self._restart(triggers[-1].slices)
            self.world.later(0.0, self.receive)

    @property
    def _slices_of_leader(self) -> int | UnsetType:
        return UNSET if self._layout is None else self._layout

    def _restart(self, slices: int | UnsetType) -> None:
        """Drop the whole state, which is in storage, and follow a leader of another layout."""
        self.world.say(f"{self.id} follows a leader of", slices)
        self._close_all()
        self.world.group.members[self.member] = lambda _: Found()
        self._begin_with(self.world, None if slices is UNSET else slices)
        self.orders, self._model = Assignments(self.id), None

    # --- gradients ----------------------------------------------------------------------------

    def _take_in(self, triggers: Sequence[UpdateTrigger]) -> None:
        if self._layout is None:
            super()._take_in(triggers)
            return
        self.replica.listen(self.orders.last_trigger)
        for trigger in triggers:
            self._carry_out(self.replica.receive(trigger))

    def _carry_on(self, compute: Compute) -> None:
        if self._layout is None:
            super()._carry_on(compute)
            return
        known = self.replica.known(compute.batches, compute.local_rate)
        if known is not None:
            self._push(known, None)
        elif not self.replica.whole or self.state is None:
            self._carry_out([self.replica.lacks()])
        else:
            self._computes_at = self.replica.held
            self._begin(compute, self.state)
            return
        self.orders.done()
        self.world.later(0.0, self.receive)

    def _found(self, compute: Compute, token: Token, seconds: float) -> None:
        """Keep the computed gradient, and report it."""
        if self._layout is None:
            super()._found(compute, token, seconds)
            return
        offsets = tuple(batch.offset for batch in compute.batches)
        samples = sum(batch.samples for batch in compute.batches)
        rate = compute.local_rate
        ready = GradientReady(
            *(self.id, compute.model, offsets, samples, 1.0, {}, seconds),
            life=self.member.life,
            local_rate=rate or UNSET,
            square=self.world.square(samples) if compute.squared else UNSET,
        )
        self._taken[offsets, rate] = TrueGradient(token, rate)
        self._carry_out([self.replica.computed(ready, compute.batches, self._computes_at)])

    # --- the group ----------------------------------------------------------------------------

    def _carry_out(self, commands: Iterable[ReplicaCommand]) -> None:
        for command in commands:
            match command:
                case Say(reply):
                    if isinstance(reply, Broken):
                        self.world.group.met["broken"] += 1
                        self._close(reply.attempt)
                    self._push(reply, None)
                case Enter(membership, reduce):
                    self._enter(membership, reduce)
                case ApplyResult(made):
                    self._apply(made)
                case CopyState(source, made, _, slices):
                    self._copy(source, made, slices)
                case OfferState() | ShareWeights():
                    # Copiers read the state directly.
                    pass
                case StoreState(made, slices):
                    self._store(made, slices)

    def _numbers(self, slices: Slices) -> tuple[int, ...]:
        return tuple(range(self._slices)) if slices is UNSET else slices

    def _of(self, attempt: AttemptId, members: tuple[Member, ...] = ()) -> Collectives:
        return self.world.group.collectives.setdefault(attempt[:2], Collectives(members))

    def _close(self, attempt: AttemptId) -> None:
        self._of(attempt).closed.add(self.member)
        self._entered = None

    def _enter(self, membership: Membership, reduce: Reduce) -> None:
        members = membership.members
        group, state = self._of(reduce.attempt, members), self.state
        group.members = members
        if state is None:
            raise Violation("enters with nothing", f"{self.member}")
        mine = reduce.parts[members.index(self.member)]
        parts = tuple((offsets, self._taken[offsets, reduce.local_rate]) for offsets in mine)
        self._entered, self._owned = reduce.attempt, membership.owned(self.member)
        owned = self._numbers(self._owned)
        if any(self.moments.get(number) != state for number in owned):
            raise Violation("wrong moments", f"{self.member} owns {owned}, has {self.moments}")
        call = group.enter(self.member, Entry(reduce, state, parts, owned))
        self._look_at(reduce, group, call)

    def _look_at(self, reduce: Reduce, group: Collectives, call: dict[Member, Entry]) -> None:
        """Check repeatedly until all members have entered, or one never will."""
        world, attempt = self.world, reduce.attempt
        if self.dead or self._entered != attempt:
            return
        cut = tuple(m for m in group.members if frozenset((m, self.member)) in world.group.links)
        missing = [member for member in group.members if member not in call]
        if not self._up():
            pass
        elif cut:
            self._carry_out(self.replica.failed(attempt, unreachable=cut))
            return
        elif missing:
            if not group.closed.isdisjoint(missing) and world.group.draw.random() < NOTICED:
                self._carry_out(self.replica.failed(attempt))
                return
        elif not group.closed or world.group.draw.random() < FINISHES:
            self._finish(reduce, group, call)
            return
        else:
            self._carry_out(self.replica.failed(attempt))
            return
        delay_s = world.group.draw.expovariate(1 / STEP_S)
        world.later(delay_s, lambda: self._look_at(reduce, group, call))

    def _finish(self, reduce: Reduce, group: Collectives, call: dict[Member, Entry]) -> None:
        world, attempt = self.world, reduce.attempt
        if len({entry.reduce.attempt for entry in call.values()}) > 1:
            # In a real collective, the numbers of samples show that attempts were mixed.
            self._carry_out(self.replica.failed(attempt))
            return
        states = {entry.state for entry in call.values()}
        if len(states) > 1:
            raise Violation("two contents", f"{attempt} is entered with {states}")
        (state,) = states
        owned = {number for entry in call.values() for number in entry.owned}
        if len(owned) < self._slices:
            raise Violation("nobody steps it", f"{attempt}: of {self._slices} slices {owned}")
        parts = [part for member in group.members for part in call[member].parts]
        if any(taken.weights != state for _, taken in parts):
            raise Violation("wrong weights", f"{attempt} at {state} of {parts}")
        if attempt not in world.group.results:
            overflows = world.scenario.overflows and world.group.draw.random() < OVERFLOWS
            made = ModelId(attempt.epoch, attempt.version)
            token = None if overflows and not world.faults_over else (made, next(world.serial))
            version = attempt.version - 1
            messages = tuple(GradientPart(o, version, taken.local_rate) for o, taken in parts)
            world.group.results[attempt] = token, messages, reduce
            if token is not None:
                batches = tuple(offset for offsets, _ in parts for offset in offsets)
                world.nodes[token] = Node(state, batches, 0.0)
        token = world.group.results[attempt][0]
        self._entered = None
        if token is None:
            world.group.overflowed = True
            self._carry_out(self.replica.failed(attempt, "not_finite"))
            return
        self.prepared = token
        square = world.square(reduce.samples) if reduce.measured else UNSET
        self._carry_out(self.replica.finished(attempt, token[1], square))

    def _apply(self, made: ModelId) -> None:
        token = self.prepared
        if token is None or self.world.nodes[token].parent != self.state:
            raise Violation("two chains", f"{self.member} applies {token} to {self.state}")
        self._be(made, token)
        self.moments = dict.fromkeys(self._numbers(self._owned), token)

    def _be(self, made: ModelId, token: Token) -> None:
        known = token if made == GENESIS else self.world.group.truth.setdefault(made, token)
        if token != known or token[0] != made:
            raise Violation("two contents", f"{self.member} has {token} as {made}, not {known}")
        self.state, self.prepared = token, None
        self.world.say(f"{self.id} is at", tuple(made))

    def _copy(self, source: Member | None, made: ModelId, slices: Slices) -> None:
        """Copy half of the source's state now, and the rest later."""
        world, replica = self.world, self.replica
        self.world.say(f"{self.id} copies", tuple(made), "from", source)

        def end(before: Found) -> None:
            if self.dead or self.replica is not replica:
                return
            if not self._up():
                self._when_up(lambda: end(before))
                return
            cut: tuple[Member, ...] = ()
            if source is None:
                found = self._fetch(made)
            else:
                cut = (source,) if frozenset((source, self.member)) in world.group.links else ()
                found = world.group.members[source](made)
                found = found if found == before and not cut else Found()
            token = found.state
            held = self.replica.held, self.replica.slices
            self._carry_out(self.replica.copied(None if token is None else made, found.origin, cut))
            taken = (self.replica.held, self.replica.slices) != held
            world.group.met["copied" if taken and source else "torn" if source else "fetched"] += 1
            if taken and token is not None:
                if self.replica.held != held[0]:
                    self._be(made, token)
                else:
                    world.group.met["moved"] += 1
                self._have(found)

        def offered(source: Member) -> Found:
            """Return everything that was requested, or nothing."""
            found = world.group.members[source](made)
            asked = self._numbers(slices)
            return found if found.moments.keys() >= set(asked) else Found()

        first = Found() if source is None else offered(source)
        world.later(world.group.draw.expovariate(1 / COPY_S), lambda: end(first))

    def _have(self, found: Found) -> None:
        """Keep the optimizer's part of the held slices, from what was found."""
        held = self._numbers(self.replica.slices)
        known = {**self.moments, **found.moments}
        self.moments = {number: known[number] for number in held if number in known}
        if list(self.moments.values()) != [self.state] * len(held):
            raise Violation("wrong moments", f"{self.member} is at {self.state}: {self.moments}")

    def _offer(self, made: ModelId) -> Found:
        """Return what others can copy now. Their copy is torn if it changes before they finish."""
        if self.replica.made != made or not self._up():
            return Found()
        return Found(self.state, self.replica.origin, dict(self.moments))

    def _fetch(self, made: ModelId) -> Found:
        """Return a version from storage.

        Each member makes version 0 itself, with a token of its own that is always the same.
        """
        every = range(self._slices)
        if made == GENESIS:
            token = GENESIS, self.member.life
            return Found(token, self.member.life, dict.fromkeys(every, token))
        stored = self.world.group.stored.get(made, {})
        if self.world.storage_away or len(stored) < self._slices:
            return Found()
        return Found(stored[0], 0, stored)

    def _store(self, made: ModelId, slices: Slices) -> None:
        world, replica = self.world, self.replica
        waiting = made, {number: self.moments[number] for number in self._numbers(slices)}
        self._to_store = waiting

        def end() -> None:
            if self.dead or self._to_store is not waiting:
                return
            fails = (
                world.scenario.slices
                and not world.faults_over
                and world.group.draw.random() < FAILS
            )
            if world.storage_away or fails:
                world.later(world.group.draw.expovariate(1 / STORE_S), end)
                return
            world.group.stored.setdefault(made, {}).update(waiting[1])
            say()

        def say() -> None:
            if self.dead or self.replica is not replica:
                return
            if self._up():
                self._carry_out(replica.stored(made, slices))
            else:
                self._when_up(say)

        world.later(world.group.draw.expovariate(1 / STORE_S), end)

    def _end(self) -> None:
        self._close_all()
        super()._end()

    def _close_all(self) -> None:
        for group in self.world.group.collectives.values():
            if self.member in group.members:
                group.closed.add(self.member)
