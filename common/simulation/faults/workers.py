"""A simulated worker: the production state machines with simulated input and output."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from msgspec import UNSET

from common.core import worker_messages as do
from common.core import worker_messages as events
from common.core.batching import DecodedRun
from common.core.liveness import Heartbeat
from common.core.messages import (
    GENESIS,
    BatchReady,
    Claim,
    Failed,
    Gradient,
    ModelId,
    Skipped,
    WorkerId,
)
from common.core.order_queue import Assignments, Compute
from common.core.settings import WorkerSettings
from common.core.spans import Address, LogPosition, Partition, Span
from common.core.worker_reading import Worker
from common.simulation.faults.checks import Violation
from common.simulation.faults.processes import SimulatedProcess
from common.simulation.faults.streams import Content
from common.simulation.faults.world import DIGEST, OTHER_DIGEST, Token, TrueGradient, World, void

if TYPE_CHECKING:
    from common.core.messages import Batch, FailedReason, Reply, UpdateTrigger
    from common.core.worker_messages import WorkerCommand, WorkerEvent
    from common.simulation.faults.scenario import Poison

BATCH_LINGER_S = 0.5
HEARTBEAT_TTL_S = 1.0
# Probability that Redis notices the end of a process at once. A machine ends silently.
NOTICED = 0.7
# Probability that a message survives a cut connection.
HELD = 0.5
# Time that a leaving worker has to finish its gradient.
LEAVE_S = 1.0
# Mean time between polls that return records.
POLL_S = 0.02
# Mean time of a read from Redis.
LOAD_S = 0.003
# Mean time to read an address back.
READ_BACK_S = 0.05
# Weights from changes applied to the wrong base.
MIXED: Token = (GENESIS, -1)
# Number of batches that one poll may complete beyond the bound.
IN_ONE_POLL = 8
# Share of late copies among records that are appended twice.
DUPLICATE_LATE_SHARE = 0.4


def worker_settings(world: World, revision: int) -> WorkerSettings:
    """Return the settings of a worker that knows this revision."""
    sizes = world.revisions[revision]
    linger_s = BATCH_LINGER_S if world.scenario.linger else None
    return WorkerSettings(sizes.batch_size, sizes.bound, linger_s, sizes.largest_group)


class SimulatedWorker(SimulatedProcess):
    """One worker process: stream side, gradient side, a cache of rows, an outbox."""

    def __init__(self, world: World, number: int, on_death: Callable[[], None]) -> None:
        super().__init__(world)
        self._on_death = on_death
        self.id = WorkerId(f"w{number}")
        build = random.Random(f"build of {world.scenario.seed} {number}")  # noqa: S311 -- reproducible
        is_other = build.random() < world.scenario.others
        self.digest = OTHER_DIGEST if is_other else DIGEST
        # Revision of the job that this process knows.
        self._revision = world.revision
        settings = worker_settings(world, self._revision)
        # Largest batch that it may announce now.
        self._most_samples = settings.batch_size
        self.machine = Worker(self.id, settings)
        self.orders = Assignments(self.id)
        # Time until which this process cannot reach Kafka.
        self.kafka_back_at = 0.0
        self.leaving = False
        self._own = dict[Partition, int | None]()
        # Positions of the partitions that it reads.
        self._known = dict[Partition, LogPosition]()
        # Records read from each partition since it was placed.
        self._read = dict[Partition, list[Content]]()
        self._reading = False
        self._cache = set[Address]()
        self._outbox = list[tuple[int, Claim]]()
        self._delivered = list[tuple[int, int]]()
        # Arrival of the newest delivery report. Reports keep their order.
        self._reported_at = 0.0
        self._model: tuple[ModelId, Token] | None = None
        self._busy = False
        world.board_readers.append(self.receive)
        self._wake()
        world.later(0.0, self._poll)

    @property
    def most_held(self) -> int:
        """Maximum number of batches in memory: the bound, and those whose claims failed."""
        losses = self.world.figures.topic_losses
        return (2 + losses) * self.world.most_bound + IN_ONE_POLL

    @property
    def idle(self) -> bool:
        """True if no announced claim is pending, and it knows the newest revision."""
        return not self._outbox and (self.dead or self._revision == self.world.revision)

    @property
    def _kafka_away(self) -> bool:
        return self.world.kafka_away or self.world.now < self.kafka_back_at

    def _push(self, reply: Reply, taken: TrueGradient | None) -> None:
        """Send a reply. During a cut connection, it arrives after the cut, or never."""
        held_s = self.redis_back_at - self.world.now
        if held_s <= 0:
            self.world.push(reply, taken)
        elif self.world.chance(HELD):
            self.world.later(held_s, lambda: self.world.push(reply, taken))

    # --- stream side --------------------------------------------------------------------------

    def _wake(self) -> None:
        """Tick when the machine is due. A frozen process catches up when it thaws."""
        if self.dead:
            return
        if self._up():
            self._notice_group()
            self._poll_changes()
            self._feed(events.Tick())
        due = max(self.machine.due(), self.frozen_until, self.world.now + 0.001)
        self.world.later(due - self.world.now + self.world.jitter(0.002), self._wake)

    def _notice_group(self) -> None:
        mine = {p for p, owner in self.world.owners.items() if owner == self.id}
        if mine == self._own.keys():
            return
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

    def _poll_changes(self) -> None:
        """Poll the jobs topic. An open batch may be larger than a new b."""
        revision = self._revision if self._kafka_away else self.world.poll_revision(self._revision)
        if revision != self._revision:
            self._revision = revision
            sizes = self.world.revisions[revision]
            self._most_samples = max(self._most_samples - 1, sizes.batch_size)
            self._feed(events.SizesChanged(sizes.batch_size, sizes.bound, sizes.largest_group))
            if not self.leaving:
                self._most_samples = sizes.batch_size

    def _poll(self) -> None:
        """Read some records of a random partition."""
        world = self.world
        if self.dead:
            return
        placed = [(p, position) for p, position in self._own.items() if position is not None]
        if self._up() and self._reading and placed and not self._kafka_away:
            partition, position = world.draw.choice(placed)
            divergence = world.streams.divergence(partition, self._known[partition])
            if divergence is not None:
                world.say(f"{self.id} finds {partition} to be another log")
                self._own[partition] = None
                self._feed(events.Truncated(partition, divergence.recreated))
            elif position < world.streams.log_start[partition]:
                self._feed(events.FellBehind(partition, world.streams.log_start[partition]))
            else:
                limit = min(world.draw.randint(1, 8), max(self.machine.room, 1))
                offsets = world.streams.fetch(partition, position, limit)
                if offsets:
                    self._take(partition, offsets)
        world.later(world.jitter(POLL_S), self._poll)

    def _take(self, partition: Partition, offsets: list[int]) -> None:
        """Process records from the position on, in runs of one leader epoch."""
        world, position = self.world, self.machine.position(partition) or 0
        below = [offset for offset in offsets if offset < position]
        if below:
            self._feed(events.RecordBelow(partition, world.streams.epoch_at(partition, below[-1])))
        epoch_at = partial(world.streams.epoch_at, partition)
        for epoch, run in groupby(offsets[len(below) :], epoch_at):
            if self._own[partition] is not None:
                self._decode(partition, list(run), epoch)

    def _decode(self, partition: Partition, offsets: list[int], epoch: int) -> None:
        bad = [o for o in offsets if (partition.index, o) in self.world.scenario.bad]
        run = DecodedRun(
            partition,
            [o for o in offsets if o not in bad],
            tuple(Skipped(*partition, o, "bad") for o in bad),
            self.world.now,
            self.world.now,
            epoch,
        )
        self._own[partition] = end = offsets[-1] + 1
        self._known[partition] = self._known[partition]._replace(offset=end, epoch=epoch)
        content = self.world.streams.content
        self._read[partition] += [content(partition, offset) for offset in offsets]
        self._feed(events.Decoded(run))

    def _feed(self, event: WorkerEvent) -> None:
        for command in self.machine.on(event, self.world.now):
            self._do(command)

    def _do(self, command: WorkerCommand) -> None:  # noqa: C901 -- one case per command
        world = self.world
        match command:
            case do.Announce(number, claim):
                world.say(f"{self.id} announces #{number}", claim)
                self._keep(claim)
                self._outbox.append((number, claim))
                if len(self._outbox) == 1:
                    world.later(world.jitter(world.scenario.kafka_s), self._send)
            case do.Place(positions):
                world.say(f"{self.id} reads", positions)
                self._own.update({p: place.offset for p, place in positions.items()})
                self._known.update(positions)
                for partition in positions:
                    self._read.setdefault(partition, []).clear()
            case do.Unplace(partition):
                if partition in self._own:
                    self._own[partition] = None
            case do.SetReading(reading, _):
                self._reading = reading
            case do.SendHeartbeat(status):
                if not self._redis_away:
                    until = world.now + HEARTBEAT_TTL_S
                    world.redis.alive[self.id] = Heartbeat(status, self.digest), until
            case do.ReadLeaderStatus():
                world.later(world.jitter(LOAD_S), self._look)
            case do.Forget(addresses):
                self._cache.difference_update(addresses)
            case do.Commit():
                pass

    def _keep(self, claim: Claim) -> None:
        if isinstance(claim, BatchReady) and claim.samples:
            if claim.samples > self._most_samples:
                raise Violation("more than b", f"{self.id} announces {claim}")
            self._cache.add(claim.address)
            self.world.figures.contents[self.id, claim.address] = frozenset(
                each
                for span in claim.address
                for each in self._read[span.place]
                if span.start <= each[1] < span.end
            )

    def _look(self) -> None:
        if not self._up() or self._redis_away:
            return
        leader_status = self.world.redis.leader_status
        delivered, self._delivered = self._delivered, []
        for number, offset in delivered:
            self._feed(events.Delivered(number, offset))
        self._feed(events.LeaderStatusSeen(leader_status))
        if len(self._cache) > self.most_held:
            raise Violation("cache unbounded", f"{self.id} holds {len(self._cache)} batches")

    def _send(self) -> None:
        """Send claims in order, with retries until they are acknowledged, some of them twice."""
        world = self.world
        if not self._outbox:
            return
        if self._kafka_away or world.now < self._silent_until:
            world.later(max(self._silent_until - world.now, 0.1), self._send)
            return
        number, claim = self._outbox.pop(0)
        offset = world.append_control(claim)
        report_s = world.jitter(world.scenario.kafka_s) if world.chance(0.5) else 0.0
        self._reported_at = max(world.now + report_s, self._reported_at)
        world.later(self._reported_at - world.now, lambda: self._delivered.append((number, offset)))
        if world.chance(world.scenario.copies):
            late_s = world.draw.uniform(0, 3.0) if world.chance(DUPLICATE_LATE_SHARE) else 0.0
            world.later(late_s, lambda: void(world.append_control(claim)))
        if self._outbox:
            world.later(world.jitter(world.scenario.kafka_s), self._send)

    # --- gradient side ------------------------------------------------------------------------

    def receive(self) -> None:
        """Read new triggers from Redis."""
        if not self._up() or self._redis_away:
            return
        self.orders.listen(self.machine.triggers)
        self._receive(self.world.triggers_after(self.orders.last_trigger, self.orders.stream))

    def _receive(self, triggers: Sequence[UpdateTrigger]) -> None:
        self._take_in(triggers)
        self.orders.receive(triggers)
        if triggers:
            self._feed(events.RoundBegan(triggers[-1].id.epoch, triggers[-1].unsettled))
        self._compute()

    def _take_in(self, triggers: Sequence[UpdateTrigger]) -> None:
        """Apply what triggers contain besides orders."""
        for trigger in triggers:
            if self._model is not None and trigger.continues(self._model[0]):
                before, after = self.world.changes[trigger.model]
                whole = after if self._model[1] == before else MIXED
                self._model = trigger.model, whole

    def _compute(self) -> None:
        if self._busy or self.dead:
            return
        compute = self.orders.next()
        if compute is not None:
            self._carry_on(compute)

    def _carry_on(self, compute: Compute) -> None:
        """Begin the next order, or report why that is impossible."""
        world = self.world
        if self._model is None or self._model[0] != compute.model:
            token = None if self._redis_away else world.redis.models.get(compute.model)
            if token is None:
                self._busy = True
                world.later(world.jitter(READ_BACK_S), lambda: self._lacks_model(compute))
                return
            self._model = (compute.model, token)
        self._begin(compute, self._model[1])

    def _begin(self, compute: Compute, token: Token) -> None:
        world = self.world
        if self.digest != DIGEST:
            raise Violation("another build", f"{self.id} is to compute {compute.batches}")
        fetched = all(batch.address in self._cache for batch in compute.batches)
        seconds = world.jitter(world.scenario.gradient_s * len(compute.batches))
        seconds += 0.0 if fetched else world.jitter(READ_BACK_S)
        self._busy = True
        world.later(seconds, lambda: self._computed(compute, token, seconds))

    def _lacks_model(self, compute: Compute) -> None:
        self._busy = False
        if not self.dead:
            self._push(self._failed(compute, "model_missing", compute.batches), None)
            self.orders.done()
            self._compute()

    def _computed(self, compute: Compute, token: Token, seconds: float) -> None:
        """Report a computed gradient. A process that is frozen reports it when it thaws."""
        world = self.world
        if self.dead:
            return
        if not self._up():
            late_s = self.frozen_until - world.now + 0.001
            # The process's clock did not stop.
            took_s = seconds + late_s
            world.later(late_s, lambda: self._computed(compute, token, took_s))
            return
        self._busy = False
        self._answer(compute, token, seconds)
        self.orders.done()
        world.later(0.0, self.receive)

    def _answer(self, compute: Compute, token: Token, seconds: float) -> None:
        world = self.world
        absent = [batch for batch in compute.batches if batch.address not in self._cache]
        expired = [batch for batch in absent if self._is_gone(batch.address)]
        poisons = {b: p for b in compute.batches if (p := self._poison_in(b.address)) is not None}
        if expired:
            self._push(self._failed(compute, "expired", expired), None)
        elif absent and (
            self._kafka_away
            or any(s.known > world.streams.stream_end(s.place) for b in absent for s in b.address)
            or world.chance(world.lossy)
        ):
            self._push(self._failed(compute, "unreadable", absent), None)
        elif any(poison.does == "kills" for poison in poisons.values()):
            world.say(f"{self.id} dies of poison")
            self.kill()
        elif poisons:
            batch, poison = next(iter(poisons.items()))
            reason: FailedReason = "raised" if poison.does == "raises" else "not_finite"
            self._push(self._failed(compute, reason, [batch]), None)
        else:
            self._found(compute, token, seconds)

    def _found(self, compute: Compute, token: Token, seconds: float) -> None:
        """Send a computed gradient."""
        samples = sum(batch.samples for batch in compute.batches)
        offsets = tuple(batch.offset for batch in compute.batches)
        rate = compute.local_rate
        gradient = Gradient(
            *(self.id, compute.model, offsets, samples, 1.0, {}, seconds),
            local_rate=rate or UNSET,
            square=self.world.square(samples) if compute.squared else UNSET,
        )
        self._push(gradient, TrueGradient(token, rate))

    def _failed(self, compute: Compute, reason: FailedReason, batches: Iterable[Batch]) -> Failed:
        return Failed(self.id, compute.model, tuple(b.offset for b in batches), reason)

    def _is_another(self, span: Span) -> bool:
        """Return True if a span's records are no longer those that were claimed."""
        leader_status = self.world.redis.leader_status
        topic_id = leader_status.topic_id(span) if leader_status is not None else ""
        if topic_id not in {"", self.world.streams.topic_ids[span.topic]}:
            return True
        return self.world.streams.epoch_at(span.place, span.known - 1) > span.epoch >= 0

    def _is_gone(self, address: Address) -> bool:
        start = self.world.streams.log_start
        return any(map(self._is_another, address)) or any(
            span.start <= offset < min(span.end, start[span.place])
            for span in address
            for offset, _ in self.world.streams.records[span.place]
        )

    def _poison_in(self, address: Address) -> Poison | None:
        """Return the poison that spoils a gradient over this address this time, if any."""
        for poison in self.world.scenario.poisons:
            if poison.lies_in(address) and self.world.chance(poison.share):
                return poison
        return None

    # --- faults -------------------------------------------------------------------------------

    def kill(self) -> None:
        """Die at once. Some records that are being sent still arrive."""
        self._outbox = self._outbox[: self.world.draw.randint(0, len(self._outbox))]
        self._end()

    def leave(self) -> None:
        """Leave on notice: finish the current gradient, and return orders that are not begun."""
        if not self._up():
            return
        self.leaving = True
        self._feed(events.Leaving())
        self._say_worker_leaving(finish=True)
        self.world.later(LEAVE_S, self._gone)

    def _say_worker_leaving(self, *, finish: bool) -> None:
        worker_leaving = self.orders.leave(finish=finish)
        if worker_leaving is not None:
            self._push(worker_leaving, None)

    def _gone(self) -> None:
        if not self.dead:
            if self._busy:
                # The time for the current gradient is over.
                self._say_worker_leaving(finish=False)
            self._end()

    def _end(self) -> None:
        """End the process. Redis usually notices at once."""
        self.dead = True
        self.world.board_readers.remove(self.receive)
        if self.world.chance(NOTICED):
            self.world.redis.alive.pop(self.id, None)
        self._on_death()

    def cut_off_redis(self, seconds: float) -> None:
        """Cut the connection to Redis for a while. Redis may notice this."""
        self.redis_back_at = self.world.now + seconds
        if self.world.chance(NOTICED):
            self.world.redis.alive.pop(self.id, None)

    def cut_off_kafka(self, seconds: float) -> None:
        """Cut the connection to Kafka for a while. The group may remove this worker."""
        self.kafka_back_at = self.world.now + seconds

    def evict(self) -> None:
        """Lose all rows in memory, so that addresses must be read back."""
        self._cache.clear()
