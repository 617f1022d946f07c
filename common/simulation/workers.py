"""A simulated worker: the production state machines with virtual hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core import commands as do
from common.core import events
from common.core.batching import Run
from common.core.messages import Claim, Failed, Gradient, Skipped, WorkerId
from common.core.orders import Compute, Orders
from common.core.settings import WorkerSettings
from common.core.spans import Address, Partition
from common.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.core.commands import WorkerCommand
    from common.core.events import WorkerEvent
    from common.simulation.world import Token, World

BATCH_LINGER_S = 0.5
BEAT_TTL_S = 1.0
POLL_S = 0.02  # mean time between polls that find something
LOAD_S = 0.003  # mean time of a look at the board
READ_BACK_S = 0.05  # mean time to read an address back
DUPLICATE_LATE_SHARE = 0.4  # of the records that are appended twice: how many much later


class SimulatedWorker:
    """One worker process: stream side, gradient side, a cache of rows, an outbox."""

    def __init__(self, world: World, number: int, on_death: Callable[[], None]) -> None:
        self.world = world
        self._on_death = on_death
        self.id = WorkerId(f"w{number}")
        scenario = world.scenario
        settings = WorkerSettings(scenario.batch_size, scenario.bound, BATCH_LINGER_S)
        self.machine = Worker(self.id, settings)
        self.orders = Orders(self.id)
        self.dead = False
        self.frozen_until = 0.0
        self.leaving = False
        self.held_most = 0
        self._own = dict[Partition, int | None]()
        self._reading = False
        self._cache = set[Address]()
        self._outbox = list[tuple[int, Claim]]()
        self._delivered = list[tuple[int, int]]()
        self._model: tuple[object, Token] | None = None
        self._busy = False
        world.board_readers.append(self.hear)
        self._wake()
        world.later(0.0, self._poll)

    @property
    def idle(self) -> bool:
        """Whether nothing that it announced is still on its way."""
        return not self._outbox

    def _up(self) -> bool:
        return not self.dead and self.world.now >= self.frozen_until

    # --- stream side --------------------------------------------------------------------------

    def _wake(self) -> None:
        """Tick whenever the machine wants it; a frozen process catches up when it thaws."""
        if self.dead:
            return
        if self._up():
            self._notice_group()
            self._feed(events.Tick())
        due = max(self.machine.due(), self.frozen_until, self.world.now + 0.001)
        self.world.later(due - self.world.now + self.world.jitter(0.002), self._wake)

    def _notice_group(self) -> None:
        mine = {p for p, owner in self.world.owners.items() if owner == self.id}
        gone = tuple(p for p in self._own if p not in mine and self.world.chance(0.5))
        new = tuple(p for p in sorted(mine) if p not in self._own and not self.leaving)
        for partition in gone:
            del self._own[partition]
        self._own.update(dict.fromkeys(new))
        if gone:
            self.world.say(f"{self.id} gives up", *gone)
            self._feed(events.Revoked(gone))
        if new:
            self.world.say(f"{self.id} is assigned", *new)
            self._feed(events.Assigned(new))

    def _poll(self) -> None:
        """Read some records of some partition, as many as a poll happens to bring."""
        world = self.world
        if self.dead:
            return
        placed = [(p, position) for p, position in self._own.items() if position is not None]
        if self._up() and self._reading and placed and not world.kafka_away:
            partition, position = world.draw.choice(placed)
            if position < world.log_start[partition]:
                self._feed(events.FellBehind(partition, world.log_start[partition]))
            else:
                limit = min(world.draw.randint(1, 8), max(self.machine.room, 1))
                offsets = world.fetch(partition, position, limit)
                if offsets:
                    self._decode(partition, offsets)
        world.later(world.jitter(POLL_S), self._poll)

    def _decode(self, partition: Partition, offsets: list[int]) -> None:
        bad = [o for o in offsets if (partition.index, o) in self.world.scenario.bad]
        run = Run(
            partition,
            [o for o in offsets if o not in bad],
            tuple(Skipped(*partition, o, "bad") for o in bad),
            self.world.now,
            self.world.now,
        )
        self._own[partition] = offsets[-1] + 1
        self._feed(events.Decoded(run))

    def _feed(self, event: WorkerEvent) -> None:
        for command in self.machine.on(event, self.world.now):
            self._do(command)

    def _do(self, command: WorkerCommand) -> None:
        world = self.world
        match command:
            case do.Announce(number, claim):
                world.say(f"{self.id} announces #{number}", claim)
                self._cache.add(claim.address)
                self._outbox.append((number, claim))
                if len(self._outbox) == 1:
                    world.later(world.jitter(world.scenario.kafka_s), self._send)
            case do.Place(positions):
                world.say(f"{self.id} reads", positions)
                self._own.update(positions)
            case do.DropRows(partition):
                if partition in self._own:
                    self._own[partition] = None
            case do.SetReading(reading, _):
                self._reading = reading
            case do.Beat(status):
                if not world.redis_away:
                    world.redis.alive[self.id] = (status, world.now + BEAT_TTL_S)
            case do.LookAtStanding():
                world.later(world.jitter(LOAD_S), self._look)
            case do.Forget(addresses):
                self._cache.difference_update(addresses)
            case do.Commit():
                pass

    def _look(self) -> None:
        if not self._up() or self.world.redis_away:
            return
        delivered, self._delivered = self._delivered, []
        for number, offset in delivered:
            self._feed(events.Delivered(number, offset))
        self._feed(events.StandingSeen(self.world.redis.standing))
        self.held_most = max(self.held_most, len(self._cache))

    def _send(self) -> None:
        """The producer: in order, retried until acknowledged, now and then written twice."""
        world = self.world
        if not self._outbox:
            return
        if world.kafka_away:
            world.later(0.1, self._send)
            return
        number, claim = self._outbox.pop(0)
        self._delivered.append((number, world.append_control(claim)))
        if world.chance(world.scenario.copies):
            late_s = world.draw.uniform(0, 3.0) if world.chance(DUPLICATE_LATE_SHARE) else 0.0
            world.later(late_s, lambda: void(world.append_control(claim)))
        if self._outbox:
            world.later(world.jitter(world.scenario.kafka_s), self._send)

    # --- gradient side ------------------------------------------------------------------------

    def hear(self) -> None:
        """Something was posted on the board."""
        if not self._up() or self.world.redis_away:
            return
        self.orders.hear(self.world.triggers_after(self.orders.heard))
        self._compute()

    def _compute(self) -> None:
        if self._busy or self.dead:
            return
        compute = self.orders.next()
        if compute is None:
            return
        world = self.world
        if self._model is None or self._model[0] != compute.model:
            token = world.redis.models.get(compute.model)
            if token is None:
                world.push(self._failed(compute, "model_missing", compute.batches), None)
                world.later(0.0, self._compute)
                return
            self._model = (compute.model, token)
        token = self._model[1]
        fetched = all(batch.address in self._cache for batch in compute.batches)
        seconds = world.jitter(world.scenario.gradient_s * len(compute.batches))
        seconds += 0.0 if fetched else world.jitter(READ_BACK_S)
        self._busy = True
        world.later(seconds, lambda: self._computed(compute, token, seconds))

    def _computed(self, compute: Compute, token: Token, seconds: float) -> None:
        """The gradient is there; a process that was frozen meanwhile has it when it thaws."""
        world = self.world
        if self.dead:
            return
        if not self._up():
            late_s = self.frozen_until - world.now + 0.001
            world.later(late_s, lambda: self._computed(compute, token, seconds))
            return
        self._busy = False
        expired = [b for b in compute.batches if self._is_gone(b.address)]
        if self._has_poison(compute):
            world.say(f"{self.id} dies of poison")
            self.kill()
        elif expired:
            world.push(self._failed(compute, "expired", expired), None)
        else:
            gradient = Gradient(
                self.id,
                compute.model,
                tuple(batch.offset for batch in compute.batches),
                sum(batch.samples for batch in compute.batches),
                1.0,
                {},
                seconds,
            )
            world.push(gradient, token)
        world.later(0.0, self.hear)

    def _failed(self, compute: Compute, reason: str, batches: Iterable[object]) -> Failed:
        offsets = tuple(b.offset for b in batches)  # type: ignore[attr-defined]
        return Failed(self.id, compute.model, offsets, reason)  # type: ignore[arg-type]

    def _is_gone(self, address: Address) -> bool:
        if address in self._cache:
            return False
        start = self.world.log_start
        return any(
            span.start <= offset < min(span.end, start[span.place])
            for span in address
            for offset, _ in self.world.records[span.place]
        )

    def _has_poison(self, compute: Compute) -> bool:
        poison = self.world.scenario.poison
        return poison is not None and any(
            span.partition == poison[0] and span.start <= poison[1] < span.end
            for batch in compute.batches
            for span in batch.address
        )

    # --- faults -------------------------------------------------------------------------------

    def kill(self) -> None:
        """Die at once; what the network already has still arrives."""
        self.dead = True
        self._outbox = self._outbox[: self.world.draw.randint(0, len(self._outbox))]
        self.world.board_readers.remove(self.hear)
        self._on_death()

    def freeze(self, seconds: float) -> None:
        """Stop, and go on later as if nothing had happened."""
        self.frozen_until = self.world.now + seconds

    def leave(self) -> None:
        """Leave well: finish what is under way, hand back what is not begun."""
        if not self._up():
            return
        self.leaving = True
        self._feed(events.Leaving())
        for compute in self.orders.drain():
            self.world.push(self._failed(compute, "leaving", compute.batches), None)
        self.world.later(1.0, self._gone)

    def _gone(self) -> None:
        if not self.dead:
            self.dead = True
            self.world.board_readers.remove(self.hear)
            self._on_death()

    def evict(self) -> None:
        """Lose every row in memory; addresses are read back."""
        self._cache.clear()


def void(_: object) -> None:
    """Drop a result."""
