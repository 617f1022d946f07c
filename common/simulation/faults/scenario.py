"""A simulated world and its faults, as data: drawn from a seed, replayed, and shrunk.

Shares are probabilities per event, and times are in virtual seconds. Every fault is a separate
entry, so that the shrinker can remove some and check that the failure remains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from common.core.settings import Mode, Rule, SliceSettings

if TYPE_CHECKING:
    from common.core.messages import Synchrony
    from common.core.spans import Address

FaultKind: TypeAlias = Literal[
    # The worker dies without notice. A part of what it sent still arrives.
    "kill worker",
    # The worker is given notice.
    "leave worker",
    # The worker stops for a while, then continues with its old state.
    "freeze worker",
    "freeze all workers",  # together
    "freeze worker and leader",
    "join worker",
    # A worker loses its cache, and reads addresses back.
    "evict rows",
    # A rebalance without a reason. The old owner does not notice it at once.
    "rebalance",
    # All workers die. One joins a while later.
    "kill all workers",
    "cut worker off redis",
    "cut worker off kafka",
    "kill coordinator",
    "freeze coordinator",
    "cut coordinator off redis",
    "lose lease",
    "wipe redis",
    # A replica stops receiving changes.
    "copy redis",
    # The replica takes over.
    "fail over redis",
    "redis away",
    "kafka away",
    "storage away",
    # Kafka deletes the oldest records of a partition, read or not.
    "retention",
    # Bytes that do not parse, and a gradient that no leader requested.
    "garbage",
    # A trigger of no leader, with an id above all leaders' ids.
    "forge trigger",
    # A report in the name of a member, or of another process of its name.
    "forge report",
    # The owner pauses the job for a while.
    "pause job",
    # The owner changes K, b and the workers' bound for good.
    "change job",
    # An operator requeues batches, perhaps wrong ones.
    "requeue batches",
    # An operator replays batches, perhaps wrong ones. If a replay counts, their records are
    # produced again.
    "replay batches",
    # A stream gets another partition for good. It has records before any process knows of it.
    "add partition",
    # A coordinator's last records for the updates topic do not arrive.
    "lose appends",
    # Other brokers lead the job's topics. No record is lost.
    "elect leaders",
    # The topic loses its last records, and assigns their offsets to new ones.
    "cut control",
    "cut updates",
    "cut both",
    # The topic loses all its records.
    "create control anew",
    "create updates anew",
    # A partition loses its last records, and may get other ones at their offsets.
    "cut stream",
    # A stream's topic is recreated, with some records.
    "create stream anew",
    # Another process starts under the worker's name before the loss is noticed.
    "restart worker",
    "kill some workers",  # together
    # Two members cannot reach each other, for a while or for good.
    "cut members",
    # The owner wants the weights to be held elsewhere.
    "switch aggregation",
    # Object storage gives wrong answers for a while.
    "store lies",
]

Lie: TypeAlias = Literal[
    # The list has no checkpoints.
    "empty",
    # The list is an old one.
    "stale",
    # The list is that of another bucket.
    "other",
    # The list ends after its first page.
    "cut",
    # The answer is a web page.
    "page",
    # Every second checkpoint lacks a part.
    "half",
    # Checkpoints written since the fault began are missing.
    "late",
    # The hint to the latest checkpoint does not parse.
    "latest",
]
LIES: tuple[Lie, ...] = get_args(Lie)

# Effect of a poison record: the worker dies, the task raises, or a number is not finite.
Harm: TypeAlias = Literal["kills", "raises", "is not finite"]

HARMLESS: tuple[FaultKind, ...] = (
    "join worker",
    "join worker",
    "rebalance",
    "evict rows",
    "garbage",
    "pause job",
)
DEADLY: tuple[FaultKind, ...] = (
    "kill worker",
    "leave worker",
    "freeze worker",
    "cut worker off redis",
    "cut worker off kafka",
)
# Faults that leave batches waiting after their workers are lost.
ORPHANS: tuple[FaultKind, ...] = ("kill worker", "join worker")
LEADERSHIP: tuple[FaultKind, ...] = (
    "kill coordinator",
    "freeze coordinator",
    "freeze coordinator",
    "cut coordinator off redis",
    "lose lease",
    "lose lease",
)
STORES: tuple[FaultKind, ...] = (
    "wipe redis",
    "copy redis",
    "fail over redis",
    "redis away",
    "kafka away",
    "storage away",
    "kill all workers",
)
# An epoch that no election reaches, and the highest one.
FORGED_EPOCHS = 2**60, 2**64 - 1
CUTS: tuple[FaultKind, ...] = ("cut stream", "create stream anew")
OPERATORS: tuple[FaultKind, ...] = ("requeue batches", "requeue batches", "replay batches")
AMONG_MEMBERS: tuple[FaultKind, ...] = (
    "restart worker",
    "kill some workers",
    "cut members",
    "freeze worker",
)
FREEZES: tuple[FaultKind, ...] = (
    "freeze all workers",
    "freeze worker and leader",
    "freeze worker",
)
LOSSES: tuple[FaultKind, ...] = (
    "cut control",
    "cut updates",
    "cut both",
    "create control anew",
    "create updates anew",
)
# Share of workers with another build, in worlds that have any.
OTHERS = 0.3
# Share of worlds whose triggers contain the changes of the model.
CHANGES = 0.3
# Share of worlds that are not synchronous.
MODES = 0.6
MOST_WORKERS = 5
# Largest K and b. Small numbers reach all cases soon.
MOST = 4
# Faults come in groups: longest time after the previous fault.
SOON_S = 0.5
# Share of modes in which one worker computes the whole group.
SINGLE_WORKER = 0.4
# Share of modes that make smaller steps with stale gradients.
DAMPED = 0.3
# Share of rules that hold while workers are idle enough. The others depend on the number of
# workers.
BUSY = 0.5
# Share of jobs whose learning rate scales with K.
BY_GROUP = 0.5
# Share of jobs with a tuned K, of those in which K can be tuned.
TUNED = 0.8
# The difference of two gradients shows the noise, so a tuned K is at least 2.
LEAST_TUNED, MOST_TUNED = 2, 2 * MOST
# Share of worlds of groups whose sums may overflow.
OVERFLOWING = 0.2
# Share of worlds with frozen processes that also have other faults.
TROUBLED = 0.5
# Share of a store's wrong answers that meet coordinators that start without Redis.
STARTING = 0.8
# Durations of most faults.
LASTS_S = (0.2, 1.0, 4.0)
# Share of changes that another change follows soon.
SOON_AGAIN = 0.3


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    at: float
    kind: FaultKind
    # Number of the worker, coordinator or partition, modulo their count.
    target: int
    # Duration, for faults that have one.
    seconds: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Settings that a job's owner may change while it runs."""

    group_size: int  # K
    batch_size: int  # b
    # Batches per worker that are announced and not settled.
    bound: int
    way: Way | None = None  # None: always synchronous
    # Number of slices if members hold the weights, 0 for whole copies. None if the coordinator
    # holds the weights.
    slices: int | None = None

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes of rounds: the job's own, then those of its rules."""
        way = self.way or Way()
        own = replace(way.mode, group_size=self.group_size)
        return (own, *(rule.mode for rule in way.rules))

    def modes_of(self, synchrony: Synchrony) -> list[Mode]:
        """Return the modes that allow this synchrony, for any K that the job's own mode may use."""
        (own, *ruled), (least, most) = self.modes, self._group_sizes
        if least <= synchrony.group_size <= most:
            own = replace(own, group_size=synchrony.group_size)
        return [mode for mode in (own, *ruled) if mode.synchrony() == synchrony]

    @property
    def _group_sizes(self) -> tuple[int, int]:
        tuned = None if self.way is None else self.way.group_sizes
        return tuned or (self.group_size, self.group_size)

    @property
    def largest_group(self) -> int:
        """K of the mode with the largest K."""
        return max(self._group_sizes[1], *(mode.group_size for mode in self.modes))

    @property
    def most_stale(self) -> int:
        """Largest staleness of a gradient in any mode."""
        return max(mode.staleness for mode in self.modes)


SYNCHRONOUS = Mode(1)


@dataclass(frozen=True, slots=True)
class Way:
    """A job's synchronization of its workers, if it differs from the paper's."""

    # Its K is not used.
    mode: Mode = SYNCHRONOUS
    reduction: Literal["mean", "sum"] = "sum"
    rules: tuple[Rule, ...] = ()
    rate_by_group: bool = False
    # Bounds within which K is tuned. The job's own K is within them.
    group_sizes: tuple[int, int] | None = None

    def of_group(self) -> Way:
        """Return the same without stale gradients and without single-worker groups."""
        rules = tuple(replace(rule, mode=_in_time(rule.mode)) for rule in self.rules)
        return replace(self, mode=_in_time(self.mode), rules=rules)


def _in_time(mode: Mode) -> Mode:
    return replace(mode, staleness=0, single_worker=False)


def sizes_of(number: int, *, modes: bool, group: bool = False) -> Sizes:
    """Return sizes by number. All choices are equally frequent."""
    group_size = 1 + number % MOST
    bound = group_size + number // MOST**2 % 3
    name = f"mode {number}"
    draw = random.Random(name)  # noqa: S311 -- reproducible
    way = _way(draw, name, group_size) if modes else None
    way = way.of_group() if way is not None and group else way
    return _with_room(Sizes(group_size, 1 + number // MOST % MOST, bound, way))


def _with_room(sizes: Sizes) -> Sizes:
    """Raise the bound to the largest group, so that a worker may hold all of its batches."""
    return replace(sizes, bound=max(sizes.bound, sizes.largest_group))


def _way(draw: random.Random, name: str, group_size: int) -> Way:
    apart = random.Random(f"rules of {name}")  # noqa: S311 -- reproducible, separate
    rules = tuple(_rule(apart) for _ in range(apart.choice([0, 1, 1, 2])))
    reductions: tuple[Literal["mean", "sum"], ...] = ("mean", "sum")
    mode, reduction, by_group = _mode(draw), draw.choice(reductions), apart.random() < BY_GROUP
    tuner = random.Random(f"tuner of {name}")  # noqa: S311 -- reproducible
    tuned = group_size >= LEAST_TUNED and not mode.single_worker and tuner.random() < TUNED
    bounds = tuner.choice([LEAST_TUNED, group_size]), tuner.choice([group_size, MOST_TUNED])
    return Way(
        mode, reduction, rules, rate_by_group=by_group, group_sizes=bounds if tuned else None
    )


def _mode(draw: random.Random) -> Mode:
    return Mode(
        1,
        staleness=draw.choice([0, 1, 1, 2, 2, 4, 9]),
        single_worker=draw.random() < SINGLE_WORKER,
        local_rate=draw.choice([0.0, 0.0, 0.125]),
        damped=draw.random() < DAMPED,
    )


def _rule(draw: random.Random) -> Rule:
    mode = replace(_mode(draw), group_size=draw.randint(1, MOST), damped=False)
    mode = replace(mode, learning_rate=draw.choice([None, None, 0.5]))
    if draw.random() < BUSY:
        return Rule(mode, busy_below=draw.choice([0.2, 0.5, 0.8, 1.0]))
    return Rule(mode, workers_from=draw.randint(2, MOST_WORKERS))


@dataclass(frozen=True, slots=True)
class Poison:
    """A record that usually spoils every gradient it is in."""

    partition: int
    offset: int
    does: Harm
    # Share of its gradients that it spoils.
    share: float

    def lies_in(self, address: Address) -> bool:
        """Return True if this record is in an address."""
        return any(
            span.partition == self.partition and span.start <= self.offset < span.end
            for span in address
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world: the job, the streams, the network, and the faults."""

    seed: int
    batch_size: int
    group_size: int
    bound: int
    on_missing: Literal["redispatch", "proceed"]
    # True if partial batches and groups are used after a time limit. The paper has no limit.
    linger: bool
    # Time between hot snapshots.
    hot_s: float | None
    # Records of each partition: (offset, arrival time).
    arrivals: tuple[tuple[tuple[int, float], ...], ...]
    # Records that do not decode: (partition, offset).
    bad: frozenset[tuple[int, int]]
    poisons: tuple[Poison, ...]
    # Number of failures that a batch may have before it is quarantined.
    max_failures: int
    # Number of poison batches without an update between them that hold the job.
    in_a_row: int
    workers: int
    # Mean time of one gradient.
    gradient_s: float
    # Mean delay of an appended record.
    kafka_s: float
    # Mean delay of a coordinator's request to Redis.
    board_s: float
    # Longest time until a checkpoint arrives.
    upload_s: float
    # Share of triggers and gradients that are lost. As many come late, and as many twice.
    lossy: float
    # Share of snapshots whose weights cannot be read.
    torn: float
    # Share of Kafka records that are appended again, some much later.
    copies: float
    faults: tuple[Fault, ...]
    # No fault begins after this.
    faults_end_at: float
    # Share of checks of the lease's holder that wrongly report it as ended.
    misheard: float = 0.0
    # Records of partitions that are added, in their order.
    added: tuple[tuple[tuple[int, float], ...], ...] = ()
    # Optional. If unset, the job stays synchronous after all changes.
    way: Way | None = None
    # True if members hold the weights and add gradients up.
    group: bool = False
    # Settings of slices that have owners. If None, members hold all weights.
    slices: SliceSettings | None = None
    # True if some sums of members are not finite.
    overflows: bool = False
    # True if triggers contain the changes of the model, and few models are published whole.
    changes: bool = False
    # Share of joining workers that have another build of the task.
    others: float = 0.0
    # True if leaders read checkpoints back and name them in the updates topic.
    names: bool = False

    @property
    def sizes(self) -> Sizes:
        """Sizes of the job as it was submitted."""
        sizes = Sizes(self.group_size, self.batch_size, self.bound, self.way)
        return _with_room(replace(sizes, slices=self.layouts[-1] if self.group else None))

    @property
    def layouts(self) -> tuple[int | None, ...]:
        """Possible layouts of the weights in this world, as in `Sizes.slices`."""
        return (None, 0) if self.slices is None else (None, 0, self.slices.count)


def from_seed(seed: int) -> Scenario:
    """Draw a scenario."""
    draw = random.Random(seed)  # noqa: S311 -- reproducible, not secret
    # Separate random numbers, so that other draws of a seed stay the same: mutants.py lists the
    # seeds that notice a missing rule.
    apart = random.Random(f"operators {seed}")  # noqa: S311 -- reproducible
    group_size = draw.randint(1, MOST)
    # If true, only poison hurts workers, so no other batch may suffer.
    quiet = draw.random() < 0.15
    faults_end_at = draw.uniform(2.0, 15.0)
    arrivals = tuple(_arrivals(draw, faults_end_at) for _ in range(draw.randint(1, 4)))
    every = [(p, offset) for p, records in enumerate(arrivals) for offset, _ in records]
    bad_share = draw.choice([0.0, 0.0, 0.1])
    bad = frozenset(record for record in every if draw.random() < bad_share)
    scenario = Scenario(
        seed=seed,
        batch_size=draw.randint(1, MOST),
        group_size=group_size,
        bound=group_size + draw.randint(0, 2),
        on_missing=draw.choice(["redispatch", "redispatch", "proceed"]),
        linger=draw.random() < 0.7,
        hot_s=draw.choice([0.2, 0.4, None]),
        arrivals=arrivals,
        bad=bad,
        poisons=_poisons(draw, sorted(set(every) - bad)) if quiet or draw.random() < 0.3 else (),
        max_failures=3 if quiet else draw.choice([0, 1, 3]),
        in_a_row=apart.choice([1, 2, 3]),
        workers=draw.randint(1, 4),
        gradient_s=draw.choice([0.01, 0.05, 0.3]),
        kafka_s=draw.choice([0.002, 0.01, 0.1, 0.4]),
        board_s=draw.choice([0.002, 0.002, 0.1]),
        upload_s=draw.choice([0.1, 2.0, 6.0]),
        lossy=draw.choice([0.0, 0.05, 0.25]),
        torn=draw.choice([0.0, 0.0, 0.3]),
        copies=draw.choice([0.0, 0.06]),
        faults=_faults(draw, faults_end_at, quiet=quiet),
        faults_end_at=faults_end_at,
    )
    # Most jobs need no operator. In the others, operators act repeatedly.
    kinds: list[FaultKind] = [*OPERATORS, "lose appends"]
    operators = _random_faults(apart, faults_end_at, apart.choice([0, 0, 3, 8]), kinds, [4.0])
    # Most streams keep their partitions and their records.
    streams = random.Random(f"streams {seed}")  # noqa: S311 -- reproducible, separate
    count = streams.choice([0, 0, 0, 0, 1, 2])
    growth = _random_faults(streams, faults_end_at, count, ["add partition"])
    cuts = random.Random(f"cuts {seed}")  # noqa: S311 -- reproducible
    more = _random_faults(cuts, faults_end_at, cuts.choice([0, 0, 0, 0, 0, 1, 3]), CUTS)
    # Kafka keeps what it acknowledged in half of the worlds.
    losses = random.Random(f"losses {seed}")  # noqa: S311 -- reproducible
    count = losses.choice([0, 0, 2, 5])
    more += _random_faults(losses, faults_end_at, count, [*LOSSES, "elect leaders"], LASTS_S)
    # Most worlds have no forgeries. No world has both forgeries and operators, because forgeries
    # would change how rare the operators' cases are.
    forgeries = random.Random(f"forgeries {seed}")  # noqa: S311 -- reproducible
    count = forgeries.choice([0, 0, 0, 0, 1, 3])
    forged = _random_faults(forgeries, faults_end_at, count, ["forge trigger"])
    changes = _changes(draw, faults_end_at, draw.choice([0, 0, 1, 2, 4]), "change job")
    scenario = _with(scenario, changes + (operators or forged) + growth + more)
    # Without poison, operators would have nothing to do.
    if operators and not scenario.poisons:
        scenario = replace(scenario, poisons=_poisons(apart, sorted(set(every) - bad)))
    scenario = replace(
        scenario,
        added=tuple(_arrivals(streams, faults_end_at) for _ in growth),
        misheard=random.Random(f"misheard {seed}").choice([0.0, 0.0, 0.01, 0.05]),  # noqa: S311 -- reproducible
        changes=random.Random(f"changes {seed}").random() < CHANGES,  # noqa: S311 -- reproducible
    )
    modes = random.Random(f"modes {seed}")  # noqa: S311 -- reproducible
    if modes.random() >= MODES:
        return scenario
    way = _way(modes, f"modes {seed}", group_size)
    return replace(scenario, way=way, workers=modes.randint(1, MOST_WORKERS))


def grouped(scenario: Scenario) -> Scenario:
    """Return the same world with members that hold the weights, and with faults among them."""
    draw = random.Random(f"group of {scenario.seed}")  # noqa: S311 -- reproducible
    end = scenario.faults_end_at
    more = _random_faults(
        draw, end, int(end * draw.choice([0.0, 0.3, 1.0])), AMONG_MEMBERS, LASTS_S
    )
    # The layout does not change in half of the worlds.
    switches = random.Random(f"switches of {scenario.seed}")  # noqa: S311 -- reproducible
    count = switches.choice([0, 0, 0, 1, 2, 4])
    return replace(
        _with(scenario, more + _changes(switches, end, count, "switch aggregation")),
        group=True,
        overflows=draw.random() < OVERFLOWING,
        changes=False,
        way=None if scenario.way is None else scenario.way.of_group(),
        workers=draw.randint(1, MOST_WORKERS),
    )


def of_two_builds(scenario: Scenario) -> Scenario:
    """Return the same world with some workers that have another build of the task."""
    return replace(scenario, others=OTHERS)


def forged(scenario: Scenario) -> Scenario:
    """Return the same world of members with forged reports."""
    draw = random.Random(f"forged reports {scenario.seed}")  # noqa: S311 -- reproducible
    end = scenario.faults_end_at
    count = int(end * draw.choice([0.3, 1.0, 3.0]))
    return _with(scenario, _random_faults(draw, end, count, ["forge report"]))


def sliced(scenario: Scenario) -> Scenario:
    """Return the same world of members with owners of slices of the weights."""
    draw = random.Random(f"slices of {scenario.seed}")  # noqa: S311 -- reproducible
    slices = SliceSettings(
        count=draw.randint(1, 4),
        owners=draw.choice([1, 1, 2, 2, 3]),
        servers=draw.choice([None, None, 1, 2]),
        stage=draw.choice([None, None, 1, 2, 3]),
    )
    cuts = tuple(
        Fault(draw.uniform(0, scenario.faults_end_at), "cut members", 0, draw.choice(LASTS_S))
        for _ in range(draw.choice([0, 0, 5, 20]))
    )
    return replace(_with(scenario, cuts), slices=slices)


def frozen(seed: int) -> Scenario:
    """Draw a scenario with frozen processes, for any layout of the weights."""
    draw = random.Random(f"frozen {seed}")  # noqa: S311 -- reproducible, separate
    scenario = from_seed(seed)
    # Layout of the weights.
    layout = draw.choice(["coordinator", "members", "slices"])
    if layout != "coordinator":
        scenario = grouped(scenario)
    if layout == "slices":
        scenario = sliced(scenario)
    end, count = scenario.faults_end_at, draw.randint(1, 4)
    freezes = _random_faults(draw, end, count, FREEZES, [*LASTS_S, 10.0])
    if draw.random() >= TROUBLED:
        scenario = replace(scenario, faults=())
    return _with(scenario, freezes)


def lying(scenario: Scenario) -> Scenario:
    """Return the same world with a store that gives wrong answers, usually while all restart."""
    draw = random.Random(f"lies of {scenario.seed}")  # noqa: S311 -- reproducible
    faults = list[Fault]()
    for _ in range(draw.choice([1, 2, 4])):
        at = draw.uniform(0.2 * scenario.faults_end_at, scenario.faults_end_at)
        lasts_s = draw.choice([1.0, 4.0, 30.0])
        faults.append(Fault(at, "store lies", draw.randrange(1000), lasts_s))
        if draw.random() < STARTING:
            times = [at + draw.uniform(0, SOON_S) for _ in range(3)]
            faults += [Fault(times[n], "kill coordinator", n, 0.0) for n in (0, 1)]
            faults.append(Fault(max(times), "wipe redis", 0, 0.0))
    scenario = _with(scenario, tuple(faults))
    return replace(scenario, names=True, upload_s=min(scenario.upload_s, 2.0))


def _with(scenario: Scenario, faults: tuple[Fault, ...]) -> Scenario:
    """Return the same world with more faults."""
    ordered = sorted(scenario.faults + faults, key=lambda fault: fault.at)
    return replace(scenario, faults=tuple(ordered))


# Kinds of worlds for a store that gives wrong answers, by the remainder of the seed.
LAYOUTS = ("", "", "group", "slices")
# Kinds of worlds, each drawn from a seed. All but the first have their own random numbers, so that
# their faults change nothing in other kinds.
WORLDS: dict[str, Callable[[int], Scenario]] = {
    "": from_seed,
    "builds": lambda seed: of_two_builds(from_seed(seed)),
    "group": lambda seed: grouped(from_seed(seed)),
    "slices": lambda seed: sliced(grouped(from_seed(seed))),
    "forged": lambda seed: forged(grouped(from_seed(seed))),
    "frozen": frozen,
    "store": lambda seed: lying(WORLDS[LAYOUTS[seed % 4]](seed)),
}


def _arrivals(draw: random.Random, faults_end_at: float) -> tuple[tuple[int, float], ...]:
    """Draw offsets with holes, and arrival times. Some records exist from the beginning."""
    count, offset = draw.randint(3, 50), draw.randint(0, 5)
    backlog = draw.random()
    times = sorted(
        0.0 if draw.random() < backlog else draw.uniform(0, faults_end_at) for _ in range(count)
    )
    records = []
    for time in times:
        records.append((offset, time))
        offset += 1 + (draw.randint(1, 4) if draw.random() < 0.25 else 0)
    return tuple(records)


def _poisons(draw: random.Random, decodable: list[tuple[int, int]]) -> tuple[Poison, ...]:
    harm: list[Harm] = ["is not finite", "raises", "kills", "kills"]
    # Some records do not fail every time.
    share = draw.choice([0.8, 1.0])
    records = draw.sample(decodable, min(draw.randint(1, 3), len(decodable)))
    # At most one record is not finite, because several in one round would rightly hold the job as
    # diverged.
    return tuple(Poison(*r, draw.choice(harm[i > 0 :]), share) for i, r in enumerate(records))


def _faults(draw: random.Random, faults_end_at: float, *, quiet: bool) -> tuple[Fault, ...]:
    """Draw faults. Some worlds have more faults of one kind than others, and some have few."""
    kinds = list(HARMLESS)
    kinds += LEADERSHIP * draw.choice([0, 1, 2, 5])
    if not quiet:
        kinds += DEADLY
        kinds += ORPHANS * draw.choice([0, 0, 0, 5])
        kinds += STORES * draw.choice([0, 1, 1, 3])
        kinds += ["retention"] * draw.choice([0, 0, 0, 1, 5])
    count = int(faults_end_at * draw.choice([0.3, 1.0, 3.0]))
    company = draw.choice([0.0, 0.5])
    times = list[float]()
    for _ in range(count):
        together = times and draw.random() < company
        times.append(
            times[-1] + draw.uniform(0, SOON_S) if together else draw.uniform(0, faults_end_at)
        )
    return tuple(
        Fault(time, draw.choice(kinds), draw.randrange(1000), draw.choice(LASTS_S))
        for time in sorted(times)
        if time < faults_end_at
    )


def _changes(
    draw: random.Random, faults_end_at: float, count: int, kind: FaultKind
) -> tuple[Fault, ...]:
    """Draw changes by the job's owner. Some follow before any process has read the last one."""
    times = [draw.uniform(0, faults_end_at) for _ in range(count)]
    times += [time + draw.uniform(0, SOON_S) for time in times if draw.random() < SOON_AGAIN]
    return tuple(
        Fault(time, kind, draw.randrange(1000), 0.0) for time in times if time < faults_end_at
    )


def _random_faults(
    draw: random.Random,
    faults_end_at: float,
    count: int,
    kinds: Sequence[FaultKind],
    seconds: Sequence[float] = (0.0,),
) -> tuple[Fault, ...]:
    """Draw `count` faults, each with a random kind and time."""
    return tuple(
        Fault(
            draw.uniform(0, faults_end_at),
            draw.choice(kinds) if len(kinds) > 1 else kinds[0],
            draw.randrange(1000),
            draw.choice(seconds) if len(seconds) > 1 else seconds[0],
        )
        for _ in range(count)
    )
