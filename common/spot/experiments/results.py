"""The result of one simulated run, and the summary of many."""

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
    """A decision that differed from the previous one."""

    at_s: float
    reason: str
    # Number of machines that may be preempted.
    spot: int
    on_demand: int  # number of machines


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """Quality of the model after some updates."""

    version: int
    at_s: float
    accuracy: float
    loss: float


class PoolUse(NamedTuple):
    """A run's use of one pool."""

    name: str
    usd: float
    # Includes start-ups, not time that was billed but not used.
    machine_s: float
    launches: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput of a run's workers, if the whole protocol was simulated."""

    batches_per_s: float
    # Versions between an update and the weights of its oldest gradient.
    mean_staleness: float
    largest_staleness: int
    # Share of all batches, by worker.
    shares: tuple[float, ...]

    @classmethod
    def over(cls, runs: Sequence[Throughput]) -> Throughput | None:
        """Summarize runs of the same workers; None without runs."""
        if not runs:
            return None
        return cls(
            float(np.mean([run.batches_per_s for run in runs])),
            float(np.mean([run.mean_staleness for run in runs])),
            max(run.largest_staleness for run in runs),
            tuple(np.mean([run.shares for run in runs], axis=0).tolist()),
        )


# Keys of a pool in the JSON.
POOL_KEYS = PoolUse._fields[1:]
_RUN_KEYS = (
    *("seed", "index", "finished", "met", "runtime_s", "deadline_s", "updates", "cost_usd"),
    *("on_demand_only_usd", "cost_ratio", "spot_share", "launches", "preemptions", "changes"),
)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One job from its first machine to its last update, or until it was given up."""

    seed: int
    # Index among the runs of that seed.
    index: int
    # True if all updates were made. Otherwise the runtime is the time until it was given up.
    finished: bool
    runtime_s: float
    deadline_s: float  # theta
    updates: float  # updates that were made
    # Cost of this work on N_tot on-demand machines, which takes theta_0.
    on_demand_only_usd: float
    pools: tuple[PoolUse, ...]  # on-demand first
    history: tuple[PolicyChange, ...] = field(default=(), repr=False)
    # Set if something was learned.
    curve: tuple[LearningPoint, ...] = field(default=(), repr=False)
    throughput: Throughput | None = None
    # Longest lag of any stream at any time. Only analytic runs without bids measure lags.
    worst_lag_s: float = 0.0
    # Mean over time of the longest lag of all streams.
    mean_lag_s: float = 0.0

    @property
    def met(self) -> bool:
        """True if all updates were made by the deadline."""
        return self.finished and self.runtime_s <= self.deadline_s

    @property
    def cost_usd(self) -> float:
        """Cost of all machines."""
        return math.fsum(pool.usd for pool in self.pools)

    @property
    def cost_ratio(self) -> float:
        """Cost over that of on-demand machines alone."""
        return self.cost_usd / self.on_demand_only_usd

    @property
    def spot_share(self) -> float:
        """Share of machine time in pools that may be preempted; 0 without machine time."""
        total_s = math.fsum(pool.machine_s for pool in self.pools)
        return 1 - self.pools[0].machine_s / total_s if total_s else 0.0

    @property
    def launches(self) -> int:
        """Number of launched machines."""
        return sum(pool.launches for pool in self.pools)

    @property
    def preemptions(self) -> int:
        """Number of preempted machines."""
        return sum(pool.preemptions for pool in self.pools)

    @property
    def changes(self) -> int:
        """Number of changed decisions after the first."""
        return max(len(self.history) - 1, 0)

    def as_dict(self) -> dict[str, Json]:
        """Convert to JSON data, without history and curve."""
        data: dict[str, Json] = {name: getattr(self, name) for name in _RUN_KEYS}
        data["pools"] = {
            name: dict(zip(POOL_KEYS, used, strict=True)) for name, *used in self.pools
        }
        if self.throughput is not None:
            data["throughput"] = asdict(self.throughput)
        return data


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and spread of a number over many runs."""

    mean: float
    # Standard deviation of single runs; None for a single run.
    std: float | None
    # 95 % interval of the mean (Student's t, which assumes a normal mean).
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Spread:
        """Summarize one value per run."""
        mean = float(values.mean())
        if len(values) == 1:
            return cls(mean, None, None, None)
        deviation = float(values.std(ddof=1))
        quantile = float(special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
        half = quantile * deviation / math.sqrt(len(values))
        return cls(mean, deviation, mean - half, mean + half)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a probability. It stays within [0, 1]."""
    square = float(special.ndtri((1 + CONFIDENCE) / 2)) ** 2
    centre = (successes + square / 2) / (trials + square)
    half = math.sqrt(square * (successes * (trials - successes) / trials + square / 4))
    half /= trials + square
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True, slots=True)
class RunsSummary:
    """Summary of many runs of one experiment.

    Means include runtimes and costs of runs that were given up, which are too low; see `finished`.
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
    # Means per run: launches, preemptions and changes.
    launches: float
    preemptions: float
    changes: float
    # Means per run, and the largest staleness of all.
    throughput: Throughput | None

    @classmethod
    def of(cls, runs: Sequence[SimulatedRun]) -> RunsSummary:
        """Summarize runs."""
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
        """Convert to JSON data."""
        data = asdict(self)
        if self.throughput is None:
            del data["throughput"]
        return data | {
            "met": {"share": self.met, "low": data.pop("met_low"), "high": data.pop("met_high")}
        }
