"""What came of one simulated run, and what many of them say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

Json: TypeAlias = "float | int | str | bool | list[Json] | dict[str, Json] | None"

CONFIDENCE = 0.95


class PolicyChange(NamedTuple):
    """A decision that differed from the one before."""

    at_s: float
    reason: str
    spot: int  # slots in a pool that may be preempted
    on_demand: int  # slots on demand


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """How good the model is after so many updates."""

    version: int
    at_s: float
    accuracy: float
    loss: float


class PoolUse(NamedTuple):
    """What a run used of one pool."""

    name: str
    usd: float
    machine_s: float  # start-ups included, what was billed but not used excluded
    launches: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the workers of a run came to, where the whole protocol was simulated."""

    batches_per_s: float
    mean_staleness: float  # of an update: versions since the weights of its oldest gradient
    largest_staleness: int
    shares: tuple[float, ...]  # of all batches, by worker

    @classmethod
    def over(cls, runs: Sequence[Throughput]) -> Throughput | None:
        """Summarise runs of the same workers; None where there are none."""
        if not runs:
            return None
        return cls(
            float(np.mean([run.batches_per_s for run in runs])),
            float(np.mean([run.mean_staleness for run in runs])),
            max(run.largest_staleness for run in runs),
            tuple(np.mean([run.shares for run in runs], axis=0).tolist()),
        )


POOL_KEYS = PoolUse._fields[1:]  # of a pool's part of the JSON
_RUN_KEYS = (
    *("seed", "index", "finished", "met", "runtime_s", "deadline_s", "updates", "cost_usd"),
    *("on_demand_only_usd", "cost_ratio", "spot_share", "launches", "preemptions", "changes"),
)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One job from its first machine to its last update, or to where it was given up."""

    seed: int
    index: int  # among the runs of that seed
    finished: bool  # all updates were made; else the runtime is when it was given up
    runtime_s: float
    deadline_s: float  # theta
    updates: float  # that were made
    on_demand_only_usd: float  # this work on N_tot on-demand machines, which takes theta_0
    pools: tuple[PoolUse, ...]  # on-demand first
    history: tuple[PolicyChange, ...] = field(default=(), repr=False)
    curve: tuple[LearningPoint, ...] = field(default=(), repr=False)  # where something was learned
    throughput: Throughput | None = None
    worst_lag_s: float = 0.0  # of records that wait for a machine
    mean_lag_s: float = 0.0  # over the time, of the stream whose records wait longest

    @property
    def met(self) -> bool:
        """Whether all updates were made by the deadline."""
        return self.finished and self.runtime_s <= self.deadline_s

    @property
    def cost_usd(self) -> float:
        """What all machines cost."""
        return math.fsum(pool.usd for pool in self.pools)

    @property
    def cost_ratio(self) -> float:
        """The cost against on-demand machines alone."""
        return self.cost_usd / self.on_demand_only_usd

    @property
    def spot_share(self) -> float:
        """The share of machine time in pools that may be preempted; 0 where there was none."""
        total_s = math.fsum(pool.machine_s for pool in self.pools)
        return 1 - self.pools[0].machine_s / total_s if total_s else 0.0

    @property
    def launches(self) -> int:
        """How many machines were launched."""
        return sum(pool.launches for pool in self.pools)

    @property
    def preemptions(self) -> int:
        """How many machines were taken away."""
        return sum(pool.preemptions for pool in self.pools)

    @property
    def changes(self) -> int:
        """How often another decision was made, after the first."""
        return max(len(self.history) - 1, 0)

    def as_dict(self) -> dict[str, Json]:
        """Make it ready for JSON; history and curve stay out."""
        data: dict[str, Json] = {name: getattr(self, name) for name in _RUN_KEYS}
        data["pools"] = {
            name: dict(zip(POOL_KEYS, used, strict=True)) for name, *used in self.pools
        }
        if self.throughput is not None:
            data["throughput"] = asdict(self.throughput)
        return data


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over many runs."""

    mean: float
    std: float | None  # standard deviation of single runs; None: there is one run only
    low: float | None  # 95 % interval of the mean (Student's t, which assumes a normal mean)
    high: float | None

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Spread:
        """Summarise one value per run."""
        mean = float(values.mean())
        if len(values) == 1:
            return cls(mean, None, None, None)
        deviation = float(values.std(ddof=1))
        quantile = float(special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
        half = quantile * deviation / math.sqrt(len(values))
        return cls(mean, deviation, mean - half, mean + half)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a probability; it keeps within [0, 1] at 0 and at all."""
    square = float(special.ndtri((1 + CONFIDENCE) / 2)) ** 2
    centre = (successes + square / 2) / (trials + square)
    half = math.sqrt(square * (successes * (trials - successes) / trials + square / 4))
    half /= trials + square
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True, slots=True)
class RunsSummary:
    """What many runs of one experiment say together.

    Runtimes and costs of runs that were given up are in the means as they were then: both are too
    low there, which `finished` tells.
    """

    runs: int
    finished: int
    met: float  # share of runs
    met_low: float  # Wilson's 95 % interval
    met_high: float
    cost_usd: Spread
    cost_ratio: Spread
    runtime_s: Spread
    runtime_ratio: Spread  # runtime over deadline
    spot_share: float
    launches: float  # mean per run, as are the next two
    preemptions: float
    changes: float
    throughput: Throughput | None  # means per run, and the largest staleness of all

    @classmethod
    def of(cls, runs: Sequence[SimulatedRun]) -> RunsSummary:
        """Summarise runs."""
        met = sum(run.met for run in runs)
        low, high = wilson(met, len(runs))
        runtimes_s = np.array([run.runtime_s for run in runs])

        def mean(name: str) -> float:
            return float(np.mean([getattr(run, name) for run in runs]))

        return cls(
            runs=len(runs),
            finished=sum(run.finished for run in runs),
            met=met / len(runs),
            met_low=low,
            met_high=high,
            cost_usd=Spread.of(np.array([run.cost_usd for run in runs])),
            cost_ratio=Spread.of(np.array([run.cost_ratio for run in runs])),
            runtime_s=Spread.of(runtimes_s),
            runtime_ratio=Spread.of(runtimes_s / [run.deadline_s for run in runs]),
            spot_share=mean("spot_share"),
            launches=mean("launches"),
            preemptions=mean("preemptions"),
            changes=mean("changes"),
            throughput=Throughput.over([run.throughput for run in runs if run.throughput]),
        )

    def as_dict(self) -> dict[str, Json]:
        """Make it ready for JSON."""
        data = asdict(self)
        if self.throughput is None:
            del data["throughput"]
        return data | {
            "met": {"share": self.met, "low": data.pop("met_low"), "high": data.pop("met_high")}
        }
