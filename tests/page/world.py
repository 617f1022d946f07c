"""A seeded made-up job in the form of its topics, for tests and pictures of the live page.

It has sixteen machines of three pools, five plans, about thirty preemptions (five of them at once)
and four thousand updates, as records of the real topics, so that the real folds read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, sin
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import (
    Batch,
    Drifted,
    Evaluated,
    Lead,
    LeaderStatus,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Partition, Span
from common.jobs.changes import Change
from common.jobs.job_file import parse_job
from common.jobs.store import JobRecord, by_stream
from common.spot.provisioning import records as plans
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.spot.provisioning.records import (
    Ended,
    EstimateRecord,
    LaunchRequested,
    Planned,
    Priced,
    Reviewed,
    Started,
)

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, Wanted
    from common.spot.provisioning.records import PlanRecord

AGE_S = 4700.0  # age of the job
STEP_S = 5.0
REVIEW_S = 15.0
SLOTS = 16
UPDATES_PER_S = 1.1  # if all slots work
# Updates between evaluated versions.
EVALUATED = 100
DRIFTED = 3200  # version at a stream's drift
POOLS = ("on-demand", "spot-a", "spot-b")
ON_DEMAND_USD_PER_HOUR = 0.286
# Records per update. They make one batch because the page shows no single batches.
_SAMPLES = 20 * 256
STREAMS = ("payments-eu", "payments-us", "payments-asia")
_JOB = """
name: {name}
streams: [{streams}]
records:
  codec: tensor
  fields: {{features: {{dtype: float32, shape: [41]}}, label: {{dtype: int64}}}}
task: {{name: tabular-mlp, classes: 2}}
batch_size: 256
group_size: 20
optimizer: {{name: adam, learning_rate: 1.0e-3}}
stop: {{updates: 9000, deadline_s: 9600}}
evaluation: {{every_updates: 100, stream: payments-held-out}}
provisioning: {{workers: 16, policy: adaptive}}
"""


class _Decision(NamedTuple):
    # Time at which it was made, as a share of the job's age.
    share: float
    spot: int  # slots
    why: str
    reason: str


_PLANS = (
    _Decision(
        0.0,
        10,
        "the first plan",
        "10 of 16 workers on spot take 9,480 s of 9,600 s on average: one more would make it"
        " 9,655 s",
    ),
    _Decision(
        0.24,
        12,
        "the price of spot-b fell by 21 %",
        "spot-b is 0.127 $/h now: two more slots pay, and 9,540 s are still in time with 95 %",
    ),
    _Decision(
        0.43,
        8,
        "five machines of spot-b went within a minute",
        "availability of spot-b is believed to be 0.84 now: only 8 slots on spot keep the deadline"
        " with 95 %",
    ),
    _Decision(
        0.68,
        9,
        "the estimate of arrivals moved by 6 %",
        "arrivals are faster than was believed: one more worker on spot is still in time",
    ),
    _Decision(
        0.9,
        11,
        "the estimate of availability.spot-b moved by 5 %",
        "11 of 16 workers on spot take 4,610 s of 4,900 s on average: one more would make it"
        " 4,925 s",
    ),
)


@dataclass
class World:
    """All data of the job."""

    record: JobRecord
    # Records of the updates topic, each with the time at which it was written.
    updates: list[tuple[float, AuditRecord]] = field(default_factory=list)
    plans: list[PlanRecord] = field(default_factory=list)
    # Lags in records, by stream, each with its time.
    lags: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)  # keyed by worker


def make_record(
    name: str, now_s: float, wanted: Wanted = "running", reason: str = "", *, rented: bool = True
) -> JobRecord:
    """A job that was submitted `AGE_S` ago."""
    text = _JOB.format(name=name, streams=", ".join(STREAMS))
    spec = parse_job(text if rented else text[: text.index("provisioning")])
    first = by_stream({Partition(stream, index): 0 for stream in STREAMS for index in range(3)})
    submitted = Change(now_s - AGE_S - 20.0, "submitted", "ada", "operator")
    settled, why = {"learning_rate": 1e-3}, "the loss had settled"
    changed = Change(now_s - AGE_S * 0.3, "changed", "ada", "operator", 1, settled, why)
    submitted_s, changes = now_s - AGE_S - 20.0, (submitted, changed)
    return JobRecord(spec, wanted, first, reason, submitted_s, revision=1, changes=changes)


def make_world(name: str, now_s: float, seed: int = 7, *, rented: bool = True) -> World:
    """Return the job in its current state."""
    world = World(make_record(name, now_s, rented=rented))
    chance = Random(seed)  # noqa: S311 -- chance, not secrets
    market = _Market(world, now_s - AGE_S, chance) if rented else None
    learning = _Learning(world, chance)
    steps = int(AGE_S / STEP_S)
    for step in range(steps + 1):
        at_s = now_s - AGE_S + step * STEP_S
        if market is not None:
            market.step(at_s, learning.version)
        learning.step(at_s, SLOTS if market is None else market.working)
    running = [] if market is None else market.ledger.running
    names = [machine.worker for machine in running] or ["w1", "w2", "w3"]
    world.statuses = dict.fromkeys(names, "alive")
    if rented:
        world.statuses[names[4]] = "leaving"
        del world.statuses[names[9]]  # its machine has just begun
    return world


def leader_status_of(
    world: World, lag: tuple[int, ...], ends: dict[Partition, int]
) -> LeaderStatus:
    """Return a leader's status with this lag in each stream."""
    claimed = {
        place: max(0, end - lag[STREAMS.index(place.topic)] // 3) for place, end in ends.items()
    }
    settled = {place: max(0, position - 9000) for place, position in claimed.items()}
    return LeaderStatus(1, 1000, claimed, 1000, 26, len(world.statuses), settled)


class _Learning:
    """Updates, their losses, and the lag of the streams."""

    def __init__(self, world: World, random: Random) -> None:
        self.version = 0
        self._world, self._random = world, random
        self._owed = 0.0
        self._backlog = [300.0, 420.0, 250.0]
        world.updates.append((world.record.submitted_s + 10.0, Lead(-1, ModelId(-1, 0), "c1", 0)))

    def step(self, at_s: float, working: int) -> None:
        random = self._random
        made = UPDATES_PER_S * STEP_S * min(1.0, working / SLOTS) * random.uniform(0.94, 1.06)
        self._owed += made
        count = int(self._owed)
        self._owed -= count
        for index in range(count):
            self._update(at_s - STEP_S + (index + random.random()) * STEP_S / count)
        short = UPDATES_PER_S * STEP_S * (1.03 - working / SLOTS) * _SAMPLES
        for place, share in enumerate((0.35, 0.42, 0.23)):
            change = short * share * random.uniform(0.4, 1.1) + random.uniform(-90, 100)
            left = self._backlog[place] * 0.985 + change
            self._backlog[place] = max(80.0, left)
        if int(at_s / STEP_S) % 2 == 0:
            self._world.lags.append((at_s, tuple(int(each) for each in self._backlog)))

    def _update(self, at_s: float) -> None:
        random = self._random
        loss = 0.142 + 0.5 * exp(-self.version / 520) + 0.06 * exp(-self.version / 2500)
        loss *= 1 + random.gauss(0, 0.035)
        accuracy = min(0.999, 0.9635 - 0.3 * exp(-self.version / 430) + random.gauss(0, 0.0035))
        self.version += 1
        start = self.version * _SAMPLES
        span = Span(STREAMS[self.version % 3], 0, start, start + _SAMPLES)
        worker = WorkerId(f"fraud-{self.version % SLOTS}")
        batch = Batch(self.version, worker, (span,), _SAMPLES)
        metrics = {"accuracy": accuracy}
        update = UpdateApplied(0, self.version, (batch,), _SAMPLES, loss, metrics)
        self._world.updates.append((at_s, update))
        if self.version % EVALUATED == 0:
            self._evaluated(at_s)

    def _evaluated(self, at_s: float) -> None:
        """Append an evaluation. It draws no random numbers from the shared generator."""
        model = ModelId(0, self.version)
        wave = 0.002 * sin(self.version / 170)
        test = {"accuracy": 0.957 - 0.31 * exp(-self.version / 430) + wave, "loss": 0.171}
        streams = {stream: {"accuracy": test["accuracy"] + 0.004} for stream in STREAMS}
        self._world.updates.append((at_s, Evaluated(model, at_s, 2000, test, streams)))
        if self.version == DRIFTED:
            drift = Drifted(model, at_s, STREAMS[1], 0.041, 0.118)
            self._world.updates.append((at_s, drift))


class _Market:
    """Machines, their prices, the plans, and the cost."""

    def __init__(self, world: World, start_s: float, random: Random) -> None:
        self.ledger = FleetLedger()
        self._world, self._start_s, self._random = world, start_s, random
        self._plans = list(_PLANS)
        self._spot = 0
        # Keyed by slot: when a machine is available again.
        self._back_s = dict[int, float]()
        self._reviewed_s = 0.0
        self._prices = {"on-demand": ON_DEMAND_USD_PER_HOUR, "spot-a": 0.131, "spot-b": 0.161}
        self._write(plans.ProvisionerLead(-1, "p1", start_s))
        self._write(Priced(0, start_s, dict(self._prices)))

    @property
    def working(self) -> int:
        return len({machine.slot for machine in self.ledger.running})

    def step(self, at_s: float, version: int) -> None:
        share = (at_s - self._start_s) / AGE_S
        if self._plans and share >= self._plans[0].share:
            if len(self._plans) == len(_PLANS) - 1:
                self._prices["spot-b"] = 0.127
                self._write(Priced(0, at_s, dict(self._prices)))
            self._plan(at_s, version, self._plans.pop(0))
        crash = 0.42 < share <= 0.42 + STEP_S / AGE_S
        for machine in self.ledger.running:
            slot = machine.slot or 0  # every order here names one
            spot = machine.pool != "on-demand"
            if spot and ((crash and machine.pool == "spot-b") or self._random.random() < 0.0021):
                self._write(Ended(0, machine.launch, at_s, "preempted"))
                self._back_s[slot] = at_s + self._random.expovariate(1 / 110) + 15
            elif self._random.random() < 0.00007:
                self._write(Ended(0, machine.launch, at_s, "failed"))
            elif self._pool_of(slot, machine.pool) != machine.pool:
                self._write(Ended(0, machine.launch, at_s, "released"))
        self._fill(at_s)
        if at_s - self._reviewed_s >= REVIEW_S:
            self._reviewed_s = at_s
            self._review(at_s, version)

    def _pool_of(self, slot: int, now: str = "") -> str:
        if slot >= self._spot:
            return "on-demand"
        return now if now in POOLS[1:] else POOLS[1 + slot % 2]

    def _fill(self, at_s: float) -> None:
        held = {machine.slot for machine in self.ledger.open}
        for slot in range(SLOTS):
            if slot in held or at_s < self._back_s.get(slot, 0.0):
                continue
            launch, pool = self.ledger.launches + 1, self._pool_of(slot)
            worker = f"fraud-{slot}-{launch}"
            self._write(LaunchRequested(0, launch, at_s, slot, pool, worker))
            if pool != "on-demand" and self._random.random() < 0.06:
                self._write(Ended(0, launch, at_s + 1, "refused", "InsufficientInstanceCapacity"))
                self._back_s[slot] = at_s + 60
            else:
                machine = f"i-{self._random.getrandbits(64):017x}"
                self._write(Started(0, launch, at_s + self._random.uniform(1, 4), machine))

    def _plan(self, at_s: float, version: int, decision: _Decision) -> None:
        self._spot = spot = decision.spot
        left_s = (9000 - version) / UPDATES_PER_S / 0.965
        per_hour = (SLOTS - spot) * ON_DEMAND_USD_PER_HOUR + spot * 0.131 * 0.9
        places = tuple(POOLS.index(self._pool_of(slot)) for slot in range(SLOTS))
        spent_usd = self.ledger.spent_usd(at_s)
        self._write(
            Planned(
                term=0,
                number=len(self.ledger.plans) + 1,
                at_s=at_s,
                policy="adaptive",
                why=decision.why,
                reason=decision.reason,
                feasible=True,
                binding="deadline",
                pools=POOLS,
                places=places,
                spot=spot,
                on_demand=SLOTS - spot,
                updates_left=9000.0 - version,
                deadline_left_s=9600.0 - (at_s - self._start_s),
                spent_usd=spent_usd,
                expected_cost_usd=per_hour * left_s / 3600,
                expected_runtime_s=left_s,
                on_demand_only_usd=_on_demand_only(9000 - version),
                stability=1.31,
                usd_per_hour=dict(self._prices),
                believed=self._believed(at_s),
            )
        )

    def _believed(self, at_s: float) -> dict[str, EstimateRecord]:
        sure = 1 / (1 + (at_s - self._start_s) / 400)
        return {
            "arrivals_per_s": _belief(352.0, 30 * sure),
            "gradient_s": _belief(0.0415, 0.006 * sure),
            "availability.spot-a": _belief(0.927, 0.05 * sure),
            "availability.spot-b": _belief(0.871, 0.09 * sure),
        }

    def _review(self, at_s: float, version: int) -> None:
        stability = 1.31 * self.working / SLOTS * self._random.uniform(0.985, 1.015)
        low = "" if stability >= 1 else f"{self.working} machines run, and 13 are needed"
        self._write(
            Reviewed(
                term=0,
                at_s=at_s,
                version=version,
                updates_left=9000.0 - version,
                running=self.working,
                wanted=SLOTS,
                spent_usd=self.ledger.spent_usd(at_s),
                on_demand_only_usd=_on_demand_only(version),
                stability=stability,
                believed=self._believed(at_s),
                warning=low,
            )
        )

    def _write(self, record: PlanRecord) -> None:
        self._world.plans.append(record)
        self.ledger.feed(len(self._world.plans) - 1, record)


def _on_demand_only(updates: float) -> float:
    return updates / UPDATES_PER_S * SLOTS * ON_DEMAND_USD_PER_HOUR / 3600


def _belief(value: float, std: float) -> EstimateRecord:
    return EstimateRecord(
        value, std, value - 1.64 * std, min(value + 1.64 * std, 0.99 if value < 1 else 1e9)
    )
