"""The update process alone, for many runs at once: only the time of each update, no protocol.

Records are not drawn one by one. The expected number of a stream's records follows from the time
for which its worker was active. Actual numbers are drawn only when they matter: for a policy that
estimates rates, periodically for a run's progress, and step by step from shortly before its end, so
that the last update has the same distribution as with single records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from common.spot.experiments.fleet import SimulatedFleet, pool_uses
from common.spot.experiments.policy_driver import Givens, PolicyDriver, Priors
from common.spot.experiments.preemption import STEP_S, Offers
from common.spot.experiments.results import SimulatedRun

if TYPE_CHECKING:
    from common.spot.experiments.prices import PoolPrices
    from common.spot.policies.policy import Policy

Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Indexes: TypeAlias = npt.NDArray[np.intp]

# Counts are drawn step by step once the last update is at most this many standard deviations ahead.
# Fewer than one run in 10^9 would have ended before.
SURE = 6.0
# Number of steps between calls of `progress`: some hundred calls in a job of the paper's size.
PROGRESS_STEPS = 50
# Number of steps between draws of a run's progress. Until the next draw, arrivals deviate from
# their mean by less than the arrivals of one step.
SEEN_STEPS = 60
# Lower bound of divisors that may be 0: updates in a step, and rates.
LEAST = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """Market and arrivals of a simulated job, which its policy only sees as they come."""

    # One for each pool.
    prices: tuple[PoolPrices, ...]
    # One for each pool; None if the pool always has machines.
    offers: tuple[Offers | None, ...]
    # c_A of the gaps between records; 1 for Poisson, 0 for even arrivals.
    variation: float = 1.0
    # Returns (R,) ratios of rates at a time to their means. If None, rates are constant.
    pace: Callable[[float], Array] | None = None
    # Fate of a preempted worker's stream.
    stream: Literal["pause", "keep", "reassign"] = "pause"
    # Converts (R,) sums of speeds to updates per second. Only for `reassign`.
    capacity_per_s: Callable[[Array], Array] | None = None
    # Time from the last batch to the last update.
    last_round_s: float = 0.0
    # True if all records exist from the beginning.
    backlog: bool = False
    step_s: float = STEP_S
    # A run is given up after this many times its deadline.
    give_up_after: float = 20.0


class ArrivedRecords:
    """Number of records of each stream: always the expected one, and an actual one on demand.

    Poisson arrivals (variation 1) are exact. Any other renewal process is approximated by the
    Brownian motion with its mean and its variance, c_A^2 of the mean, to which it converges over
    hundreds of records. With frequent draws, the running maximum is at most c_A^2 / 2 records too
    high. Even arrivals (variation 0) are random only in their phase.

    Attributes:
        expected: (R, N) expected records so far.
    """

    def __init__(self, shape: tuple[int, int], variation: float, rng: np.random.Generator) -> None:
        self.expected = np.zeros(shape)
        self._variation = variation
        self._rng = rng
        # Expected records when the counts were drawn.
        self._drawn_at = np.zeros(shape)
        self._level = rng.random(shape) if variation != 1 else None
        self._counts = np.zeros(shape, np.int64)

    def count(self, runs: Indexes | slice) -> Counts:
        """Draw the records since the last draw of these runs, and return all counts."""
        expected = self.expected[runs]
        more = expected - self._drawn_at[runs]
        self._drawn_at[runs] = expected
        if self._level is None:
            self._counts[runs] += self._rng.poisson(more)
        else:
            deviations = self._variation * np.sqrt(more) * self._rng.standard_normal(more.shape)
            self._level[runs] += more + deviations
            level = np.floor(self._level[runs]).astype(np.int64)
            self._counts[runs] = np.maximum(self._counts[runs], level)
        return self._counts[runs]


class _Streams:
    """Records and lags of the streams of all runs."""

    def __init__(self, givens: Givens, conditions: Conditions, rng: np.random.Generator) -> None:
        shape = givens.rates_per_s.shape
        self._conditions = conditions
        # (R, N) records of a step at the mean rates.
        self._come = givens.rates_per_s * conditions.step_s
        # Records that one worker of speed 1 processes in a step: a batch takes it mu_C.
        self._most = givens.batch_size / givens.gradient_s * conditions.step_s
        self._waiting = np.zeros(shape) if conditions.stream == "keep" else None
        self._update_records = givens.group_size * givens.batch_size
        self._rates_per_s = np.maximum(givens.rates_per_s, LEAST)
        self.worst_lag_s = np.zeros(givens.runs)
        # Integral over time of the worst lag of all streams.
        self._lag_s2 = np.zeros(givens.runs)
        # Number of steps with possible arrivals.
        self._observed_steps = np.zeros(shape, np.int32)
        self.records = ArrivedRecords(shape, conditions.variation, rng)

    def go_on(self, now_s: float, fleet: SimulatedFleet) -> Array:
        """Return (R, N) records that are expected to be read in the step that begins now."""
        pace = self._conditions.pace
        come = self._come if pace is None else self._come * pace(now_s)[:, np.newaxis]
        if self._conditions.stream == "pause":
            self._observed_steps += fleet.active
            return come * fleet.active
        self._observed_steps += 1
        if self._waiting is None:
            return come
        self._waiting += come
        come = np.minimum(self._waiting, fleet.speeds * self._most)
        self._waiting -= come
        return come

    def lag_s(self) -> Array | None:
        """Return (R, N) lags of the streams at mean arrivals; None unless they keep records."""
        return None if self._waiting is None else self._waiting / self._rates_per_s

    def note_lag(self, behind: Array, going: Flags) -> None:
        """Record the longest lag of each run's streams, at mean arrivals.

        Args:
            behind: (R,) updates whose batches are complete and that are not applied.
            going: (R,) runs that are not over.
        """
        lag_s = self.lag_s()
        if lag_s is not None:
            longest_s = lag_s.max(axis=1)
        else:
            longest_s = behind * self._update_records / self._rates_per_s.sum(axis=1)
        np.maximum(self.worst_lag_s, longest_s, out=self.worst_lag_s, where=going)
        self._lag_s2 += longest_s * going * self._conditions.step_s

    def mean_lag_s(self, runtimes_s: Array) -> Array:
        """Return (R,) means over time of the worst lag of all streams."""
        mean: Array = self._lag_s2 / runtimes_s
        return mean

    def unread(self) -> Array | float:
        """Return (R,) records that wait for their worker, in updates."""
        return 0.0 if self._waiting is None else self._waiting.sum(axis=1) / self._update_records

    def seen(self, runs: Indexes) -> tuple[Array, Array]:
        """Return the records of each stream and the observed seconds."""
        observed_s: Array = self._observed_steps[runs] * np.float64(self._conditions.step_s)
        return self.records.count(runs).astype(np.float64), observed_s


class _Progress:
    """Number of updates that are done.

    The J-th update is applied when K J batches are complete, which takes more than J K b records:
    each stream but the one that completed the last batch has part of a batch left over.
    """

    def __init__(self, givens: Givens, conditions: Conditions, records: ArrivedRecords) -> None:
        self._givens = givens
        self._conditions = conditions
        self._records = records
        # Records over all streams: counted ones, and expected ones since then.
        self._total = np.zeros(givens.runs)
        self._left_over = givens.workers * (givens.batch_size - 1) / 2  # mean
        deviation = max(conditions.variation, 1.0) * np.sqrt(givens.records)
        # Number of records from which counts are drawn step by step.
        self._look_from = givens.records - SURE * deviation
        self._looking = np.zeros(givens.runs, np.bool_)
        self._steps = 0
        # Updates whose batches are complete.
        self._arrived = np.zeros(givens.runs)
        self.made = np.zeros(givens.runs)  # updates
        if conditions.backlog:
            self._total += givens.records
            self._arrived += givens.updates

    def go_on(self, come: Array, fleet: SimulatedFleet, going: Flags) -> tuple[Indexes, Array]:
        """Simulate a step; return the runs that end in it, and at which share of the step."""
        if not self._conditions.backlog:
            self._arrive(come, going)
        givens, capacity_per_s = self._givens, self._conditions.capacity_per_s
        before = self.made
        self.made = self._arrived
        if capacity_per_s is not None:
            most = capacity_per_s(fleet.speeds.sum(axis=1)) * self._conditions.step_s
            self.made = np.minimum(self.made, before + most)
        over = np.flatnonzero(going & (self.made >= givens.updates))
        missing, gained = givens.updates - before[over], self.made[over] - before[over]
        return over, np.clip(missing / np.maximum(gained, LEAST), 0.0, 1.0)

    def _arrive(self, come: Array, going: Flags) -> None:
        """Add the expected arrivals of a step."""
        givens, capacity_per_s = self._givens, self._conditions.capacity_per_s
        self._steps += 1
        if self._steps % SEEN_STEPS == 0:
            seen = np.flatnonzero(going & ~self._looking)
            self._total[seen] = self._records.count(seen).sum(axis=1)
        self._total += come.sum(axis=1)
        begin = np.flatnonzero(going & ~self._looking & (self._total >= self._look_from))
        if begin.size:
            self._looking[begin] = True
            # Count the records before this step.
            self._count(begin)
            exact = self._arrived[begin]
            behind = np.minimum(self.made[begin], exact)
            self.made[begin] = exact if capacity_per_s is None else behind
        self._records.expected += come
        records = np.maximum(self._total - self._left_over, 0.0)
        estimated = records / (givens.group_size * givens.batch_size)
        self._arrived = np.where(self._looking, self._arrived, estimated)
        self._count(np.flatnonzero(self._looking & going & (self._arrived < givens.updates)))

    @property
    def behind(self) -> Array:
        """(R,) updates whose batches are complete and that are not applied."""
        return self._arrived - self.made

    def unused(self) -> Array:
        """Return (R,) records that were read and are in no update, in updates."""
        unused: Array = self._total / (self._givens.group_size * self._givens.batch_size)
        return unused - self.made

    def _count(self, runs: Indexes) -> None:
        if runs.size:
            batches = self._records.count(runs) // self._givens.batch_size
            self._arrived[runs] = batches.sum(axis=1) / self._givens.group_size


def simulate_analytically(
    givens: Givens,
    policy: Policy,
    conditions: Conditions,
    seed: int,
    beliefs: Priors | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> tuple[SimulatedRun, ...]:
    """Run a job R times.

    Args:
        givens: The job.
        policy: Decides which machines run.
        conditions: Prices, outages and arrivals. Its offers can be used only once.
        seed: Seed of the records. Prices and offers have their own.
        beliefs: Priors of a policy that estimates rates and availability. If None, it knows the
            true ones.
        progress: Called with the share of all updates that is done, every `PROGRESS_STEPS` steps,
            and with 1.0 once at the end.
    """
    step_s = conditions.step_s
    shape = givens.runs, givens.workers
    fleet = SimulatedFleet(givens.pools, *shape, step_s, givens.slots_per_pool, givens.rates_per_s)
    streams = _Streams(givens, conditions, np.random.default_rng(seed))
    work = _Progress(givens, conditions, streams.records)
    driver = PolicyDriver(
        policy, fleet, givens, None if beliefs is None else (beliefs, streams.seen)
    )
    going = np.ones(givens.runs, np.bool_)
    finished = np.zeros(givens.runs, np.bool_)
    # Upper bounds until the runs end.
    runtimes_s = conditions.give_up_after * givens.deadline_s
    changed = np.zeros(givens.runs, np.bool_)
    now_s = before_s = 0.0
    steps = 0
    while going.any():
        usd_per_hour = [prices.at(now_s) for prices in conditions.prices]
        if steps:
            changed = _changed(conditions.prices, before_s, now_s)
        # At least one update is left until a run ends.
        left = np.maximum(givens.updates - work.made, 1.0)
        waiting = None if conditions.stream == "pause" else streams.unread() + work.unused()
        driver.consider(now_s, usd_per_hour, changed, left, going, waiting, streams.lag_s())
        offered = [None if offers is None else offers(now_s) for offers in conditions.offers]
        fleet.step(now_s, offered, usd_per_hour)
        over, share = work.go_on(streams.go_on(now_s, fleet), fleet, going)
        if over.size:
            after_s = share * step_s + conditions.last_round_s
            runtimes_s[over] = now_s + after_s
            finished[over], going[over] = True, False
            fleet.stop(over, after_s)
        lost = np.flatnonzero(going & (now_s + step_s >= runtimes_s))
        if lost.size:
            going[lost] = False
            fleet.stop(lost, runtimes_s[lost] - now_s)
        streams.note_lag(work.behind, going)
        before_s = now_s
        steps += 1
        now_s = steps * step_s
        if steps % PROGRESS_STEPS == 0:
            progress(min(float(work.made.mean()) / givens.updates, 1.0))
    progress(1.0)
    made = np.where(finished, givens.updates, work.made)
    mean_lag_s = streams.mean_lag_s(runtimes_s)
    return tuple(
        SimulatedRun(
            seed=seed,
            index=run,
            finished=bool(finished[run]),
            runtime_s=float(runtimes_s[run]),
            deadline_s=float(givens.deadline_s[run]),
            updates=float(made[run]),
            on_demand_only_usd=float(givens.on_demand_only_usd[run]),
            pools=pool_uses(fleet, run),
            history=tuple(driver.history[run]),
            worst_lag_s=float(streams.worst_lag_s[run]),
            mean_lag_s=float(mean_lag_s[run]),
        )
        for run in range(givens.runs)
    )


def _changed(prices: Sequence[PoolPrices], before_s: float, now_s: float) -> Flags:
    changed: Flags = np.logical_or.reduce([one.changed(before_s, now_s) for one in prices])
    return changed
