"""A provisioner on a manual clock, with its log, provider, prices and lease.

Commands are carried out and answered immediately and in order, unless a test delays something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from common.core.events import LeaseAnswered, Tick
from common.errors import UnavailableError
from common.spot.plans import decode_plan, encode_plan
from common.spot.provisioning import commands as do
from common.spot.provisioning import events
from common.spot.provisioning.provisioner import Provisioner
from tests.fakes.clock import ManualClock
from tests.memory_fleet import MemoryFleet, MemoryPrices
from tests.unit.spot.provisioning.examples import PRICES, SETTINGS, T0

if TYPE_CHECKING:
    from common.spot.provisioning.commands import ProvisionerCommand
    from common.spot.provisioning.events import ProvisionerEvent
    from common.spot.provisioning.fleet_ledger import FleetLedger
    from common.spot.provisioning.records import PlanRecord
    from common.spot.provisioning.settings import ProvisionerSettings

Kind = TypeVar("Kind")


@dataclass
class Street:
    """Clock, log, prices, fleet and workers that several provisioners share.

    Attributes:
        joins_s: Time by pool from the start of a machine to the first heartbeat of its worker; a
            worker of another pool sends none. If empty, Redis is unavailable.
    """

    clock: ManualClock = field(default_factory=lambda: ManualClock(T0))
    log: list[bytes] = field(default_factory=list)
    prices: MemoryPrices = field(default_factory=lambda: MemoryPrices(PRICES))
    joins_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = MemoryFleet(self.clock)

    def append(self, record: PlanRecord) -> None:
        """Write to the plans topic."""
        self.log.append(encode_plan(record))

    def members(self, ledger: FleetLedger) -> frozenset[str]:
        """Return the names of the workers with heartbeats."""
        return frozenset(
            ledger.machines[machine.launch].member
            for machine in self.fleet.rented
            if machine.state == "running"
            and self.clock() >= machine.started_s + self.joins(machine.launch, machine.pool)
        )

    def joins(self, launch: int, pool: str) -> float:
        """Return the time from a machine's start to its worker's first heartbeat."""
        del launch
        return self.joins_s.get(pool, math.inf)

    @property
    def records(self) -> list[PlanRecord]:
        """Return all written records."""
        return [decode_plan(data) for data in self.log]

    def written(self, kind: type[Kind]) -> list[Kind]:
        """Return all records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]


class ProviderThread:
    """One provisioner.

    Attributes:
        done: All commands of the provisioner so far.
        holds_lease: Answer to the provisioner's requests for the lease.
        reads: If False, the provisioner does not read the log.
        launched: Each launch, with the provisioner's position in the log at that time.
    """

    def __init__(
        self, street: Street, settings: ProvisionerSettings = SETTINGS, name: str = "p1"
    ) -> None:
        self.street = street
        self.provisioner = Provisioner(name, settings)
        self.done: list[ProvisionerCommand] = []
        self.holds_lease = True
        self.reads = True
        self.launched: list[tuple[int, int]] = []
        self._read = 0

    def on(self, event: ProvisionerEvent) -> None:
        """Send the provisioner an event. Carry out its commands, and send it their results."""
        for command in self.provisioner.on(event, self.street.clock()):
            self.done.append(command)
            answer = self._carry_out(command)
            if answer is not None:
                self.on(answer)

    def read(self) -> None:
        """Send the provisioner the new records of the log."""
        while self.reads:
            data = self.street.log[self._read :]
            records = tuple((self._read + n, decode_plan(d)) for n, d in enumerate(data))
            self._read += len(data)
            self.on(events.PlansRead(records, caught_up=True))
            if len(self.street.log) == self._read:
                return

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        """Advance the time in ticks."""
        self.read()
        for _ in range(round(seconds / step_s)):
            self.street.clock.advance(step_s)
            if self.street.clock() >= self.provisioner.due():
                self.on(Tick())
            self.read()

    def did(self, kind: type[Kind]) -> list[Kind]:
        """Return all commands of a kind so far."""
        return [command for command in self.done if isinstance(command, kind)]

    def _carry_out(  # noqa: PLR0911 -- one case per command
        self, command: ProvisionerCommand
    ) -> ProvisionerEvent | None:
        fleet = self.street.fleet
        try:
            match command:
                case do.AskProvisioningLease():
                    return LeaseAnswered(self.holds_lease)
                case do.AppendPlan(record):
                    self.street.append(record)
                case do.Launch(orders):
                    launches = tuple(order.launch for order in orders)
                    self.launched += [(launch, self._read) for launch in launches]
                    return events.LaunchAnswered(launches, fleet.launch(orders))
                case do.Release(machines):
                    fleet.release(machines)
                case do.PollMachines():
                    if self.street.joins_s:
                        members = self.street.members(self.provisioner.ledger)
                        self.on(events.HeartbeatsSeen(members, self.street.clock()))
                    return events.MachinesSeen(fleet.machines(), self.street.clock())
                case do.PollPastPrices():
                    return events.PastSeen(self.street.prices.past())
                case do.PollPrices():
                    return self._prices()
                case _:
                    pass
        except UnavailableError as error:
            return events.FleetAway(str(error))
        return None

    def _prices(self) -> ProvisionerEvent:
        try:
            return events.PricesSeen(self.street.prices.look())
        except UnavailableError as error:
            return events.PricesAway(str(error))
