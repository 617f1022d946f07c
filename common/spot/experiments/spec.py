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
    """A rate drawn for each worker in each run (section V-B: U(1, 250))."""

    low: Seconds = Field(description="Lowest rate of a worker, in records per second.")
    high: Positive = Field(description="Highest rate of a worker, in records per second.")

    @model_validator(mode="after")
    def _ordered(self) -> UniformRates:
        if self.low > self.high:
            raise ValueError(f"low: must be at most high ({self.high:g}), got {self.low:g}")
        return self


class UniformSpeeds(UniformRates):
    """A speed drawn for each worker in each run."""

    low: Positive = Field(
        description="Lowest speed of a worker; at 1, a gradient takes `gradient.mean_s`."
    )
    high: Positive = Field(
        description="Highest speed of a worker; at 1, a gradient takes `gradient.mean_s`."
    )


class ArrivalsSpec(WrittenPart):
    """The process by which records arrive at each stream."""

    process: Literal["poisson", "trace", "backlog"] = Field(
        default="poisson",
        description="How records arrive. With `backlog`, all exist from the start.",
    )
    trace: TraceSpec | None = Field(
        default=None,
        description="Recorded arrivals per second, for `process: trace`; scaled to the mean"
        " `rates`.",
    )

    @model_validator(mode="after")
    def _complete(self) -> ArrivalsSpec:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("trace: must be given with `process: trace`, and only then")
        return self


class GradientSpec(WrittenPart):
    """C, the time of one batch's gradient on a worker: gamma distributed."""

    mean_s: Positive = Field(
        default=0.01, description="Mean time of one gradient in seconds (mu_C)."
    )
    variation: Seconds = Field(
        default=0.0,
        description="Standard deviation of the time over its mean. 0 is constant, 1 exponential.",
    )


StartUp = Annotated[
    float,
    Field(ge=0, description="Seconds from the order of a machine until its worker works."),
]


Transfer = Annotated[
    float, Field(ge=0, description="Of what machines and servers send each other, see update_mb.")
]


class OnDemandSpec(WrittenPart):
    """Machines that are never preempted."""

    usd_per_hour: Positive = Field(
        description="Price of an on-demand machine, in US dollars per hour (pi_o)."
    )
    start_up_s: StartUp = 0.0
    billing: BillingSpec = BillingRules()
    transfer_usd_per_gb: Transfer = 0.0


class SpotSpec(WrittenPart):
    """Machines of one pool that may be preempted."""

    name: str = Field(default="spot", description="Name of the pool.")
    usd_per_hour: Positive | TraceSpec = Field(
        description="Price of a machine of the pool, in US dollars per hour (pi_s), or a recording."
    )
    availability: Annotated[float, Field(ge=0, le=1)] | TraceSpec = Field(
        default=1.0,
        description="Share of the time that a machine is available (alpha), or a recording.",
    )
    cycle_s: Positive = Field(
        default=1000.0,
        description="Mean time in seconds between two preemptions of a machine. Not for traces.",
    )
    together: bool = Field(
        default=False,
        description="With a trace: true if all workers follow the same part of it at the same time,"
        " false if each follows its own part.",
    )
    bid_usd_per_hour: Positive | None = Field(
        default=None,
        description="Bid in US dollars per hour; machines are preempted while the price is above."
        " Optional. If unset, the price never preempts machines.",
    )
    speed: Positive = Field(
        default=1.0, description="Speed of gradients, relative to on-demand machines."
    )
    capacity: Count | None = Field(
        default=None, description="Maximum number of machines. Optional. If unset, no limit."
    )
    start_up_s: StartUp = 0.0
    billing: BillingSpec = BillingRules()
    transfer_usd_per_gb: Transfer = 0.0


class SimulatedBidBrainSpec(WrittenPart):
    """Time that a job loses when its machines change, as `bidbrain` counts it."""

    lambda_s: Seconds = Field(
        default=30.0, description="Seconds that all work stops after an eviction (lambda)."
    )
    start_s: Seconds | None = Field(
        default=None,
        description="Seconds that all work stops when machines are added or removed (sigma)."
        " Optional. If unset, the longest start-up time.",
    )


class PolicySpec(WrittenPart):
    """The policy that decides which machines run."""

    name: PolicyName = Field(default="static", description="Name of the policy.")
    probability: float = Field(
        default=0.95,
        gt=0.5,
        lt=1,
        description="Probability of meeting the deadline, for the policy chance.",
    )
    spot: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="Number of spot workers (N_s) of the policy static. Optional. If unset, the"
        " optimum.",
    )
    spot_up_to: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="Maximum number of machines per spot pool, as a multiple of the streams."
        " Above 1"
        " it helps only policies that count machines.",
    )
    max_lag_s: Positive | None = Field(
        default=None,
        description="Longest time in seconds that records may wait for a machine, for the"
        " policy pools"
        " with `while_preempted: keep`. Optional. If unset, no limit.",
    )
    bidbrain: SimulatedBidBrainSpec = Field(
        default=SimulatedBidBrainSpec(),
        description="Cost of changing machines, for the policy bidbrain.",
    )


class LearningSpec(WrittenPart):
    """Real SGD on a real data set."""

    data: str = Field(
        default="digits", description="Data set: `digits`, or a file that `doll produce` can read."
    )
    hidden: tuple[Count, ...] = Field(
        default=(32,), description="Widths of the hidden layers. Without any, logistic regression."
    )
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="Optimizer of the steps.")
    learning_rate: Positive = Field(default=1e-3, description="Learning rate of a step.")
    evaluate_every: Count = Field(default=20, description="Number of updates between evaluations.")


LIVE_STREAMS = (
    "the policy bidbrain is for a backlog, because more machines cannot make a live stream faster;"
    " use another policy, or `arrivals: {process: backlog}` and `on_preemption: reassign` without"
    " rates"
)


class Experiment(WrittenPart):
    """One experiment to simulate."""

    name: str = Field(default="experiment", description="Name of the experiment in its results.")
    workers: Count = Field(description="Number of workers, one per stream (N_tot).")
    rates: Positive | UniformRates | tuple[Seconds, ...] | None = Field(
        default=None,
        description="Records per second that arrive at each worker (lambda_A). Leave unset for a"
        " backlog.",
    )
    arrivals: ArrivalsSpec = ArrivalsSpec()
    group_size: Count = Field(description="Number of batches per update (K).")
    batch_size: Count = Field(description="Number of records per batch (b).")
    updates: Count = Field(description="Number of updates to make (J).")
    deadline_s: Positive | None = Field(
        default=None, description="Deadline in seconds (theta). Or give `deadline_factor`."
    )
    deadline_factor: Positive | None = Field(
        default=None,
        description="Deadline as a multiple of the runtime without preemptions (theta / theta_0).",
    )
    gradient: GradientSpec = GradientSpec()
    speeds: Positive | UniformSpeeds | tuple[Positive, ...] = Field(
        default=1.0,
        description="Speed of each worker's gradients, multiplied by the speed of its pool.",
    )
    link_s: Seconds = Field(
        default=0.0,
        description="Seconds that each model and each gradient occupy the link that workers share.",
    )
    synchronisation: SynchronisationSpec | None = Field(
        default=None,
        description="Synchronisation, as in a job file. Optional. If unset, synchronous.",
    )
    on_preemption: Literal["hold", "reassign"] = Field(
        default="hold",
        description="With `hold` (as in the paper), the stream of a preempted worker waits; with"
        " `reassign`, another worker reads it.",
    )
    while_preempted: Literal["pause", "keep"] = Field(
        default="pause",
        description="With `on_preemption: hold`: `keep` if records that arrive while a worker is"
        " preempted wait in Kafka, `pause` if none arrive.",
    )
    update_mb: Seconds = Field(
        default=0.0, description="Megabytes that a machine sends and receives per update."
    )
    on_demand: OnDemandSpec
    spot: tuple[SpotSpec, ...] = Field(min_length=1, description="Pools of spot machines.")
    policy: PolicySpec = PolicySpec()
    mode: Literal["analytic", "protocol"] = Field(
        default="analytic",
        description="`analytic` simulates only the times of updates, `protocol` all messages.",
    )
    learning: LearningSpec | None = Field(
        default=None,
        description="Training of a real model in mode protocol. Optional. If unset, updates only"
        " take time.",
    )

    @property
    def most_staleness(self) -> int:
        """Maximum number of versions since the weights of a gradient that counts."""
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
