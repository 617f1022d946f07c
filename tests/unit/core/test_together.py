"""Workers and coordinators connected directly: records in, updates out, every offset once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from common.core import commands as do
from common.core import events, worker_messages
from common.core.audit import Audit, audit
from common.core.batching import DecodedRun
from common.core.coordinator import Coordinator
from common.core.liveness import Heartbeat
from common.core.order_queue import Assignments
from common.core.settings import WorkerSettings
from common.core.snapshots import genesis
from common.core.spans import Partition
from common.core.worker_reading import Worker
from tests.unit.core.bench import QUIET
from tests.unit.core.examples import FIRST, SAMPLES, A, B, P, Q, gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.messages import (
        AuditRecord,
        Claim,
        Gradient,
        LeaderStatus,
        Positions,
        UpdateTrigger,
        WorkerId,
    )
    from common.core.snapshots import Snapshot
    from common.core.worker_messages import WorkerCommand, WorkerEvent

# Virtual time between two steps of a process.
STEP_S = 0.05
# Number of steps after which everything must have drained.
PATIENCE = 2000
WORKER = WorkerSettings(batch_size=SAMPLES, bound=3, batch_linger_s=0.2)
COORDINATOR = replace(QUIET, group_linger_s=0.3, hot_every_updates=2)


@dataclass
class _World:
    """Log, shared state and clock of all processes."""

    ends: Positions  # log ends of the partitions
    now: float = 0.0
    control: list[Claim] = field(default_factory=list)
    updates: list[AuditRecord] = field(default_factory=list)
    leader_status: LeaderStatus | None = None
    triggers: list[UpdateTrigger] = field(default_factory=list)
    replies: dict[int, list[Gradient]] = field(default_factory=dict)  # keyed by epoch
    heartbeats: dict[WorkerId, Heartbeat] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    lease: str = "one"

    def audit(self) -> Audit:
        return audit(FIRST, enumerate(self.control), enumerate(self.updates))

    def wipe(self) -> None:
        """Empty the shared state."""
        self.leader_status = None
        for thing in (self.triggers, self.replies, self.heartbeats, self.snapshots):
            thing.clear()


class _Member:
    """A worker: its stream side, its orders, and a gradient device that takes no time."""

    def __init__(self, world: _World, name: WorkerId, *own: Partition) -> None:
        self.world, self.name, self.own = world, name, list[Partition]()
        self.stream, self.orders, self.reading = Worker(name, WORKER), Assignments(name), False
        self.assign(*own)

    def assign(self, *own: Partition) -> None:
        self.own += own
        self.feed(worker_messages.Assigned(own))

    def feed(self, event: WorkerEvent) -> None:
        for answer in tuple(self.carry_out(self.stream.on(event, self.world.now))):
            self.feed(answer)

    def step(self) -> None:
        self.feed(events.Tick())
        for partition in self.own:
            start = self.stream.position(partition)
            if start is None or not self.reading:
                continue
            end = min(self.world.ends[partition], start + self.stream.room)
            if start < end:
                self.feed(
                    worker_messages.Decoded(DecodedRun(partition, range(start, end), (), 0.0, 0.0))
                )
        self.orders.receive(self.world.triggers)
        while (order := self.orders.next()) is not None:
            reply = gradient(self.name, order.model, order.batches)
            self.world.replies.setdefault(order.model.epoch, []).append(reply)

    def carry_out(self, commands: Iterable[WorkerCommand]) -> Iterator[WorkerEvent]:
        for command in commands:
            match command:
                case worker_messages.Announce(number, claim):
                    self.world.control.append(claim)
                    yield worker_messages.Delivered(number, len(self.world.control) - 1)
                case worker_messages.ReadLeaderStatus():
                    yield worker_messages.LeaderStatusSeen(self.world.leader_status)
                case worker_messages.SetReading(reading):
                    self.reading = reading
                case worker_messages.SendHeartbeat(status):
                    self.world.heartbeats[self.name] = Heartbeat(status)


class _Replica:
    """A coordinator; the world says who holds the lease."""

    def __init__(self, world: _World, name: str) -> None:
        self.world, self.name, self.machine = world, name, Coordinator(name, COORDINATOR)
        self.epoch = self.updates_read = self.control_read = 0

    def feed(self, event: CoordinatorEvent) -> None:
        for answer in tuple(self.carry_out(self.machine.on(event, self.world.now))):
            self.feed(answer)

    def step(self) -> None:
        self.feed(events.Tick())
        updates = tuple(enumerate(self.world.updates))[self.updates_read :]
        self.updates_read += len(updates)
        self.feed(events.UpdatesRead(updates))
        if self.machine.leader is not None:
            control = tuple(enumerate(self.world.control))[self.control_read :]
            self.control_read += len(control)
            self.feed(events.ControlRead(control))
            self.feed(events.RepliesRead(tuple(self.world.replies.pop(self.epoch, ()))))

    def carry_out(  # noqa: C901 -- one case per command
        self, commands: Iterable[CoordinatorCommand]
    ) -> Iterator[CoordinatorEvent]:
        world = self.world
        for command in commands:
            match command:
                case do.AskLease():
                    yield events.LeaseAnswered(held=world.lease == self.name)
                case do.FindSnapshots(source):
                    self.updates_read = end = len(world.updates)
                    found = (genesis(FIRST),) if source == "genesis" else tuple(world.snapshots)
                    yield events.SnapshotsFound(source, found, tuple(enumerate(world.updates)), end)
                case do.RestoreSnapshot():
                    yield events.SnapshotRestored(len(world.updates))
                case do.Begin(epoch, snapshot):
                    self.epoch, self.control_read = epoch, snapshot.control_position
                case do.AppendAudit(record):
                    world.updates.append(record)
                case do.PostTrigger(trigger):
                    world.triggers.append(trigger)
                case do.PutLeaderStatus(leader_status):
                    world.leader_status = leader_status
                case do.PublishSnapshot(snapshot):
                    world.snapshots.append(snapshot)
                case do.ReadHeartbeats():
                    yield events.WorkersSeen(dict(world.heartbeats))


class _Cluster:
    """Two workers on a partition each, and two replicas of the coordinator."""

    def __init__(self, p: int, q: int) -> None:
        self.world = _World({P: p, Q: q})
        self.members = {"a": _Member(self.world, A, P), "b": _Member(self.world, B, Q)}
        self.replicas = {name: _Replica(self.world, name) for name in ("one", "two")}

    def step(self, who: str) -> None:
        """Give one process a turn, if it still exists."""
        self.world.now += STEP_S
        actor = self.members.get(who) or self.replicas.get(who)
        if actor is not None:
            actor.step()

    def lose_a(self) -> None:
        """Kill worker A; the group assigns its partition to B."""
        if self.members.pop("a", None) is not None:
            self.world.heartbeats.pop(A, None)
            self.members["b"].assign(P)

    def take_over(self) -> None:
        """Give the lease to the other replica before this one knows."""
        self.world.lease = "two" if self.world.lease == "one" else "one"

    def run(self, until: Callable[[Audit], bool]) -> Audit:
        for _ in range(PATIENCE // 4):
            for who in (*self.members, *self.replicas):
                self.step(who)
            if until(found := self.world.audit()):
                return found
        raise AssertionError(f"nothing moves any more: {self.world.audit()}")

    def drain(self) -> Audit:
        return self.run(lambda found: found.settled == self.world.ends)


def test_every_offset_is_in_exactly_one_update() -> None:
    cluster = _Cluster(p=60, q=60)
    found = cluster.drain()
    assert (found.flaws, found.trained, found.taken_back) == ((), 120, 0)
    assert [update.short for update in found.updates] == [""] * 6
    assert len(cluster.world.triggers) == 6  # no order was repeated


def test_new_coordinator_continues_after_the_loss_of_the_old_one() -> None:
    cluster = _Cluster(p=100, q=100)
    cluster.run(lambda found: len(found.updates) >= 3)
    cluster.take_over()
    del cluster.replicas["one"]
    found = cluster.drain()
    assert (found.flaws, found.trained, found.takeovers) == ((), 200, 2)


def test_survivor_takes_over_partition_and_batches_of_a_lost_worker() -> None:
    cluster = _Cluster(p=100, q=35)
    cluster.run(lambda found: len(found.updates) >= 1)
    cluster.lose_a()
    found = cluster.drain()
    assert (found.flaws, found.trained) == ((), 135)


happenings = st.lists(
    st.sampled_from(["a", "b", "one", "two"] * 4 + ["wipe", "lose a", "take over"]),
    min_size=40,
    max_size=80,
)


@given(happenings, st.integers(0, 90), st.integers(0, 90))
def test_every_offset_is_used_exactly_once_despite_delays_and_losses(
    happenings: list[str], p: int, q: int
) -> None:
    cluster = _Cluster(p, q)
    for what in happenings:
        match what:
            case "wipe":
                cluster.world.wipe()
            case "lose a":
                cluster.lose_a()
            case "take over":
                cluster.take_over()
            case _:
                cluster.step(what)
    found = cluster.drain()
    assert found.flaws == ()
    assert found.trained == p + q
