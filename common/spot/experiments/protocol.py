"""The whole protocol in virtual time, with every decision made by the production state machines.

Kafka and Redis always work, with a small delay each. Machines come and go as the fleet decides. All
faults but preemption are in `common.simulation.faults`. The time of a gradient is drawn; its value
is nothing, or real numbers from `learning`.

    streams ──full batch──▶ Machine (core.Worker) ──claim──▶ control ──▶ core.Coordinator
                               ▲   core.Orders ◀──trigger── board ◀───────┘   │
                               └────────────gradient──▶ board ────────────────┘
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from common.config.synchronisation import SYNCHRONOUS, SynchronisationSpec
from common.core import commands as do
from common.core import events, worker_messages
from common.core.coordinator import Coordinator
from common.core.liveness import ALIVE, Heartbeat
from common.core.messages import Assignment, Gradient, UpdateTrigger, WorkerId
from common.core.order_queue import Assignments, Compute
from common.core.settings import CoordinatorSettings, WorkerSettings
from common.core.snapshots import genesis
from common.core.worker_reading import Worker

if TYPE_CHECKING:
    import numpy as np

    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.messages import Claim, LeaderStatus, Reply, Vector
    from common.core.spans import Partition
    from common.core.worker_messages import WorkerCommand, WorkerEvent
    from common.spot.experiments.arrivals import SimulatedStream

# Number of gradient times drawn in one call: a draw costs little, a call costs much.
DRAWN = 4096
# Time between polls of the leader's status while a worker waits for room to read.
LOOK_S = 0.1
FOR_EVER_S = 1e12
# Time between polls of the coordinator's clock. Overdue orders may be noticed this late.
TICK_S = 0.5
# Time between polls of the leader's status while a worker reads. They only free memory.
LEADER_STATUS_S = 60.0
# Number of reads of the control topic in the time in which the records of an update arrive. A claim
# waits for an eighth of that time on average.
READS = 4


class VirtualTime:
    """A clock that jumps from event to event. Events due at the same time keep their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap = list[tuple[float, int, "Callable[..., None]", tuple[Any, ...]]]()
        self._serial = 0
        self._stopped = False

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Schedule an action. If the time has passed, the action runs after all that are due."""
        serial = self._serial = self._serial + 1
        due_s = time_s if time_s > self.now else self.now  # noqa: FURB136 -- a call costs more
        heappush(self._heap, (due_s, serial, action, arguments))

    def run(self) -> None:
        """Run actions in order until `stop` is called or none is left."""
        heap = self._heap
        self._stopped = False
        while heap and not self._stopped:
            self.now, _, action, arguments = heappop(heap)
            action(*arguments)

    def stop(self) -> None:
        """Stop after the current action."""
        self._stopped = True


class Computed(msgspec.Struct, frozen=True, gc=False):
    """The gradient of some batches. Every number is a sum over their samples."""

    loss_sum: float
    # None if nothing is learned, or if the gradient is too late to count.
    vector: Vector | None


NOTHING = Computed(0.0, None)


class Learner:
    """Computes gradients and weights. This base class learns nothing: it simulates only times."""

    def gradient(self, compute: Compute) -> Computed:
        """Compute a gradient."""
        del compute
        return NOTHING

    def add(self, round_: int, computed: Vector | None, samples: int) -> None:
        """Add a gradient to the sum of a round."""

    def apply(self, command: do.Apply, now: float) -> None:
        """Apply an update from the sum."""

    def discard(self, round_: int) -> None:
        """Drop the sum of a round."""


class GradientTimeDraws:
    """C, the time of one batch's gradient: gamma distributed and independent.

    Args:
        mean_s: mu_C
        variation: Standard deviation over mean; 0 for a constant, 1 for exponential.
        rng: Source of the draws.
    """

    def __init__(self, mean_s: float, variation: float, rng: np.random.Generator) -> None:
        self._mean_s = mean_s
        self._shape = variation**-2 if variation > 0 else None
        self._rng = rng
        self._drawn = list[float]()

    def draw(self, batches: int, speed: float) -> float:
        """Draw the time of this many consecutive batches on a machine of this speed."""
        if self._shape is None:
            return batches * self._mean_s / speed
        if len(self._drawn) < batches:
            scale_s = self._mean_s / self._shape
            self._drawn += self._rng.gamma(self._shape, scale_s, DRAWN + batches).tolist()
        # Most orders have one batch.
        if batches == 1:
            return self._drawn.pop() / speed
        return sum([self._drawn.pop() for _ in range(batches)]) / speed


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of one machine that runs everything."""

    # Time from a record's append to a reader that waits for it.
    control_s: float = 0.003
    # Time of a trigger or a gradient through Redis.
    board_s: float = 0.0005
    # Time until a preempted machine's work is reassigned.
    death_s: float = 0.1
    # Time that each order with its model, and each gradient, occupies the shared link.
    link_s: float = 0.0


class SimulatedMachine:
    """One worker from its start to its preemption.

    Args:
        worker: Its id. A machine that returns is another worker.
        settings: Settings of the production worker.
        speed: Speed of its gradients.
    """

    def __init__(
        self, protocol: Protocol, worker: WorkerId, settings: WorkerSettings, speed: float
    ) -> None:
        self.id = worker
        self.streams = dict["Partition", "SimulatedStream"]()
        self.gone = False
        # Arrival time of the last message sent to it.
        self.receives_at = 0.0
        self._protocol = protocol
        self._time = protocol.time
        self._batch_size = settings.batch_size
        self._speed = speed
        self._worker = Worker(worker, settings)
        self._orders = Assignments(worker)
        self._computing = False
        self._posted = list["UpdateTrigger"]()
        self._reading = False
        # Position whose batch is awaited.
        self._awaited = dict["Partition", int]()
        self._tick_at = inf
        self._looking = False

    def preempt(self) -> None:
        """Be preempted without notice."""
        self.gone = True

    # --- streams ------------------------------------------------------------------------------

    def own(self, streams: list[SimulatedStream]) -> None:
        """Add streams that the group assigned."""
        self.streams.update((stream.partition, stream) for stream in streams)
        self._feed(worker_messages.Assigned(tuple(stream.partition for stream in streams)))
        self._wake_when_due()

    def disown(self, partitions: list[Partition]) -> None:
        """Remove partitions that the group revoked."""
        for partition in partitions:
            del self.streams[partition]
            self._awaited.pop(partition, None)
        self._feed(worker_messages.Revoked(tuple(partitions)))

    def await_batches(self) -> None:
        """Schedule the next batch of each stream that has no scheduled batch."""
        for stream in self.streams.values():
            self._await(stream)

    def _await(self, stream: SimulatedStream) -> None:
        """Read a batch of a stream as soon as it is full.

        A real consumer reads all that is available. Cutting batches one stream at a time changes
        which records share a batch, not the number of batches at any time.
        """
        if not self._reading:
            return
        partition = stream.partition
        position = self._worker.position(partition)
        if position is None or self._awaited.get(partition) == position:
            return
        full_at = stream.full_at(position, self._batch_size)
        if full_at == inf:
            # The stream stands still. Its restart calls this method again.
            return
        self._awaited[partition] = position
        self._time.at(full_at, self._read, stream, position)

    def _read(self, stream: SimulatedStream, position: int) -> None:
        partition, streams = stream.partition, self.streams
        if self.gone or self._awaited.get(partition) != position:
            return
        del self._awaited[partition]
        if not self._reading:
            return
        if len(streams) > 1:
            # Move the stream behind the others, which are read first now.
            streams[partition] = streams.pop(partition)
        self._feed(worker_messages.Decoded(stream.read(position, self._batch_size)))
        self._await(stream)

    # --- orders -------------------------------------------------------------------------------

    def receive(self, trigger: UpdateTrigger) -> None:
        """Receive a trigger. Like a real worker, the machine listens between two gradients."""
        self._posted.append(trigger)
        if not self._computing:
            self._listen()
            self._begin_next()

    def _listen(self) -> None:
        self._orders.receive(self._posted)
        newest = self._posted[-1]
        self._posted.clear()
        self._feed(worker_messages.RoundBegan(newest.id.epoch, newest.unsettled))
        if not self._reading:
            # The worker may be due to check for room sooner now.
            self._wake_when_due()

    def _begin_next(self) -> None:
        compute = self._orders.next()
        self._computing = compute is not None
        if compute is None:
            return
        batches, protocol = compute.batches, self._protocol
        seconds = protocol.gradient_times.draw(len(batches), self._speed)
        computed = protocol.learner.gradient(compute)
        gradient = Gradient(
            self.id,
            compute.model,
            tuple([batch.offset for batch in batches]),
            sum([batch.samples for batch in batches]),
            computed.loss_sum,
            {},
            seconds,
            compute.local_rate or UNSET,
            vector=computed.vector,
        )
        self._time.at(self._time.now + seconds, self._computed, gradient)

    def _computed(self, gradient: Gradient) -> None:
        if self.gone:
            return
        if self._posted:
            # This gradient answers a waiting trigger that requests it again.
            self._listen()
        self._protocol.board.reply(gradient)
        self._begin_next()

    # --- the state machine --------------------------------------------------------------------

    def _wake_when_due(self) -> None:
        due = max(self._worker.due(), self._time.now)
        if due < self._tick_at:
            self._tick_at = due
            self._time.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if self.gone or due != self._tick_at:
            return
        self._tick_at = inf
        self._feed(events.Tick())
        self._wake_when_due()

    def _look_until_reading(self) -> None:
        """Poll the leader's status as often as a real worker until a status leaves room to read."""
        if not self._looking:
            self._looking = True
            self._time.at(self._time.now, self._look)

    def _look(self) -> None:
        self._looking = False
        if not self.gone and not self._reading:
            self._feed(worker_messages.LeaderStatusSeen(self._protocol.look()))
        if not self.gone and not self._reading:
            self._looking = True
            self._time.at(self._time.now + LOOK_S, self._look)

    def _feed(self, event: WorkerEvent) -> None:
        for command in self._worker.on(event, self._time.now):
            # `Announce` and `Forget` occur for each batch, so they are matched first.
            if isinstance(command, worker_messages.Announce):
                offset = self._protocol.announce(command.claim)
                self._feed(worker_messages.Delivered(command.number, offset))
            # `Forget` drops rows, which do not exist here.
            elif not isinstance(command, worker_messages.Forget):
                self._obey(command)

    def _obey(self, command: WorkerCommand) -> None:
        match command:
            case worker_messages.SetReading(reading):
                self._reading = reading
                if reading:
                    self.await_batches()
                else:
                    self._look_until_reading()
            case worker_messages.Place(positions):
                for partition in positions:
                    self._await(self.streams[partition])
            case worker_messages.Unplace(partition):
                self._awaited.pop(partition, None)
            case worker_messages.ReadLeaderStatus():
                self._feed(worker_messages.LeaderStatusSeen(self._protocol.leader_status))
            case _:
                # Other commands, such as heartbeats and commits, have no counterpart here.
                pass


class _Board:
    """Messages between machines and the coordinator through Redis, over one link.

    Args:
        deliver: Receives gradients when they arrive.
    """

    def __init__(
        self, time: VirtualTime, delays: Delays, deliver: Callable[[events.RepliesRead], None]
    ) -> None:
        self._time, self._delays, self._deliver = time, delays, deliver
        self._link_free_at = 0.0
        self._replies = list["Reply"]()
        self._replies_at = -1.0

    def reply(self, gradient: Gradient) -> None:
        """Send a gradient. Gradients that arrive at the same time are read together."""
        sent = self.linked() if self._delays.link_s else self._time.now
        arrives = sent + self._delays.board_s
        if arrives != self._replies_at:
            self._replies, self._replies_at = [], arrives
            self._time.at(arrives, self._replied, self._replies)
        self._replies.append(gradient)

    def linked(self) -> float:
        """Return the time at which a message sent now has passed the link."""
        self._link_free_at = max(self._link_free_at, self._time.now) + self._delays.link_s
        return self._link_free_at

    def _replied(self, replies: list[Reply]) -> None:
        self._deliver(events.RepliesRead(tuple(replies)))


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """The job, as the production code sees it."""

    group_size: int  # K
    batch_size: int  # b
    updates: int  # J(epsilon)
    # Mean time of the arrival of an update's records: K b over the rate of all streams.
    group_s: float
    synchronisation: SynchronisationSpec = SYNCHRONOUS


class Protocol:
    """One job's coordinator and its current machines.

    Attributes:
        board: Carries triggers and gradients.
        coordinator: Decides.
        leader_status: The leader's status on the board.
        update_times_s: Time at which each update was applied.
        finished: True if the job has ended.
        computed: Number of batches whose gradient counted, by worker.
        staleness: Versions between each update and the weights of its oldest gradient.
        too_stale: Number of updates above the allowed staleness.
    """

    def __init__(
        self,
        time: VirtualTime,
        job: SimulatedJob,
        streams: Sequence[SimulatedStream],
        gradient_times: GradientTimeDraws,
        learner: Learner,
        delays: Delays | None = None,
    ) -> None:
        self.time = time
        self.gradient_times = gradient_times
        self.learner = learner
        self.leader_status: LeaderStatus | None = None
        self.update_times_s = list[float]()
        self.finished = False
        self.computed = Counter[WorkerId]()
        self.staleness = list[int]()
        self.too_stale = 0
        given = job.synchronisation
        # True if triggers also go to machines without an order, as in these modes.
        modes = {mode.mode for mode, _ in given.modes(job.group_size)}
        self._triggers_pass = not modes.isdisjoint(("stale", "asynchronous"))
        self._delays = delays or Delays()
        self.board = _Board(time, self._delays, self._feed)
        self._first = {stream.partition: 0 for stream in streams}
        bound = given.batches_held(job.group_size)
        self._worker_settings = WorkerSettings(
            job.batch_size, bound, heartbeat_s=FOR_EVER_S, leader_status_s=LEADER_STATUS_S
        )
        settings = CoordinatorSettings(
            given.core_mode(job.group_size),
            bound,
            rules=given.core_rules(job.group_size),
            stop_updates=job.updates,
            # There is one coordinator without rivals and nothing to recover from. So there is no
            # lease, no heartbeat and no hot snapshot.
            hot_every_s=None,
            checkpoint_every_s=None,
            lease_ttl_s=FOR_EVER_S,
            alive_s=FOR_EVER_S,
        )
        self.coordinator = Coordinator("simulated", settings)
        self._machines = dict[WorkerId, SimulatedMachine]()
        self._joined = 0
        self._control_end = self._updates_end = 0
        # Claims that are appended but not read.
        self._claims = list[tuple[int, "Claim"]]()
        self._read_at = self._ticked_at = -inf
        self._read_s = job.group_s / READS
        self._commands = deque["CoordinatorCommand"]()
        self._tick()

    def look(self) -> LeaderStatus | None:
        """Return the leader's current status, for a caller that waits for a change."""
        if self.time.now - self._ticked_at >= LOOK_S:
            self._tick_now()
        return self.leader_status

    # --- machines come and go -----------------------------------------------------------------

    def join(self, speed: float) -> SimulatedMachine:
        """Start a worker without streams."""
        self._joined += 1
        worker = WorkerId(f"w{self._joined}")
        machine = SimulatedMachine(self, worker, self._worker_settings, speed)
        self._machines[worker] = machine
        self._see_workers()
        return machine

    def preempt(self, machine: SimulatedMachine) -> None:
        """Preempt a machine without notice. Records that it has appended stay."""
        machine.preempt()
        del self._machines[machine.id]
        self.time.at(self.time.now + self._delays.death_s, self._see_workers)

    def _see_workers(self) -> None:
        self._feed(events.WorkersSeen(dict.fromkeys(self._machines, Heartbeat(ALIVE))))

    # --- messages from machines ---------------------------------------------------------------

    def announce(self, claim: Claim) -> int:
        """Append a claim to the control topic, which the leader reads periodically.

        Returns:
            The claim's offset.
        """
        offset, self._control_end = self._control_end, self._control_end + 1
        if not self._claims:
            read_at = max(self._read_at + self._read_s, self.time.now + self._delays.control_s)
            self.time.at(read_at, self._read_control)
        self._claims.append((offset, claim))
        return offset

    def _read_control(self) -> None:
        self._read_at = self.time.now
        claims, self._claims = tuple(self._claims), []
        self._feed(events.ControlRead(claims))

    # --- the coordinator ----------------------------------------------------------------------

    def _tick(self) -> None:
        self._tick_now()
        if not self.finished:
            self.time.at(self.time.now + TICK_S, self._tick)

    def _tick_now(self) -> None:
        self._ticked_at = self.time.now
        if self.coordinator.due() <= self.time.now:
            self._feed(events.Tick())

    def _feed(self, event: CoordinatorEvent) -> None:
        commands = self._commands
        commands.extend(self.coordinator.on(event, self.time.now))
        while commands:
            command = commands.popleft()
            # `AddGradient` occurs for each batch, so it is matched first.
            if isinstance(command, do.AddGradient):
                self._add(command)
            else:
                self._obey(command)

    def _feed_next(self, event: CoordinatorEvent) -> None:
        """Process an event at once, and queue the coordinator's commands behind earlier ones."""
        self._commands.extend(self.coordinator.on(event, self.time.now))

    def _triggered(self, trigger: UpdateTrigger) -> None:
        asked = dict[WorkerId, list[Assignment]]()
        for order in trigger.orders:
            asked.setdefault(order.worker, []).append(order)
        for worker in self._machines if self._triggers_pass else asked:
            machine = self._machines.get(worker)
            if machine is None:
                # The machine was preempted. The coordinator will reassign its batches.
                continue
            orders = tuple(asked.get(worker, ()))
            sent = msgspec.structs.replace(trigger, orders=orders)
            # Messages that wait for the link keep their order.
            if self._delays.link_s:
                machine.receives_at = max(
                    self.board.linked() if orders else 0.0, machine.receives_at
                )
                self.time.at(machine.receives_at, machine.receive, sent)
            else:
                machine.receive(sent)

    def _add(self, command: do.AddGradient) -> None:
        gradient = command.gradient
        # Gradients carry their vectors because only the coordinator holds the weights.
        if isinstance(gradient, Gradient):
            self.computed[gradient.worker] += len(gradient.batches)
            self.learner.add(command.round, gradient.vector, gradient.samples)

    def _obey(self, command: CoordinatorCommand) -> None:  # noqa: C901 -- one case each
        now = self.time.now
        match command:
            case do.PutLeaderStatus(leader_status):
                self.leader_status = leader_status
            case do.PostTrigger(trigger):
                self.time.at(now + self._delays.board_s, self._triggered, trigger)
            case do.Apply(_, update):
                self.update_times_s.append(now)
                self.staleness.append(update.staleness)
                allowed = 0 if update.synchrony is UNSET else update.synchrony.staleness
                self.too_stale += update.staleness > allowed
                self.learner.apply(command, now)
            case do.DiscardSum(number):
                self.learner.discard(number)
            case do.AppendAudit(record):
                offset, self._updates_end = self._updates_end, self._updates_end + 1
                read_back = events.UpdatesRead(((offset, record),))
                self.time.at(now + self._delays.control_s, self._feed, read_back)
            case do.AskLease():
                self._feed_next(events.LeaseAnswered(held=True))
            case do.FindSnapshots(source):
                found = (genesis(self._first),) if source == "genesis" else ()
                self._feed_next(events.SnapshotsFound(source, found, (), 0))
            case do.RestoreSnapshot():
                self._feed_next(events.SnapshotRestored(self._updates_end))
            case do.ReadHeartbeats():
                self._feed_next(events.WorkersSeen(dict.fromkeys(self._machines, Heartbeat(ALIVE))))
            case do.Finish():
                self.finished = True
                self.time.stop()
            case do.Hold(reason):
                raise RuntimeError(f"the simulated job was held: {reason}")
            case _:
                # Models, snapshots and dead letters have no counterpart here.
                pass
