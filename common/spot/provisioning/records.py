"""The nouns of a job's plans topic: who provisions, what was decided and why, what machines cost.

One partition, one order. Several provisioners may believe that they are the one. The fold in
`common.spot.provisioning.fleet_ledger` says what counts, as `common.core.history` does for leaders:

    offset   0         1       2        3        4         5         6          7
    record   Lead(-1)  Priced  Planned  Ordered  Started   Lead(0)   Ordered    Ended
                       of 0    of 0     1 of 0   1 of 0              2 of 0     1 of 5
    term     0         0       0        0        0         5         void       5

An order is written down before the machine is asked for, and asked for only after it was read back
as valid; who takes over asks again with the same token, and gets the same machine.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

import msgspec

from common.core.field_types import Count, NonEmpty, Ordinal, OrNone, Rate
from common.spot.machines import Offer


class ProvisionerLead(msgspec.Struct, frozen=True, tag="provisioner-lead"):
    """A candidate wants to provision: counts only if `after` is what the topic last came to.

    After a `Settled` that is its offset: who has not read that the job is over cannot begin anew.
    """

    after: OrNone  # offset of the Lead found in force, or of the Settled that ended it; -1 for none
    candidate: NonEmpty[str]  # unique for each candidacy
    at_s: Rate  # since 1970, as all times here


class OfferPrice(msgspec.Struct, frozen=True):
    """What one type of a pool's machines costs, anywhere or in one zone."""

    pool: NonEmpty[str]
    type: NonEmpty[str]
    zone: str
    usd_per_hour: Rate


class Priced(msgspec.Struct, frozen=True, tag="priced", omit_defaults=True):
    """What machines cost from now on; at first everything, then what changed."""

    term: Count
    at_s: Rate
    usd_per_hour: dict[NonEmpty[str], Rate]  # by pool
    offers: tuple[OfferPrice, ...] = ()  # where prices in a pool differ


class EstimateRecord(msgspec.Struct, frozen=True):
    """An estimate: value, standard deviation and where the quantity lies with 90 %."""

    value: Rate
    std: Rate
    low: Rate
    high: Rate


class OfferCount(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many machines of an offer there shall be: `common.spot.machines.Offer`."""

    pool: str
    count: Count
    type: str = ""
    zone: str = ""
    bid_usd_per_hour: Rate | None = None


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A policy's decision, by slot or counted; it stands until the next one."""

    term: Count
    number: Ordinal  # counts the job's plans, from 1
    at_s: Rate
    policy: NonEmpty[str]
    why: NonEmpty[str]  # what made it decide: the first plan, a price, an estimate, somebody asked
    reason: NonEmpty[str]  # why this plan, in the policy's words
    feasible: bool
    binding: str  # `common.spot.theory.provisioning.Binding`
    pools: NonEmpty[tuple[str, ...]]  # by index; the first is on-demand
    places: tuple[OrNone, ...]  # (N_tot,) pool of each slot, -1 for none; empty: counted
    spot: Count  # slots on spot machines
    on_demand: Count  # machines on demand
    updates_left: Rate
    deadline_left_s: Rate | None  # None: the job has none
    spent_usd: Rate  # until now
    expected_cost_usd: Rate  # of what is left
    expected_runtime_s: Rate  # of what is left
    on_demand_only_usd: Rate  # of what is left, with every worker on demand
    stability: Rate  # capacity over arrivals, Proposition 1; below 1 updates cannot keep up
    usd_per_hour: dict[NonEmpty[str], Rate]  # by pool, as it was decided on
    # "arrivals_per_s", "gradient_s", "availability.<pool>", ...
    believed: dict[str, EstimateRecord]
    warning: str = ""  # the fleet is below what Proposition 1 needs, and why it is left so
    transfer_usd: float = 0.0  # of the expected cost: what machines and servers send each other
    answers: OrNone = -1  # offset of the latest ReplanAsked that had been read, -1 for none
    machines: tuple[OfferCount, ...] = ()  # where they are counted

    @property
    def counted(self) -> bool:
        """Whether it does not say which machine is for which slot."""
        return not self.places

    @property
    def counts(self) -> dict[Offer, int]:
        """How many machines of each offer there shall be, where they are counted."""
        return {
            Offer(each.pool, each.type, each.zone, each.bid_usd_per_hour): each.count
            for each in self.machines
        }

    @property
    def predicted_usd(self) -> float:
        """What the machines of the whole job cost if it comes as expected."""
        return self.spent_usd + self.expected_cost_usd - self.transfer_usd


class LaunchRequested(msgspec.Struct, frozen=True, tag="launch-requested", omit_defaults=True):
    """A machine is to be launched; the order that comes first with this number counts."""

    term: Count
    launch: Ordinal  # counts the job's launches, from 1
    at_s: Rate
    slot: Count | None  # None: for whichever it is seated on, see `SlotAssigned`
    pool: NonEmpty[str]
    worker: NonEmpty[str]
    machine_type: str = ""  # empty: whichever the pool has
    zone: str = ""  # likewise
    bid_usd_per_hour: Rate | None = None  # what it may cost at most; None: no limit


class Started(msgspec.Struct, frozen=True, tag="started", omit_defaults=True):
    """The machine of an order was seen running."""

    term: Count
    launch: Ordinal
    at_s: Rate  # since when it is paid for
    machine: NonEmpty[str]  # the provider's id
    machine_type: str = ""  # what was given, where a pool has several; else empty
    zone: str = ""  # likewise
    usd_per_hour: Rate | None = None  # at which it was given; None: as was told of its offer


EndedBecause: TypeAlias = Literal[
    "preempted",
    "released",
    "failed",
    "refused",  # it never began: there was no capacity, or the order was wrong
    "lost",  # it is no longer there and nobody knows why
]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The machine of an order is gone, or there will be none."""

    term: Count
    launch: Ordinal
    at_s: Rate
    cause: EndedBecause
    detail: str = ""


class SlotAssigned(msgspec.Struct, frozen=True, tag="slot-assigned"):
    """A slot's stream is this machine's until the machine ends."""

    term: Count
    at_s: Rate
    slot: Count
    launch: Ordinal
    # The name under which the machine's worker reads it: the slot's static member.
    worker: NonEmpty[str]


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The worker of a machine that has a seat is gone from it: the slot waits for another one.

    The machine runs still: the provider has given notice, or the worker has failed.
    """

    term: Count
    at_s: Rate
    launch: Ordinal


class Reviewed(msgspec.Struct, frozen=True, tag="reviewed"):
    """How things stand, now and then: for people, and for curves over time."""

    term: Count
    at_s: Rate
    version: Count  # J, updates made so far
    updates_left: Rate
    running: Count  # machines
    wanted: Count  # machines
    spent_usd: Rate
    on_demand_only_usd: Rate  # what the updates made so far would have cost that way
    stability: Rate
    believed: dict[str, EstimateRecord]
    warning: str = ""


class ReplanAsked(msgspec.Struct, frozen=True, tag="replan-asked"):
    """A person wants the policy to be asked anew; of no term, since anybody may ask."""

    at_s: Rate
    by: NonEmpty[str]
    reason: str = ""


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """The job is over and its machines are given back: the last word of a term.

    A stopped job that is resumed is provisioned again, in another term.
    """

    term: Count
    at_s: Rate
    why: NonEmpty[str]
    spent_usd: Rate
    on_demand_only_usd: Rate  # of the whole job
    predicted_usd: Rate | None  # by the last plan; None: there was none


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
    """Name an order for the provider: the same for whoever carries it out; EC2 takes 64 characters.

    A job's id is its own for ever, since its topics are never emptied.
    """
    return f"doll-{hashlib.sha256(f'{job}/{launch}'.encode()).hexdigest()[:40]}"
