"""Records of a job's plans topic: the provisioner in charge, its decisions and their reasons.

The topic has one partition and one order. Several provisioners may believe that they are in charge.
The fold in `common.spot.provisioning.fleet_ledger` decides what counts, as `common.core.history`
does for leaders:

    offset   0         1       2        3        4         5         6          7
    record   Lead(-1)  Priced  Planned  Ordered  Started   Lead(0)   Ordered    Ended
                       of 0    of 0     1 of 0   1 of 0              2 of 0     1 of 5
    term     0         0       0        0        0         5         void       5

Here "1 of 0" means launch 1, written in term 0.

An order is written first, and the machine is requested only after the order was read back as valid.
A successor requests it again with the same token, and gets the same machine.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

import msgspec

from common.core.field_types import Count, NonEmpty, Ordinal, OrNone, Rate
from common.spot.machines import Offer


class ProvisionerLead(msgspec.Struct, frozen=True, tag="provisioner-lead"):
    """Candidacy of a provisioner; counts only if `after` is the topic's current head.

    After a `Settled`, the head is that record's offset: a candidate that has not read that the job
    is over cannot start it again.
    """

    # Offset of the Lead in force, or of the Settled that ended it; -1 for none.
    after: OrNone
    # Unique for each candidacy.
    candidate: NonEmpty[str]
    # Seconds since 1970, as all times here.
    at_s: Rate


class OfferPrice(msgspec.Struct, frozen=True):
    """Price of one type of a pool's machines, anywhere or in one zone."""

    pool: NonEmpty[str]
    type: NonEmpty[str]
    zone: str
    usd_per_hour: Rate


class Priced(msgspec.Struct, frozen=True, tag="priced", omit_defaults=True):
    """Prices of machines from now on, if they differ from those in earlier records."""

    term: Count
    at_s: Rate
    usd_per_hour: dict[NonEmpty[str], Rate]  # keyed by pool
    # Used if prices in a pool differ.
    offers: tuple[OfferPrice, ...] = ()


class EstimateRecord(msgspec.Struct, frozen=True):
    """An estimate: value, standard deviation and 90 % interval."""

    value: Rate
    std: Rate
    low: Rate
    high: Rate


class OfferCount(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wanted number of machines of an offer: `common.spot.machines.Offer`."""

    pool: str
    count: Count
    type: str = ""
    zone: str = ""
    bid_usd_per_hour: Rate | None = None


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A policy's decision: the pool of each slot, or numbers of machines.

    It is in force until the next one.
    """

    term: Count
    # Number of the plan in the job, from 1.
    number: Ordinal
    at_s: Rate
    policy: NonEmpty[str]
    # Reason to decide: first plan, price, estimate, request.
    why: NonEmpty[str]
    # Reason of this plan, in the policy's words.
    reason: NonEmpty[str]
    feasible: bool
    binding: str  # `common.spot.theory.provisioning.Binding`
    # Pools by index; the first is on-demand.
    pools: NonEmpty[tuple[str, ...]]
    # (N_tot,) pool of each slot, -1 for none; empty if machines are counted.
    places: tuple[OrNone, ...]
    spot: Count  # slots on spot machines
    on_demand: Count  # machines on demand
    updates_left: Rate
    # None if the job has no deadline.
    deadline_left_s: Rate | None
    # Cost until now.
    spent_usd: Rate
    expected_cost_usd: Rate  # remaining work
    expected_runtime_s: Rate  # remaining work
    # Cost of the remaining work with every worker on demand.
    on_demand_only_usd: Rate
    # Capacity over arrivals, Proposition 1. Below 1, updates cannot keep up.
    stability: Rate
    # Price of each pool at the decision.
    usd_per_hour: dict[NonEmpty[str], Rate]
    # Keys: "arrivals_per_s", "gradient_s", "availability.<pool>", ...
    believed: dict[str, EstimateRecord]
    # Problem of the plan, such as fewer machines than Proposition 1 requires; empty for none.
    warning: str = ""
    # Cost of traffic between machines and servers, included in the expected cost.
    transfer_usd: float = 0.0
    # Offset of the latest ReplanAsked that this plan answers, -1 for none.
    answers: OrNone = -1
    # Wanted machines, if they are counted.
    machines: tuple[OfferCount, ...] = ()

    @property
    def counted(self) -> bool:
        """True if machines have no fixed slots."""
        return not self.places

    @property
    def counts(self) -> dict[Offer, int]:
        """Wanted machines of each offer, if they are counted."""
        return {
            Offer(each.pool, each.type, each.zone, each.bid_usd_per_hour): each.count
            for each in self.machines
        }

    @property
    def predicted_usd(self) -> float:
        """Predicted cost of the whole job's machines, without traffic."""
        return self.spent_usd + self.expected_cost_usd - self.transfer_usd


class LaunchRequested(msgspec.Struct, frozen=True, tag="launch-requested", omit_defaults=True):
    """Order of a machine. The first record with its number counts."""

    term: Count
    # Number of the launch in the job, from 1.
    launch: Ordinal
    at_s: Rate
    # None if `SlotAssigned` gives it a slot later.
    slot: Count | None
    pool: NonEmpty[str]
    worker: NonEmpty[str]
    # Empty for any type of the pool.
    machine_type: str = ""
    # Empty for any zone.
    zone: str = ""
    # Highest price; None for no limit.
    bid_usd_per_hour: Rate | None = None


class Started(msgspec.Struct, frozen=True, tag="started", omit_defaults=True):
    """An order's machine was seen running."""

    term: Count
    launch: Ordinal
    # Beginning of the billed time.
    at_s: Rate
    machine: NonEmpty[str]  # the provider's id
    # Type that the provider reports; empty if it has no types.
    machine_type: str = ""
    # Zone that the provider reports; empty if it has no zones.
    zone: str = ""
    # Actual price; None for the known price of its offer.
    usd_per_hour: Rate | None = None


EndedBecause: TypeAlias = Literal[
    "preempted",
    "released",
    "failed",
    # The machine never started: there was no capacity, or the order was wrong.
    "refused",
    # The machine no longer exists for an unknown reason, or somebody else stopped or ended it.
    "lost",
]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """An order's machine has ended, or will never start."""

    term: Count
    launch: Ordinal
    at_s: Rate
    cause: EndedBecause
    detail: str = ""


class SlotAssigned(msgspec.Struct, frozen=True, tag="slot-assigned"):
    """Assigns a slot's stream to this machine until the machine ends."""

    term: Count
    at_s: Rate
    slot: Count
    launch: Ordinal
    # The name under which the machine's worker reads the stream: the slot's static member.
    worker: NonEmpty[str]


class Left(msgspec.Struct, frozen=True, tag="left", omit_defaults=True):
    """A machine still runs, but has no worker, and another machine takes its place.

    The worker of a machine with a slot is gone: the provider has given notice, or it has failed.
    """

    term: Count
    at_s: Rate
    launch: Ordinal
    # True if its worker never sent a heartbeat. Then the machine may have no slot.
    never_reported: bool = False


class Reviewed(msgspec.Struct, frozen=True, tag="reviewed"):
    """Periodic status, for users and for curves over time."""

    term: Count
    at_s: Rate
    version: Count  # J, updates made so far
    updates_left: Rate
    running: Count  # machines
    wanted: Count  # machines
    spent_usd: Rate
    # On-demand cost of the updates so far.
    on_demand_only_usd: Rate
    stability: Rate
    believed: dict[str, EstimateRecord]
    warning: str = ""


class ReplanAsked(msgspec.Struct, frozen=True, tag="replan-asked"):
    """A user's request for another plan. It has no term, since any process may write it."""

    at_s: Rate
    by: NonEmpty[str]
    reason: str = ""


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """The job is over and its machines are released: the last record of a term.

    A stopped job that is resumed is provisioned again, in another term.
    """

    term: Count
    at_s: Rate
    why: NonEmpty[str]
    spent_usd: Rate
    on_demand_only_usd: Rate  # whole job
    # Prediction of the last plan; None without a plan.
    predicted_usd: Rate | None


PlanRecord: TypeAlias = (
    ProvisionerLead
    | Priced
    | Planned
    | LaunchRequested
    | Started
    | SlotAssigned
    | Left
    | Ended
    | Reviewed
    | ReplanAsked
    | Settled
)


def client_token(job: str, launch: int) -> str:
    """Return an order's token for the provider, the same in every process.

    EC2 accepts 64 characters. A job's id is unique forever, since its topics are never emptied.
    """
    return f"doll-{hashlib.sha256(f'{job}/{launch}'.encode()).hexdigest()[:40]}"
