"""Arrival times of a stream's records on the stream's own clock, one time for each record.

A run has some fifty million records, so times are drawn in chunks on demand, and dropped once they
are not needed any more. The stream's clock stands still while its records do not arrive (the
paper's preempted worker). The owner of the stream stops and restarts it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from common.core.batching import DecodedRun
from common.spot.experiments.spec import ArrivalsSpec, UniformRates
from common.spot.theory.errors import ParameterError
from common.spot.traces.files import starts_of

if TYPE_CHECKING:
    from common.core.spans import Partition
    from common.spot.traces.trace import Floats, Trace

    # Draws this number of gaps with mean 1.
    Gaps: TypeAlias = Callable[[int], Floats]
    # Maps sums of such gaps to seconds, which never decrease.
    Clock: TypeAlias = Callable[[Floats], Floats]

# Number of past batches that may be read again: claims under way when a machine was lost.
KEPT = 128
# Number of batches whose times are looked up at once. Single look-ups would dominate the run time.
AHEAD = 64
# Number of gaps drawn at a time: 128 KiB, which stay in a core's cache while they are summed.
CHUNK = 16_384


class Arrivals:
    """Records of one stream: sums of independent gaps with mean 1, mapped to the stream's clock."""

    def __init__(self, gaps: Gaps, clock: Clock) -> None:
        """Begin at time 0, as if a record had just arrived."""
        self._gaps, self._clock = gaps, clock
        self._sum = 0.0  # sum of all gaps so far
        # Arrival times in seconds, ascending, (CHUNK,) each.
        self._chunks: list[Floats] = []
        self._ends: list[float] = []  # last time of each chunk
        # Index of the first record that is kept.
        self._first = 0

    def count_until(self, t_s: float) -> int:
        """Return the number of records up to and including this time, without dropping any."""
        while not self._ends or self._ends[-1] <= t_s:
            self._draw()
        chunk = bisect_right(self._ends, t_s)
        within = int(self._chunks[chunk].searchsorted(t_s, side="right"))
        return self._first + chunk * CHUNK + within

    def time_of(self, index: int) -> float:
        """Return the time of a record, counted from 0; inf if it never arrives.

        Raises:
            ParameterError: If the record was dropped.
        """
        if index < self._first:
            raise ParameterError("index", f"record {index} was forgotten, up to {self._first}")
        chunk, within = divmod(index - self._first, CHUNK)
        while chunk >= len(self._chunks):
            self._draw()
        return float(self._chunks[chunk][within])

    def times_of(self, indexes: range) -> list[float]:
        """Return the times of equally spaced records.

        Raises:
            ParameterError: If one was dropped.
        """
        times_s = list[float]()
        while indexes:
            # Draws the record's chunk, or raises.
            self.time_of(indexes[0])
            chunk, within = divmod(indexes[0] - self._first, CHUNK)
            end = self._first + (chunk + 1) * CHUNK
            here = indexes[: len(range(indexes[0], end, indexes.step))]
            times_s += self._chunks[chunk][within :: indexes.step][: len(here)].tolist()
            indexes = indexes[len(here) :]
        return times_s

    def forget_before(self, index: int) -> None:
        """Drop earlier records, by whole chunks."""
        chunks = min((index - self._first) // CHUNK, len(self._chunks))
        if chunks > 0:
            self._first += chunks * CHUNK
            del self._chunks[:chunks], self._ends[:chunks]

    def _draw(self) -> None:
        gaps = self._gaps(CHUNK)
        gaps[0] += self._sum
        np.cumsum(gaps, out=gaps)
        self._sum = float(gaps[-1])
        chunk = self._clock(gaps)
        self._chunks.append(chunk)
        self._ends.append(float(chunk[-1]))


def even(rate_per_s: float, phase: float) -> Arrivals:
    """Make a record arrive exactly every 1 / rate seconds.

    Args:
        rate_per_s: lambda_A.
        phase: Time of the first record in gaps: from 0 to below 1.
    """
    return Arrivals(np.ones, lambda sums: (sums - 1 + phase) / rate_per_s)


class Paced:
    """The clock of a rate that changes: the inverse of the integral of lambda(t).

    A process of rate 1 put on it is an inhomogeneous Poisson process (time change).
    """

    def __init__(self, rate_per_s: float, trace: Trace, start_s: float) -> None:
        """Scale a trace of rates.

        Args:
            rate_per_s: lambda_A, the mean after scaling.
            trace: The rate over time, in any unit.
            start_s: Time in the trace at which the stream begins.

        Raises:
            ParameterError: If the trace is 0 throughout.
        """
        if not trace.values.any():
            raise ParameterError("trace", f"{trace.source} must have a value above 0, got only 0")
        rates = trace.values * (rate_per_s / trace.mean())
        integral = np.concatenate(([0.0], np.cumsum(rates * trace.durations_s)))
        # The integral has no inverse while nothing arrives, and needs none.
        flowing = np.diff(integral) > 0
        self._lap, self._end_s = float(integral[-1]), trace.end_s
        self._sums, self._rates = integral[:-1][flowing], rates[flowing]
        self._times_s = trace.times_s[flowing]
        before = int(trace.times_s.searchsorted(start_s, side="right")) - 1
        self._start = integral[before] + rates[before] * (start_s - trace.times_s[before])
        self._start_s, self._last_s = start_s, 0.0

    def __call__(self, sums: Floats) -> Floats:
        """Return the times of records in seconds since the start. They never decrease."""
        due = sums + self._start
        first_lap, last_lap = due[0] // self._lap, due[-1] // self._lap
        # Most chunks lie within one lap of the trace, many within one of its pieces. A division and
        # a search for each record would cost more than its draw.
        laps = first_lap if first_lap == last_lap else due // self._lap
        rest = np.maximum(due - laps * self._lap, 0.0)
        if first_lap == last_lap:
            low, high = self._sums.searchsorted(rest[[0, -1]], side="right") - (1, 0)
        else:
            low, high = 0, len(self._sums)
        piece = low
        if high - low > 1:
            piece = low + self._sums[low + 1 : high].searchsorted(rest, side="right")
        within = self._times_s[piece] + (rest - self._sums[piece]) / self._rates[piece]
        times_s = laps * self._end_s + within - self._start_s
        # Rounding between two pieces must not turn time back.
        times_s = np.maximum.accumulate(np.maximum(times_s, self._last_s))
        self._last_s = float(times_s[-1])
        return times_s


def arrivals_of(
    spec: ArrivalsSpec, rates_per_s: Floats, rng: np.random.Generator, trace: Trace | None = None
) -> list[Arrivals]:
    """Make the streams of one run, each with its own randomness, so that their order is irrelevant.

    Args:
        spec: The process.
        rates_per_s: (N,) lambda_A,n.
        rng: Source of all draws.
        trace: Result of `traced` for `spec.trace`. All streams of a run begin at one place in it.

    Raises:
        ParameterError: If the trace is 0.
    """
    start_s = 0.0
    if spec.trace is not None and trace is not None:
        start_s = float(starts_of(spec.trace, trace, (1,), rng)[0])
    return [
        _stream(float(rate), stream_rng, trace, start_s)
        for rate, stream_rng in zip(rates_per_s, rng.spawn(len(rates_per_s)), strict=True)
    ]


def draw_rates(
    rates: float | UniformRates | tuple[float, ...],
    workers: int,
    runs: int,
    rng: np.random.Generator,
) -> Floats:
    """Draw (R, N) rates lambda_A,n, or speeds, of each worker in each run."""
    shape = (runs, workers)
    if isinstance(rates, UniformRates):
        return rng.uniform(rates.low, rates.high, shape)
    return np.broadcast_to(np.array(rates, np.float64), shape).copy()


def _stream(
    rate_per_s: float,
    rng: np.random.Generator,
    trace: Trace | None,
    start_s: float,
) -> Arrivals:
    # Nothing ever arrives.
    if rate_per_s == 0:
        return Arrivals(np.ones, lambda sums: np.full_like(sums, math.inf))
    if trace is not None:
        return Arrivals(rng.standard_exponential, Paced(rate_per_s, trace, start_s))
    return Arrivals(rng.standard_exponential, lambda sums: np.divide(sums, rate_per_s, out=sums))


class SimulatedStream:
    """A topic partition that fills as records arrive. Offsets are indexes of arrivals.

    Its owner stops its clock while no records arrive: in the paper, nothing arrives at a preempted
    worker (section III-B.4). In Kafka, the records would wait.
    """

    def __init__(self, partition: Partition, arrivals: Arrivals) -> None:
        self.partition = partition
        self._arrivals = arrivals
        # Total time that the clock has stood still.
        self._still_s = 0.0
        self._stopped_at: float | None = None
        # Times of the first and last record of the next batches, by position.
        self._ahead = dict[int, tuple[float, float]]()
        # Number of records in each of these batches.
        self._ahead_samples = 0

    def stop(self, now: float) -> None:
        """Stop the stream's clock."""
        if self._stopped_at is None:
            self._stopped_at = now

    def go_on(self, now: float) -> None:
        """Restart the stream's clock."""
        if self._stopped_at is not None:
            self._still_s += now - self._stopped_at
            self._stopped_at = None

    def observed(self, now: float) -> tuple[int, float]:
        """Return the number of records so far, and the seconds on its own clock."""
        observed_s = (now if self._stopped_at is None else self._stopped_at) - self._still_s
        return self._arrivals.count_until(observed_s), observed_s

    def full_at(self, position: int, samples: int) -> float:
        """Return the time at which these samples have arrived; inf if its clock stops before."""
        found = self._ahead.get(position) if samples == self._ahead_samples else None
        _, time_s = found or self._look_ahead(position, samples)
        if self._stopped_at is not None and time_s > self._stopped_at - self._still_s:
            return math.inf
        return time_s + self._still_s

    def read(self, position: int, samples: int) -> DecodedRun:
        """Read records. All of them must have arrived.

        All their times are shifted by the total time that the clock has stood still, even of
        records that arrived before a stop.
        """
        found = self._ahead.get(position) if samples == self._ahead_samples else None
        first_s, last_s = found or self._look_ahead(position, samples)
        offsets = range(position, position + samples)
        return DecodedRun(
            self.partition, offsets, (), first_s + self._still_s, last_s + self._still_s
        )

    def _look_ahead(self, position: int, samples: int) -> tuple[float, float]:
        """Return the times of the first and the last of these records, on its own clock.

        Times of the next batches are kept, see `AHEAD`.
        """
        self._ahead_samples = samples
        self._arrivals.forget_before(max(position - KEPT * samples, 0))
        firsts = range(position, position + AHEAD * samples, samples)
        lasts = range(firsts.start + samples - 1, firsts.stop + samples - 1, samples)
        times = zip(self._arrivals.times_of(firsts), self._arrivals.times_of(lasts), strict=True)
        self._ahead = dict(zip(firsts, times, strict=True))
        return self._ahead[position]
