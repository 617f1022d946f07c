"""Everything outside the simulated processes: virtual time, Kafka, Redis, storage, the group.

Nothing here knows the protocol. Redis may be wiped or replaced by a stale copy. Kafka appends after
a delay, once or twice. Both may be unavailable.
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

# Probability that a poll of the jobs topic finds new records.
POLL_CHANCE = 0.15
# Difference between clocks of machines. A successor's clock may be behind.
CLOCK_ERROR_S = 5.0
# Noise of a gradient. Some of these values raise a tuned K, others lower it.
NOISES = (0.0, 4.0, 64.0)
# Layout digest of the job's model.
DIGEST = "0123456789abcdef"
# Layout digest of another build's model.
OTHER_DIGEST = "f" * 16
# Mean time until a reader of Redis sees a change.
BOARD_S = 0.001
# Longest delay of a late message, which spans several takeovers.
LATE_S = 3.0

# Stands for weights: their version, and a serial number.
Token: TypeAlias = tuple[ModelId, int]


@dataclass
class Redis:
    """Content of Redis."""

    lease: tuple[str, float] | None = None
    # Holders that lost the lease before it expired.
    taken_from: set[str] = field(default_factory=set)
    models: dict[ModelId, Token] = field(default_factory=dict)
    triggers: dict[str, list[UpdateTrigger]] = field(default_factory=dict)  # keyed by stream
    replies: dict[int, list[tuple[Reply, TrueGradient | None]]] = field(default_factory=dict)
    leader_status: LeaderStatus | None = None
    alive: dict[WorkerId, tuple[Heartbeat, float]] = field(default_factory=dict)
    # The weights are None if members hold them.
    snapshots: dict[int, tuple[Snapshot, Token | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """One optimizer step: its base weights and its batches."""

    parent: Token
    batches: tuple[int, ...]
    # Updates so far, with this one, in units of the job's own K.
    progress: float


class GradientPart(NamedTuple):
    """A gradient message in a sum."""

    batches: tuple[int, ...]
    # Version of the weights at which the gradient was taken.
    version: int
    # Actual rate of the local steps.
    local_rate: float


@dataclass(frozen=True)
class TrueGradient:
    """Facts about a gradient, which its message may state wrongly."""

    # Weights at which it was taken.
    weights: Token
    local_rate: float


class Entry(NamedTuple):
    """A member's input to a collective."""

    reduce: Reduce
    state: Token
    parts: tuple[tuple[tuple[int, ...], TrueGradient], ...]
    owned: tuple[int, ...]  # slices


@dataclass
class Collectives:
    """A process group. The n-th calls of its members form one collective."""

    members: tuple[Member, ...]
    closed: set[Member] = field(default_factory=set)
    calls: defaultdict[int, dict[Member, Entry]] = field(default_factory=lambda: defaultdict(dict))
    count: Counter[Member] = field(default_factory=Counter)

    def enter(self, member: Member, entry: Entry) -> dict[Member, Entry]:
        """Make a member's next call. Return the call's entries, to which others are added later."""
        self.count[member] += 1
        call = self.calls[self.count[member]]
        call[member] = entry
        return call


class Found(NamedTuple):
    """The part of a version that a copier finds."""

    state: Token | None = None
    # Version 0 only: life of the member that made it.
    origin: int = 0
    # Keyed by slice: the state whose optimizer part this is.
    moments: Mapping[int, Token] = MappingProxyType({})


@dataclass
class Between:
    """State shared by members that hold the weights."""

    draw: random.Random
    members: dict[Member, Callable[[ModelId], Found]] = field(default_factory=dict)
    # Cut connections.
    links: set[frozenset[Member]] = field(default_factory=set)
    # Collectives of each membership, and the result of each attempt: its state (None if not
    # finite), its messages, and its order.
    collectives: dict[tuple[int, int], Collectives] = field(default_factory=dict)
    results: dict[AttemptId, tuple[Token | None, tuple[GradientPart, ...], Reduce]] = field(
        default_factory=dict
    )
    overflowed: bool = False
    # Number of events of each kind.
    met: Counter[str] = field(default_factory=Counter)
    # State of each version.
    truth: dict[ModelId, Token] = field(default_factory=dict)
    stored: dict[ModelId, dict[int, Token]] = field(default_factory=dict)  # keyed by slice


class ChanceSources:
    """Sources of random numbers, one per kind of event, so that kinds do not affect each other."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(f"numbers {seed}")  # noqa: S311 -- reproducible, not secret
        self.looks = random.Random(f"looks {seed}")  # noqa: S311 -- reproducible
        self.losses = random.Random(f"losses of {seed}")  # noqa: S311 -- reproducible
        self.cuts = random.Random(f"cuts of {seed}")  # noqa: S311 -- reproducible
        self.leases = random.Random(f"leases {seed}")  # noqa: S311 -- reproducible
        self.noise = random.Random(f"noise {seed}")  # noqa: S311 -- reproducible


@dataclass
class Outages:
    """Times when unavailable servers answer again, and wrong answers of object storage."""

    kafka_back_at: float = 0.0
    redis_back_at: float = 0.0
    storage_back_at: float = 0.0
    # Kind of wrong answer, its end, and the number of checkpoints at its beginning.
    lie: tuple[Lie, float, int] | None = None


@dataclass
class Figures:
    """Events so far, only for checks and reports."""

    # Records that a worker read for a claim, by worker and address.
    contents: dict[tuple[WorkerId, Address], frozenset[Content]] = field(default_factory=dict)
    # All `claimed` that leaders have published, keyed by their position in the control topic.
    leader_statuses: dict[LogPosition, Positions] = field(default_factory=dict)
    newest_lead: int = -1
    slices: int | UnsetType | None = None  # layout of the newest leader
    # Number of times that a coordinator lacked the checkpoint that it needed.
    awaited: int = 0
    # Malformed records that have a dead letter.
    dead_letters: set[tuple[Partition, int]] = field(default_factory=set)
    # Quarantined batches that have a dead letter.
    dead_batches: set[Batch] = field(default_factory=set)
    # Number of `Requeued` records that count.
    requeued: int = 0
    # Batches whose records were produced again.
    replayed: set[Batch] = field(default_factory=set)
    # Reason why a coordinator held the job, until an operator has read it.
    held_for: str = ""
    # Number of times that Kafka lost records of the control or the updates topic.
    topic_losses: int = 0


class World:
    """Everything outside the processes, with virtual time and the main source of randomness."""

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
        # Coordinators that have ended.
        self.ended = set[str]()
        self.redis = Redis()
        self.replica: Redis | None = None
        self.blobs = list[tuple[Snapshot, Token | None]]()  # ordered by arrival
        self.nodes = dict[Token, Node]()
        self.group = Between(random.Random(f"between members {scenario.seed}"))  # noqa: S311 -- reproducible
        # Changes of a trigger, keyed by its model: weights before and after.
        self.changes = dict[ModelId, tuple[Token, Token]]()
        # The jobs topic: all revisions of the job, in order.
        self.revisions = [scenario.sizes]
        self.owners = dict[Partition, WorkerId]()
        self.control_readers = list["Callable[[], None]"]()
        self.board_readers = list["Callable[[], None]"]()

    # --- time ---------------------------------------------------------------------------------

    def say(self, text: str, *details: object) -> None:
        """Add a line to the narration, if there is one."""
        if self._narrate is not None:
            self._narrate(self.now, " ".join([text, *map(str, details)]))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action after a delay."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self.serial), action))

    def _wake(self, readers: list[Callable[[], None]], mean_s: float) -> None:
        for wake in readers:
            self.later(self.jitter(mean_s), wake)

    def step(self) -> None:
        """Run the next action."""
        self.now, _, action = heapq.heappop(self._heap)
        action()

    def jitter(self, mean_s: float) -> float:
        """Draw a random delay with a long tail."""
        return self.draw.expovariate(1.0 / mean_s)

    def chance(self, share: float) -> bool:
        """Draw True with this probability."""
        return share > 0 and self.draw.random() < share

    def unused_number(self) -> int:
        """Return a number for an epoch, from a clock that may be wrong by some seconds."""
        clock_s = max(self.now + self.draws.numbers.uniform(-CLOCK_ERROR_S, CLOCK_ERROR_S), 0.0)
        return unused_number(clock_s, self.draws.numbers.randrange(4096))

    def square(self, samples: int) -> float:
        """Return |gradient summed over samples|^2, for a gradient of length 1 plus noise."""
        return samples * (samples + self.draws.noise.choice(NOISES))

    @property
    def lossy(self) -> float:
        """Share of triggers and gradients that are lost; 0 after the last fault."""
        return 0.0 if self.faults_over else self.scenario.lossy

    # --- Kafka --------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """The newest revision of the job."""
        return len(self.revisions) - 1

    @property
    def most_bound(self) -> int:
        """The largest bound of any revision."""
        return max(sizes.bound for sizes in self.revisions)

    def poll_revision(self, revision: int) -> int:
        """Return the revision that a process finds: its own, or any newer one."""
        if revision == self.revision or self.kafka_away or not self.chance(POLL_CHANCE):
            return revision
        return self.draw.randint(revision + 1, self.revision)

    @property
    def kafka_away(self) -> bool:
        """True if the broker is unavailable."""
        return self.now < self.outages.kafka_back_at

    @property
    def redis_away(self) -> bool:
        """True if Redis is unavailable."""
        return self.now < self.outages.redis_back_at

    @property
    def storage_away(self) -> bool:
        """True if object storage is unavailable."""
        return self.now < self.outages.storage_back_at

    def append_control(self, record: ControlRecord | None) -> int:
        """Append to the control topic now, and return the offset."""
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
        """Let a topic of the job lose its records from an offset on, or recreate it."""
        self.figures.topic_losses += 1
        if end is None:
            topic.recreate()
        else:
            topic.cut(end)
        self.say(f"{topic.name} topic:", "created anew" if end is None else f"cut at {end}")
        # If a record `Replayed` is lost, no log shows that the batch was produced again.
        history, replayed = History(), set[Batch]()
        for offset, record in enumerate(self.updates):
            if history.feed(offset, record) and isinstance(record, Replayed):
                replayed.add(record.batch)
        self.figures.replayed &= replayed
        for wake in self.control_readers:
            self.later(self.draws.losses.expovariate(1 / self.scenario.kafka_s), wake)

    # --- object storage -----------------------------------------------------------------------

    def lie(self, lie: Lie, seconds: float) -> None:
        """Make object storage give wrong answers for a while."""
        self.outages.lie = lie, self.now + seconds, len(self.blobs)

    def listed(self) -> tuple[list[tuple[Snapshot, Token | None]], dict[ModelId, str], bool]:
        """Return storage's answer: checkpoints, torn checkpoints, and True if storage failed."""
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
        """Store weights under a name, and delete the oldest names."""
        models = self.redis.models
        models[model] = token
        for old in list(models)[:-kept]:
            del models[old]

    def post(self, trigger: UpdateTrigger, stream: str) -> bool:
        """Post a trigger unless a later one exists. Some are trimmed before anyone reads them."""
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
        """Write a trigger of no leader to the current stream, unless one as high exists."""
        status = self.redis.leader_status
        triggers = self.redis.triggers.setdefault("" if status is None else status.triggers, [])
        forged = UpdateTrigger(TriggerId(epoch, 1), ModelId(epoch, 1), ())
        if not triggers or forged.id > triggers[-1].id:
            self.say("forged", forged.id)
            triggers.append(forged)
            self._wake(self.board_readers, BOARD_S)

    def forge_report(self, which: int) -> None:
        """Forge a report of a member, or of another process of its name."""
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
        """Return triggers above an id. Some may be trimmed before this worker reads them."""
        found = [
            trigger for trigger in self.redis.triggers.get(stream, ()) if trigger.id > last_trigger
        ]
        return [t for t in found if not self.chance(self.lossy * 0.2)]

    def push(self, reply: Reply, taken: TrueGradient | None) -> None:
        """Send a reply. It may be lost, or come late or twice."""

        def arrive() -> None:
            self.redis.replies.setdefault(reply.model.epoch, []).append((reply, taken))
            self._wake(self.board_readers, BOARD_S)

        if not self.chance(self.lossy):
            self.later(self.draw.uniform(0, LATE_S) if self.chance(self.lossy) else 0.001, arrive)
        if self.chance(self.lossy):
            self.later(self.draw.uniform(0, LATE_S), arrive)

    def wipe_redis(self) -> None:
        """Replace Redis by an empty one."""
        self.redis = Redis()

    def copy_redis(self) -> None:
        """Copy Redis to a replica, which then falls behind."""
        self.replica = copy.deepcopy(self.redis)

    def fail_over_redis(self) -> None:
        """Let the replica take over, without the changes that it has missed."""
        if self.replica is not None:
            self.redis, self.replica = self.replica, None


def void(_: object) -> None:
    """Drop a result."""
