"""The outside of the simulated processes: virtual time, Kafka, Redis, object storage, the group.

Nothing here knows the protocol. Redis may be wiped or replaced by a stale copy, Kafka appends after
a delay, once or twice; both may be away.
"""

from __future__ import annotations

import copy
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from common.core.history import History
from common.core.messages import (
    AttemptId,
    AuditRecord,
    Batch,
    ControlRecord,
    Lead,
    LeaderStatus,
    Member,
    ModelId,
    Positions,
    Reduce,
    Replayed,
    Reply,
    StateReport,
    TriggerId,
    UpdateTrigger,
    WorkerId,
    unused_number,
)
from common.core.snapshots import Snapshot
from common.core.spans import Address, LogPosition, Partition
from common.simulation.faults.streams import Content, Streams
from common.simulation.faults.topic import SimulatedTopic

if TYPE_CHECKING:
    from msgspec import UnsetType

    from common.core.liveness import Heartbeat
    from common.simulation.faults.scenario import Lie, Scenario

POLL_CHANCE = 0.15  # how often a process that looks at the jobs topic finds what is new there
CLOCK_ERROR_S = 5.0  # between machines: a successor's clock may be behind
NOISES = (0.0, 4.0, 64.0)  # of a gradient: K goes up by some messages, and down by others
# Digest of the layout of the job's model.
DIGEST = "0123456789abcdef"
OTHER_DIGEST = "f" * 16  # of the layout that another build of the task makes
BOARD_S = 0.001  # mean time until a reader of the board sees what is new there
LATE_S = 3.0  # how late a late message may be: several takeovers

Token: TypeAlias = tuple[ModelId, int]  # stands for weights: who made them, and a serial number


@dataclass
class Redis:
    """The board's content."""

    lease: tuple[str, float] | None = None
    taken_from: set[str] = field(default_factory=set)  # before their lease ran out
    models: dict[ModelId, Token] = field(default_factory=dict)
    triggers: dict[str, list[UpdateTrigger]] = field(default_factory=dict)  # by stream
    replies: dict[int, list[tuple[Reply, TrueGradient | None]]] = field(default_factory=dict)
    leader_status: LeaderStatus | None = None
    alive: dict[WorkerId, tuple[Heartbeat, float]] = field(default_factory=dict)
    # Without weights, where members hold them.
    snapshots: dict[int, tuple[Snapshot, Token | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """One optimizer step: from which weights, with which batches."""

    parent: Token
    batches: tuple[int, ...]
    progress: float  # updates of the job's own K, with this one


class GradientPart(NamedTuple):
    """A gradient message in a sum."""

    batches: tuple[int, ...]
    version: int  # of the weights that it was taken at
    local_rate: float  # at which it really was walked


@dataclass(frozen=True)
class TrueGradient:
    """What is true of a gradient, whatever its message says."""

    weights: Token  # that it was taken at
    local_rate: float


class Entry(NamedTuple):
    """What a member enters a collective with."""

    reduce: Reduce
    state: Token
    parts: tuple[tuple[tuple[int, ...], TrueGradient], ...]
    owned: tuple[int, ...]  # slices


@dataclass
class Collectives:
    """A process group: each member's n-th call meets the others' n-th."""

    members: tuple[Member, ...]
    closed: set[Member] = field(default_factory=set)
    calls: defaultdict[int, dict[Member, Entry]] = field(default_factory=lambda: defaultdict(dict))
    count: Counter[Member] = field(default_factory=Counter)

    def enter(self, member: Member, entry: Entry) -> dict[Member, Entry]:
        """A member's next call; returns what others meet it with, now or later."""
        self.count[member] += 1
        call = self.calls[self.count[member]]
        call[member] = entry
        return call


class Found(NamedTuple):
    """What a copier finds of a version."""

    state: Token | None = None
    origin: int = 0  # of version 0: who made it
    moments: Mapping[int, Token] = MappingProxyType({})  # of which state it has this, by slice


@dataclass
class Between:
    """What is among members that hold the weights."""

    draw: random.Random
    members: dict[Member, Callable[[ModelId], Found]] = field(default_factory=dict)
    links: set[frozenset[Member]] = field(default_factory=set)  # that are cut
    # What met in each membership's collectives, and what came out of each attempt: None, where that
    # is not finite, of which messages, by which order.
    collectives: dict[tuple[int, int], Collectives] = field(default_factory=dict)
    results: dict[AttemptId, tuple[Token | None, tuple[GradientPart, ...], Reduce]] = field(
        default_factory=dict
    )
    overflowed: bool = False
    met: Counter[str] = field(default_factory=Counter)  # what has happened, how often
    truth: dict[ModelId, Token] = field(default_factory=dict)  # what each version is
    stored: dict[ModelId, dict[int, Token]] = field(default_factory=dict)  # by slice


class ChanceSources:
    """Sources of chance, one for each kind of event, so that other worlds stay as they are."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(f"numbers {seed}")  # noqa: S311 -- reproducible, not secret
        self.looks = random.Random(f"looks {seed}")  # noqa: S311 -- likewise
        self.losses = random.Random(f"losses of {seed}")  # noqa: S311 -- likewise
        self.cuts = random.Random(f"cuts of {seed}")  # noqa: S311 -- likewise
        self.leases = random.Random(f"leases {seed}")  # noqa: S311 -- likewise
        self.noise = random.Random(f"noise {seed}")  # noqa: S311 -- likewise


@dataclass
class Outages:
    """When servers that are away answer again, and until when object storage answers wrongly."""

    kafka_back_at: float = 0.0
    redis_back_at: float = 0.0
    storage_back_at: float = 0.0
    lie: tuple[Lie, float, int] | None = None  # until when, and how many checkpoints there were


@dataclass
class Figures:
    """What has happened, for checks and reports alone."""

    # What workers read for their claims: offsets, and of which log they were.
    contents: dict[tuple[WorkerId, Address], frozenset[Content]] = field(default_factory=dict)
    # Every `claimed` that any leader stated, by its position and the control topic it had read.
    leader_statuses: dict[LogPosition, Positions] = field(default_factory=dict)
    newest_lead: int = -1
    slices: int | UnsetType | None = None  # as the newest leader has it
    awaited: int = 0  # how often a coordinator did not find the checkpoint that it needed
    dead_letters: set[tuple[Partition, int]] = field(default_factory=set)  # of malformed records
    dead_batches: set[Batch] = field(default_factory=set)  # quarantined, and with a dead letter
    requeued: int = 0  # records of operators that count
    replayed: set[Batch] = field(default_factory=set)  # whose records were produced anew
    held_for: str = ""  # why, if a coordinator said so and no operator has seen it yet
    topic_losses: int = 0  # how often Kafka lost records of the control or the updates topic


class World:
    """Everything outside; it also carries virtual time and the one source of randomness."""

    def __init__(self, scenario: Scenario, narrate: Callable[[float, str], None] | None) -> None:
        self.scenario = scenario
        self.draw = random.Random(scenario.seed + 1)  # noqa: S311 -- reproducible, not secret
        self.draws = ChanceSources(scenario.seed)
        self.now = 0.0
        self.faults_over = False
        self._narrate = narrate
        self._heap = list[tuple[float, int, "Callable[[], None]"]]()
        self.serial = count(1)
        self.streams = Streams(scenario, lambda: self.now, self.say, self.serial)
        self.figures = Figures()
        self.outages = Outages()
        self.control = SimulatedTopic[ControlRecord]("control")
        self.updates = SimulatedTopic[AuditRecord]("updates")
        self.ended = set[str]()  # coordinators
        self.redis = Redis()
        self.replica: Redis | None = None
        self.blobs = list[tuple[Snapshot, Token | None]]()  # in the order of their arrival
        self.nodes = dict[Token, Node]()
        self.group = Between(random.Random(f"between members {scenario.seed}"))  # noqa: S311 -- likewise
        # What a trigger's changes make of which weights, by the leader's epoch and the model.
        self.changes = dict[ModelId, tuple[Token, Token]]()
        # The jobs topic: the job as its owner wanted it, one after another.
        self.revisions = [scenario.sizes]
        self.owners = dict[Partition, WorkerId]()
        self.control_readers = list["Callable[[], None]"]()
        self.board_readers = list["Callable[[], None]"]()

    # --- time ---------------------------------------------------------------------------------

    def say(self, text: str, *details: object) -> None:
        """Add a line to the story, where somebody listens."""
        if self._narrate is not None:
            self._narrate(self.now, " ".join([text, *map(str, details)]))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something after a delay."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self.serial), action))

    def _wake(self, readers: list[Callable[[], None]], mean_s: float) -> None:
        for wake in readers:
            self.later(self.jitter(mean_s), wake)

    def step(self) -> None:
        """Do the next thing."""
        self.now, _, action = heapq.heappop(self._heap)
        action()

    def jitter(self, mean_s: float) -> float:
        """A random delay with a long tail."""
        return self.draw.expovariate(1.0 / mean_s)

    def chance(self, share: float) -> bool:
        """Whether something happens this time."""
        return share > 0 and self.draw.random() < share

    def unused_number(self) -> int:
        """A number for an epoch: of a process whose clock may be wrong by some seconds."""
        clock_s = max(self.now + self.draws.numbers.uniform(-CLOCK_ERROR_S, CLOCK_ERROR_S), 0.0)
        return unused_number(clock_s, self.draws.numbers.randrange(4096))

    def square(self, samples: int) -> float:
        """|gradient summed over so many samples|^2, where the gradient's own length is 1."""
        return samples * (samples + self.draws.noise.choice(NOISES))

    @property
    def lossy(self) -> float:
        """Share of triggers and gradients that get lost; none after the last fault."""
        return 0.0 if self.faults_over else self.scenario.lossy

    # --- Kafka --------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """The newest revision of the job."""
        return len(self.revisions) - 1

    @property
    def most_bound(self) -> int:
        """The largest bound that a worker may ever have gone by."""
        return max(sizes.bound for sizes in self.revisions)

    def poll_revision(self, revision: int) -> int:
        """What a process knows next of the job: some of what is new, all of it, or nothing yet."""
        if revision == self.revision or self.kafka_away or not self.chance(POLL_CHANCE):
            return revision
        return self.draw.randint(revision + 1, self.revision)

    @property
    def kafka_away(self) -> bool:
        """Whether the broker is down."""
        return self.now < self.outages.kafka_back_at

    @property
    def redis_away(self) -> bool:
        """Whether the board is down."""
        return self.now < self.outages.redis_back_at

    @property
    def storage_away(self) -> bool:
        """Whether object storage is down."""
        return self.now < self.outages.storage_back_at

    def append_control(self, record: ControlRecord | None) -> int:
        """Append to the control topic now; returns the offset."""
        offset = self.control.append(record)
        self._wake(self.control_readers, self.scenario.kafka_s)
        return offset

    def append_audit(self, record: AuditRecord | None) -> None:
        """Append to the updates topic now."""
        if isinstance(record, Lead):
            self.figures.newest_lead = max(self.figures.newest_lead, record.epoch)
        self.updates.append(record)
        self._wake(self.control_readers, self.scenario.kafka_s)

    def lose(
        self, topic: SimulatedTopic[AuditRecord] | SimulatedTopic[ControlRecord], end: int | None
    ) -> None:
        """A topic of the job loses its records from an offset on, or is created anew."""
        self.figures.topic_losses += 1
        if end is None:
            topic.create_anew()
        else:
            topic.cut(end)
        self.say(f"{topic.name} topic:", "created anew" if end is None else f"cut at {end}")
        # Of the others nobody knows any more that their records were produced anew.
        history, replayed = History(), set[Batch]()
        for offset, record in enumerate(self.updates):
            if history.feed(offset, record) and isinstance(record, Replayed):
                replayed.add(record.batch)
        self.figures.replayed &= replayed
        for wake in self.control_readers:
            self.later(self.draws.losses.expovariate(1 / self.scenario.kafka_s), wake)

    # --- object storage -----------------------------------------------------------------------

    def lie(self, lie: Lie, seconds: float) -> None:
        """Let object storage answer wrongly for a while."""
        self.outages.lie = lie, self.now + seconds, len(self.blobs)

    def listed(self) -> tuple[list[tuple[Snapshot, Token | None]], dict[ModelId, str], bool]:
        """Return what object storage answers: checkpoints, torn ones, and whether it failed."""
        lie, until, before = self.outages.lie or ("", 0.0, 0)
        there = sorted(self.blobs, key=lambda blob: blob[0].name)
        if self.storage_away:
            return [], {}, True
        torn = dict[ModelId, str]()
        if self.faults_over or self.now >= until:
            lie = ""
        if lie == "half":
            torn = {snapshot.name: "a part is missing" for snapshot, _ in there[1::2]}
        listed = {
            "empty": [],
            "other": [],
            "page": [],
            "stale": self.blobs[: before // 2],
            "late": self.blobs[:before],
            "cut": there[: len(there) // 2],
            "half": [blob for blob in there if blob[0].name not in torn],
        }
        return listed.get(lie, there), torn, lie in {"other", "page"}

    # --- Redis --------------------------------------------------------------------------------

    def put_model(self, model: ModelId, token: Token, kept: int) -> None:
        """Put weights under a name; the oldest names are forgotten."""
        models = self.redis.models
        models[model] = token
        for old in list(models)[:-kept]:
            del models[old]

    def post(self, trigger: UpdateTrigger, stream: str) -> bool:
        """Post a trigger, unless a later one is there; some are trimmed before anybody reads."""
        triggers = self.redis.triggers.setdefault(stream, [])
        if triggers and trigger.id <= triggers[-1].id:
            return False
        if self.chance(self.lossy * 0.3):
            return True
        triggers.append(trigger)
        del triggers[:-20]
        self._wake(self.board_readers, BOARD_S)
        return True

    def forge_trigger(self, epoch: int) -> None:
        """Put a trigger that nobody made where workers read, unless its like is there."""
        status = self.redis.leader_status
        triggers = self.redis.triggers.setdefault("" if status is None else status.triggers, [])
        forged = UpdateTrigger(TriggerId(epoch, 1), ModelId(epoch, 1), ())
        if not triggers or forged.id > triggers[-1].id:
            self.say("forged", forged.id)
            triggers.append(forged)
            self._wake(self.board_readers, BOARD_S)

    def forge_report(self, which: int) -> None:
        """Say something in the name of a member, or of another process of its name."""
        status = self.redis.leader_status
        posted = () if status is None else self.redis.triggers.get(status.triggers, ())
        own = [each for each in posted if status is not None and each.id.epoch == status.epoch]
        if not own or own[-1].group is UNSET or not own[-1].group.membership.members:
            return
        trigger, group = own[-1], own[-1].group
        members = group.membership.members
        worker, life = members[which % len(members)]
        another = StateReport(worker, trigger.model, 10**9 + which, trigger.id, group.made)
        far = TriggerId(trigger.id.epoch, 2**62)
        forged: tuple[StateReport, ...] = (
            another,
            replace(another, numbers=2**62),
            replace(another, life=life, last_trigger=far),
            replace(another, life=life, made=ModelId(trigger.id.epoch, 2**40)),
            replace(another, life=life, slices=(99,), numbers=2**39),
        )
        report = forged[which % len(forged)]
        self.say("forged", report)
        self.redis.replies.setdefault(report.model.epoch, []).append((report, None))
        self._wake(self.board_readers, BOARD_S)

    def triggers_after(self, last_trigger: TriggerId, stream: str) -> list[UpdateTrigger]:
        """Triggers above an id; now and then some are trimmed before this worker reads them."""
        found = [
            trigger for trigger in self.redis.triggers.get(stream, ()) if trigger.id > last_trigger
        ]
        return [t for t in found if not self.chance(self.lossy * 0.2)]

    def push(self, reply: Reply, taken: TrueGradient | None) -> None:
        """Send a reply: it may get lost, come late, or twice."""

        def arrive() -> None:
            self.redis.replies.setdefault(reply.model.epoch, []).append((reply, taken))
            self._wake(self.board_readers, BOARD_S)

        if not self.chance(self.lossy):
            self.later(self.draw.uniform(0, LATE_S) if self.chance(self.lossy) else 0.001, arrive)
        if self.chance(self.lossy):
            self.later(self.draw.uniform(0, LATE_S), arrive)

    def wipe_redis(self) -> None:
        """Redis comes back empty."""
        self.redis = Redis()

    def copy_redis(self) -> None:
        """A replica is this far."""
        self.replica = copy.deepcopy(self.redis)

    def fail_over_redis(self) -> None:
        """The replica takes over, whatever it has missed."""
        if self.replica is not None:
            self.redis, self.replica = self.replica, None


def void(_: object) -> None:
    """Drop a result."""
