"""What a provisioner wants done: its shell carries these out, in order.

The shell appends and carries on: that a record is in the log is known when it is read there. A call
to the fleet or the prices is answered by an event; where it fails the shell says so by `FleetAway`
or `PricesAway`, and the provisioner asks again when it is time. A record that Kafka refuses, or
whose fate is unknown, ends the process: what it knew can be read from the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from common.spot.machines import LaunchRequest
    from common.spot.provisioning.records import PlanRecord


class ProvisionerCommand(msgspec.Struct, frozen=True):
    """One thing that a provisioner wants done."""


class AskProvisioningLease(ProvisionerCommand, frozen=True):
    """Take or renew the lease of the job's provisioning; answered by LeaseAnswered."""


class ReleaseProvisioningLease(ProvisionerCommand, frozen=True):
    """Let others try."""


class AppendPlan(ProvisionerCommand, frozen=True):
    """Append to the plans topic."""

    record: PlanRecord


class Launch(ProvisionerCommand, frozen=True):
    """Ask the fleet for machines; answered by LaunchAnswered or FleetAway."""

    orders: tuple[LaunchRequest, ...]


class Release(ProvisionerCommand, frozen=True):
    """Give machines back, by the provider's ids; only a failure is answered, by FleetAway."""

    machines: tuple[str, ...]
    reason: str  # for the log


class PollMachines(ProvisionerCommand, frozen=True):
    """Ask the fleet what there is; answered by MachinesSeen or FleetAway."""


class PollPrices(ProvisionerCommand, frozen=True):
    """Ask what machines cost; answered by PricesSeen or PricesAway."""


class PollPastPrices(ProvisionerCommand, frozen=True):
    """Ask what machines have cost until now; answered by PastSeen or PricesAway."""


class BecameLeader(ProvisionerCommand, frozen=True):
    """From now on this process decides; worth a log line."""

    term: int


class StopProvisioning(ProvisionerCommand, frozen=True):
    """It decides no more; worth a log line. What it asked for may still be answered."""

    reason: str


class FinishProvisioning(ProvisionerCommand, frozen=True):
    """The job's provisioning is over: `finished` is true now, and no event does anything.

    A job that is resumed later gets another `Provisioner`.
    """

    reason: str
