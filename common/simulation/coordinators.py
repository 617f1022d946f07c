"""A simulated coordinator: the production state machine with virtual hands."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.coordinator import Coordinator
from common.core.messages import GENESIS, AuditRecord, Gradient, Lead, ModelId, UpdateApplied
from common.core.settings import CoordinatorSettings
from common.core.snapshots import genesis
from common.simulation.checks import Violation
from common.simulation.world import Node, Token

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.snapshots import Snapshot
    from common.simulation.world import World

GROUP_LINGER_S = 0.7
SNAPSHOT_S = 0.4
UPLOAD_S = 2.0  # longest time that a checkpoint takes to arrive
MODELS_KEPT = 3
GENESIS_TOKEN: Token = (GENESIS, 0)
SERIAL = count(1)


class SimulatedCoordinator:
    """One coordinator process: role machine, weights as a token, an outbox to the updates topic."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"c{number}"
        scenario = world.scenario
        self.machine = Coordinator(
            self.name,
            CoordinatorSettings(
                group_size=scenario.group_size,
                bound=scenario.bound,
                group_linger_s=GROUP_LINGER_S,
                on_missing=scenario.on_missing,
                deadline_floor_s=0.2,
                strikes=3,
                hot_every_s=SNAPSHOT_S,
                checkpoint_every_s=1.5,
                checkpoint_every_updates=None,
            ),
        )
        self.dead = False
        self.frozen_until = 0.0
        self.takeovers = 0
        self.waiting_most = 0
        self._outbox = list[AuditRecord]()
        self._updates_position = self._control_position = 0
        self._found = dict[tuple[int, int, int], Token]()
        self._token = self._copy = GENESIS_TOKEN
        self._sum = list[int]()
        self._applied = 0
        world.control_readers.append(self.read)
        world.board_readers.append(self.read)
        self._wake()

    def _up(self) -> bool:
        return not self.dead and self.world.now >= self.frozen_until

    @property
    def idle(self) -> bool:
        """Whether it leads, and knows and has written all that there is."""
        standing = self.world.redis.standing
        return (
            self._up()
            and self.machine.leader is not None
            and not self._outbox
            and self._updates_position == len(self.world.updates)
            and self._control_position == len(self.world.control)
            and standing is not None
            and standing.cpos == self._control_position
            and standing.waiting == 0
        )

    # --- inputs -------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self.dead:
            return
        if self._up():
            self._feed(events.Tick())
            self.read()
        due = max(self.machine.due(), self.frozen_until, self.world.now + 0.002)
        self.world.later(due - self.world.now + self.world.jitter(0.002), self._wake)

    def read(self) -> None:
        """Read whatever is there, in any order and in pieces of any size."""
        if not self._up():
            return
        sources = [self._read_updates, self._read_control, self._read_replies]
        self.world.draw.shuffle(sources)
        for source in sources:
            source()

    def _read_updates(self) -> None:
        updates, position = self.world.updates, self._updates_position
        if self.world.kafka_away or position >= len(updates):
            return
        end = min(len(updates), position + self.world.draw.randint(1, 6))
        self._updates_position = end
        self._feed(events.UpdatesRead(tuple((o, updates[o]) for o in range(position, end))))

    def _read_control(self) -> None:
        control, position = self.world.control, self._control_position
        if self.machine.leader is None or self.world.kafka_away or position >= len(control):
            return
        end = min(len(control), position + self.world.draw.randint(1, 6))
        self._control_position = end
        self._feed(events.ControlRead(tuple((o, control[o]) for o in range(position, end))))

    def _read_replies(self) -> None:
        leader = self.machine.leader
        if leader is None or self.world.redis_away:
            return
        box = self.world.redis.replies.get(leader.model.epoch, [])
        for reply, token in box[:3]:
            box.pop(0)
            if isinstance(reply, Gradient) and reply.model == leader.model:
                self._check_weights(token)
            if self.machine.leader is leader:
                self._feed(events.RepliesRead((reply,)))

    def _check_weights(self, token: Token | None) -> None:
        if token != self._token:
            raise Violation("wrong weights", f"a gradient of {token} for a round of {self._token}")

    def _feed(self, event: CoordinatorEvent) -> None:
        for command in self.machine.on(event, self.world.now):
            self._do(command)

    # --- commands -----------------------------------------------------------------------------

    def _do(self, command: CoordinatorCommand) -> None:  # noqa: C901, PLR0912, PLR0915 -- a case each
        world = self.world
        match command:
            case do.AskLease():
                world.later(world.jitter(0.002), self._ask_lease)
            case do.ReleaseLease():
                if world.redis.lease is not None and world.redis.lease[0] == self.name:
                    world.redis.lease = None
            case do.FindSnapshots():
                world.later(world.jitter(0.01), self._find_snapshots)
            case do.Begin(epoch, snapshot):
                world.say(f"{self.name} LEADS with epoch {epoch} from", snapshot.made)
                self.takeovers += 1
                self._token = self._copy = self._found[snapshot.rank]
                self._control_position = snapshot.control_position
                self._sum = []
            case do.AppendAudit(record):
                self._outbox.append(record)
                if len(self._outbox) == 1:
                    world.later(world.jitter(world.scenario.kafka_s), self._send)
            case do.PublishModel(model):
                if not world.redis_away:
                    world.redis.models[model] = self._token
                    for old in list(world.redis.models)[:-MODELS_KEPT]:
                        del world.redis.models[old]
            case do.PostTrigger(trigger):
                if not world.redis_away:
                    orders = {o.worker: [b.offset for b in o.batches] for o in trigger.orders}
                    world.say(f"{self.name} orders {tuple(trigger.model)}", orders)
                    world.post(trigger)
            case do.PutStanding(standing):
                self.waiting_most = max(self.waiting_most, standing.waiting)
                self._check_standing(standing.cpos, standing.claimed)
                if not world.redis_away:
                    world.redis.standing = standing
            case do.AddGradient(gradient):
                self._sum += gradient.batches
            case do.Apply(update):
                self._apply(update)
            case do.DiscardSum():
                self._sum = []
            case do.CopyWeights():
                self._copy = self._token
            case do.PublishSnapshot(snapshot, checkpoint):
                self._publish(snapshot, checkpoint=checkpoint)
            case do.DeadLetterRecords(skipped):
                world.dead_letters |= {(world.partitions[s.partition], s.offset) for s in skipped}
            case do.LookForWorkers():
                world.later(world.jitter(0.002), self._look_for_workers)
            case do.StepDown(reason):
                world.say(f"{self.name} steps down: {reason}")
                self._sum = []
                self._outbox = [r for r in self._outbox if not isinstance(r, Lead)]
            case do.Hold(reason):
                raise Violation("held", reason)
            case do.DeadLetterBatch(record):
                world.say(f"{self.name} quarantines", record.batch, record.reason)
            case do.Drop() | do.Finish():
                pass

    def _check_standing(self, cpos: int, claimed: dict[object, int]) -> None:
        known = self.world.standings.setdefault(cpos, claimed)  # type: ignore[arg-type]
        if known != claimed:
            raise Violation("replay differs", f"claimed at cpos {cpos}: {known} and {claimed}")

    def _apply(self, update: UpdateApplied) -> None:
        batches = tuple(batch.offset for batch in update.batches)
        if sorted(batches) != sorted(self._sum):
            raise Violation("wrong sum", f"update of {batches} with gradients of {self._sum}")
        if len(batches) != self.world.scenario.group_size and not update.short:
            raise Violation("not K", f"{len(batches)} batches, and no reason given")
        made: Token = (ModelId(update.epoch, update.version), next(SERIAL))
        self.world.nodes[made] = Node(self._token, batches)
        self.world.say(f"{self.name} applies e{update.epoch} J{update.version}", batches)
        self._token, self._sum = made, []
        self._applied += 1

    def _publish(self, snapshot: Snapshot, *, checkpoint: bool) -> None:
        world, token = self.world, self._copy
        if not world.redis_away:
            world.redis.snapshots[snapshot.by] = (snapshot, token)
        if checkpoint:
            upload_s = world.draw.uniform(0.01, UPLOAD_S)
            world.later(upload_s, lambda: world.blobs.append((snapshot, token)))

    def _ask_lease(self) -> None:
        if not self._up() or self.world.redis_away:
            return
        redis, now = self.world.redis, self.world.now
        held = redis.lease is None or redis.lease[1] <= now or redis.lease[0] == self.name
        if held:
            redis.lease = (self.name, now + 1.0)
        self._feed(events.LeaseAnswered(held))

    def _find_snapshots(self) -> None:
        if not self._up():
            return
        world = self.world
        first = dict.fromkeys(world.partitions, 0)
        found = [*world.redis.snapshots.values(), *world.blobs, (genesis(first), GENESIS_TOKEN)]
        self._found = {snapshot.rank: token for snapshot, token in found}
        begin = min(snapshot.updates_position for snapshot, _ in found)
        self._updates_position = len(world.updates)
        updates = tuple((o, world.updates[o]) for o in range(begin, len(world.updates)))
        self._feed(events.SnapshotsFound(tuple(snapshot for snapshot, _ in found), updates))

    def _look_for_workers(self) -> None:
        if self._up() and not self.world.redis_away:
            beats = self.world.redis.alive.items()
            seen = {w: status for w, (status, until) in beats if until > self.world.now}
            self._feed(events.WorkersSeen(seen))

    def _send(self) -> None:
        """The producer of audit records: in order, now and then written twice."""
        world = self.world
        if not self._outbox:
            return
        if world.kafka_away:
            world.later(0.1, self._send)
            return
        record = self._outbox.pop(0)
        world.append_audit(record)
        if world.chance(world.scenario.copies * 0.5):
            world.append_audit(record)
        if self._outbox:
            world.later(world.jitter(world.scenario.kafka_s), self._send)

    # --- faults -------------------------------------------------------------------------------

    def kill(self) -> None:
        """Die at once; what the network already has still arrives, drop by drop."""
        self.dead = True
        self._outbox = self._outbox[: self.world.draw.randint(0, len(self._outbox))]
        self.world.control_readers.remove(self.read)
        self.world.board_readers.remove(self.read)

    def freeze(self, seconds: float) -> None:
        """Stop, and go on later as if nothing had happened."""
        self.frozen_until = self.world.now + seconds
