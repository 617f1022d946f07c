"""The input of `doll simulate`: a job, its arrivals, a market and a policy, fully checked.

With `learning`, real SGD runs in the same virtual time. Without it, an update only takes time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.config.policy_names import PolicyName  # noqa: TC001 -- pydantic reads it when run
from common.config.synchronisation import SYNCHRONOUS, SynchronisationSpec
from common.spot.market.billing_spec import BillingRules, BillingSpec
from common.spot.traces.spec import Positive, Seconds, TraceSpec, WrittenPart

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class UniformRates(WrittenPart):
    """A rate of arriving records for each worker in each run, drawn between two bounds."""

    low: Seconds = Field(
        description="Lowest rate of records that arrive at a worker, in records per second."
    )
    high: Positive = Field(
        description="Highest rate of records that arrive at a worker, in records per second."
    )

    @model_validator(mode="after")
    def _ordered(self) -> UniformRates:
        if self.low > self.high:
            raise ValueError(f"low: must be at most high ({self.high:g}), got {self.low:g}")
        return self


class UniformSpeeds(UniformRates):
    """A speed of computing gradients for each worker in each run, drawn between two bounds."""

    low: Positive = Field(
        description="Lowest speed at which a worker computes gradients, as a multiple: at 1, a"
        " gradient takes `gradient.mean_s`."
    )
    high: Positive = Field(
        description="Highest speed at which a worker computes gradients, as a multiple: at 1, a"
        " gradient takes `gradient.mean_s`."
    )


class ArrivalsSpec(WrittenPart):
    """Arrival of records in each stream of a simulation."""

    process: Literal["poisson", "trace", "backlog"] = Field(
        default="poisson",
        description="Arrival of records: `poisson` at random, with the mean `rates`; `trace` as"
        " recorded; with `backlog`, all records exist from the start.",
    )
    trace: TraceSpec | None = Field(
        default=None,
        description="Recording of arrivals per second, for `process: trace`; scaled to the mean"
        " `rates`. Optional. If unset, `process` must not be `trace`.",
    )

    @model_validator(mode="after")
    def _complete(self) -> ArrivalsSpec:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("trace: must be given with `process: trace`, and only then")
        return self


class GradientSpec(WrittenPart):
    """Time to compute the gradient of one batch on a worker (C), gamma distributed."""

    mean_s: Positive = Field(
        default=0.01,
        description="Mean time to compute the gradient of one batch on a worker, in seconds"
        " (mu_C).",
    )
    variation: Seconds = Field(
        default=0.0,
        description="Standard deviation of the time to compute a gradient divided by its mean. 0:"
        " all times are equal; 1: exponential.",
    )


StartUp = Annotated[
    float,
    Field(
        ge=0, description="Time from the order of a machine until its worker computes, in seconds."
    ),
]


Transfer = Annotated[
    float,
    Field(
        ge=0,
        description="Price of network traffic between machines and servers, in US dollars per"
        " gigabyte; `update_mb` sets the traffic.",
    ),
]


class OnDemandSpec(WrittenPart):
    """On-demand machines of a simulation, which the provider never takes away."""

    usd_per_hour: Positive = Field(
        description="Price of an on-demand machine, in US dollars per hour (pi_o)."
    )
    start_up_s: StartUp = 0.0
    billing: BillingSpec = BillingRules()
    transfer_usd_per_gb: Transfer = 0.0


class SpotSpec(WrittenPart):
    """One pool of spot machines (one kind at one price), which the provider may take away."""

    name: str = Field(default="spot", description="Name of the pool of spot machines.")
    usd_per_hour: Positive | TraceSpec = Field(
        description="Price of one machine of the pool, in US dollars per hour (pi_s), or a"
        " recording of prices."
    )
    availability: Annotated[float, Field(ge=0, le=1)] | TraceSpec = Field(
        default=1.0,
        description="Share of the time that a machine of the pool is available, from 0 to 1"
        " (alpha), or a recording of it.",
    )
    cycle_s: Positive = Field(
        default=1000.0,
        description="Mean time from one preemption of a machine of the pool to its next, in"
        " seconds. Not used if `availability` is a recording.",
    )
    together: bool = Field(
        default=False,
        description="If `availability` is a recording: true if all workers follow the same part of"
        " it at the same time, false if each worker follows its own part.",
    )
    bid_usd_per_hour: Positive | None = Field(
        default=None,
        description="Bid for one machine of the pool, in US dollars per hour: machines are"
        " preempted while the price is above it. Optional. If unset, the price never preempts"
        " machines.",
    )
    speed: Positive = Field(
        default=1.0,
        description="Speed at which machines of the pool compute gradients, relative to on-demand"
        " machines.",
    )
    capacity: Count | None = Field(
        default=None,
        description="Maximum number of machines of the pool. Optional. If unset, no limit.",
    )
    start_up_s: StartUp = 0.0
    billing: BillingSpec = BillingRules()
    transfer_usd_per_gb: Transfer = 0.0


class SimulatedBidBrainSpec(WrittenPart):
    """Time that a job loses when its machines change, as the policy `bidbrain` assumes."""

    lambda_s: Seconds = Field(
        default=30.0,
        description="Time for which all work is assumed to stop after the provider takes a machine"
        " away, in seconds (lambda).",
    )
    start_s: Seconds | None = Field(
        default=None,
        description="Time for which all work is assumed to stop when machines are added or"
        " removed, in seconds (sigma). Optional. If unset, the longest start-up time of a machine.",
    )


class PolicySpec(WrittenPart):
    """The policy: the rule that decides which machines a simulated job rents."""

    name: PolicyName = Field(
        default="static",
        description="Policy that decides which machines run. `on-demand`: no spot machines;"
        " `static`: the DOLL paper's optimum, once; `adaptive`: that optimum again when prices or"
        " estimates change; `chance`: meets the deadline with `probability`; `pools`: rents a"
        " number of machines over several spot pools; `bidbrain`: bids for machines that process a"
        " backlog.",
    )
    probability: float = Field(
        default=0.95,
        gt=0.5,
        lt=1,
        description="Probability of meeting the deadline that a plan must have, for the policy"
        " `chance`.",
    )
    spot: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="Number of workers on spot machines (N_s), for the policy `static`. Optional."
        " If unset, the number with the lowest cost that meets the deadline.",
    )
    spot_up_to: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="Maximum number of machines per pool of spot machines, as a multiple of the"
        " number of workers. Above 1 is useful only for policies that rent spare machines, such as"
        " `pools`.",
    )
    max_lag_s: Positive | None = Field(
        default=None,
        description="Maximum time that records may wait for a machine, in seconds. For the policy"
        " `pools` with `while_preempted: keep`. Optional. If unset, no limit.",
    )
    bidbrain: SimulatedBidBrainSpec = Field(
        default=SimulatedBidBrainSpec(),
        description="Time that a job loses when its machines change, for the policy `bidbrain`.",
    )


class LearningSpec(WrittenPart):
    """Training of a real model by SGD on a data set in a simulation, to see its loss over time."""

    data: str = Field(
        default="digits",
        description="Data set to train the model on: `digits` (handwritten digits), or a file that"
        " the command `doll produce` can read; the API accepts only `digits`.",
    )
    hidden: tuple[Count, ...] = Field(
        default=(32,),
        description="Number of units in each hidden layer of the model. If the list is empty,"
        " logistic regression.",
    )
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="Optimizer of the model.")
    learning_rate: Positive = Field(
        default=1e-3, description="Learning rate of the model's optimizer."
    )
    evaluate_every: Count = Field(
        default=20, description="Number of updates of the model from one evaluation to the next."
    )


LIVE_STREAMS = (
    "the policy bidbrain is for a backlog, because more machines cannot make a live stream faster;"
    " use another policy, or `arrivals: {process: backlog}` and `on_preemption: reassign` without"
    " rates"
)


class Experiment(WrittenPart):
    """One job to simulate, with its workers, arriving records, machines and policy."""

    name: str = Field(default="experiment", description="Name of the experiment in its results.")
    workers: Count = Field(description="Number of workers, one per stream (N_tot).")
    rates: Positive | UniformRates | tuple[Seconds, ...] | None = Field(
        default=None,
        description="Records per second that arrive at each worker (lambda_A): one number for all,"
        " one for each worker, or bounds to draw them from. Optional. Leave unset for a backlog.",
    )
    arrivals: ArrivalsSpec = ArrivalsSpec()
    group_size: Count = Field(description="Number of batches per update of the model (K).")
    batch_size: Count = Field(description="Number of records per batch (b).")
    updates: Count = Field(description="Number of updates of the model to make (J).")
    deadline_s: Positive | None = Field(
        default=None,
        description="Deadline, in seconds after the start of the job (theta). Required unless"
        " `deadline_factor` is set.",
    )
    deadline_factor: Positive | None = Field(
        default=None,
        description="Deadline as a multiple of the job's runtime without preemptions (theta /"
        " theta_0). Required unless `deadline_s` is set.",
    )
    gradient: GradientSpec = GradientSpec()
    speeds: Positive | UniformSpeeds | tuple[Positive, ...] = Field(
        default=1.0,
        description="Speed at which each worker computes gradients, as a multiple of the speed of"
        " its machine's pool: one number for all, one for each worker, or bounds to draw them"
        " from. Only if the experiment's `mode` is `protocol`.",
    )
    link_s: Seconds = Field(
        default=0.0,
        description="Time that each message with the model or a gradient occupies the network link"
        " that all workers share, in seconds. Only if the experiment's `mode` is `protocol`.",
    )
    synchronisation: SynchronisationSpec | None = Field(
        default=None,
        description="Synchronisation between workers, as the block `synchronisation` in a job"
        " file. Only if the experiment's `mode` is `protocol`. Optional. If unset, synchronous.",
    )
    on_preemption: Literal["hold", "reassign"] = Field(
        default="hold",
        description="Rule for the stream of a preempted worker. `hold` (as in the DOLL paper): it"
        " waits for that worker; `reassign`: another worker reads it.",
    )
    while_preempted: Literal["pause", "keep"] = Field(
        default="pause",
        description="Records that arrive for a worker while it is preempted. `keep`: they wait in"
        " Kafka; `pause`: none arrive. For `on_preemption: hold`.",
    )
    update_mb: Seconds = Field(
        default=0.0,
        description="Megabytes of weights and gradients that a machine sends and receives per"
        " update, both directions added.",
    )
    on_demand: OnDemandSpec
    spot: tuple[SpotSpec, ...] = Field(
        min_length=1,
        description="Pools of spot machines; a pool is machines of one kind at one price.",
    )
    policy: PolicySpec = PolicySpec()
    mode: Literal["analytic", "protocol"] = Field(
        default="analytic",
        description="Detail of the simulation: `analytic` simulates only the times of updates,"
        " `protocol` every message between workers and the coordinator.",
    )
    learning: LearningSpec | None = Field(
        default=None,
        description="Training of a real model in the simulation. Only if the experiment's `mode`"
        " is `protocol`. Optional. If unset, no model is trained, and updates only take time.",
    )

    @property
    def most_staleness(self) -> int:
        """Maximum number of updates between a gradient's weights and its own update."""
        given = self.synchronisation or SYNCHRONOUS
        modes = [mode for mode, _ in given.modes(self.group_size)]
        return max(m.fixed_staleness + m.staleness_per_worker * self.workers for m in modes)

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        if (self.deadline_s is None) == (self.deadline_factor is None):
            raise ValueError("deadline_s, deadline_factor: give exactly one of them")
        for name, given in (("rates", self.rates), ("speeds", self.speeds)):
            if isinstance(given, tuple) and len(given) != self.workers:
                raise ValueError(
                    f"{name}: must have {self.workers} entries, one per worker, got {len(given)}"
                )
        self._works_off_a_backlog()
        for name in ("speeds", "link_s", "synchronisation", "learning"):
            given, default = getattr(self, name), type(self).model_fields[name].default
            if given != default and self.mode != "protocol":
                raise ValueError(f"{name}: needs `mode: protocol`")
        if self.synchronisation is not None:
            optimizer = "" if self.learning is None else self.learning.optimizer
            self.synchronisation.check_local_steps(self.group_size, optimizer, "learning.optimizer")
        if len({pool.name for pool in self.spot}) != len(self.spot):
            raise ValueError("spot: pools must have different names")
        return self

    def _works_off_a_backlog(self) -> None:
        backlog = self.arrivals.process == "backlog"
        if backlog and self.rates is not None:
            raise ValueError(
                "rates: must not be given for a backlog, whose records exist from the start; remove"
                " it"
            )
        if not backlog and self.rates is None:
            raise ValueError("rates: must be given, unless arrivals are `{process: backlog}`")
        if backlog and (self.on_preemption, self.mode) != ("reassign", "analytic"):
            raise ValueError(
                "arrivals: a backlog needs `on_preemption: reassign` and `mode: analytic`"
            )
        if self.policy.name == "bidbrain" and not backlog:
            raise ValueError(LIVE_STREAMS)
