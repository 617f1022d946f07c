"""Complete lives of a job's provisioning in virtual time, seeded, with faults and checks.

Several replicas share only a plans topic, a lease and a provider of machines. Each is a process
that handles one event after another and carries out its commands one by one. It may die or freeze
between any two of them; messages that it has sent by then still arrive.

    python -m tests.system.provisioning_world 0 100    # seeds 0 to 99; exits 1 if one fails
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, get_args
from unittest.mock import patch

from common.config.policy_names import PolicyName
from common.core.events import LeaseAnswered, Tick
from common.core.messages import GENESIS, Batch, BatchReady, Lead, UpdateApplied, WorkerId
from common.core.spans import Span
from common.errors import UnavailableError
from common.spot.machines import Offer
from common.spot.plans import decode_plan, encode_plan
from common.spot.policies.policy import ON_DEMAND
from common.spot.provisioning import commands as do
from common.spot.provisioning import events, policy_runner
from common.spot.provisioning import records as plans
from common.spot.provisioning.fleet_ledger import FleetLedger
from common.spot.provisioning.provisioner import Provisioner
from common.spot.provisioning.records import (
    LaunchRequested,
    Left,
    Planned,
    ReplanAsked,
    Settled,
    SlotAssigned,
    Started,
)
from common.spot.provisioning.settings import ProvisionerSettings
from common.spot.theory.billing import HOUR_S, Billing, Preempted
from common.spot.theory.work import Pool
from tests.counting_policy import Counting
from tests.memory_fleet import Chain, MemoryFleet, MemoryPrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from common.core.messages import AuditRecord, Claim
    from common.spot.machines import LaunchRequest, Machine
    from common.spot.provisioning.commands import ProvisionerCommand
    from common.spot.provisioning.events import ProvisionerEvent
    from common.spot.provisioning.records import PlanRecord


LEASE_S = 3.0
SPOT_OFFERS = Offer("spot", "small", "a"), Offer("spot", "large", "b")
ON_DEMAND_BILLING = Billing(), Billing(minimum_s=30.0)
ANY, LARGE, ALONE, OTHER = Offer("spot"), SPOT_OFFERS[1], Offer("on-demand"), Offer("other")
# Seeds with this remainder modulo 3 have a policy that counts machines.
COUNTED = 2
# Plans for 5 slots: spares, too few, a pool that is given up, another bid.
SCRIPT = (
    {ANY: 4, ALONE: 1, OTHER: 2},
    {ANY: 3, OTHER: 0, ALONE: 2},
    {LARGE._replace(bid_usd_per_hour=0.5): 3, ALONE: 3},
    {ANY: 2, ALONE: 1},
)
SPOT_BILLING = (
    Billing(),
    Billing(minimum_s=20.0, preempted=Preempted(free_within_s=10.0)),
    Billing("hour", price="hour_start", preempted=Preempted(hour_refunded=True), hour_s=20.0),
)


class Faults:
    """Causes one fault after another in a world.

    Attributes:
        last_s: End of the last fault.
        hidden: Launches that the provider hid for a while.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.chance
        self.last_s = world.now_s
        self.hidden = set[int]()

    def apply(self) -> None:
        """Apply a random fault."""
        self._lasts(0.0)
        self._chance.choice(
            (
                *(self._crash, self._crash, self._freeze, self._freeze, self._fleet_away),
                *(self._lease_moves, self._answers_lost, self._hide, self._price, self._price),
                *(self._preempt, self._fail, self._refuse, self._replan, self._pause),
                self._settings,
            )
        )()

    def _lasts(self, seconds: float) -> None:
        self.last_s = max(self.last_s, self._world.now_s + seconds)

    def _some(self) -> Process | None:
        alive = [p for p in self._world.replicas if not p.dead and not p.machine.finished]
        charged = [p for p in alive if p.machine.is_leader]
        return self._chance.choice(charged * 3 + alive) if alive else None

    def _crash(self) -> None:
        process = self._some()
        if process is not None:
            process.dead = True
            self._world.after(self._chance.uniform(0.1, 8), self._world.start)

    def _freeze(self) -> None:
        process = self._some()
        if process is not None:
            frozen_s = self._chance.uniform(1, 20)
            process.frozen_until_s = self._world.now_s + frozen_s
            self._lasts(frozen_s)
            self._world.after(frozen_s, lambda: self._world.handle(process))

    def _fleet_away(self) -> None:
        self._world.fleet.go_away()
        gone_s = self._chance.uniform(1, 12)
        self._lasts(gone_s)
        self._world.after(gone_s, self._world.fleet.come_back)

    def _answers_lost(self) -> None:
        faults = self._world.fleet.faults
        faults.answers_lost = True
        gone_s = self._chance.uniform(1, 6)
        self._lasts(gone_s)

        def mend() -> None:
            faults.answers_lost = False

        self._world.after(gone_s, mend)

    def _lease_moves(self) -> None:
        process = self._some()
        until_s = self._world.now_s + LEASE_S
        self._world.lease = None if process is None else (process.name, until_s)

    def _hide(self) -> None:
        """Hide a machine from the provider's list for a while."""
        if launches := self._world.running():
            launch = self._chance.choice(launches)
            hidden = self._world.fleet.faults.hidden
            hidden.add(launch)
            self.hidden.add(launch)
            gone_s = self._chance.uniform(1, 15)
            self._lasts(gone_s)
            self._world.after(gone_s, lambda: hidden.discard(launch))

    def _price(self) -> None:
        world = self._world
        pool, usd_per_hour = self._chance.choice(("spot", "other")), self._chance.uniform(0.1, 1.2)
        world.set_price(pool, usd_per_hour)
        world.reported_prices.append((world.now_s, world.prices.look()))

    def _preempt(self) -> None:
        running = self._world.running()
        self._world.fleet.preempt(*self._chance.sample(running, k=min(2, len(running))))

    def _fail(self) -> None:
        if launches := self._world.running():
            self._world.fleet.fail(self._chance.choice(launches))

    def _refuse(self) -> None:
        pool = self._chance.choice(self._world.settings.pool_names)
        self._world.fleet.faults.without.add(pool)
        gone_s = self._chance.uniform(1, 15)
        self._lasts(gone_s)
        self._world.after(gone_s, lambda: self._world.fleet.faults.without.discard(pool))

    def _replan(self) -> None:
        data = encode_plan(ReplanAsked(self._world.now_s, "ada", "to see"))
        self._world.after(0.1, lambda: self._world.append(data, "ada"))

    def _pause(self) -> None:
        world = self._world
        if world.wanted == "running":
            world.want("paused")
            self._lasts(10.0)

            def resume() -> None:
                if world.wanted == "paused":
                    world.want("running")

            world.after(self._chance.uniform(2, 10), resume)

    def _settings(self) -> None:
        world = self._world
        world.settings = replace(world.settings, updates=self._chance.choice((28, 50_000)))
        world.deliver_all(lambda: events.ProvisioningChanged(world.settings))


BEGIN_S = 1_000_000.0
STOP_S = BEGIN_S + 150.0  # the job is wanted stopped
FAULTS_END_S = BEGIN_S + 110.0  # no fault begins later
# Latest time at which everything is released.
LATEST_S = BEGIN_S + 400.0

K, B = 4, 16


@dataclass
class Process:
    """One replica: a state machine, its unread events, and its pending commands."""

    name: str
    machine: Provisioner
    inbox: deque[ProvisionerEvent] = field(default_factory=deque)
    todo: deque[ProvisionerCommand] = field(default_factory=deque)
    frozen_until_s: float = 0.0
    dead: bool = False
    busy: bool = False
    # Time at which the last record arrives. Later ones of this producer may not overtake it.
    last_append_s: float = 0.0
    read: int = 0  # position in the plans topic
    caught_up: bool = False
    claims_read: int = 0
    updates_read: int = 0


class World:
    """Everything in one run, for one seed.

    Args:
        seed: Determines the whole run.
        faulty: True to inject faults.
    """

    def __init__(self, seed: int, *, faulty: bool = True) -> None:
        self.chance = random.Random(f"provisioning/{seed}")  # noqa: S311 -- a seeded simulation
        self.now_s = BEGIN_S
        self.faulty = faulty
        self.violations: list[Violation] = []
        self.log: list[bytes] = []
        self.truth = FleetLedger()
        self.counted: list[PlanRecord] = []
        # Writer of the Lead in force.
        self.leader = ""
        self.replicas: list[Process] = []
        self.born = 0
        self.lease: tuple[str, float] | None = None
        self.faults = Faults(self)
        self.claims: list[Claim] = []
        self.updates: list[AuditRecord] = [Lead(-1, GENESIS, "c", 0)]
        self.takeovers = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        alpha = self.chance.choice((0.6, 0.9, 0.9))
        pools = (
            Pool("on-demand", 1.0, billing=self.chance.choice(ON_DEMAND_BILLING)),
            Pool("spot", 0.3, alpha, 20.0, billing=self.chance.choice(SPOT_BILLING)),
            Pool("other", 0.4, alpha, 40.0, speed=2.0),
        )
        chains = {pool.name: Chain(alpha, pool.cycle_s) for pool in pools[1:]}
        lag_s = self.chance.choice((0.0, 0.0, 1.5))
        self.fleet = MemoryFleet(
            lambda: self.now_s, chains, seed, lag_s, named_s=60.0, offers={"spot": SPOT_OFFERS}
        )
        self.prices = MemoryPrices({pool.name: pool.usd_per_hour for pool in pools})
        self.set_price("spot", 0.3)
        self.reported_prices = [(BEGIN_S, self.prices.look())]
        self.settings = ProvisionerSettings(
            job="digits",
            workers=5,
            group_size=K,
            batch_size=B,
            submitted_s=BEGIN_S,
            pools=pools,
            updates=self.chance.choice((None, 25, 30, 100_000)),
            deadline_at_s=self.chance.choice((None, BEGIN_S + 300, BEGIN_S + 170, STOP_S)),
            on_preemption=self.chance.choice(("hold", "reassign")),
            policy=self.chance.choice(get_args(PolicyName)),
            review_s=self.chance.choice((None, 10.0)),
            lease_ttl_s=LEASE_S,
            look_s=1.0,
            prices_s=5.0,
            grace_s=4.0,
            unseen_s=8.0,
            warned_s=5.0,
            reviewed_s=15.0,
        )
        self.wanted: Literal["running", "paused", "stopped"] = "running"
        self.counting: Counting | None = None
        # Launches whose workers have left.
        self.silent = set[int]()
        # Launches whose workers never start, under `reassign`.
        self.dead = set(self.chance.choices(range(1, 7), k=self.chance.choice((0, 0, 2))))
        # Time by launch at which its worker joined.
        self.begun_s: dict[int, float] = {}
        if seed % 3 == COUNTED:
            self.counting = Counting(SCRIPT, self.chance.choice((15.0, 40.0, 60.0)))
            start_up_s = self.chance.choice((0.0, 3.0))
            slower = tuple(replace(pool, start_up_s=start_up_s) for pool in pools)
            self.settings = replace(self.settings, pools=slower)

    # --- time ----------------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._numbers += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._numbers, action))

    def run(self) -> World:
        """Run the world, and check it at the end."""
        if self.counting is None:
            return self._run()
        policy = self.counting
        for _ in range(4):
            self.after(self.chance.uniform(5, FAULTS_END_S - BEGIN_S), self._fall_silent)
        with patch.object(policy_runner, "policy_of", lambda *_, **__: policy):
            return self._run()

    def _run(self) -> World:
        for _ in range(self.chance.choice((2, 3))):
            self.after(self.chance.uniform(0, 2), self.start)
        self.after(1.0, self._work)
        self.after(STOP_S - BEGIN_S, self._stop)
        if self.faulty:
            for _ in range(self.chance.randrange(4, 14)):
                self.after(self.chance.uniform(0, FAULTS_END_S - BEGIN_S), self.faults.apply)
        while self._queue and not self.violations:
            at_s, _, action = heapq.heappop(self._queue)
            if at_s > LATEST_S:
                break
            self.now_s = at_s
            action()
            if self.wanted == "stopped" and self.over():
                break
        if not self.violations:
            self.violations += check_end(self)
        return self

    def over(self) -> bool:
        """Return True if all processes have ended."""
        return bool(self.replicas) and all(
            p.machine.finished and not p.todo for p in self.replicas if not p.dead
        )

    def running(self) -> list[int]:
        """Return the launches whose machines run."""
        return [machine.launch for machine in self.fleet.rented if machine.state == "running"]

    # --- processes -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process."""
        self.born += 1
        name = f"p{self.born}"
        process = Process(name, Provisioner(name, self.settings, self.wanted, "as asked"))
        self.replicas.append(process)
        self._beat(process)

    def _beat(self, process: Process) -> None:
        """Read new records, and tick when due, as the loop of a shell does."""
        if process.dead or process.machine.finished:
            return
        if self.now_s >= process.frozen_until_s and not process.busy:
            self._read(process)
            process.inbox.append(Tick())
            self.handle(process)
        self.after(self.chance.uniform(0.2, 0.4), lambda: self._beat(process))

    def _read(self, process: Process) -> None:
        count = self.chance.choice((1, 3, 1000))
        data = self.log[process.read : process.read + count]
        records = tuple((process.read + i, decode_plan(d)) for i, d in enumerate(data))
        process.read += len(data)
        if records or not process.caught_up:
            process.caught_up = process.read == len(self.log)
            process.inbox.append(events.PlansRead(records, process.caught_up))
        if claims := tuple(self.claims[process.claims_read :]):
            process.claims_read += len(claims)
            process.inbox.append(events.ClaimsRead(claims))
        if audit := tuple(enumerate(self.updates))[process.updates_read :]:
            process.updates_read += len(audit)
            process.inbox.append(events.UpdateRecordsRead(audit))

    def _deliver(self, process: Process, event: ProvisionerEvent, seconds: float) -> None:
        def arrive() -> None:
            if not process.dead:
                process.inbox.append(event)
                self.handle(process)

        self.after(seconds, arrive)

    def handle(self, process: Process) -> None:
        """Process events while no command is pending, then carry out the first command."""
        if process.busy or process.dead or self.now_s < process.frozen_until_s:
            return
        while process.inbox and not process.todo:
            before = process.machine.is_leader
            process.todo.extend(process.machine.on(process.inbox.popleft(), self.now_s))
            self.takeovers += process.machine.is_leader and not before
        if process.todo:
            process.busy = True
            self.after(self.chance.choice((0.0, 0.01, 0.1)), lambda: self._act(process))

    def _act(self, process: Process) -> None:
        if process.dead:
            return
        if self.now_s < process.frozen_until_s:
            self.after(process.frozen_until_s - self.now_s, lambda: self._act(process))
            return
        process.busy = False
        self._carry_out(process, process.todo.popleft())
        self.handle(process)

    def _carry_out(self, process: Process, command: ProvisionerCommand) -> None:
        soon_s = self.chance.choice((0.01, 0.1, 0.5))
        match command:
            case do.AskProvisioningLease():
                self._deliver(process, LeaseAnswered(self._ask_lease(process.name)), soon_s)
            case do.ReleaseProvisioningLease():
                if self.lease is not None and self.lease[0] == process.name:
                    self.lease = None
            case do.AppendPlan(record):
                data = encode_plan(record)
                at_s = max(self.now_s + soon_s, process.last_append_s)
                process.last_append_s = at_s
                self.after(at_s - self.now_s, lambda: self.append(data, process.name))
            case do.Launch(orders):
                self._launch(process, orders, soon_s)
            case do.Release(machines):
                self._call(process, lambda: self.fleet.release(machines))
            case do.PollMachines():
                self._look(process, soon_s)
            case do.PollPastPrices():
                self._deliver(process, events.PastSeen(self.prices.past()), soon_s)
            case do.PollPrices():
                self._deliver(process, events.PricesSeen(self.prices.look()), soon_s)
            case _:
                pass

    def _call(self, process: Process, call: Callable[[], None]) -> bool:
        try:
            call()
        except UnavailableError as error:
            self._deliver(process, events.FleetAway(str(error)), 0.1)
            return False
        return True

    def _launch(self, process: Process, orders: tuple[LaunchRequest, ...], soon_s: float) -> None:
        for order in orders:
            self.violations += check_order(self, order)
        answer: list[events.LaunchAnswered] = []
        launches = tuple(order.launch for order in orders)
        if self._call(
            process,
            lambda: answer.append(events.LaunchAnswered(launches, self.fleet.launch(orders))),
        ):
            self._deliver(process, answer[0], soon_s)

    def _look(self, process: Process, soon_s: float) -> None:
        if self.settings.on_preemption == "reassign" or self.counting is not None:
            self._deliver(process, events.HeartbeatsSeen(self._members(), self.now_s), soon_s)
        seen: list[tuple[Machine, ...]] = []
        if self._call(process, lambda: seen.append(self.fleet.machines())):
            look = events.MachinesSeen(seen[0], self.now_s)
            self._deliver(process, look, soon_s)
            if self.chance.random() < 0.1:  # twice, or long after
                self._deliver(process, look, self.chance.uniform(0, 6))

    def _members(self) -> frozenset[str]:
        """Return the members with heartbeats; workers join some time after start or assignment."""
        if self.settings.on_preemption == "reassign":
            return frozenset(
                self.truth.machines[machine.launch].member
                for machine in self.fleet.rented
                if machine.state == "running"
                and self.now_s >= machine.started_s + joins_s(machine.launch)
                and machine.launch not in self.dead
            )
        held = (self.truth.machines[launch] for launch in self.running())
        begun = [
            each for each in held if self.now_s >= self.begun_s.get(each.launch, self.now_s + 1)
        ]
        return frozenset(each.member for each in begun if each.launch not in self.silent)

    def _fall_silent(self) -> None:
        """End a worker, on notice or by a fault, while its machine continues to run."""
        held = [launch for launch in self.running() if self.truth.machines[launch].has_slot]
        if held:
            self.silent.add(self.chance.choice(held))

    def _ask_lease(self, name: str) -> bool:
        if self.lease is None or self.lease[0] == name or self.lease[1] <= self.now_s:
            self.lease = (name, self.now_s + LEASE_S)
        return self.lease[0] == name

    def append(self, data: bytes, writer: str) -> None:
        """Append a record to the log."""
        offset, record = len(self.log), decode_plan(data)
        self.log.append(data)
        if self.truth.feed(offset, record):
            self.counted.append(record)
            self.violations += check_record(self, record, writer)

    # --- the job and its faults ------------------------------------------------------------------

    def _work(self) -> None:
        """Add a second of arrivals, and an update if workers run."""
        second = len(self.claims)
        address = (Span("s", 0, second * B, second * B + B),)
        worker = WorkerId(f"digits-w{second % 5}")
        self.claims.append(BatchReady(worker, address, B, (), self.now_s - 1, self.now_s))
        if second % K == K - 1 and self.fleet.rented:
            batches = tuple(Batch(n, worker, address, B) for n in range(second - K + 1, second + 1))
            version = len(self.updates)
            self.updates.append(UpdateApplied(0, version, batches, K * B, 1.0, gradient_s=0.4))
        if self.now_s < STOP_S:
            self.after(1.0, self._work)

    def _stop(self) -> None:
        self.violations += check_settled(self)
        self.want("stopped")

    def set_price(self, pool: str, usd_per_hour: float) -> None:
        """Change what a pool costs; its second type costs more than its first."""
        self.prices.set(pool, usd_per_hour)
        if pool == "spot":
            for dearer, offer in enumerate(SPOT_OFFERS):
                self.prices.set(pool, usd_per_hour * (1 + 0.4 * dearer), offer.type, offer.zone)
        self.fleet.reprice(self.prices.look())

    def want(self, wanted: Literal["running", "paused", "stopped"]) -> None:
        """Change the wanted state of the job."""
        self.wanted = wanted
        self.deliver_all(lambda: events.ProvisioningWanted(self.wanted, "as asked"))

    def deliver_all(self, event: Callable[[], ProvisionerEvent]) -> None:
        """Deliver an event to all processes at different times, each with the state by then."""
        for process in self.replicas:
            self.after(self.chance.uniform(0, 3), partial(self._deliver_now, process, event))

    def _deliver_now(self, process: Process, event: Callable[[], ProvisionerEvent]) -> None:
        self._deliver(process, event(), 0.0)


def main(first: int, end: int) -> int:
    """Run seeds until a check fails; print the check and the seed."""
    for seed in range(first, end):
        for violation in World(seed).run().violations[:1]:
            print(f"seed {seed}: {violation.check}: {violation.detail}", "1 failures", sep="\n")  # noqa: T201 -- a command's output
            return 1
    print("0 failures")  # noqa: T201 -- a command's output
    return 0


# Time without faults after which the wanted machines run.
PATIENCE_S = 25.0
JOINS = 3  # different start-up times
# Latest time until a price change is seen, even if a provisioner died and another took over.
PRICES_SEEN_S = 60.0


def joins_s(launch: int) -> float:
    """Return the time from a machine's start until its worker joins, under `reassign`."""
    return 1.0 + launch % JOINS


class Violation(NamedTuple):
    """A check that failed."""

    check: str
    detail: str


def check_order(world: World, order: LaunchRequest) -> Iterator[Violation]:
    """Check that an order equals its record in the log, and follows it."""
    known = world.truth.machines.get(order.launch)
    written = known and (
        None if known.counted else known.slot,
        *(known.worker, known.asked),
    )
    asked = Offer(order.pool, order.type, order.zone, order.bid_usd_per_hour)
    if written != (order.slot, order.worker, asked):
        yield Violation("an order is recorded before it is sent", str(order))


def check_record(world: World, record: PlanRecord, writer: str) -> Iterator[Violation]:
    """Check a record that the ledger accepted."""
    if isinstance(record, plans.ProvisionerLead):
        world.leader = writer
    elif writer != world.leader and not isinstance(record, ReplanAsked):
        yield Violation(
            "only one provisioner decides at a time",
            f"{writer} while {world.leader} does: {record}",
        )
    if isinstance(record, Planned) and not (record.why and record.reason):
        yield Violation("a plan has reasons", str(record))
    if isinstance(record, Started):
        machines = [machine.id for machine in world.fleet.rented if machine.launch == record.launch]
        if machines != [record.machine]:
            yield Violation("a launch has one machine", f"{record} {machines}")
    yield from _counted(world, record)
    if isinstance(record, Settled) and world.running() and not world.faults.hidden:
        yield Violation("no machine runs after the job is settled", str(world.running()))


def _counted(world: World, record: PlanRecord) -> Iterator[Violation]:
    """Check that machines are ordered only if needed, and that a slot's machine is its alone."""
    machines, plan = world.truth.machines, world.truth.plan
    if isinstance(record, LaunchRequested) and record.slot is None and plan is not None:
        asked = machines[record.launch].asked
        there = sum(each.asked == asked and not each.left for each in world.truth.open)
        if there > plan.counts.get(asked, 0):
            yield Violation("no more machines are ordered than planned", f"{there} of {asked}")
        if asked.bid_usd_per_hour is not None:
            yield from _bid_once(world, asked, there)
    beats = set(world.running()) - world.silent - world.dead
    if isinstance(record, Left) and record.launch in beats:
        yield Violation("a worker that sends heartbeats has not left", str(record))
    if isinstance(record, SlotAssigned):
        start_up_s = {pool.name: pool.start_up_s for pool in world.settings.pools}
        machine = machines[record.launch]
        if record.at_s < (machine.started_s or 0.0) + start_up_s[machine.pool]:
            yield Violation("a slot is assigned only to a ready machine", str(record))
        holders = [
            launch
            for launch in world.running()
            if machines[launch].slot == record.slot
            and launch not in world.faults.hidden | world.silent
        ]
        world.begun_s[record.launch] = world.now_s + 2.0
        others = [each.launch for each in world.counted[:-1] if isinstance(each, SlotAssigned)]
        if record.launch in others:
            yield Violation("a machine has one slot", str(record))
        if holders not in ([record.launch], []):
            yield Violation("a slot has one holder", f"{record}: {holders}")


def check_settled(world: World) -> Iterator[Violation]:
    """Check that, some time after faults, planned machines run and no request for a plan waits.

    A pool with a worker that never reported may still wait before it is used again in full.
    """
    plan = world.truth.plan
    since_s = max(world.faults.last_s, plan.at_s if plan else 0.0)
    if world.now_s - since_s < PATIENCE_S or world.wanted != "running":
        return
    if plan is None:
        yield Violation("a running job has a plan", "none")
        return
    wanted = {slot for slot, place in enumerate(plan.places) if place == ON_DEMAND}
    running = {machine.slot for machine in world.fleet.rented if machine.state == "running"}
    if plan.counted:
        yield from _settled_counted(world, plan)
    elif not wanted <= running and not world.truth.never_reported[ALONE.pool]:
        yield Violation("planned machines run", f"{wanted} wanted, {running} run")
    if world.truth.replans:
        yield Violation("a request for a plan is answered", str(world.truth.replans))


def _bid_once(world: World, asked: Offer, there: int) -> Iterator[Violation]:
    """Check that a plan requests a machine under a bid once; the next plan replaces a lost one."""
    begun = max(at for at, each in enumerate(world.counted) if isinstance(each, Planned))
    plan, machines = world.counted[begun], world.truth.machines
    ordered = [
        machines[each.launch]
        for each in world.counted[begun + 1 :]
        if isinstance(each, LaunchRequested)
    ]
    since = [each for each in ordered if each.asked == asked]
    before = there - sum(each.open for each in since)
    if isinstance(plan, Planned) and before + len(since) > plan.counts.get(asked, 0):
        yield Violation(
            "a plan bids only once for a machine", f"{len(since)} and {before} of {asked}"
        )


def _settled_counted(world: World, plan: Planned) -> Iterator[Violation]:
    there = world.truth.running
    counts = Counter(each.asked for each in there if not each.left)
    alone = plan.counts.get(ALONE, 0)
    if counts[ALONE] != alone and not world.truth.never_reported[ALONE.pool]:
        yield Violation("planned on-demand machines run", f"{alone} of {there}")
    if too_many := {asked: n for asked, n in counts.items() if n > plan.counts.get(asked, 0)}:
        yield Violation("machines beyond the plan are released", str(too_many))
    spares = [each for each in there if each.slot is None]
    assigned = {each.slot for each in there if each.has_slot}
    settled_s = max((each.started_s or 0.0 for each in spares), default=0.0) + PATIENCE_S
    holds = world.settings.on_preemption == "hold"
    if holds and spares and len(assigned) < world.settings.workers and world.now_s > settled_s:
        yield Violation("no slot waits beside a spare", f"{assigned} assigned beside {spares}")
    if assigned and not holds:
        yield Violation("streams that move have no slots", str(assigned))


def check_end(world: World) -> Iterator[Violation]:
    """Check that a finished job leaves nothing open or unaccounted."""
    if not world.over():
        left = [p.name for p in world.replicas if not p.dead and not p.machine.finished]
        yield Violation("all machines and orders end", f"{left} open {world.truth.open}")
        return
    yield from _machines(world)
    yield from _check_slots(world)
    yield from _start_ups(world)
    yield from _cost(world)
    terms = [record.term for record in world.counted if isinstance(record, Settled)]
    if len(terms) != len(set(terms)) or world.truth.settled is None:
        yield Violation("each term is settled at most once, and the last one is", str(terms))


def _machines(world: World) -> Iterator[Violation]:
    """Check that the provider and the ledger have the same machines."""
    machines = world.fleet.rented
    launches = [machine.launch for machine in machines]
    if len(set(launches)) < len(launches):
        yield Violation("a launch has one machine", str(launches))
    if world.truth.open or world.running():
        yield Violation("all machines are released", f"{world.truth.open} {world.running()}")
    for machine in machines:
        rented = world.truth.machines[machine.launch]
        reported = (rented.machine, rented.started_s, rented.ended_s, rented.cause)
        given_up = rented.never_reported and machine.cause == "released"
        cause = "failed" if given_up else machine.cause
        true = (machine.id, machine.started_s, machine.ended_s, cause)
        if reported != true and machine.launch not in world.faults.hidden:
            yield Violation("machines are reported as they were", f"{rented} {machine}")


def _check_slots(world: World) -> Iterator[Violation]:
    """Check that a slot has one machine of its own at a time, unless the provider hid one.

    A machine that the provider does not list for long counts as lost. Its successor runs beside it
    until the machine is listed again and released. A deposed provisioner cannot cause this, because
    its orders are void or were sent before. With `reassign`, a slot that moves to another pool has
    a machine in each of both pools for a while.
    """
    moves = world.settings.on_preemption == "reassign"
    occupied: dict[tuple[int | None, str], list[tuple[float, float, int]]] = {}
    for machine in world.fleet.rented:
        if machine.slot is not None and machine.ended_s is not None:
            slot: tuple[int | None, str] = (machine.slot, machine.pool if moves else "")
            held = (machine.started_s, machine.ended_s, machine.launch)
            occupied.setdefault(slot, []).append(held)
    for slot, held_by in occupied.items():
        for (_, ended_s, first), (started_s, _, second) in pairwise(sorted(held_by)):
            if started_s < ended_s and not {first, second} & world.faults.hidden:
                yield Violation(
                    "a slot has only one machine of its own", f"{slot}: {first}, {second}"
                )


def _start_ups(world: World) -> Iterator[Violation]:
    """Check that recorded start-up times are of the market file or of a machine."""
    settings, shortest_s, longest_s = world.settings, joins_s(0), joins_s(JOINS - 1)
    for process in world.replicas:
        start_ups = process.machine._known.estimator.start_ups  # noqa: SLF001 -- no public access
        for pool in settings.pools:
            start_up_s = start_ups.start_up_s(pool)
            # A join is noticed at the next poll, so the measured time may differ.
            least_s = min(pool.start_up_s, shortest_s / 2)
            most_s = max(pool.start_up_s, longest_s + settings.grace_s / 2)
            if world.dead:
                # Such a machine is given up after this time, noticed at a poll.
                most_s = max(most_s, settings.unseen_s + 2 * settings.grace_s)
            if not least_s <= start_up_s <= most_s:
                yield Violation(
                    "start-up times are learned correctly", f"{start_up_s} of {pool.name}"
                )


def _cost(world: World) -> Iterator[Violation]:
    """Check that the ledger's cost is the provider's bill, except for prices seen late."""
    if world.faults.hidden:
        return
    billing = world.settings.billing
    bill = 0.0
    for machine in world.fleet.rented:
        ran_s = (machine.ended_s or world.now_s) - machine.started_s
        offer, rule = Offer(machine.pool, machine.type, machine.zone), billing[machine.pool]
        if rule.per == "hour":
            bill += _hours_usd(world, offer, machine, rule.hour_s)
            continue
        paid_s = float(rule.paid_s(ran_s, preempted=machine.cause == "preempted"))
        bill += _bill_usd(world, offer, machine.started_s, machine.started_s + paid_s)
    ledger = FleetLedger(billing)
    for offset, data in enumerate(world.log):
        ledger.feed(offset, decode_plan(data))
    moved_usd_per_s = sum(
        max(abs(after[offer] - before[offer]) for offer in after) / HOUR_S
        for (_, before), (_, after) in pairwise(world.reported_prices)
    )
    slack = moved_usd_per_s * PRICES_SEEN_S * world.settings.workers * 2 + 1e-9
    reported = ledger.spent_usd(world.now_s)
    if abs(reported - bill) > slack:
        yield Violation(
            "the cost in the ledger is the bill of the provider", f"{reported} against {bill}"
        )


def _hours_usd(world: World, offer: Offer, machine: Machine, hour_s: float) -> float:
    """Add up hours at the price of their begin; the hour of a preemption is free."""
    total, begun_s, ended_s = 0.0, machine.started_s, machine.ended_s or world.now_s
    while begun_s < ended_s:
        if machine.cause != "preempted" or begun_s + hour_s <= ended_s:
            (usd_per_hour,) = (
                prices[offer]
                for (at_s, prices), (end_s, _) in pairwise([*world.reported_prices, (math.inf, {})])
                if at_s <= begun_s < end_s
            )
            total += usd_per_hour * hour_s / HOUR_S
        begun_s += hour_s
    return total


def _bill_usd(world: World, offer: Offer, since_s: float, until_s: float) -> float:
    total = 0.0
    ends = [at_s for at_s, _ in world.reported_prices[1:]] + [float("inf")]
    for (at_s, prices), end_s in zip(world.reported_prices, ends, strict=True):
        seconds = min(until_s, end_s) - max(since_s, at_s)
        total += max(seconds, 0.0) * prices[offer] / HOUR_S
    return total


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
