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
    """One pool of spot machines: machines of one kind at one price."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Name of the pool of spot machines, for the response."
    )
    usd_per_hour: Usd = Field(
        description="Price of one machine of the pool, in US dollars per hour."
    )
    availability: Annotated[float, Field(ge=0, le=1)] = Field(
        description="Share of the time that a machine of the pool is available, from 0 to 1."
    )
    cycle_s: Annotated[float, Field(gt=0, le=1e12)] = Field(
        default=1000.0,
        description="Mean time from one preemption of a machine of the pool to its next, in"
        " seconds.",
    )
    capacity: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | None = Field(
        default=None,
        description="Maximum number of machines of the pool. Optional. If unset, no limit.",
    )
    start_up_s: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0,
        description="Time from the order of a machine of the pool until its worker computes, in"
        " seconds.",
    )
    billing: BillingSpec = Field(
        default=BillingRules(),
        description="Billing rules of the pool's machines, or the name of a provider's rules, such"
        " as `ec2`.",
    )
    past_usd_per_hour: (
        Annotated[list[tuple[Seconds, Usd]], Field(min_length=2, max_length=MOST_PRICES)] | None
    ) = Field(
        default=None,
        description="Past prices of a machine of the pool, for `policy: bidbrain`: pairs of a time"
        " in seconds and the price from then on, in US dollars per hour. The last time is now."
        " Optional. If unset, the price has always been `usd_per_hour`.",
    )
    transfer_usd_per_gb: Usd = Field(
        default=0.0,
        description="Price of network traffic between machines of the pool and servers, in US"
        " dollars per gigabyte; `update_mb` sets the traffic.",
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
        description="Policy of the plan. `bidbrain` returns the bids of this policy for a backlog,"
        " with at most `workers` machines. Optional. If unset, the DOLL paper's optimum for a"
        " deadline.",
    )
    gradient_s: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None,
        description="Mean time to compute the gradient of one batch on an on-demand machine, in"
        " seconds. For `policy: bidbrain`.",
    )
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = Field(
        default=None, description="Number of workers (N_tot), all with the same `rate_per_s`."
    )
    rate_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None,
        description="Rate of records that arrive at each worker, in records per second. Optional."
        " If unset, `rates_per_s` or `job` determines the rates.",
    )
    rates_per_s: Annotated[list[Rate], Field(min_length=1, max_length=MOST_WORKERS)] | None = Field(
        default=None,
        description="Records per second of each worker, instead of `workers` and `rate_per_s`.",
    )
    job: str = Field(
        default="",
        max_length=200,
        description="Name of a job that supplies unset values: K, b, the remaining updates and"
        " time, and the rates of its recent arrivals (K: batches per update, b: records per batch)."
        " Optional. If unset, the request must contain them.",
    )
    group_size: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        default=None,
        description="Number of batches per update of the model (K). Optional if `job` is set;"
        " then, if unset, that job's value.",
    )
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        default=None,
        description="Number of records per batch (b). Optional if `job` is set; then, if unset,"
        " that job's value.",
    )
    updates: Annotated[float, Field(ge=0, le=1e15)] | None = Field(
        default=None,
        description="Number of updates of the model that are left to make (J). Optional if `job`"
        " is set; then, if unset, that job's value.",
    )
    deadline_s: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        default=None,
        description="Time left until the deadline, in seconds. Optional if `job` is set; then, if"
        " unset, that job's value.",
    )
    availability: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Share of the time that a spot machine is available, from 0 to 1. Required"
        " unless `pools` is set.",
    )
    spot_usd_per_hour: Usd | None = Field(
        default=None,
        description="Price of one spot machine, in US dollars per hour. Required unless `pools` is"
        " set.",
    )
    on_demand_usd_per_hour: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="Price of one on-demand machine, in US dollars per hour."
    )
    cycle_s: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None,
        description="Mean time from one preemption of a spot machine to its next, in seconds."
        " Optional. If unset, 1000.",
    )
    pools: Annotated[list[SpotPoolAsked], Field(min_length=1, max_length=MOST_POOLS)] | None = (
        Field(
            default=None,
            description="Several pools of spot machines (each of one kind at one price), instead of"
            " `availability`, `cycle_s` and `spot_usd_per_hour`. The plan uses the cheapest pool."
            " Optional.",
        )
    )
    seen: bool = Field(
        default=False,
        description="True to replace `availability` and `cycle_s` of each pool with the values"
        " that were measured on the machines of `job`, which must be set.",
    )
    update_mb: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        default=None,
        description="Megabytes of weights and gradients that a machine sends and receives per"
        " update, both directions added, for pools with a `transfer_usd_per_gb`. Optional. If"
        " unset, the mean that the workers of `job` measured, or 0.",
    )
    probability: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Probability of meeting the deadline that the plan must have. Optional. If"
        " unset, the plan meets the deadline on average.",
    )
    spot: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | None = Field(
        default=None,
        description="Number of workers on spot machines (N_s) to evaluate. Optional. If unset, the"
        " plan chooses the number.",
    )
    list_workers: bool = Field(
        default=False,
        description="True to list the indexes of the workers that run on spot machines.",
    )
    curve: int = Field(
        default=0,
        ge=0,
        le=MOST_POINTS,
        description="Approximate number of points in the response's curve of cost and runtime by"
        " the number of workers on spot machines. 0 returns no curve.",
    )
