"""The whole protocol in virtual time: every decision is the production state machines'.

Kafka and Redis do what they should, each a little late; machines come and go as the fleet says.
What goes wrong beside preemption is the business of `common.simulation.faults`.

    streams ──full batch──▶ Machine (core.Worker) ──claim──▶ control ──▶ core.Coordinator
                               ▲   core.Orders ◀──trigger── board ◀───────┘   │
                               └────────────gradient──▶ board ────────────────┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.coordinator import Coordinator
from common.core.messages import UpdateTrigger, WorkerId
from common.core.settings import CoordinatorSettings, WorkerSettings
from common.core.snapshots import genesis
from common.simulation.experiments.delays import LOOK_S, Delays
from common.simulation.experiments.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.messages import Claim, Gradient, Reply, Standing
    from common.simulation.experiments.clock import VirtualTime
    from common.simulation.experiments.computing import GradientTimes, Learner
    from common.simulation.experiments.streams import Stream

FOR_EVER_S = 1e12
TICK_S = 0.5  # between looks at the coordinator's clock: overdue orders may be noticed so late
STANDING_S = 60.0  # between looks at the standing of who reads: it frees memory, no more
READS = 4  # of the control topic in the time of a group: a claim waits an eighth of it on average


@dataclass(frozen=True, slots=True)
class Job:
    """What the production code is told of the job."""

    group_size: int  # K
    batch_size: int  # b
    updates: int  # J(epsilon)
    group_s: float  # mean time in which the batches of an update arrive


class Protocol:
    """One job's coordinator, and the machines that are there now.

    Attributes:
        standing: What the board says of the leader's standing.
        update_times_s: When each update was applied.
        finished: Whether the job has reached its end.
    """

    def __init__(
        self,
        time: VirtualTime,
        job: Job,
        streams: Sequence[Stream],
        gradient_times: GradientTimes,
        learner: Learner,
        delays: Delays | None = None,
    ) -> None:
        self.time = time
        self.gradient_times = gradient_times
        self.learner = learner
        self.standing: Standing | None = None
        self.update_times_s = list[float]()
        self.finished = False
        self._delays = delays or Delays()
        self._first = {stream.partition: 0 for stream in streams}
        bound = 2 * job.group_size
        self._worker_settings = WorkerSettings(
            job.batch_size, bound, beat_s=FOR_EVER_S, standing_s=STANDING_S
        )
        settings = CoordinatorSettings(
            job.group_size,
            bound,
            stop_updates=job.updates,
            # One coordinator that nobody contends with, and nothing to recover from: no lease, no
            # beats, no hot snapshots.
            hot_every_s=None,
            checkpoint_every_s=None,
            lease_ttl_s=FOR_EVER_S,
            alive_s=FOR_EVER_S,
        )
        self._coordinator = Coordinator("simulated", settings)
        self._machines = dict[WorkerId, Machine]()
        self._joined = 0
        self._control_end = self._updates_end = 0
        self._claims = list[tuple[int, "Claim"]]()  # appended, not read
        self._read_at = self._ticked_at = float("-inf")
        self._read_s = job.group_s / READS
        self._commands = deque["CoordinatorCommand"]()
        self._replies = list["Reply"]()
        self._replies_at = -1.0
        self._tick()

    @property
    def machines(self) -> Mapping[WorkerId, Machine]:
        """Those that are there now."""
        return self._machines

    def look(self) -> Standing | None:
        """See the standing as it is now, for who waits for it to change."""
        if self.time.now - self._ticked_at >= LOOK_S:
            self._tick_now()
        return self.standing

    # --- machines come and go -----------------------------------------------------------------

    def join(self, speed: float) -> Machine:
        """Start a worker; it owns nothing yet."""
        self._joined += 1
        worker = WorkerId(f"w{self._joined}")
        machine = Machine(self, worker, self._worker_settings, speed)
        self._machines[worker] = machine
        self._see_workers()
        return machine

    def preempt(self, machine: Machine) -> None:
        """Take a machine away without notice; what it has appended already stays."""
        machine.vanish()
        del self._machines[machine.id]
        self.time.at(self.time.now + self._delays.death_s, self._see_workers)

    def _see_workers(self) -> None:
        self._feed(events.WorkersSeen(dict.fromkeys(self._machines, "alive")))

    # --- what machines send -------------------------------------------------------------------

    def announce(self, machine: Machine, number: int, claim: Claim) -> None:
        """Append to the control topic, which the leader reads now and then."""
        offset, self._control_end = self._control_end, self._control_end + 1
        if not self._claims:
            read_at = max(self._read_at + self._read_s, self.time.now + self._delays.control_s)
            self.time.at(read_at, self._read_control)
        self._claims.append((offset, claim))
        machine.delivered(number, offset)

    def _read_control(self) -> None:
        self._read_at = self.time.now
        claims, self._claims = tuple(self._claims), []
        self._feed(events.ControlRead(claims))

    def reply(self, gradient: Gradient) -> None:
        """Put a gradient on the board; what arrives at one moment is read at once."""
        arrives = self.time.now + self._delays.board_s
        if arrives != self._replies_at:
            self._replies, self._replies_at = [], arrives
            self.time.at(arrives, self._replied, self._replies)
        self._replies.append(gradient)

    def _replied(self, replies: list[Reply]) -> None:
        self._feed(events.RepliesRead(tuple(replies)))

    # --- the coordinator ----------------------------------------------------------------------

    def _tick(self) -> None:
        self._tick_now()
        if not self.finished:
            self.time.at(self.time.now + TICK_S, self._tick)

    def _tick_now(self) -> None:
        self._ticked_at = self.time.now
        if self._coordinator.due() <= self.time.now:
            self._feed(events.Tick())

    def _feed(self, event: CoordinatorEvent) -> None:
        self._commands.extend(self._coordinator.on(event, self.time.now))
        while self._commands:
            self._obey(self._commands.popleft())

    def _feed_next(self, event: CoordinatorEvent) -> None:
        """Answer at once, after what was ordered before."""
        self._commands.extend(self._coordinator.on(event, self.time.now))

    def _triggered(self, trigger: UpdateTrigger) -> None:
        for order in trigger.orders:
            machine = self._machines.get(order.worker)
            if machine is not None:  # else it was preempted: the coordinator will ask others
                machine.hear(UpdateTrigger(trigger.id, trigger.model, (order,)))

    def _obey(self, command: CoordinatorCommand) -> None:  # noqa: C901, PLR0912 -- one case each
        now = self.time.now
        match command:
            case do.AddGradient(gradient):
                self.learner.add(gradient.vector, gradient.samples)
            case do.PutStanding(standing):
                self.standing = standing
            case do.PostTrigger(trigger):
                self.time.at(now + self._delays.board_s, self._triggered, trigger)
            case do.Apply(update):
                self.update_times_s.append(now)
                self.learner.apply(update.version, now)
            case do.DiscardSum():
                self.learner.discard()
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
            case do.LookForWorkers():
                self._feed_next(events.WorkersSeen(dict.fromkeys(self._machines, "alive")))
            case do.Finish():
                self.finished = True
                self.time.stop()
            case do.Hold(reason):
                raise RuntimeError(f"the simulated job was held: {reason}")
            case _:
                pass  # models, snapshots and dead letters have no counterpart here
