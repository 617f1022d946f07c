"""A plan as it is told: the answer of the API, and what `doll plan` draws and writes.

Without the theory, so that whoever only draws a plan need not load scipy.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ToldCurve(BaseModel):
    """Cost and runtime against the number of spot workers: columns of equal length."""

    model_config = ConfigDict(frozen=True)

    spot: tuple[int, ...] = Field(description="N_s, ascending: 0, N_tot and the plan's among them.")
    cost_usd: tuple[float | None, ...] = Field(description="Null: never done.")
    runtime_s: tuple[float | None, ...] = Field(description="Null: never done.")
    in_time: tuple[float, ...] = Field(description="Probability to meet the deadline.")
    enough: tuple[bool, ...] = Field(description="Whether so many do what was asked.")


class ToldPlan(BaseModel):
    """How many workers shall run on spot machines, and what to expect of it."""

    model_config = ConfigDict(frozen=True)

    feasible: bool = Field(description="Whether the deadline can be met; `reason` says why not.")
    spot: int = Field(ge=0, description="N_s", examples=[30])
    on_demand: int = Field(ge=0, description="Workers on demand.", examples=[34])
    expected_cost_usd: float | None = Field(description="Null: it is never done.")
    expected_runtime_s: float | None = Field(description="Null: it is never done.")
    cost_ratio_to_on_demand: float | None = Field(description="Null: it is never done.")
    binding: str = Field(description="What limits the plan.", examples=["deadline"])
    reason: str = Field(description="Why this plan; or why the deadline cannot be met.")
    deadline_probability: float = Field(ge=0, le=1, description="To meet the deadline.")
    spot_workers: tuple[int, ...] | None = Field(
        description="Which workers run on spot machines, where it was asked to name them."
    )
    names: tuple[str, ...] = Field(description="Of all workers, where a job says them.")
    curve: ToldCurve | None = Field(description="Null: it was not asked for.")
    notes: tuple[str, ...] = Field(description="Where the numbers come from, if not from you.")
    # What was planned for: given, or taken from a job.
    workers: int = Field(ge=1, description="N_tot")
    arrivals_per_s: float = Field(description="Of all workers together.")
    group_size: int = Field(description="K, batches per update.")
    batch_size: int = Field(description="b, records per batch.")
    updates: float = Field(description="J, those that are left.")
    deadline_s: float = Field(description="Seconds that are left.")
    undisturbed_s: float | None = Field(description="theta_0: its time if nothing is preempted.")
    availability: float = Field(description="Share of the time that a spot machine is there.")
    spot_usd_per_hour: float = Field(description="Of one spot machine.")
    on_demand_usd_per_hour: float = Field(description="Of one on-demand machine.")
    on_demand_only_usd: float | None = Field(description="Cost with every worker on demand.")
    cycle_s: float = Field(description="Mean time from one preemption of a machine to its next.")
