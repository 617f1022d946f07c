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

    low: Seconds = Field(description="Records per second.")
    high: Positive = Field(description="Records per second.")

    @model_validator(mode="after")
    def _ordered(self) -> UniformRates:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class UniformSpeeds(UniformRates):
    """A speed drawn for each worker in each run."""

    low: Positive = Field(description="Of gradients; 1: `gradient.mean_s` for one.")
    high: Positive = Field(description="Likewise.")


class ArrivalsSpec(WrittenPart):
    """The process by which records arrive at each stream."""

    process: Literal["poisson", "trace", "backlog"] = Field(
        default="poisson",
        description="How records arrive; backlog: all are there from the beginning.",
    )
    trace: TraceSpec | None = Field(
        default=None,
        description="trace: arrivals per second over time; its mean becomes `rates`.",
    )

    @model_validator(mode="after")
    def _complete(self) -> ArrivalsSpec:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("a trace is named exactly where the process is trace")
        return self


class GradientSpec(WrittenPart):
    """C, the time of one batch's gradient on a worker: gamma distributed."""

    mean_s: Positive = Field(default=0.01, description="mu_C")
    variation: Seconds = Field(
        default=0.0,
        description="Standard deviation over the mean; 0: always the same, 1: exponential.",
    )


StartUp = Annotated[float, Field(ge=0, description="From the order until the worker works.")]


Transfer = Annotated[
    float, Field(ge=0, description="Of what machines and servers send each other, see update_mb.")
]


class OnDemandSpec(WrittenPart):
    """Machines that are never preempted."""

    usd_per_hour: Positive = Field(description="pi_o")
    start_up_s: StartUp = 0.0
    billing: BillingSpec = BillingRules()
    transfer_usd_per_gb: Transfer = 0.0


class SpotSpec(WrittenPart):
    """Machines of one pool that may be preempted."""

    name: str = Field(default="spot", description="Of the pool.")
    usd_per_hour: Positive | TraceSpec = Field(description="pi_s")
    availability: Annotated[float, Field(ge=0, le=1)] | TraceSpec = Field(
        default=1.0, description="alpha"
    )
    cycle_s: Positive = Field(
        default=1000.0, description="Mean time from one preemption to the next; not for traces."
    )
    together: bool = Field(
        default=False,
        description="With a trace: all workers see it at once; else each its own part of it.",
    )
    bid_usd_per_hour: Positive | None = Field(
        default=None, description="Preempted while the price is above; null: never so."
    )
    speed: Positive = Field(default=1.0, description="Of gradients, against on-demand.")
    capacity: Count | None = Field(default=None, description="Machines; null: as many as asked.")
    start_up_s: StartUp = 0.0
    billing: BillingSpec = BillingRules()
    transfer_usd_per_gb: Transfer = 0.0


class SimulatedBidBrainSpec(WrittenPart):
    """Time that a job loses when its machines change, as `bidbrain` counts it."""

    lambda_s: Seconds = Field(
        default=30.0, description="lambda: all work stands still for so long after an eviction."
    )
    start_s: Seconds | None = Field(
        default=None, description="sigma, when machines come or go; null: the longest start-up."
    )


class PolicySpec(WrittenPart):
    """The policy that decides which machines run."""

    name: PolicyName = Field(default="static", description="The policy.")
    probability: float = Field(
        default=0.95, gt=0.5, lt=1, description="chance: to meet the deadline."
    )
    spot: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="static: N_s as given instead of the optimum."
    )
    spot_up_to: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="Machines that a spot pool has at a time, over streams; more than 1 is of use"
        " to policies that count machines.",
    )
    max_lag_s: Positive | None = Field(
        default=None,
        description="pools, where records wait (while_preempted: keep): for so long at most.",
    )
    bidbrain: SimulatedBidBrainSpec = Field(
        default=SimulatedBidBrainSpec(), description="bidbrain: what changes of its machines cost."
    )


class LearningSpec(WrittenPart):
    """Real SGD on a real data set."""

    data: str = Field(
        default="digits", description="Built in, or a file that `doll produce` can read."
    )
    hidden: tuple[Count, ...] = Field(
        default=(32,), description="Widths of the hidden layers; empty: logistic regression."
    )
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="Of the steps.")
    learning_rate: Positive = Field(default=1e-3, description="Of a step.")
    evaluate_every: Count = Field(default=20, description="Updates.")


LIVE_STREAMS = (
    "policy bidbrain bids for a backlog, and a stream cannot go faster than it arrives: take"
    " another policy, or say `arrivals: {process: backlog}` and `on_preemption: reassign`, without"
    " rates"
)


class Experiment(WrittenPart):
    """One experiment to simulate."""

    name: str = Field(default="experiment", description="Of its results.")
    workers: Count = Field(description="N_tot, one per stream.")
    rates: Positive | UniformRates | tuple[Seconds, ...] | None = Field(
        default=None, description="lambda_A, records per second; left out for a backlog."
    )
    arrivals: ArrivalsSpec = ArrivalsSpec()
    group_size: Count = Field(description="K, batches per update.")
    batch_size: Count = Field(description="b, records per batch.")
    updates: Count = Field(description="J(epsilon)")
    deadline_s: Positive | None = Field(default=None, description="theta")
    deadline_factor: Positive | None = Field(default=None, description="theta / theta_0 instead.")
    gradient: GradientSpec = GradientSpec()
    speeds: Positive | UniformSpeeds | tuple[Positive, ...] = Field(
        default=1.0, description="Of each worker's gradients, times that of its machine's pool."
    )
    link_s: Seconds = Field(
        default=0.0,
        description="For which each model and each gradient hold the one link of all workers.",
    )
    synchronisation: SynchronisationSpec | None = Field(
        default=None, description="As in a job file; null: synchronous."
    )
    on_preemption: Literal["hold", "reassign"] = Field(
        default="hold", description="hold, the paper's: the stream of a lost worker waits."
    )
    while_preempted: Literal["pause", "keep"] = Field(
        default="pause", description="hold: whether its records wait in Kafka."
    )
    update_mb: Seconds = Field(
        default=0.0, description="Megabytes that a machine sends and receives for an update."
    )
    on_demand: OnDemandSpec
    spot: tuple[SpotSpec, ...] = Field(min_length=1, description="Pools of spot machines.")
    policy: PolicySpec = PolicySpec()
    mode: Literal["analytic", "protocol"] = Field(
        default="analytic", description="The update process alone; or the whole protocol."
    )
    learning: LearningSpec | None = Field(
        default=None, description="Null: an update costs only its time."
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
            raise ValueError("give either deadline_s or deadline_factor")
        for name, given in (("rates", self.rates), ("speeds", self.speeds)):
            if isinstance(given, tuple) and len(given) != self.workers:
                raise ValueError(f"{name} has {len(given)} entries for {self.workers} workers")
        self._works_off_a_backlog()
        for name in ("speeds", "link_s", "synchronisation", "learning"):
            given, default = getattr(self, name), type(self).model_fields[name].default
            if given != default and self.mode != "protocol":
                raise ValueError(f"{name} needs mode: protocol")
        if self.synchronisation is not None:
            optimizer = "" if self.learning is None else self.learning.optimizer
            self.synchronisation.check_local_steps(self.group_size, optimizer, "learning.optimizer")
        if len({pool.name for pool in self.spot}) != len(self.spot):
            raise ValueError("two spot pools have one name")
        return self

    def _works_off_a_backlog(self) -> None:
        backlog = self.arrivals.process == "backlog"
        if backlog and self.rates is not None:
            raise ValueError(
                "rates: leave them out: a backlog is there from the beginning, and is worked off as"
                " fast as `workers` machines compute (gradient)"
            )
        if not backlog and self.rates is None:
            raise ValueError("rates: must be given, unless arrivals are `{process: backlog}`")
        if backlog and (self.on_preemption, self.mode) != ("reassign", "analytic"):
            raise ValueError(
                "arrivals: a backlog is worked off by whichever machines there are: add"
                " `on_preemption: reassign`, in mode analytic"
            )
        if self.policy.name == "bidbrain" and not backlog:
            raise ValueError(LIVE_STREAMS)
