"""Whole lives of a job's provisioning in virtual time, seeded, with faults, checked from outside.

Some replicas share a plans topic, a lease and a lender of machines, and nothing else. Each is a
process that handles one event after another and carries out its commands one by one; it may die or
freeze between any two of them, and what it has sent by then still arrives.

    python -m tests.system.provisioning_world 0 100     the seeds from 0 to 99; 1 where one fails
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from common.core.messages import GENESIS, Batch, BatchReady, Lead, UpdateApplied, WorkerId
from common.core.spans import Span
from common.errors import UnavailableError
from common.provisioning import commands as do
from common.provisioning import events
from common.provisioning.codec import decode_plan, encode_plan
from common.provisioning.ledger import FleetLedger
from common.provisioning.provisioner import Provisioner
from common.provisioning.settings import ProvisionerSettings
from common.testing.fleet import Chain, MemoryFleet, MemoryPrices
from common.theory.policy import POLICY_NAMES
from common.theory.work import Pool
from tests.system.provisioning_checks import check_calm, check_end, check_order, check_record
from tests.system.provisioning_faults import LEASE_S, Faults

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from common.core.messages import AuditRecord, Claim
    from common.provisioning.commands import ProvisionerCommand
    from common.provisioning.events import ProvisionerEvent
    from common.provisioning.records import PlanRecord
    from common.renting import LaunchOrder, Machine
    from tests.system.provisioning_checks import Violation

BEGIN_S = 1_000_000.0
STOP_S = BEGIN_S + 150.0  # the job is wanted stopped
CALM_S = BEGIN_S + 110.0  # no fault begins later
LATEST_S = BEGIN_S + 400.0  # by then everything is given back, or it never will be

K, B = 4, 16


@dataclass
class Process:
    """One replica: a state machine, what has come for it, and what it has yet to do."""

    name: str
    machine: Provisioner
    inbox: deque[ProvisionerEvent] = field(default_factory=deque)
    todo: deque[ProvisionerCommand] = field(default_factory=deque)
    frozen_until_s: float = 0.0
    dead: bool = False
    busy: bool = False
    last_append_s: float = 0.0  # one producer: its records arrive in order
    read: int = 0  # of the plans topic
    caught_up: bool = False
    claims_read: int = 0
    updates_read: int = 0


class World:
    """All of it, for one seed.

    Args:
        seed: Says everything.
        faulty: Whether anything goes wrong on purpose.
    """

    def __init__(self, seed: int, *, faulty: bool = True) -> None:
        self.chance = random.Random(f"provisioning/{seed}")  # noqa: S311 -- a seeded simulation
        self.now_s = BEGIN_S
        self.faulty = faulty
        self.violations: list[Violation] = []
        self.log: list[bytes] = []
        self.truth = FleetLedger()
        self.counted: list[PlanRecord] = []
        self.in_charge = ""  # who wrote the Taken in force
        self.replicas: list[Process] = []
        self.born = 0
        self.lease: tuple[str, float] | None = None
        self.faults = Faults(self)
        self.claims: list[Claim] = []
        self.updates: list[AuditRecord] = [Lead(-1, GENESIS, "c")]
        self.takeovers = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        alpha = self.chance.choice((0.6, 0.9, 0.9))
        pools = (
            Pool("on-demand", 1.0, minimum_billing_s=self.chance.choice((0.0, 30.0))),
            Pool("spot", 0.3, alpha, 20.0, minimum_billing_s=self.chance.choice((0.0, 20.0))),
            Pool("other", 0.4, alpha, 40.0, speed=2.0),
        )
        chains = {pool.name: Chain(alpha, pool.cycle_s) for pool in pools[1:]}
        lag_s = self.chance.choice((0.0, 0.0, 1.5))
        self.fleet = MemoryFleet(lambda: self.now_s, chains, seed, lag_s, named_s=60.0)
        self.prices = MemoryPrices({pool.name: pool.usd_per_hour for pool in pools})
        self.told_prices = [(BEGIN_S, dict(self.prices.look()))]
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
            policy=self.chance.choice(POLICY_NAMES),
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

    # --- time ----------------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._numbers += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._numbers, action))

    def run(self) -> World:
        """Live it, and check it at the end."""
        for _ in range(self.chance.choice((2, 3))):
            self.after(self.chance.uniform(0, 2), self.start)
        self.after(1.0, self._work)
        self.after(STOP_S - BEGIN_S, self._stop)
        if self.faulty:
            for _ in range(self.chance.randrange(4, 14)):
                self.after(self.chance.uniform(0, CALM_S - BEGIN_S), self.faults.strike)
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
        """Whether all processes have come to their end."""
        return bool(self.replicas) and all(
            p.machine.finished and not p.todo for p in self.replicas if not p.dead
        )

    def running(self) -> list[int]:
        """Launches whose machines run."""
        return [machine.launch for machine in self.fleet.rented if machine.state == "running"]

    # --- processes -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process."""
        self.born += 1
        name = f"p{self.born}"
        process = Process(name, Provisioner(name, self.settings, self.wanted, "as asked"))
        self.replicas.append(process)
        self._beat(process)

    def _beat(self, process: Process) -> None:
        """Read what is new and tick when due, as a shell's loop does."""
        if process.dead or process.machine.finished:
            return
        if self.now_s >= process.frozen_until_s and not process.busy:
            self._read(process)
            process.inbox.append(events.Tick())
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
            process.inbox.append(events.UpdatesRead(audit))

    def _tell(self, process: Process, event: ProvisionerEvent, seconds: float) -> None:
        def arrive() -> None:
            if not process.dead:
                process.inbox.append(event)
                self.handle(process)

        self.after(seconds, arrive)

    def handle(self, process: Process) -> None:
        """Take in events while there is nothing to do, then do the first thing."""
        if process.busy or process.dead or self.now_s < process.frozen_until_s:
            return
        while process.inbox and not process.todo:
            before = process.machine.in_charge
            process.todo.extend(process.machine.on(process.inbox.popleft(), self.now_s))
            self.takeovers += process.machine.in_charge and not before
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
            case do.AskLease():
                self._tell(process, events.LeaseAnswered(self._ask_lease(process.name)), soon_s)
            case do.ReleaseLease():
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
            case do.LookAtMachines():
                self._look(process, soon_s)
            case do.LookAtPrices():
                self._tell(process, events.PricesSeen(self.prices.look()), soon_s)
            case _:
                pass

    def _call(self, process: Process, call: Callable[[], None]) -> bool:
        try:
            call()
        except UnavailableError as error:
            self._tell(process, events.FleetAway(str(error)), 0.1)
            return False
        return True

    def _launch(self, process: Process, orders: tuple[LaunchOrder, ...], soon_s: float) -> None:
        for order in orders:
            self.violations += check_order(self, order)
        answer: list[events.LaunchAnswered] = []
        launches = tuple(order.launch for order in orders)
        if self._call(
            process,
            lambda: answer.append(events.LaunchAnswered(launches, self.fleet.launch(orders))),
        ):
            self._tell(process, answer[0], soon_s)

    def _look(self, process: Process, soon_s: float) -> None:
        seen: list[tuple[Machine, ...]] = []
        if self._call(process, lambda: seen.append(self.fleet.machines())):
            look = events.MachinesSeen(seen[0], self.now_s)
            self._tell(process, look, soon_s)
            if self.chance.random() < 0.1:  # twice, or long after
                self._tell(process, look, self.chance.uniform(0, 6))

    def _ask_lease(self, name: str) -> bool:
        if self.lease is None or self.lease[0] == name or self.lease[1] <= self.now_s:
            self.lease = (name, self.now_s + LEASE_S)
        return self.lease[0] == name

    def append(self, data: bytes, writer: str) -> None:
        """A record arrives in the log."""
        offset, record = len(self.log), decode_plan(data)
        self.log.append(data)
        if self.truth.feed(offset, record):
            self.counted.append(record)
            self.violations += check_record(self, record, writer)

    # --- the job, and what goes wrong ------------------------------------------------------------

    def _work(self) -> None:
        """A second of arrivals, and an update where workers run."""
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
        self.violations += check_calm(self)
        self.want("stopped")

    def want(self, wanted: Literal["running", "paused", "stopped"]) -> None:
        """A person changes their mind."""
        self.wanted = wanted
        self.tell_all(lambda: events.WantedChanged(self.wanted, "as asked"))

    def tell_all(self, event: Callable[[], ProvisionerEvent]) -> None:
        """Everybody hears of it sooner or later, and then of how it is by then."""
        for process in self.replicas:
            self.after(self.chance.uniform(0, 3), partial(self._tell_now, process, event))

    def _tell_now(self, process: Process, event: Callable[[], ProvisionerEvent]) -> None:
        self._tell(process, event(), 0.0)


def main(first: int, end: int) -> int:
    """Live through seeds until something does not hold; say what, and which seed shows it."""
    for seed in range(first, end):
        for violation in World(seed).run().violations[:1]:
            print(f"seed {seed}: {violation.check}: {violation.detail}", "1 failures", sep="\n")  # noqa: T201 -- a command's output
            return 1
    print("0 failures")  # noqa: T201 -- likewise
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
