"""What happens to a provisioner: facts that its shell observed, handed to `on(event, now_s)`."""

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
    """Any event of a provisioner but a `Tick` and `LeaseAnswered`."""


# --- what Kafka says; each topic from its beginning on, in order, in charge or not ---------------


class PlansRead(ProvisionerFact, frozen=True):
    """Records of the plans topic by offset, None for one that does not parse.

    Those of this process come back here too: an order counts when it does. A candidate stands once
    it has caught up: where a topic is empty the shell says so by an event without records.
    """

    records: tuple[tuple[int, PlanRecord | None], ...]
    caught_up: bool = False  # nothing more was there at the time


class UpdateRecordsRead(ProvisionerFact, frozen=True):
    """Records of the updates topic by offset, from its beginning on."""

    records: tuple[tuple[int, AuditRecord | None], ...]


class ClaimsRead(ProvisionerFact, frozen=True):
    """Records of the control topic, in order; it may begin anywhere, the newest are enough."""

    claims: tuple[ControlRecord | None, ...]


class RecordsCounted(ProvisionerFact, frozen=True):
    """How many records the job's streams hold, from where the job began to their ends."""

    records: int


# --- what a person wants -------------------------------------------------------------------------


class ProvisioningWanted(ProvisionerFact, frozen=True):
    """The job shall run, pause or be over; a job that is done or deleted is wanted stopped."""

    wanted: Wanted
    reason: str = ""  # in the job record's words


class ProvisioningChanged(ProvisionerFact, frozen=True):
    """The job's settings are others now: its deadline, K, b, updates; or the market file is."""

    settings: ProvisionerSettings


# --- what the fleet and the prices say -----------------------------------------------------------


class MachinesSeen(ProvisionerFact, frozen=True):
    """What `Fleet.machines` said."""

    machines: tuple[Machine, ...]
    as_of_s: float  # when the call was begun; an answer to an earlier call is passed over


class HeartbeatsSeen(ProvisionerFact, frozen=True):
    """Whose heartbeats there are, by name."""

    members: frozenset[str]
    as_of_s: float  # when they were asked for


class LaunchAnswered(ProvisionerFact, frozen=True):
    """`Fleet.launch` came back without an error."""

    launches: tuple[int, ...]  # all that were asked for in the call
    refused: tuple[Refused, ...]


class FleetAway(ProvisionerFact, frozen=True):
    """A call to the fleet failed, whichever: it is made again later."""

    reason: str


class PricesSeen(ProvisionerFact, frozen=True):
    """What `Prices.look` said: USD per hour of one machine."""

    usd_per_hour: Mapping[Offer, float]


class PastSeen(ProvisionerFact, frozen=True):
    """What `Prices.past` said, by pool."""

    prices: Mapping[str, PriceHistory]


class PricesAway(ProvisionerFact, frozen=True):
    """`Prices` failed; what was known stays true."""

    reason: str


ProvisionerEvent: TypeAlias = ProvisionerFact | Tick | LeaseAnswered
