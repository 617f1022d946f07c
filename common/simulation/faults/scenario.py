"""One simulated world and what befalls it, as data: made from a seed, replayed, and shrunk.

Rates are per event, times in virtual seconds. A scenario holds every fault as an entry of its own,
so that the shrinker can leave some out and see whether the failure stays.
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
    "kill worker",  # without notice; a part of what it sent still arrives
    "leave worker",  # on notice
    "freeze worker",  # stops for a while, then goes on with all it had in mind
    "freeze all workers",  # at once
    "freeze worker and leader",
    "join worker",
    "evict rows",  # a worker loses its cache and reads addresses back
    "rebalance",  # for no reason; the old owner does not notice at once
    "kill all workers",  # one is back a while later
    "cut worker off redis",
    "cut worker off kafka",
    "kill coordinator",
    "freeze coordinator",
    "cut coordinator off redis",
    "lose lease",
    "wipe redis",
    "copy redis",  # a replica that lags behind from here on
    "fail over redis",  # to that replica
    "redis away",
    "kafka away",
    "storage away",
    "retention",  # the oldest records of a partition go, read or not
    "garbage",  # bytes that do not parse, and a gradient that nobody asked for
    "forge trigger",  # nobody made it, and no leader's id is above its
    "forge report",  # of a member, or of another process of its name
    "pause job",  # by its owner, for a while
    "change job",  # by its owner: K, b and the workers' bound, for good
    "requeue batches",  # by an operator, who may be wrong about what is quarantined
    "replay batches",  # likewise; where it counts, their records are produced anew
    "add partition",  # to a stream, for good; its first records are there before anybody knows
    "lose appends",  # a coordinator's last records for the updates topic do not get there
    "elect leaders",  # other brokers lead the job's topics, which lose nothing
    "cut control",  # the topic loses its last records, and gives their offsets to others
    "cut updates",
    "cut both",
    "create control anew",  # all that it held is lost
    "create updates anew",
    "cut stream",  # a partition loses its last records, and may get others at their offsets
    "create stream anew",  # its topic, with some records
    "restart worker",  # another process under its name, before anybody misses it
    "kill some workers",  # at once
    "cut members",  # two reach each other no longer, for a while or for good
    "switch aggregation",  # by its owner: others are to hold the weights
    "store lies",  # object storage answers wrongly for a while
]

Lie: TypeAlias = Literal[
    "empty",  # the list has no checkpoints
    "stale",  # the list is of an earlier time
    "other",  # the list is of another bucket
    "cut",  # the list ends after its first page
    "page",  # a web page instead of a list
    "half",  # of every second checkpoint a part is missing
    "late",  # what was written since is missing
    "latest",  # the hint does not parse
]
LIES: tuple[Lie, ...] = get_args(Lie)

Harm: TypeAlias = Literal["kills", "raises", "is not finite"]  # a worker, a task, the numbers

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
ORPHANS: tuple[FaultKind, ...] = ("kill worker", "join worker")  # their batches wait ownerless
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
FORGED_EPOCHS = 2**60, 2**64 - 1  # one that no election comes to, and the highest there is
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
OTHERS = 0.3  # share of the workers of another build, in worlds that have any
CHANGES = 0.3  # share of the worlds in which triggers say what has changed of the model
MODES = 0.6  # share of the worlds that are not synchronous
MOST_WORKERS = 5
MOST = 4  # K and b: small numbers meet all cases soon
SOON_S = 0.5  # trouble comes in company: how soon after another fault
SINGLE_WORKER = 0.4  # share of the modes in which a group is one worker's
DAMPED = 0.3  # share of the modes in which stale gradients make a smaller step
BUSY = 0.5  # share of the rules that hold while workers are not busy; others, while so many live
BY_GROUP = 0.5  # share of the jobs whose learning rate goes with K
TUNED = 0.8  # share of the jobs whose K is tuned, of those in which it can be
LEAST_TUNED, MOST_TUNED = 2, 2 * MOST  # noise shows in the difference of two gradients
OVERFLOWING = 0.2  # share of the worlds of groups in which a sum may overflow
TROUBLED = 0.5  # share of the worlds with frozen processes in which there are other faults, too
STARTING = 0.8  # share of the lies of a store that meet coordinators that start without Redis
LASTS_S = (0.2, 1.0, 4.0)  # how long most faults may last
SOON_AGAIN = 0.3  # share of the changes that another one follows soon


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    kind: FaultKind
    target: int  # which worker, coordinator or partition, modulo how many there are
    seconds: float  # how long, where that means anything


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a job's owner may change while it runs."""

    group_size: int  # K
    batch_size: int  # b
    bound: int  # batches announced and not settled, per worker
    way: Way | None = None  # None: synchronous, whatever happens
    slices: int | None = None  # as members hold the weights, 0: whole; None: the coordinator does

    @property
    def modes(self) -> tuple[Mode, ...]:
        """How rounds may be made: as the job says, or as one of its rules."""
        way = self.way or Way()
        own = replace(way.mode, group_size=self.group_size)
        return (own, *(rule.mode for rule in way.rules))

    def modes_of(self, synchrony: Synchrony) -> list[Mode]:
        """Those by which a round may have been made so, of whatever K the job's own may be."""
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
        """K of the mode that has the largest."""
        return max(self._group_sizes[1], *(mode.group_size for mode in self.modes))

    @property
    def most_stale(self) -> int:
        """How stale a gradient may be."""
        return max(mode.staleness for mode in self.modes)


SYNCHRONOUS = Mode(1)


@dataclass(frozen=True, slots=True)
class Way:
    """How a job synchronises its workers, where not as in the paper."""

    mode: Mode = SYNCHRONOUS  # but for K
    reduction: Literal["mean", "sum"] = "sum"
    rules: tuple[Rule, ...] = ()
    rate_by_group: bool = False
    group_sizes: tuple[int, int] | None = None  # within which K is tuned; around the job's own

    def of_group(self) -> Way:
        """The same, where no gradient is stale and no update is of one worker's batches."""
        rules = tuple(replace(rule, mode=_in_time(rule.mode)) for rule in self.rules)
        return replace(self, mode=_in_time(self.mode), rules=rules)


def _in_time(mode: Mode) -> Mode:
    return replace(mode, staleness=0, single_worker=False)


def sizes_of(number: int, *, modes: bool, group: bool = False) -> Sizes:
    """Sizes by number: every choice of them comes as often."""
    group_size = 1 + number % MOST
    bound = group_size + number // MOST**2 % 3
    name = f"mode {number}"
    draw = random.Random(name)  # noqa: S311 -- reproducible
    way = _way(draw, name, group_size) if modes else None
    way = way.of_group() if way is not None and group else way
    return _with_room(Sizes(group_size, 1 + number // MOST % MOST, bound, way))


def _with_room(sizes: Sizes) -> Sizes:
    """A worker may hold the batches of the largest group that it may be asked for."""
    return replace(sizes, bound=max(sizes.bound, sizes.largest_group))


def _way(draw: random.Random, name: str, group_size: int) -> Way:
    apart = random.Random(f"rules of {name}")  # noqa: S311 -- reproducible, and apart
    rules = tuple(_rule(apart) for _ in range(apart.choice([0, 1, 1, 2])))
    reductions: tuple[Literal["mean", "sum"], ...] = ("mean", "sum")
    mode, reduction, by_group = _mode(draw), draw.choice(reductions), apart.random() < BY_GROUP
    tuner = random.Random(f"tuner of {name}")  # noqa: S311 -- likewise
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
    """A record that spoils, mostly, whatever gradient it is in."""

    partition: int
    offset: int
    does: Harm
    share: float  # of the gradients that it is in

    def lies_in(self, address: Address) -> bool:
        """Whether it is one of these records."""
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
    linger: bool  # whether partial batches and groups go at last; not so in the paper
    hot_s: float | None  # between hot snapshots
    arrivals: tuple[tuple[tuple[int, float], ...], ...]  # per partition: (offset, arrival time)
    bad: frozenset[tuple[int, int]]  # (partition, offset) of records that do not decode
    poisons: tuple[Poison, ...]
    max_failures: int  # that a batch may have before it is quarantined
    in_a_row: int  # poison batches without an update between them that hold the job
    workers: int
    gradient_s: float  # mean time of one gradient
    kafka_s: float  # mean delay of an appended record
    board_s: float  # mean delay of a coordinator's question to the board
    upload_s: float  # longest time that a checkpoint takes to arrive
    lossy: float  # share of triggers and gradients that are lost; as many come late or twice
    torn: float  # share of snapshots whose weights cannot be read
    copies: float  # share of Kafka records that are appended again, some much later
    faults: tuple[Fault, ...]
    faults_end_at: float  # no fault begins after this
    misheard: float = 0.0  # share of looks at the lease's holder that take it for ended
    added: tuple[tuple[tuple[int, float], ...], ...] = ()  # of partitions that are added, in order
    way: Way | None = None  # None: synchronous, whatever its owner changes
    group: bool = False  # members hold the weights and add gradients up
    slices: SliceSettings | None = None  # of the weights, with owners; None: members hold them all
    overflows: bool = False  # some of their sums are not finite
    changes: bool = False  # triggers say what has changed of the model, and few put it whole
    others: float = 0.0  # share of the workers that join with another build of the task
    names: bool = False  # leaders read checkpoints back and name them in the updates topic

    @property
    def sizes(self) -> Sizes:
        """Of the job as it was submitted."""
        sizes = Sizes(self.group_size, self.batch_size, self.bound, self.way)
        return _with_room(replace(sizes, slices=self.layouts[-1] if self.group else None))

    @property
    def layouts(self) -> tuple[int | None, ...]:
        """Who may hold the weights in this world, as `Sizes` says it."""
        return (None, 0) if self.slices is None else (None, 0, self.slices.count)


def from_seed(seed: int) -> Scenario:
    """Draw a scenario."""
    draw = random.Random(seed)  # noqa: S311 -- reproducible, not secret
    # Apart from the rest: which seeds notice that a rule is missing, mutants.py knows.
    apart = random.Random(f"operators {seed}")  # noqa: S311 -- likewise
    group_size = draw.randint(1, MOST)
    quiet = draw.random() < 0.15  # nothing but poison hurts a worker: no other batch may suffer
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
    # Most jobs are left to themselves; where somebody works by hand, it is again and again.
    kinds: list[FaultKind] = [*OPERATORS, "lose appends"]
    operators = _random_faults(apart, faults_end_at, apart.choice([0, 0, 3, 8]), kinds, [4.0])
    # Most streams keep their partitions, and are the logs that they were.
    streams = random.Random(f"streams {seed}")  # noqa: S311 -- likewise, and apart as that is
    count = streams.choice([0, 0, 0, 0, 1, 2])
    growth = _random_faults(streams, faults_end_at, count, ["add partition"])
    cuts = random.Random(f"cuts {seed}")  # noqa: S311 -- likewise
    more = _random_faults(cuts, faults_end_at, cuts.choice([0, 0, 0, 0, 0, 1, 3]), CUTS)
    # Half of the worlds have a Kafka that keeps what it acknowledged.
    losses = random.Random(f"losses {seed}")  # noqa: S311 -- likewise
    count = losses.choice([0, 0, 2, 5])
    more += _random_faults(losses, faults_end_at, count, [*LOSSES, "elect leaders"], LASTS_S)
    # On most boards there is nothing but what the job put there. Never both, or what operators meet
    # would not stay as rare as it was.
    forgeries = random.Random(f"forgeries {seed}")  # noqa: S311 -- likewise
    count = forgeries.choice([0, 0, 0, 0, 1, 3])
    forged = _random_faults(forgeries, faults_end_at, count, ["forge trigger"])
    changes = _changes(draw, faults_end_at, draw.choice([0, 0, 1, 2, 4]), "change job")
    scenario = _with(scenario, changes + (operators or forged) + growth + more)
    if operators and not scenario.poisons:  # they would have nothing to do
        scenario = replace(scenario, poisons=_poisons(apart, sorted(set(every) - bad)))
    scenario = replace(
        scenario,
        added=tuple(_arrivals(streams, faults_end_at) for _ in growth),
        misheard=random.Random(f"misheard {seed}").choice([0.0, 0.0, 0.01, 0.05]),  # noqa: S311 -- likewise
        changes=random.Random(f"changes {seed}").random() < CHANGES,  # noqa: S311 -- likewise
    )
    modes = random.Random(f"modes {seed}")  # noqa: S311 -- likewise
    if modes.random() >= MODES:
        return scenario
    way = _way(modes, f"modes {seed}", group_size)
    return replace(scenario, way=way, workers=modes.randint(1, MOST_WORKERS))


def grouped(scenario: Scenario) -> Scenario:
    """The same world, but that members hold the weights; with what may befall these."""
    draw = random.Random(f"group of {scenario.seed}")  # noqa: S311 -- likewise
    end = scenario.faults_end_at
    more = _random_faults(
        draw, end, int(end * draw.choice([0.0, 0.3, 1.0])), AMONG_MEMBERS, LASTS_S
    )
    # Half of the owners know from the beginning who is to hold the weights.
    switches = random.Random(f"switches of {scenario.seed}")  # noqa: S311 -- likewise
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
    """Return the same world, in which some workers have another build of the task."""
    return replace(scenario, others=OTHERS)


def forged(scenario: Scenario) -> Scenario:
    """Return the same world of members, in which somebody forges what they say."""
    draw = random.Random(f"forged reports {scenario.seed}")  # noqa: S311 -- likewise
    end = scenario.faults_end_at
    count = int(end * draw.choice([0.3, 1.0, 3.0]))
    return _with(scenario, _random_faults(draw, end, count, ["forge report"]))


def sliced(scenario: Scenario) -> Scenario:
    """The same world of members, but that slices of the weights have owners."""
    draw = random.Random(f"slices of {scenario.seed}")  # noqa: S311 -- likewise
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
    """Draw a scenario in which processes stand still, whoever holds the weights."""
    draw = random.Random(f"frozen {seed}")  # noqa: S311 -- reproducible, and apart from the rest
    scenario = from_seed(seed)
    layout = draw.choice(["coordinator", "members", "slices"])  # who holds the weights
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
    """Return the same world with a store that answers wrongly, mostly while all start anew."""
    draw = random.Random(f"lies of {scenario.seed}")  # noqa: S311 -- likewise
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
    """The same world, with further faults."""
    ordered = sorted(scenario.faults + faults, key=lambda fault: fault.at)
    return replace(scenario, faults=tuple(ordered))


# Kinds of worlds in which storage lies, by the remainder of the seed.
LAYOUTS = ("", "", "group", "slices")
# The kinds of worlds, each drawn from a seed. Each but the first has random numbers of its own, so
# that its faults change nothing in the worlds of another kind.
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
    """Offsets with holes; some records are there before anybody begins."""
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
    share = draw.choice([0.8, 1.0])  # some data fails only now and then
    records = draw.sample(decodable, min(draw.randint(1, 3), len(decodable)))
    # At most one is not finite: several in one round would rightly hold the job as diverged.
    return tuple(Poison(*r, draw.choice(harm[i > 0 :]), share) for i, r in enumerate(records))


def _faults(draw: random.Random, faults_end_at: float, *, quiet: bool) -> tuple[Fault, ...]:
    """Some worlds know more of one kind of trouble than others, and some hardly any."""
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
    """Changes by the job's owner; some come twice before anybody has heard of the first."""
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
    """Draw faults, each of one of these kinds, for one of these times."""
    return tuple(
        Fault(
            draw.uniform(0, faults_end_at),
            draw.choice(kinds) if len(kinds) > 1 else kinds[0],
            draw.randrange(1000),
            draw.choice(seconds) if len(seconds) > 1 else seconds[0],
        )
        for _ in range(count)
    )
