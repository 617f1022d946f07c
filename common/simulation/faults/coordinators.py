"""A simulated coordinator: the production state machine with simulated input and output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isclose
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from common.core import commands as do
from common.core import events
from common.core.coordinator import Coordinator
from common.core.losses import Divergence
from common.core.messages import (
    GENESIS,
    AuditRecord,
    Gradient,
    Lead,
    ModelId,
    Opened,
    Quarantined,
    Synchrony,
    UpdateApplied,
    unused_number,
)
from common.core.settings import AggregationSettings, CoordinatorSettings, Mode, RateSchedule
from common.core.snapshots import Snapshot, genesis
from common.core.spans import LogPosition, Partition
from common.simulation.faults.checks import Violation, effective_updates
from common.simulation.faults.processes import SimulatedProcess
from common.simulation.faults.scenario import Way
from common.simulation.faults.world import (
    DIGEST,
    LATE_S,
    GradientPart,
    Node,
    Token,
    TrueGradient,
    World,
    void,
)

if TYPE_CHECKING:
    from common.core.commands import CoordinatorCommand
    from common.core.events import CoordinatorEvent
    from common.core.messages import ControlRecord, LeaderStatus, UpdateTrigger
    from common.simulation.faults.topic import SimulatedTopic

# This and the other times are short, so that a few virtual seconds contain many events.
LEASE_S = 1.0
GROUP_LINGER_S = 0.7
# Longest time between polls of the jobs topic.
JOBS_S = 1.0
# Time between checks that the holder of the lease is alive.
LEASE_LOOK_S = 0.05
# Mean time between polls of the list of partitions.
LOOK_S = 0.5
# Share of polls that are certain that a stream lost records.
SURE = 0.7
# Mean delivery time of a dead letter.
DEAD_LETTER_S = 0.1
RULE_ROUNDS = 3
# Worlds are short, so K may change with each round.
TUNED_ROUNDS = 1
MODELS_KEPT = 3
# Time between attempts to read a checkpoint back.
READ_BACK_S = 0.1
# One version in this many has changed too much, and is published whole.
WHOLE_EVERY = 7
# Probability that a process reads a topic when it can. Otherwise it is slow.
PROMPT = 0.7
# No two updates of a chain have the same rate.
SCHEDULE = RateSchedule("inverse_sqrt", warmup=4, updates=3)
GROUP = AggregationSettings(heal_s=0.3, first_attempt_s=1.0)
GENESIS_TOKEN: Token = (GENESIS, 0)


def learning_rate(revision: int) -> float:
    """Return the rate of the job's own mode. It differs by revision, and from all rules' rates."""
    return 1.0 + revision


def coordinator_settings(world: World, revision: int) -> CoordinatorSettings:
    """Return the settings of a coordinator that knows this revision.

    The learning rate identifies the revision, so each step shows the revision that it used.
    """
    scenario, sizes = world.scenario, world.revisions[revision]
    way = sizes.way or Way()
    return CoordinatorSettings(
        dataclasses.replace(sizes.modes[0], learning_rate=learning_rate(revision)),
        bound=sizes.bound,
        revision=revision,
        rules=way.rules,
        rule_rounds=RULE_ROUNDS if way.group_sizes is None else TUNED_ROUNDS,
        reduction=way.reduction,
        rate_by_group=way.rate_by_group,
        schedule=SCHEDULE,
        group_sizes=way.group_sizes,
        group_linger_s=GROUP_LINGER_S if scenario.linger else None,
        on_missing=scenario.on_missing,
        deadline_floor_s=0.2,
        max_failures=scenario.max_failures,
        poison_in_a_row=scenario.in_a_row,
        hot_every_s=scenario.hot_s,
        checkpoint_every_s=1.5,
        checkpoint_every_updates=None,
        lease_ttl_s=LEASE_S,
        aggregation=None
        if sizes.slices is None
        else dataclasses.replace(GROUP, slices=scenario.slices if sizes.slices else None),
    )


@dataclass
class CoordinatorFigures:
    """Figures of one coordinator, for checks."""

    takeovers: int = 0
    # Maximum number of waiting batches, without those that a takeover put back.
    waiting_most: int = 0
    # Maximum number of live workers.
    live_most: int = 0
    # Oldest waiting batch, and the version since which it has waited.
    oldest: tuple[int | None, int] = (None, 0)
    # True if that batch was in flight before the current event.
    oldest_in_flight: bool = False
    # Poison batches since the last update or resume.
    in_a_row: int = 0
    # Newest own version that this coordinator has read back from the updates topic.
    read_back: int = 0
    # Newest version in one of its own snapshots.
    published: int = 0
    # Control position up to which a takeover replays.
    replayed_at: int = 0
    # Control offset of the snapshot that it began with.
    began_at: int = 0
    # True until its status covers the replay.
    replays: bool = False
    # Number of waiting batches that the replay put back.
    put_back: int = 0


@dataclass
class WeightTokens:
    """Tokens that stand for the weights of one coordinator."""

    # Weights of the snapshots found by the last search, keyed by rank.
    found: dict[tuple[int, int, int], Token | None] = field(default_factory=dict)
    # The current weights, and the copy for the next snapshot.
    token: Token = GENESIS_TOKEN
    copy: Token = GENESIS_TOKEN
    # Model and weights that workers of this leadership have.
    viewed: tuple[ModelId, Token] = GENESIS, GENESIS_TOKEN
    # Facts about the reply being processed.
    taken: TrueGradient | None = None
    sums: dict[int, list[GradientPart]] = field(default_factory=dict)  # keyed by round
    # Weights of this leadership, keyed by version.
    chain: dict[int, Token] = field(default_factory=dict)


class SimulatedCoordinator(SimulatedProcess):
    """One coordinator process: state machine, weights as a token, outbox for the updates topic."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world)
        self.name = f"c{number}"
        # Revision of the job that this process knows.
        self._revision = world.revision
        self.settings = coordinator_settings(world, self._revision)
        self.machine = Coordinator(self.name, self.settings)
        self.request = events.WantedChanged("running")
        # Lifetime of the lease that it requests.
        self._lease_s = LEASE_S
        # Time until which it checks that the holder of the lease is alive.
        self._looks_until = 0.0
        self.figures = CoordinatorFigures()
        self._weights = WeightTokens()
        # True if the jobs topic has a record that this process has not read.
        self.unheard = False
        self._outbox = list[AuditRecord]()
        self._updates_at = world.updates.position(0)
        self._control_at = world.control.position(0)
        # True while this process follows the updates topic, so that lost records concern it.
        self._follows = False
        # Stream of its triggers.
        self._triggers = ""
        # Its latest status.
        self._leader_status: LeaderStatus | None = None
        # True once this leadership has written its status.
        self._stated = False
        # True if a model or a trigger could not be written.
        self._orders_lost = False
        # Number of dead letters in delivery.
        self._undelivered = 0
        self._after_dead_letters: list[Callable[[], None]] = []
        world.control_readers.append(self.read)
        world.board_readers.append(self.read)
        self._wake()

    @property
    def idle(self) -> bool:
        """True if it leads, and has read and written everything."""
        leader_status, leader = self.world.redis.leader_status, self.machine.leader
        enough = 1 if self.world.scenario.linger or leader is None else leader.mode.group_size
        return (
            self._up()
            and leader is not None
            and self._revision == self.world.revision
            and not self._outbox
            and not self._undelivered
            and self.figures.published == leader.model.version
            and self._updates_at == self.world.updates.position(len(self.world.updates))
            and self._control_at == self.world.control.position(len(self.world.control))
            and leader_status is not None
            and leader_status.control_position == self._control_at.offset
            and leader_status.waiting < enough
            and not any(round_.todo for round_ in leader.rounds)
            and not leader.handover.requested
        )

    # --- inputs -------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self.dead:
            return
        if self._up():
            if self.unheard:
                self.unheard = False
                self.figures.in_a_row = 0
                self._feed(self.request)
            revision = self.world.poll_revision(self._revision)
            if revision != self._revision:
                self._revision = revision
                settings = coordinator_settings(self.world, revision)
                self._feed(events.SettingsChanged(settings))
            self._feed(events.Tick())
            self.read()
        # The machine of a held job needs no tick, but the job may be resumed.
        due = min(self.machine.due(), self.world.now + JOBS_S)
        due = max(due, self.frozen_until, self.world.now + 0.002)
        self.world.later(due - self.world.now + self.world.jitter(0.002), self._wake)

    def read(self) -> None:
        """Read some of what there is, in any order and in pieces of any size."""
        if not self._up():
            return
        sources = [self._read_updates, self._read_control, self._read_replies]
        self.world.draw.shuffle(sources)
        for source in sources:
            if self.world.chance(PROMPT):
                source()

    def _read_updates(self) -> None:
        updates = self.world.updates
        if self.world.kafka_away:
            return
        if not updates.agrees(self._updates_at):
            self._meet_loss(updates)
            self._updates_at = updates.position(len(updates))
        position = self._updates_at.offset
        if position >= len(updates):
            return
        end = min(len(updates), position + self.world.draw.randint(1, 6))
        records, epoch = updates.run(position, end)
        self._updates_at = updates.position(position + len(records))
        for _, record in records:
            if isinstance(record, UpdateApplied) and record.epoch == self._weights.token[0].epoch:
                self.figures.read_back = max(self.figures.read_back, record.version)
        self._feed(events.UpdatesRead(records, epoch))

    def _read_control(self) -> None:
        control, position = self.world.control, self._control_at.offset
        if self.machine.leader is None or self.world.kafka_away:
            return
        if not control.agrees(self._control_at):
            self._meet_loss(control)
            return
        if position >= len(control):
            return
        end = min(len(control), position + self.world.draw.randint(1, 6))
        records, epoch = control.run(position, end)
        self._control_at = control.position(position + len(records))
        self._feed(events.ControlRead(records, epoch))

    def _meet_loss(
        self, topic: SimulatedTopic[AuditRecord] | SimulatedTopic[ControlRecord]
    ) -> None:
        """Hold the job, because a topic lost records that this process has read."""
        if self._follows:
            reason = f"the {topic.name} topic lost records; `doll job resume --after-loss`"
            self._feed(events.HoldRequired(reason))

    def _read_replies(self) -> None:
        leader = self.machine.leader
        if leader is None or self._redis_away:
            return
        box = self.world.redis.replies.get(leader.model.epoch, [])
        for reply, taken in box[:3]:
            box.pop(0)
            if self.machine.leader is leader:
                self._weights.taken = taken
                self._feed(events.RepliesRead((reply,)))

    def _feed(self, event: CoordinatorEvent) -> None:
        leader, (oldest, _) = self.machine.leader, self.figures.oldest
        rounds = () if leader is None or oldest is None else leader.rounds
        self.figures.oldest_in_flight = any(oldest in r.todo or oldest in r.counted for r in rounds)
        for command in self.machine.on(event, self.world.now):
            self._do(command)

    # --- commands -----------------------------------------------------------------------------

    def _do(self, command: CoordinatorCommand) -> None:  # noqa: C901, PLR0912, PLR0915 -- one case per command
        world = self.world
        match command:
            case do.AskLease(ttl_s):
                self._lease_s = ttl_s
                world.later(world.jitter(world.scenario.board_s), self._ask_lease)
            case do.ReleaseLease() if not self._redis_away:
                if world.redis.lease is not None and world.redis.lease[0] == self.name:
                    world.redis.lease = None
            case do.FindSnapshots(source):
                world.later(
                    world.jitter(world.scenario.board_s), lambda: self._find_snapshots(source)
                )
            case do.RestoreSnapshot(snapshot, members):
                delay_s = world.jitter(world.scenario.board_s)
                world.later(delay_s, lambda: self._restore(snapshot, members=members))
            case do.Begin(epoch, snapshot):
                self._begin(epoch, snapshot)
            case do.AppendAudit(record):
                self._count_poison(record)
                if isinstance(record, UpdateApplied) and record.by is not UNSET:
                    self._take(record)
                self._append(record)
            case do.OpenPartition(record):
                self._open(record)
            case do.PublishModel() | do.PostTrigger() if self._redis_away:
                self._orders_lost = True
            case do.PublishModel(model, whole):
                if whole or not world.scenario.changes:
                    self._weights.viewed = model, self._weights.token
                    world.put_model(model, self._weights.token, MODELS_KEPT)
            case do.PostTrigger(trigger, moves):
                if world.scenario.changes and self._weights.viewed[0] != trigger.model:
                    trigger = self._with_changes(trigger)
                orders = {o.worker: [b.offset for b in o.batches] for o in trigger.orders}
                world.say(f"{self.name} orders {tuple(trigger.model)}", orders)
                self._post(trigger, moves=moves)
            case do.PutLeaderStatus(leader_status):
                self._put_leader_status(leader_status)
            case do.AddGradient(number, Gradient() as gradient):
                self._add(number, gradient)
            case do.Apply(number, update, rate, measured):
                self._apply(number, update, rate)
                if measured:
                    self._say_square(update)
            case do.DiscardSum(number):
                self._weights.sums.pop(number, None)
            case do.CopyWeights():
                self._weights.copy = self._weights.token
            case do.PublishSnapshot():
                self._publish(command)
            case do.DeadLetterRecords(skipped):
                partitions = world.streams.partitions
                places = {(partitions[s.partition], o) for s in skipped for o in s.offsets}
                self._write_dead_letter(lambda: world.figures.dead_letters.update(places))
            case do.DeadLetterBatch(record):
                world.say(f"{self.name} quarantines", record.batch, record.reason)
                self._write_dead_letter(lambda: world.figures.dead_batches.add(record.batch))
            case do.ReadHeartbeats():
                world.later(world.jitter(world.scenario.board_s), self._look_for_workers)
            case do.StepDown(reason, fallback):
                world.say(f"{self.name} steps down: {reason}")
                if fallback is not None:
                    self._count_fallback(fallback)
                self._follows = False
                self._weights.sums = {}
                self._outbox = [r for r in self._outbox if not isinstance(r, Lead)]
            case do.AwaitCheckpoint(reason):
                world.say(f"{self.name} waits: {reason}")
                world.figures.awaited += 1
                self._follows = False
            case do.Hold(reason) if " are poison: " in reason or self._is_expected(reason):
                world.say(f"{self.name} holds the job: {reason}")
                world.figures.held_for = reason
                if self.figures.oldest_in_flight:
                    # The batch is put back, and its waiting time starts again.
                    self.figures.oldest = None, 0
            case do.Hold(reason):
                raise Violation("held", reason)
            case do.Drop() | do.Finish() | do.ReleaseLease():
                pass

    def _count_fallback(self, version: int) -> None:
        """Count a fallback, the versions that it takes back, and newer ones that still exist."""
        group, effective = self.world.group, effective_updates(self.world)[0]
        group.met["fallen back"] += 1
        made = [ModelId(update.epoch, update.version) for update in effective]
        # Empty if the topic was recreated.
        for newest in made[-1:]:
            there = [hold for hold in group.members.values() if hold(newest)[0] is not None]
            group.met["in vain"] += bool(there)
            group.met["taken back"] += max(newest.version - version, 0)
        count = 1 if self.world.scenario.slices is None else self.world.scenario.slices.count
        stored = [each for each in made if len(group.stored.get(each, ())) == count]
        group.met["past a backup"] += any(each.version > version for each in stored)

    def _is_expected(self, reason: str) -> bool:
        """Return True if lost records or an overflowed sum are a valid reason to hold the job."""
        world = self.world
        if world.group.overflowed and reason.startswith("diverged: a sum "):
            return True
        if world.streams.losses and "`doll job resume --" in reason:
            return True
        return bool(world.figures.topic_losses) and " topic lost " in reason

    def _begin(self, epoch: int, snapshot: Snapshot) -> None:
        self.world.say(f"{self.name} LEADS with epoch {epoch} from", snapshot.made)
        self.figures.takeovers += 1
        slices = UNSET if self.machine.leader is None else self.machine.leader.slices
        if self.world.figures.slices not in (None, slices):
            self.world.group.met["switched"] += 1
        self.world.figures.slices = slices
        self._stated = self._orders_lost = False
        self.figures.in_a_row = 0
        self._control_at = snapshot.control
        self._triggers, self._leader_status = "", None
        figures, version = self.figures, snapshot.made.version
        figures.replayed_at, figures.began_at = len(self.world.control), snapshot.control.offset
        figures.replays, figures.put_back = True, 0
        figures.read_back = figures.published = version
        self._weights.sums, self.figures.oldest = {}, (None, 0)
        self._weights.chain = {snapshot.made.version: self._weights.token}
        self._check_beginning(snapshot)
        self._look_at_streams(self.figures.takeovers)

    def _check_beginning(self, snapshot: Snapshot) -> None:
        """Check that the leader keeps the K of the last update, unless a rule made that update."""
        leader, made = self.machine.leader, snapshot.synchrony
        sizes = self.world.revisions[self._revision]
        modes = [] if made is None else sizes.modes_of(made)
        if leader is None or not modes or modes[0] in sizes.modes[1:]:
            return
        if leader.mode.synchrony() != made:
            raise Violation("begins otherwise", f"by {leader.mode}, after {made}")

    def _look_at_streams(self, leadership: int) -> None:
        """Poll the list of partitions repeatedly while it leads."""
        if self.dead or self.figures.takeovers != leadership or self.machine.leader is None:
            return
        world = self.world
        if self._up() and not world.kafka_away:
            number = unused_number(world.now, world.draws.looks.randrange(4096))
            ids = world.streams.topic_ids
            there = {place: ids[place.topic] for place in world.streams.partitions}
            divergence = self._divergences()
            sure = not divergence or world.draws.cuts.random() < SURE
            divergence = divergence if sure else {}
            control_end = len(world.control)
            self._feed(events.StreamsSeen(there, number, divergence, sure, control_end))
        look_s = world.draws.looks.expovariate(1 / LOOK_S)
        world.later(look_s, lambda: self._look_at_streams(leadership))

    def _divergences(self) -> dict[Partition, Divergence]:
        """Return the streams that differ from what this leader knows of them."""
        leader = self.machine.leader
        if leader is None:
            return {}
        ledger, found = leader.ledger, dict[Partition, Divergence]()
        for place, claimed in ledger.claimed.items():
            divergence = self.world.streams.divergence(
                place, ledger.known.get(place, LogPosition(claimed))
            )
            generation = ledger.generation(place)
            if divergence is not None and generation is not None:
                found[place] = divergence._replace(generation=generation)
        return found

    def _open(self, record: Opened) -> None:
        """Append a record to the control topic. It may arrive late, twice or never."""
        world = self.world
        world.say(f"{self.name} opens {record.partition} at {record.start}")
        if world.chance(world.lossy):
            return
        late_s = LATE_S if world.chance(world.scenario.copies) else world.scenario.kafka_s
        world.later(world.jitter(late_s), lambda: void(world.append_control(record)))
        if world.chance(world.scenario.copies):
            world.later(world.draw.uniform(0, LATE_S), lambda: void(world.append_control(record)))

    def _with_changes(self, trigger: UpdateTrigger) -> UpdateTrigger:
        """Add the changes since the model that workers have, or publish the whole model."""
        weights = self._weights
        (since, before), weights.viewed = weights.viewed, (trigger.model, weights.token)
        if trigger.model.version % WHOLE_EVERY == 0:
            self.world.put_model(trigger.model, self._weights.token, MODELS_KEPT)
            return trigger
        self.world.changes[trigger.model] = before, self._weights.token
        return replace(trigger, since=since, changes=b"")

    def _post(self, trigger: UpdateTrigger, *, moves: bool) -> None:
        """Post a trigger, in a new stream if it moves or if a later trigger blocks it."""
        if not moves and self.world.post(trigger, self._triggers):
            return
        self._triggers = f"{self.name} {next(self.world.serial)}"
        self.world.post(trigger, self._triggers)
        if self._leader_status is not None and not self._redis_away:
            self._state(self._leader_status)

    def _put_leader_status(self, leader_status: LeaderStatus) -> None:
        self._leader_status = leader_status
        statuses = self.world.figures.leader_statuses
        known = statuses.setdefault(self._control_at, leader_status.claimed)
        if known != leader_status.claimed:
            raise Violation(
                "replay differs",
                f"claimed at {leader_status.control_position}: {known}, {leader_status.claimed}",
            )
        leader = self.machine.leader
        figures = self.figures
        if figures.replays and leader is None:
            # The leader held the job at once, so all waiting batches are those that it began with.
            figures.put_back = leader_status.waiting
        elif figures.replays and leader is not None:
            figures.replays = leader_status.control_position < figures.replayed_at
            # If the topic was recreated, the snapshot's batches have offsets of the previous log.
            begun = max(figures.replayed_at, figures.began_at)
            figures.put_back = sum(batch.offset < begun for batch in leader.batches)
        # A deposed leader that wakes up still has batches that others have used.
        if leader_status.epoch >= self.world.figures.newest_lead:
            figures.waiting_most = max(
                figures.waiting_most, leader_status.waiting - figures.put_back
            )
        figures.live_most = max(figures.live_most, leader_status.live)
        if not self._redis_away:
            if self.world.redis.leader_status is None and self._stated:
                self.world.later(0.0, lambda: self._notice(events.BoardWiped()))
            elif self._orders_lost:
                self.world.later(0.0, lambda: self._notice(events.OrdersLost()))
            self._state(leader_status)
            self._stated, self._orders_lost = True, False

    def _state(self, leader_status: LeaderStatus) -> None:
        self.world.redis.leader_status = replace(leader_status, triggers=self._triggers)

    def _notice(self, event: CoordinatorEvent) -> None:
        if self._up():
            self._feed(event)

    def _add(self, number: int, gradient: Gradient) -> None:
        taken, version = self._weights.taken, gradient.model.version
        if taken is None or taken.weights != self._weights.chain.get(version):
            raise Violation("wrong weights", f"a gradient of {taken}, as one of version {version}")
        part = GradientPart(gradient.batches, version, taken.local_rate)
        self._weights.sums.setdefault(number, []).append(part)

    def _apply(self, number: int, update: UpdateApplied, rate: float | None) -> None:
        batches = tuple(batch.offset for batch in update.batches)
        parts = self._weights.sums.pop(number, [])
        if batches != tuple(offset for part in parts for offset in part.batches):
            raise Violation("wrong sum", f"update of {batches} with gradients of {parts}")
        self._check_synchrony(update, parts, rate)
        self._check_starving(update)
        unread = update.version - self.figures.read_back
        in_flight = 1 + max(sizes.most_stale for sizes in self.world.revisions)
        if unread > self.settings.unread_audits + in_flight:
            raise Violation("audit left behind", f"{unread} updates are not read back yet")
        made: Token = (ModelId(update.epoch, update.version), next(self.world.serial))
        self.world.nodes[made] = Node(self._weights.token, batches, self._progress(update))
        self.world.say(f"{self.name} applies e{update.epoch} J{update.version}", batches)
        self._weights.token, self.figures.in_a_row = made, 0
        self._weights.chain[update.version] = made

    def _take(self, update: UpdateApplied) -> None:
        """Check an update that members computed. They may apply it once it is read back."""
        world = self.world
        if update.by is UNSET or update.by not in world.group.results:
            raise Violation("nobody has it", f"{update}")
        token, parts, reduce = world.group.results[update.by]
        if token is None:
            raise Violation("not finite", f"{update}")
        batches = tuple(batch.offset for batch in update.batches)
        if sorted(batches) != sorted(offset for part in parts for offset in part.batches):
            raise Violation("wrong sum", f"update of {batches} with gradients of {parts}")
        if (update.samples, update.scale or 1.0) != (reduce.samples, reduce.scale):
            raise Violation("wrong step", f"{update} by {reduce}")
        self._weights.token = world.nodes[token].parent
        order = {offsets: place for place, offsets in enumerate(batches)}
        parts = tuple(sorted(parts, key=lambda part: order[part.batches[0]]))
        world.group.met["adopted"] += (update.copies or 0) < len(
            world.group.collectives[update.by[:2]].members
        )
        self._check_synchrony(update, list(parts), reduce.learning_rate)
        self._check_starving(update)
        if update.version - 1 > self.figures.read_back:
            raise Violation("audit left behind", f"{update.version} upon {self.figures.read_back}")
        world.say(f"{self.name} appends e{update.epoch} J{update.version}", batches, update.by)
        world.nodes[token] = dataclasses.replace(
            world.nodes[token], progress=self._progress(update)
        )
        self._weights.token, self.figures.in_a_row = token, 0

    def _say_square(self, update: UpdateApplied) -> None:
        """Report the squared norm of a sum: at once or later, sometimes twice, while it leads."""
        world, leadership = self.world, self.figures.takeovers
        event = events.Summed(ModelId(update.epoch, update.version), world.square(update.samples))

        def say() -> None:
            if self.machine.leader is not None and self.figures.takeovers == leadership:
                self._feed(event)

        for _ in range(world.draws.noise.choice([1, 1, 1, 2])):
            late_s = world.draws.noise.choice([0.0, 0.0, 0.0, world.scenario.gradient_s])
            world.later(late_s, lambda: self._when_up(say))

    def _check_synchrony(
        self, update: UpdateApplied, parts: list[GradientPart], rate: float | None
    ) -> None:
        """Check K, staleness, local steps and rate against the modes of the update's revision."""
        sizes = self.world.revisions[update.revision]
        synchrony = update.synchrony or Synchrony(sizes.group_size)
        modes = sizes.modes_of(synchrony)
        count = len(update.batches)
        if count > synchrony.group_size or (count < synchrony.group_size and not update.short):
            raise Violation("not K", f"{count} batches of {synchrony}, and no reason")
        if not modes:
            raise Violation("wrong synchrony", f"{synchrony}, not one of {sizes.modes}")
        if {part.local_rate for part in parts} != {synchrony.local_rate}:
            raise Violation("wrong walk", f"{parts} in an update of {synchrony}")
        stale = update.version - 1 - min(part.version for part in parts)
        if stale != update.staleness or stale > synchrony.staleness:
            raise Violation("too stale", f"{stale}, said {update.staleness}, of {synchrony}")
        expected_parts = (
            tuple(len(part.batches) for part in parts) if synchrony.local_rate else UNSET
        )
        if update.parts != expected_parts:
            raise Violation("wrong parts", f"{update.parts}, not {expected_parts}")
        step = (rate or 0.0) * (1.0 if update.scale is UNSET else update.scale)
        expected = [self._steps(update, mode, count / len(parts)) for mode in modes]
        if update.rate != step or not any(
            low <= step <= high or isclose(step, low) or isclose(step, high)
            for low, high in expected
        ):
            raise Violation(
                "wrong rate", f"{rate} x {update.scale}, said {update.rate}, not one of {expected}"
            )

    def _progress(self, update: UpdateApplied) -> float:
        """Return the progress of an update and all before it: the sum of K / (the job's own K)."""
        own = self.world.revisions[update.revision].group_size
        before = self.world.nodes.get(self._weights.token)
        progress = (update.synchrony.group_size if update.synchrony else own) / own
        progress += before.progress if before is not None else 0.0
        if not isclose(update.progress, progress):
            raise Violation("miscounted", f"{update.progress} updates, not {progress}")
        return progress

    def _steps(self, update: UpdateApplied, mode: Mode, stepped: float) -> tuple[float, float]:
        """Return the bounds of an update's rate in a mode. They differ only if K is tuned."""
        sizes = self.world.revisions[update.revision]
        way, own = sizes.way or Way(), learning_rate(update.revision)
        if mode.local_rate and way.reduction == "mean":
            steps = [mode.local_rate * stepped]
        elif mode.learning_rate is not None:
            steps = [mode.learning_rate]
        elif way.rate_by_group:
            steps = [own * mode.group_size / sizes.group_size]
            steps += [own] if way.group_sizes else []
        else:
            steps = [own]
        before = self.world.nodes.get(self._weights.token)
        share = SCHEDULE.share(before.progress if before is not None else 0.0)
        share /= 1 + update.staleness if mode.damped else 1
        return min(steps) * share, max(steps) * share

    def _check_starving(self, update: UpdateApplied) -> None:
        """Check that the oldest batch is settled in time, unless it is requested again."""
        leader = self.machine.leader
        if leader is None:
            return
        status = leader.unsettled
        oldest = status.oldest_unsettled if status.waiting else None
        round_ = None if oldest is None else leader.rounds.of(oldest)
        again = round_ is not None and len(round_.asked.get(oldest or 0, ())) > 1
        if self.figures.oldest[0] != oldest or again:
            self.figures.oldest = oldest, update.version
        most = max(sizes.most_stale for sizes in self.world.revisions)
        since = self.figures.oldest[1]
        if oldest is not None and update.version - since > 2 * most + 3:
            raise Violation("starves", f"batch {oldest} since {since}: {update.version}")

    def _count_poison(self, record: AuditRecord) -> None:
        if isinstance(record, Quarantined) and record.batch.offset == self.figures.oldest[0]:
            # The batch is settled. If an operator requeues it, it waits from then on.
            self.figures.oldest = None, 0
        if isinstance(record, Quarantined) and not record.expired:
            self.figures.in_a_row += 1
            if self.figures.in_a_row > self.settings.poison_in_a_row:
                raise Violation("poison in a row", f"{self.figures.in_a_row} batches, and no hold")

    def _publish(self, command: do.PublishSnapshot) -> None:
        world, leadership, snapshot = self.world, self.figures.takeovers, command.snapshot
        token = self._weights.copy if snapshot.slices is UNSET else self._fetch(snapshot)

        def publish() -> None:
            self.figures.published = snapshot.made.version
            if not self._redis_away:
                world.redis.snapshots[snapshot.by] = (snapshot, token)
            if command.checkpoint:
                upload_s = world.draw.uniform(0.01, world.scenario.upload_s)
                upload_s += max(world.outages.storage_back_at - world.now, 0.0)
                world.later(upload_s, uploaded)

        def uploaded() -> None:
            self._verify(snapshot)
            if not command.state or token is None:
                world.blobs.append((snapshot, token))
                return
            every = range(world.scenario.slices.count if world.scenario.slices else 1)
            world.group.stored[snapshot.made] = dict.fromkeys(every, token)
            world.blobs.append((replace(snapshot, stored=(snapshot.made,)), token))
            if self.figures.takeovers == leadership and not self.dead:
                self._when_up(lambda: self._feed(events.StateStored(snapshot.made)))

        self._after_dead_letters.append(publish)
        self._dead_letter_delivered(0)

    def _verify(self, snapshot: Snapshot) -> None:
        """Read a checkpoint back repeatedly until it is complete. Then it may be named."""
        world = self.world

        def read() -> None:
            if any(each.name == snapshot.name for each, _ in world.listed()[0]):
                self._when_up(lambda: self._feed(events.CheckpointVerified(snapshot.name)))
            elif not self.dead:
                world.later(READ_BACK_S, read)

        if world.scenario.names:
            world.later(READ_BACK_S, read)

    def _fetch(self, snapshot: Snapshot) -> Token | None:
        """Return what members have stored of a version; None if a slice is missing."""
        world = self.world
        stored = world.group.stored.get(snapshot.made, {})
        slices = world.scenario.slices
        return stored[0] if len(stored) == (1 if slices is None else slices.count) else None

    def _write_dead_letter(self, write: Callable[[], object]) -> None:
        """Deliver a dead letter later, unless this process dies first."""

        def deliver() -> None:
            if not self.dead:
                write()
                self._dead_letter_delivered(1)

        self._undelivered += 1
        self.world.later(self.world.jitter(DEAD_LETTER_S), deliver)

    def _dead_letter_delivered(self, count: int) -> None:
        self._undelivered -= count
        if not self._undelivered:
            waiting, self._after_dead_letters = self._after_dead_letters, []
            for publish in waiting:
                publish()

    # --- Redis --------------------------------------------------------------------------------

    def _ask_lease(self) -> None:
        if not self._up() or self._redis_away:
            return
        redis, now = self.world.redis, self.world.now
        held = redis.lease is None or redis.lease[1] <= now or redis.lease[0] == self.name
        if held:
            redis.lease = (self.name, now + self._lease_s)
        elif now >= self._looks_until:
            self.world.later(LEASE_LOOK_S, self._look_at_holder)
        self._looks_until = 0.0 if held else now + LEASE_S
        self._feed(events.LeaseAnswered(held))

    def _look_at_holder(self) -> None:
        """Take the lease of a holder that has ended, or seems to have; at most once per holder."""
        world = self.world
        redis, now = world.redis, world.now
        if self.dead or now >= self._looks_until:
            return
        world.later(LEASE_LOOK_S, self._look_at_holder)
        if not self._up() or self._redis_away or redis.lease is None:
            return
        holder = redis.lease[0]
        seems = world.draws.leases.random() < world.scenario.misheard and not world.faults_over
        if holder in {self.name, *redis.taken_from} or not (holder in world.ended or seems):
            return
        world.say(f"{self.name} takes the lease of {holder}", "" if holder in world.ended else "!")
        redis.taken_from.add(holder)
        redis.lease = None
        self._ask_lease()

    def _find_snapshots(self, source: events.Source) -> None:
        world = self.world
        if not self._up():
            return
        names = world.scenario.names
        lacking = (
            world.kafka_away,
            source != "genesis" and self._redis_away,
            source == "all" and world.storage_away and not names,
        )
        if any(lacking):
            self._feed(events.AttemptFailed("a server is unavailable"))
            return
        hot = list(world.redis.snapshots.values())
        version_0 = genesis(world.streams.first, world.streams.known)
        first: tuple[Snapshot, Token | None] = version_0, GENESIS_TOKEN
        stored, torn, failed = world.listed() if names else (world.blobs, {}, False)
        found = {"hot": hot, "all": [*stored, *hot], "genesis": [first]}[source]
        self._weights.found = {snapshot.rank: token for snapshot, token in found}
        snapshots = tuple(snapshot for snapshot, _ in found)
        lost = {
            snapshot.rank: f"the {topic.name} topic lost records"
            for snapshot in snapshots
            for topic, known in (
                (world.updates, snapshot.updates),
                (world.control, snapshot.control),
            )
            if known.offset and not topic.agrees(known)
        }
        end = len(world.updates)
        self._updates_at, self._follows = world.updates.position(end), True
        covered = [snapshot for snapshot in snapshots if snapshot.rank not in lost]
        # Only the best covered snapshot may be used.
        if source == "hot":
            covered = sorted(covered, key=lambda each: each.rank)[-1:]
            snapshots = tuple(s for s in snapshots if s.rank in lost or s in covered)
        begin = min((snapshot.updates_position for snapshot in covered), default=end)
        updates = tuple((o, record) for o, record in enumerate(world.updates) if o >= begin)
        ids = world.control.topic_id, world.updates.topic_id
        answer = events.SnapshotsFound(source, snapshots, updates, end, lost, *ids)
        if source == "all":
            answer = replace(answer, storage_failed=failed, torn=torn)
        self._feed(answer)

    def _restore(self, snapshot: Snapshot, *, members: bool) -> None:
        """Load the weights. Sometimes they are torn, or cannot be fetched now."""
        if not self._up():
            if not self.dead:
                self._when_up(lambda: self._restore(snapshot, members=members))
            return
        if snapshot.rank not in self._weights.found:
            return
        if snapshot.by >= 0 and self._redis_away and self.world.storage_away:
            self._feed(events.AttemptFailed("neither board nor storage can be read"))
            return
        if snapshot.by >= 0 and not members and self.world.chance(self.world.scenario.torn):
            self._feed(events.SnapshotTorn(snapshot))
            return
        token = self._weights.found[snapshot.rank]
        if token is None and not members:
            token = GENESIS_TOKEN if snapshot.made == GENESIS else self._fetch(snapshot)
            if token is None:
                raise Violation("no weights", f"of {snapshot.made}, which are said to be stored")
        self._weights.token = self._weights.copy = token or (snapshot.made, 0)
        self._feed(events.SnapshotRestored(self.world.unused_number(), DIGEST))

    def _look_for_workers(self) -> None:
        if self._up() and not self._redis_away:
            heartbeats = self.world.redis.alive.items()
            seen = {w: beat for w, (beat, until) in heartbeats if until > self.world.now}
            self._feed(events.WorkersSeen(seen))

    # --- the updates topic --------------------------------------------------------------------

    def _append(self, record: AuditRecord) -> None:
        self._outbox.append(record)
        if len(self._outbox) == 1:
            self.world.later(self.world.jitter(self.world.scenario.kafka_s), self._send)

    def _send(self) -> None:
        """Send audit records in order, some of them twice."""
        world = self.world
        if not self._outbox:
            return
        if world.kafka_away or world.now < self._silent_until:
            world.later(max(self._silent_until - world.now, 0.1), self._send)
            return
        record = self._outbox.pop(0)
        world.append_audit(record)
        if isinstance(record, Lead):
            self._when_up(lambda: self._feed(events.LeadDelivered(record.candidate)))
        if world.chance(world.scenario.copies * 0.5):
            world.append_audit(record)
        if self._outbox:
            world.later(world.jitter(world.scenario.kafka_s), self._send)

    # --- faults -------------------------------------------------------------------------------

    def kill(self) -> None:
        """Die at once. Some records that are being sent still arrive."""
        self.dead = True
        self.world.ended.add(self.name)
        self._outbox = self._outbox[: self.world.draw.randint(0, len(self._outbox))]
        self.world.control_readers.remove(self.read)
        self.world.board_readers.remove(self.read)

    def lose_appends(self) -> None:
        """Drop some of its unsent records, and report the failure to the process."""
        if self._outbox and self._up():
            self._outbox = self._outbox[: self.world.draw.randrange(len(self._outbox))]
            self._feed(events.AttemptFailed("a record was not appended"))
