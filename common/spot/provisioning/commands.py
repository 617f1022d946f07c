"""Commands of a provisioner, which its shell carries out in order.

The shell appends records without waiting: a record is in the log when it is read there. A call to
the fleet or the prices is answered by an event. If it fails, the event is `FleetAway` or
`PricesAway`, and the provisioner repeats the call when it is due. If Kafka refuses a record or does
not confirm it, the process ends; another one can read its state from the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from common.spot.machines import LaunchRequest
    from common.spot.provisioning.records import PlanRecord


class ProvisionerCommand(msgspec.Struct, frozen=True):
    """A single command of a provisioner."""


class AskProvisioningLease(ProvisionerCommand, frozen=True):
    """Acquire or renew the lease of the job's provisioning; answered by LeaseAnswered."""


class ReleaseProvisioningLease(ProvisionerCommand, frozen=True):
    """Release the lease, so that others may try."""


class AppendPlan(ProvisionerCommand, frozen=True):
    """Append to the plans topic."""

    record: PlanRecord


class Launch(ProvisionerCommand, frozen=True):
    """Request machines from the fleet; answered by LaunchAnswered or FleetAway."""

    orders: tuple[LaunchRequest, ...]


class Release(ProvisionerCommand, frozen=True):
    """Release machines by the provider's ids; only a failure is answered, by FleetAway."""

    machines: tuple[str, ...]
    reason: str  # text of the log line


class PollMachines(ProvisionerCommand, frozen=True):
    """Request the fleet's machines; answered by MachinesSeen or FleetAway."""


class PollPrices(ProvisionerCommand, frozen=True):
    """Request current prices; answered by PricesSeen or PricesAway."""


class PollPastPrices(ProvisionerCommand, frozen=True):
    """Request past prices; answered by PastSeen or PricesAway."""


class BecameLeader(ProvisionerCommand, frozen=True):
    """Log that this process is in charge from now on."""

    term: int


class StopProvisioning(ProvisionerCommand, frozen=True):
    """Log that this process is no longer in charge. Its requests may still be answered."""

    reason: str


class FinishProvisioning(ProvisionerCommand, frozen=True):
    """Log the end of the job's provisioning: `finished` is true, and events have no effect.

    A job that is resumed later gets another `Provisioner`.
    """

    reason: str
