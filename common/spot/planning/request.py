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
        description="Name of the pool in the plan."
    )
    usd_per_hour: Usd = Field(
        description="Price of one machine of the pool, in US dollars per hour."
    )
    availability: Annotated[float, Field(ge=0, le=1)] = Field(
        description="Share of the time that a machine of the pool is available, 0 to 1."
    )
    cycle_s: Annotated[float, Field(gt=0, le=1e12)] = Field(
        default=1000.0,
        description="Mean time in seconds between two preemptions of a machine of the pool.",
    )
    capacity: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | None = Field(
        default=None, description="Maximum number of machines. Optional. If unset, no limit."
    )
    start_up_s: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0, description="Seconds from the order of a machine until its worker works."
    )
    billing: BillingSpec = Field(
        default=BillingRules(), description="Billing of a machine, as in a market file."
    )
    past_usd_per_hour: (
        Annotated[list[tuple[Seconds, Usd]], Field(min_length=2, max_length=MOST_PRICES)] | None
    ) = Field(
        default=None,
        description="Past prices of a machine for the policy bidbrain, as pairs of the time in"
        " seconds and the price in US dollars per hour from then on. The last time is now."
        " Optional. If unset, the price has always been `usd_per_hour`.",
    )
    transfer_usd_per_gb: Usd = Field(
        default=0.0,
        description="Price of traffic between machines and servers, in US dollars per gigabyte;"
        " `update_mb` is the traffic.",
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
        description="`bidbrain` returns the bids of this policy for a backlog, with at most"
        " `workers` machines. Optional. If unset, the paper's plan.",
    )
    gradient_s: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None,
        description="Mean seconds per gradient on an on-demand machine, for the policy bidbrain.",
    )
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = Field(
        default=None, description="Number of workers (N_tot), all with the same `rate_per_s`."
    )
    rate_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None, description="Records per second that arrive at each worker."
    )
    rates_per_s: Annotated[list[Rate], Field(min_length=1, max_length=MOST_WORKERS)] | None = Field(
        default=None,
        description="Records per second of each worker, instead of `workers` and `rate_per_s`.",
    )
    job: str = Field(
        default="",
        max_length=200,
        description="Name of a job that supplies unset values: K, b, the remaining updates and"
        " time, and the rates of its recent arrivals.",
    )
    group_size: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        default=None, description="Number of batches per update (K)."
    )
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        default=None, description="Number of records per batch (b)."
    )
    updates: Annotated[float, Field(ge=0, le=1e15)] | None = Field(
        default=None, description="Number of updates left to make (J)."
    )
    deadline_s: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        default=None, description="Seconds left until the deadline."
    )
    availability: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Share of the time that a spot machine is available, 0 to 1.",
    )
    spot_usd_per_hour: Usd | None = Field(
        default=None, description="Price of a spot machine, in US dollars per hour."
    )
    on_demand_usd_per_hour: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="Price of an on-demand machine, in US dollars per hour."
    )
    cycle_s: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None,
        description="Mean time in seconds between two preemptions of a spot machine. Optional. If"
        " unset, 1000.",
    )
    pools: Annotated[list[SpotPoolAsked], Field(min_length=1, max_length=MOST_POOLS)] | None = (
        Field(
            default=None,
            description="Several pools of spot machines, instead of `availability`, `cycle_s` and"
            " `spot_usd_per_hour`. The cheapest pool is the plan.",
        )
    )
    seen: bool = Field(
        default=False,
        description="True to replace `availability` and `cycle_s` of each pool with what the job's"
        " provisioner has observed. Needs `job`.",
    )
    update_mb: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        default=None,
        description="Megabytes that a machine sends and receives per update, for pools with a"
        " `transfer_usd_per_gb`. Optional. If unset, the value of the job, else what its workers"
        " measured, else 0.",
    )
    probability: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Probability of meeting the deadline. Optional. If unset, on average.",
    )
    spot: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | None = Field(
        default=None, description="Evaluate this number of spot workers instead of planning."
    )
    list_workers: bool = Field(default=False, description="True to list the spot workers.")
    curve: int = Field(
        default=0,
        ge=0,
        le=MOST_POINTS,
        description="Approximate number of points in the curve of cost and runtime by the number of"
        " spot workers. 0 returns no curve.",
    )
