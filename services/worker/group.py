"""A worker of a job whose members hold the weights and sum gradients among themselves.

    control      receives triggers, and executes the commands of `common.core.members.replica`
    collective   forms groups and reduces in them, one after another
    gradients    computes what is ordered, at the weights that are held (Algorithm 2)
    copies       one thread for each copy of the state to or from another member

One lock guards the held state. Slow work (gradients, collectives, copies, uploads) runs without it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from secrets import randbits
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from msgspec import UNSET

from common.collectives.port import Peer
from common.core.members.replica import (
    ApplyResult,
    CopyState,
    Enter,
    OfferState,
    Say,
    ShareWeights,
    StoreState,
    WeightReplica,
)
from common.core.members.stages import MemberMachine
from common.core.messages import GENESIS, Failed, GradientReady, Member
from common.core.order_queue import Assignments
from common.errors import GroupError, OutsideError, UnavailableError
from common.learning.errors import NotFiniteError
from services.worker.effects.weights import StateUploader, WeightsSharer
from services.worker.held_weights import Formed
from services.worker.traffic import LIFE_BITS, TrafficCounter, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from msgspec import UnsetType
    from torch import Tensor

    from common.collectives.port import Group, Groups
    from common.core.members.replica import ReplicaCommand
    from common.core.messages import (
        GroupOrders,
        ModelId,
        Reduce,
        Reply,
        Slices,
        Tier,
        TriggerId,
        UpdateTrigger,
        WorkerId,
    )
    from common.core.order_queue import Compute
    from common.storage.store import CheckpointStore
    from services.worker.compute import OrderComputer, Shell
    from services.worker.held_weights import Gradients, HeldWeights

# Key of a gradient: its batches and its local rate.
_Key: TypeAlias = tuple[tuple[int, ...], float]

# Longest wait for a trigger or an order, and so the longest delay before the end of the job is
# noticed.
LISTEN_S = 0.25
# Longest wait for ending threads. Forming a group cannot be interrupted at once.
JOIN_S = 1.0
NOBODY: tuple[Member, ...] = ()
# Time to store or pass on state that no other member holds. The shortest notice leaves at
# least 10 s.
LEAVE_S = 5.0


class GroupAccess(NamedTuple):
    """The additional access that a member needs."""

    groups: Groups
    checkpoints: CheckpointStore
    # Checksum of the initial weights. Empty if the job specifies none.
    origin: str = ""
    # How long a leaving member may be needed.
    leave_s: float = LEAVE_S


class GroupLoop:
    """Carries out this worker's orders and its part in the group.

    Args:
        worker: Name of this worker.
        compute: Computes gradients.
        shell: Parts of the process that the thread uses.
        access: Access to other members and to storage.
        make_held: Returns the state with the weights of version 0.
        machine: Tier and start time of this process, and the number of slices that it can own. None
            if slices have no owners.
        slices: Number of slices. If 0, members hold the complete state.
    """

    def __init__(
        self,
        worker: WorkerId,
        compute: OrderComputer,
        shell: Shell,
        access: GroupAccess,
        make_held: Callable[[], HeldWeights],
        machine: tuple[Tier, float, int] | None = None,
        *,
        slices: int = 0,
    ) -> None:
        self._own_slices = slices
        # Slices according to the leader that was last followed.
        self.slices: int | UnsetType = slices
        self._compute = compute
        self._shell = shell
        self._access = access
        self._make_held = make_held
        self._member = Member(worker, randbits(LIFE_BITS))
        self._count = TrafficCounter(shell.measures)
        # Guards the fields below, up to `_threads`.
        self._changed = threading.Condition()
        runs_on = None if machine is None else MemberMachine(self._member, *machine)
        numbers = len(compute.computer.model.state)
        self._replica = WeightReplica(self._member, access.groups.address, numbers, runs_on)
        self._orders = Assignments(worker, shell.life)
        # The state whose version the replica tracks.
        self._held: HeldWeights | None = None
        # Gradients and their samples.
        self._vectors = dict[_Key, tuple["Tensor", int]]()
        self._formed: Formed | None = None
        # Number of copies that other members are taking.
        self._giving = 0
        self._leaving = False
        # True if another process with this name is a member.
        self._is_double = False
        self._fault: BaseException | None = None
        # The version at which gradients are computed.
        self._loaded: tuple[ModelId | None, int] = None, 0
        # When triggers were last received, in seconds since 1970.
        self._received_s = 0.0
        self._over = threading.Event()
        # Tasks of the collective thread.
        self._tasks = SimpleQueue["Callable[[], None] | None"]()
        self._uploader = StateUploader(access.checkpoints, self._over, shell.logger, self._stored)
        self._sharer = WeightsSharer(shell.board, self._count, compute.times, shell.logger)
        # Started by the first turn.
        self._threads = list[threading.Thread]()

    def turn(self) -> None:
        """Carry out one order in the gradient thread.

        Raises:
            BaseException: The fault that ended one of the other threads.
        """
        if not self._threads:
            for body, name in ((self._control, "group-control"), (self._collective, "group")):
                thread = threading.Thread(
                    target=self._guarded, args=(body,), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._shell.watchdog.beat()
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._orders) or self._fault or self._is_another, LISTEN_S
            )
            if self._fault is not None:
                raise self._fault
            if self._is_another:
                return
            compute = self._orders.next()
            if compute is None:
                return
            received_s, reply = self._received_s, self._answered_before(compute)
        if reply is not None:
            self._shell.push(reply, compute.reply_to)
        else:
            self._answer(compute, received_s)
        with self._changed:
            self._orders.done()

    @property
    def _is_another(self) -> bool:
        """True if a newer leader has its weights held in another layout."""
        return self.slices != self._own_slices

    def leave(self, *, finish: bool = True) -> None:
        """Start no further order, and inform the leader. Safe to call from any thread.

        Args:
            finish: True if there is time to finish the order under way.
        """
        with self._changed:
            self._leaving = True
            said, reply_to = self._orders.leave(finish=finish), self._orders.reply_to
        if said is not None:
            self._shell.push(said, reply_to)

    @property
    def pinned(self) -> bool:
        """True if the held state keeps this worker at its job. Safe to call from any thread."""
        with self._changed:
            return self._replica.pinned

    def close(self) -> None:
        """Wait as long as others need this leaving member, then release everything."""
        until = monotonic() + self._access.leave_s
        with self._changed:
            while self._needed and (left_s := until - monotonic()) > 0:
                self._changed.wait(min(left_s, LISTEN_S))
            formed, self._formed = self._formed, None
        self._over.set()
        self._tasks.put(None)
        if formed is not None:
            formed.group.abort()
        until = monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(until - monotonic(), 0.0))
        self._compute.close()
        self._compute.times.log(self._shell.logger)

    @property
    def _needed(self) -> bool:
        """True if others wait for the state of this member."""
        return self._leaving and self._fault is None and (self._replica.needed or self._giving > 0)

    # --- gradients --------------------------------------------------------------------------------

    def _answered_before(self, compute: Compute) -> Reply | None:
        """Return a reply that needs no computation; otherwise load the weights."""
        replica = self._replica
        known = replica.known(compute.batches, compute.local_rate)
        if known is not None:
            return known
        if not replica.whole or self._held is None:
            return replica.lacks().reply
        held = replica.held
        if self._loaded != held:
            started = perf_counter()
            self._compute.computer.load(self._held.weights)
            self._loaded = held
            took_s = self._compute.times.add("fetch", started)
            self._shell.measures.stage_s.labels("fetch").observe(took_s)
            # The digest comes last, because gradients wait for the weights and nothing waits for
            # the digest.
            self._tasks.put(partial(self._settle, self._held))
        return None

    def _answer(self, compute: Compute, received_s: float) -> None:
        loaded = self._loaded
        answer = self._compute.answer(compute, _nothing)
        reply: Reply
        if isinstance(answer, Failed):
            reply = answer
        else:
            ready = GradientReady(
                self._member.worker,
                **answer.fields(compute),
                life=self._member.life,
                traffic=self._count.traffic,
            )
            with self._changed:
                reply = self._replica.computed(ready, compute.batches, loaded).reply
                held = self._held
                if reply is ready and held is not None:
                    key = ready.batches, compute.local_rate
                    part = answer.found.tensor, ready.samples
                    self._vectors[key] = part
                    # Runs while other members still compute.
                    self._tasks.put(partial(self._add_own, held, key, part))
        sent = self._shell.push(reply, compute.reply_to)
        self._shell.traces.answered(compute, received_s, reply, sent=sent)

    # --- control ----------------------------------------------------------------------------------

    def _control(self) -> None:
        while not (self._over.is_set() or self._is_another):
            with self._changed:
                self._orders.listen(self._shell.stream())
                self._replica.listen(self._orders.last_trigger)
                last_trigger, stream = self._orders.last_trigger, self._orders.stream
            try:
                found = self._shell.board.triggers(last_trigger, LISTEN_S, stream)
                self._shell.outage.quiet()
            except UnavailableError as error:
                self._shell.outage.met(error)
                self._over.wait(LISTEN_S)
                continue
            with self._changed:
                triggers = self._orders.believed(found, self._own_slices)
            if found and not triggers:
                # Without this pause, the next read would return the same triggers at once.
                self._over.wait(LISTEN_S)
            if triggers:
                self._on_triggers(triggers)
                self._shell.round_began(triggers[-1].id.epoch, triggers[-1].unsettled)
            with self._changed:
                self._share()

    def _on_triggers(self, triggers: Sequence[UpdateTrigger]) -> None:
        said = list[Say]()
        with self._changed:
            self.slices = triggers[-1].slices
            if self._is_another:
                self._changed.notify_all()
                return
            self._received_s = time()
            for trigger in triggers:
                commands, orders = self._replica.receive(trigger), trigger.group
                self._orders.receive([trigger])
                if orders is not UNSET and self._replica.last_trigger == trigger.id:
                    self._follow(trigger.id.epoch, orders)
                    said += self._carry_out(commands, orders)
            self._changed.notify_all()
        self._say(said)

    def _follow(self, epoch: int, orders: GroupOrders) -> None:
        """Leave the group of the previous membership, and form that of the next one."""
        place, members = (epoch, orders.membership.number), orders.membership.members
        me = self._member
        others = [each for each in members if each.worker == me.worker and each != me]
        if others and not self._is_double:
            self._shell.logger.warning(
                "left_out",
                worker=me.worker,
                reason="the leader accepts another process with this worker name, which reported"
                " first; stop one of the two, or give it another --name",
            )
        self._is_double = bool(others)
        if self._formed is not None and self._formed.place == place:
            return
        if self._formed is not None:
            self._formed.group.abort()
            self._formed = None
        if self._member in members:
            peers = [Peer(each.worker, orders.addresses.get(each.worker, "")) for each in members]
            rank = members.index(self._member)
            group = counted(self._access.groups, self._count)("{}-{}".format(*place), peers, rank)
            self._formed = Formed(place, orders.membership, rank, group)
            self._tasks.put(partial(self._form, self._formed))

    def _carry_out(self, commands: Iterable[ReplicaCommand], orders: GroupOrders) -> list[Say]:
        """Start the commands, and return what must be reported."""
        said = list[Say]()
        for command in commands:
            match command:
                case Say():
                    said.append(command)
                case Enter(_, reduce):
                    self._enter(reduce)
                case ApplyResult():
                    self._apply()
                case CopyState():
                    self._begin_copy(command, orders)
                case OfferState():
                    self._offer(command, orders)
                case StoreState(made, slices):
                    self._store(made, slices)
                case ShareWeights():
                    self._sharer.due = command
                    self._share()
        return said

    def _say(self, said: Iterable[Say]) -> None:
        with self._changed:
            reply_to = self._orders.reply_to
        for each in said:
            self._shell.push(each.reply, reply_to)

    def _apply(self) -> None:
        if self._held is None:
            raise AssertionError("a pending result needs the held weights")
        started = perf_counter()
        self._held.apply()
        # The attempt is over, so these vectors are not needed any more.
        for vector, _ in self._vectors.values():
            self._compute.computer.model.give_back(vector)
        self._vectors.clear()
        self._compute.times.add("apply", started)

    # --- collectives ------------------------------------------------------------------------------

    def _collective(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _form(self, formed: Formed) -> None:
        if len(formed.members) == 1:
            return
        started = perf_counter()
        try:
            formed.group.form()
        except GroupError as error:
            formed.failed = error
            self._shell.logger.info("group_not_formed", reason=str(error))
        self._compute.times.add("form", started)

    def _settle(self, held: HeldWeights) -> None:
        with self._changed:
            stays = self._stays(held)
        if stays:
            held.settle()

    def _add_own(self, held: HeldWeights, key: _Key, part: tuple[Tensor, int]) -> None:
        """Add a gradient unless its version was replaced.

        The vector stays valid meanwhile: it is released only when a result is applied.
        """
        with self._changed:
            stays = self._stays(held) and self._vectors.get(key) is part
        if stays:
            held.add_own(*part)

    def _stays(self, held: HeldWeights) -> bool:
        """Return True if this state is still held and has no pending result."""
        return held is self._held and not held.is_pending

    def _enter(self, reduce: Reduce) -> None:
        formed, held = self._formed, self._held
        if formed is None or held is None:
            raise AssertionError(
                "a member that enters a collective has formed its group and holds a version"
            )
        rank = formed.rank
        mine = [self._vectors[batches, reduce.local_rate] for batches in reduce.parts[rank]]
        self._tasks.put(partial(self._reduce_once, formed, held, reduce, mine))

    def _reduce_once(
        self, formed: Formed, held: HeldWeights, reduce: Reduce, mine: Gradients
    ) -> None:
        started = perf_counter()
        try:
            if formed.failed is not None:
                raise formed.failed
            held.add_up(formed, reduce, mine)
            with self._changed:
                said = self._replica.finished(reduce.attempt, *held.result(reduce))
        except NotFiniteError:
            with self._changed:
                said = self._replica.failed(reduce.attempt, "not_finite")
        except GroupError as error:
            formed.group.abort()
            formed.failed = GroupError(str(error), error.unreachable)
            lost = tuple(m for m in formed.members if m.worker in error.unreachable)
            with self._changed:
                said = self._replica.failed(reduce.attempt, "left", lost)
            if said:
                self._shell.logger.info("group_broke", reason=str(error))
        self._compute.times.add("reduce", started)
        self._say(said)

    # --- copies -----------------------------------------------------------------------------------

    def _begin_copy(self, copy: CopyState, orders: GroupOrders) -> None:
        get = partial(self._begin_with, copy.made)
        if copy.source is not None:
            pair = self._pair(copy.source, self._member, copy.ordered, orders)
            get = partial(self._receive, pair)
        self._aside(partial(self._copy, copy, get))

    def _pair(self, source: Member, to: Member, ordered: TriggerId, orders: GroupOrders) -> Group:
        """Return the group of two members for a copy from one to the other."""
        both = [Peer(each.worker, orders.addresses.get(each.worker, "")) for each in (source, to)]
        name = f"{ordered.epoch}-copy-{ordered.number}-{to.worker}"
        rank = (source, to).index(self._member)
        return counted(self._access.groups, self._count)(name, both, rank)

    def _copy(self, copy: CopyState, get: Callable[[], tuple[bytes, int]]) -> None:
        started = perf_counter()
        held, made, source, unreachable = self._make_held(), copy.made, copy.source, NOBODY
        origin, got, slices = 0, False, copy.slices
        try:
            data, origin = get()
            if data:
                held.restore(data, slices)
                self._shell.measures.copied_bytes.inc(len(data))
            got = True
        except OutsideError as error:
            self._shell.logger.info("copy_failed", version=made.version, reason=str(error))
            if source is not None and isinstance(error, GroupError):
                unreachable = (source,) if source.worker in error.unreachable else ()
        with self._changed:
            before = self._replica.held, self._replica.slices
            said = self._replica.copied(made if got else None, origin, unreachable)
            if self._replica.held != before[0]:
                self._held = held
                self._vectors.clear()
            elif self._held is not None and self._replica.slices != before[1]:
                self._held.adopt(held, slices)
            if (self._replica.held, self._replica.slices) != before:
                of = None if source is None else source.worker
                self._shell.logger.info(
                    "weights_copied", epoch=made.epoch, version=made.version, of=of
                )
            self._changed.notify_all()
        self._compute.times.add("copy", started)
        self._say(said)

    def _begin_with(self, made: ModelId) -> tuple[bytes, int]:
        """Return the job's initial weights, or the state that a member has stored."""
        checkpoints, origin = self._access.checkpoints, self._access.origin
        if made != GENESIS:
            return checkpoints.state(made), 0
        return checkpoints.origin(origin) if origin else b"", self._member.life

    def _receive(self, pair: Group) -> tuple[bytes, int]:
        """Receive the state of the other member, and the member that made its version 0."""
        pair.form()
        head = torch.zeros(2, dtype=torch.int64)
        pair.copy([head.view(torch.float32)])
        length, origin = head.tolist()
        data = torch.empty(-(-length // 4))
        pair.copy([data])
        return data.numpy().tobytes()[:length], origin

    def _offer(self, offer: OfferState, orders: GroupOrders) -> None:
        if self._held is None:
            return
        data, origin = self._held.snapshot(offer.slices), self._replica.origin
        self._giving += 1
        pair = self._pair(self._member, offer.to, offer.ordered, orders)
        self._aside(partial(self._give, pair, data, origin))

    def _give(self, pair: Group, data: bytes, origin: int) -> None:
        payload = torch.zeros(-(-len(data) // 4))
        payload.numpy().view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        # The copying member reports the failure and gets new orders.
        with suppress(GroupError):
            pair.form()
            pair.copy([torch.tensor([len(data), origin]).view(torch.float32)])
            pair.copy([payload])
        with self._changed:
            self._giving -= 1
            self._changed.notify_all()

    def _store(self, made: ModelId, slices: Slices) -> None:
        """Copy the state now and store it, in place of an earlier state that still waits."""
        if self._held is not None and self._uploader.put(made, slices, self._held.stored(slices)):
            self._aside(self._uploader.run)

    def _stored(self, made: ModelId, slices: Slices) -> None:
        with self._changed:
            said = self._replica.stored(made, slices)
        self._say(said)

    def _share(self) -> None:
        """Put weights in Redis, once the previous transfer has ended and its pause is over."""
        share = self._sharer.begin(None if self._held is None else self._replica.made)
        if share is not None and self._held is not None:
            self._aside(partial(self._sharer.put, share, self._held.model()))

    # --- threads ----------------------------------------------------------------------------------

    def _aside(self, body: Callable[[], None]) -> None:
        """Run slow work in a separate thread."""
        threading.Thread(target=self._guarded, args=(body,), name="group-copy", daemon=True).start()

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as fault:  # noqa: BLE001 -- raised again by the gradient thread
            with self._changed:
                self._fault = self._fault or fault
                self._changed.notify_all()


def _nothing() -> None:
    """Do nothing: the weights are loaded already."""
