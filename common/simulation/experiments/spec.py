"""What a person asks `doll simulate`: a job, its arrivals, a market, a policy; checked whole.

`learning` asks for real SGD in the same virtual time; without it an update costs only its time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.policies.policy import PolicyName  # noqa: TC001 -- pydantic reads it when run
from common.traces.spec import TraceSpec  # noqa: TC001 -- pydantic reads it when run

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Part(BaseModel):
    """What all parts share: nothing unknown, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class UniformRates(Part):
    """A rate drawn for each worker, anew in each run (section V-B: U(1, 250))."""

    low: Seconds
    high: Positive

    @model_validator(mode="after")
    def _ordered(self) -> UniformRates:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class ArrivalsSpec(Part):
    """The process by which records arrive at each stream."""

    process: Literal["poisson", "gamma", "even", "trace"] = "poisson"
    variation: Positive = 1.0  # gamma: standard deviation of the gaps over their mean
    trace: TraceSpec | None = None  # trace: arrivals per second over time; its mean becomes `rates`

    @model_validator(mode="after")
    def _complete(self) -> ArrivalsSpec:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("a trace is named exactly where the process is trace")
        return self


class GradientSpec(Part):
    """C, the time that a worker takes for the gradient of one batch: gamma distributed."""

    mean_s: Positive = 0.01  # mu_C
    variation: Seconds = 0.0  # standard deviation over the mean; 0: always the same, 1: exponential


class OnDemandSpec(Part):
    """Machines that are never preempted."""

    usd_per_hour: Positive  # pi_o
    start_up_s: Seconds = 0.0
    minimum_billing_s: Seconds = 0.0


class SpotSpec(Part):
    """Machines of one pool that may be preempted."""

    name: str = "spot"
    usd_per_hour: Positive | TraceSpec  # pi_s
    availability: Annotated[float, Field(ge=0, le=1)] | TraceSpec = 1.0  # alpha
    cycle_s: Positive = 1000.0  # mean time from one preemption to the next; not for traces
    together: bool = False  # with a trace: all workers see it at once; else each its own part of it
    bid_usd_per_hour: Positive | None = None  # preempted while the price is above; None: never so
    speed: Positive = 1.0  # of gradients, against on-demand
    capacity: Count | None = None
    start_up_s: Seconds = 0.0
    minimum_billing_s: Seconds = 0.0


class PolicySpec(Part):
    """Who decides what runs where."""

    name: PolicyName = "static"
    probability: Annotated[float, Field(gt=0.5, lt=1)] = 0.95  # chance, reassign: of the deadline
    spot: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = (
        None  # static: N_s as given instead of the optimum
    )


class LearningSpec(Part):
    """Real SGD on a real data set."""

    data: str = "digits"  # built in, or a file that `doll produce` can read
    hidden: tuple[Count, ...] = (32,)  # widths of the hidden layers; empty: logistic regression
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: Positive = 1e-3
    evaluate_every: Count = 20  # updates


class Experiment(Part):
    """One thing to simulate."""

    name: str = "experiment"
    workers: Count  # N_tot, one per stream
    rates: Positive | UniformRates | tuple[Seconds, ...]  # lambda_A, records per second
    arrivals: ArrivalsSpec = ArrivalsSpec()
    group_size: Count  # K
    batch_size: Count  # b
    updates: Count  # J(epsilon)
    deadline_s: Positive | None = None  # theta
    deadline_factor: Positive | None = None  # theta / theta_0 instead
    gradient: GradientSpec = GradientSpec()
    on_preemption: Literal["hold", "reassign"] = "hold"  # the paper's: the stream waits
    while_preempted: Literal["pause", "keep"] = "pause"  # hold: do its records wait in Kafka?
    on_demand: OnDemandSpec
    spot: tuple[SpotSpec, ...] = Field(min_length=1)
    policy: PolicySpec = PolicySpec()
    mode: Literal["updates", "full"] = "updates"  # the update process alone; or the whole protocol
    learning: LearningSpec | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        if (self.deadline_s is None) == (self.deadline_factor is None):
            raise ValueError("give either deadline_s or deadline_factor")
        if isinstance(self.rates, tuple) and len(self.rates) != self.workers:
            raise ValueError(f"rates has {len(self.rates)} entries for {self.workers} workers")
        if self.policy.name == "reassign" and self.on_preemption != "reassign":
            raise ValueError(
                "policy reassign leaves slots without a machine, whose streams nobody would ever"
                " read: add `on_preemption: reassign`"
            )
        if self.learning is not None and self.mode != "full":
            raise ValueError("learning needs mode: full")
        if len({pool.name for pool in self.spot}) != len(self.spot):
            raise ValueError("two spot pools have one name")
        return self
