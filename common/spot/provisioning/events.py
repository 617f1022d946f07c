"""Events of a provisioner: facts that its shell observed, passed to `on(event, now_s)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from common.core.events import LeaseAnswered, Tick

if TYPE_CHECKING:
    from common.core.messages import AuditRecord, ControlRecord, Wanted
    from common.spot.machines import Machine, Offer, PriceHistory, Refused
    from common.spot.provisioning.records import PlanRecord
    from common.spot.provisioning.settings import ProvisionerSettings


class ProvisionerFact(msgspec.Struct, frozen=True):
    """Any event of a provisioner except `Tick` and `LeaseAnswered`."""


# --- from Kafka, each topic in order, also while another process is in charge --------------------


class PlansRead(ProvisionerFact, frozen=True):
    """Records of the plans topic by offset, from its beginning on; None for unparsable ones.

    The process's own records come back here, too: an order counts only once it has come back. A
    process becomes a candidate only once it has caught up. If the topic is empty, the shell reports
    that by an event without records.
    """

    records: tuple[tuple[int, PlanRecord | None], ...]
    # True if there were no further records at the time.
    caught_up: bool = False


class UpdateRecordsRead(ProvisionerFact, frozen=True):
    """Records of the updates topic by offset, from its beginning on."""

    records: tuple[tuple[int, AuditRecord | None], ...]


class ClaimsRead(ProvisionerFact, frozen=True):
    """Records of the control topic, in order. They may begin anywhere; the newest are enough."""

    claims: tuple[ControlRecord | None, ...]


class RecordsCounted(ProvisionerFact, frozen=True):
    """Number of records in the job's streams, from the job's beginning to their ends."""

    records: int


# --- from users ----------------------------------------------------------------------------------


class ProvisioningWanted(ProvisionerFact, frozen=True):
    """Wanted state of the job; "stopped" for a finished or deleted job."""

    wanted: Wanted
    reason: str = ""  # the job record's words


class ProvisioningChanged(ProvisionerFact, frozen=True):
    """The job's settings have changed, for example its deadline or K."""

    settings: ProvisionerSettings


# --- from the fleet and the prices ---------------------------------------------------------------


class MachinesSeen(ProvisionerFact, frozen=True):
    """Result of `Fleet.machines`."""

    machines: tuple[Machine, ...]
    # Beginning of the call. A response to an earlier call is skipped.
    as_of_s: float


class HeartbeatsSeen(ProvisionerFact, frozen=True):
    """Names of the workers with heartbeats."""

    members: frozenset[str]
    as_of_s: float  # time of the request


class LaunchAnswered(ProvisionerFact, frozen=True):
    """`Fleet.launch` returned without an error."""

    # All launches of the call.
    launches: tuple[int, ...]
    refused: tuple[Refused, ...]


class FleetAway(ProvisionerFact, frozen=True):
    """A call to the fleet failed. It is repeated later."""

    reason: str


class PricesSeen(ProvisionerFact, frozen=True):
    """Result of `Prices.look`: USD per hour of one machine."""

    usd_per_hour: Mapping[Offer, float]


class PastSeen(ProvisionerFact, frozen=True):
    """Result of `Prices.past`, by pool."""

    prices: Mapping[str, PriceHistory]


class PricesAway(ProvisionerFact, frozen=True):
    """`Prices` failed. Known prices stay valid."""

    reason: str


ProvisionerEvent: TypeAlias = ProvisionerFact | Tick | LeaseAnswered
