"""The request of `doll plan` and the API for a plan, every number with its range."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from common.spot.market.billing_spec import BillingRules, BillingSpec
from common.spot.traces.spec import WrittenPart

# A typing error must not use all memory.
MOST_WORKERS = 1_000_000
MOST_POINTS = 10_000
MOST_POOLS = 100
# Two minutes apart, most of a year.
MOST_PRICES = 200_000

Rate = Annotated[float, Field(ge=0, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Usd = Annotated[float, Field(ge=0, le=1e6)]


class SpotPoolAsked(WrittenPart):
    """One kind of spot machines."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="By which the plan names it."
    )
    usd_per_hour: Usd = Field(description="Of one machine.")
    availability: Annotated[float, Field(ge=0, le=1)] = Field(
        description="Share of the time that a machine is there."
    )
    cycle_s: Annotated[float, Field(gt=0, le=1e12)] = Field(
        default=1000.0, description="Mean time from one preemption of a machine to its next."
    )
    capacity: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | None = Field(
        default=None, description="Machines; null: as many as asked."
    )
    start_up_s: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0, description="From the order until the worker works."
    )
    billing: BillingSpec = Field(
        default=BillingRules(), description="What a machine is paid for, as in a market file."
    )
    past_usd_per_hour: (
        Annotated[list[tuple[Seconds, Usd]], Field(min_length=2, max_length=MOST_PRICES)] | None
    ) = Field(
        default=None,
        description="For bidbrain: what a machine has cost, each price from so many seconds on,"
        " until now; null: it has always been `usd_per_hour`.",
    )
    transfer_usd_per_gb: Usd = Field(
        default=0.0, description="Of what machines and servers send each other, see update_mb."
    )


class PlanRequest(WrittenPart):
    """A job's work, its workers and the prices of machines."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "workers": 64,
                "rate_per_s": 125,
                "group_size": 20,
                "batch_size": 256,
                "updates": 10000,
                "deadline_s": 6720,
                "availability": 0.9,
                "spot_usd_per_hour": 0.158,
                "on_demand_usd_per_hour": 0.286,
            }
        },
    )

    policy: Literal["bidbrain"] | None = Field(
        default=None,
        description="bidbrain: what it would bid now, to work off a backlog with `workers` machines"
        " at most; null: the paper's plan.",
    )
    gradient_s: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="For bidbrain: mean time of one gradient on demand."
    )
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = Field(
        default=None, description="N_tot, all of the same `rate_per_s`."
    )
    rate_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None, description="Records per second of each worker."
    )
    rates_per_s: Annotated[list[Rate], Field(min_length=1, max_length=MOST_WORKERS)] | None = Field(
        default=None, description="A rate for each worker instead."
    )
    job: str = Field(
        default="",
        max_length=200,
        description="K, b, and the updates and time that are left are taken from this job, and"
        " rates from what arrived lately, where they are not given.",
    )
    group_size: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        default=None, description="K, batches per update."
    )
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        default=None, description="b, records per batch."
    )
    updates: Annotated[float, Field(ge=0, le=1e15)] | None = Field(
        default=None, description="J, those that are left."
    )
    deadline_s: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        default=None, description="Seconds that are left."
    )
    availability: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Share of the time that a spot machine is there."
    )
    spot_usd_per_hour: Usd | None = Field(default=None, description="Of one spot machine.")
    on_demand_usd_per_hour: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="Of one on-demand machine."
    )
    cycle_s: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None,
        description="Mean time from one preemption of a machine to its next; null: 1000.",
    )
    pools: Annotated[list[SpotPoolAsked], Field(min_length=1, max_length=MOST_POOLS)] | None = (
        Field(
            default=None,
            description="Several kinds of spot machines instead of `availability`, `cycle_s` and"
            " `spot_usd_per_hour`: each is planned for, and the cheapest is the plan.",
        )
    )
    seen: bool = Field(
        default=False,
        description="With a job: what its provisioner has seen of a pool stands above the pool's"
        " `availability` and `cycle_s`.",
    )
    update_mb: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        default=None,
        description="Megabytes that a machine sends and receives for an update, for pools with a"
        " price of transfer; null: what the job says, else what its workers"
        " have counted, or none.",
    )
    probability: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Meet the deadline with this probability, not only on average."
    )
    spot: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | None = Field(
        default=None, description="Say what so many spot workers come to instead."
    )
    list_workers: bool = Field(default=False, description="Whether to name the spot workers.")
    curve: int = Field(
        default=0,
        ge=0,
        le=MOST_POINTS,
        description="About so many points of cost and runtime against the number of spot workers.",
    )
