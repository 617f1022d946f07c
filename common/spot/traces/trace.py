"""A quantity recorded over time, and readers at many places of it at once.

A trace is endless for its reader: it starts again after `end_s`. A run that is longer than its
trace sees the same values twice, which is better than invented ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import UserError

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# Recorders are sometimes late. Half a distance more cannot hide a missing row.
_HOLE_GAPS = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Values over time. Each holds until the next.

    Raises:
        UserError: If a row is out of order, not a number of at least 0, or missing. The message
            names the source and the row.
    """

    times_s: Floats  # (T,) ascending, from 0
    values: Floats  # (T,) of at least 0
    # End of the last value, after which the trace starts again.
    end_s: float
    source: str = "trace"
    # Distance of the rows; None if rows are events.
    gap_s: float | None = None
    # (T,) positions in the source; if None, they are counted from 1.
    rows: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        times, values = self.times_s, self.values
        if times.ndim != 1 or times.shape != values.shape or len(times) < 2:
            raise UserError(f"{self.source}: must have at least 2 rows, got {len(times)}")
        self._refuse(~np.isfinite(times), "must have a finite time")
        bad = ~(np.isfinite(values) & (values >= 0))
        self._refuse(bad, "must be a number of at least 0; correct or remove it")
        back = np.diff(times, prepend=-math.inf) <= 0
        if back.any():
            row = int(np.argmax(back))
            problem = f"is {times[row - 1] - times[row]:g} s before the previous row"
            self._refuse(back, f"{problem}; sort the rows")
        if times[0] != 0:
            raise UserError(f"{self.source}: must begin at 0 s, got {times[0]:g} s")
        if not (math.isfinite(self.end_s) and self.end_s >= times[-1]):
            problem = f"ends at {self.end_s:g} s, before its last row at {times[-1]:g} s"
            raise UserError(f"{self.source}: {problem}")
        if self.gap_s is not None:
            hole = np.diff(times, append=self.end_s) > _HOLE_GAPS * self.gap_s
            advice = "fill the gap, or end the trace there"
            self._refuse(
                hole, f"is followed by a gap, but rows are {self.gap_s:g} s apart; {advice}"
            )

    def _refuse(self, bad: Bools, problem: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            row = index + 1 if self.rows is None else int(self.rows[index])
            raise UserError(f"{self.source}: row {row} ({self.times_s[index]:g} s) {problem}")

    def value_at(self, times_s: Floats | float) -> Floats:
        """Return the value at each time. The trace starts again after its end."""
        within = np.mod(times_s, self.end_s)
        return self.values[self.times_s.searchsorted(within, side="right") - 1]

    @property
    def durations_s(self) -> Floats:
        """(T,) duration of each value."""
        return np.diff(self.times_s, append=self.end_s)

    def mean(self) -> float:
        """Return the average over time."""
        return float(self.values @ self.durations_s) / self.end_s

    def share(self, holds: Bools) -> float:
        """Return the share of the time for which some of the values are in force.

        Args:
            holds: (T,) True for these values, for example `trace.values <= bid`.
        """
        return float(self.durations_s[holds].sum()) / self.end_s

    def faster(self, speed: float) -> Trace:
        """Return the same values at `speed` times the speed."""
        gap_s = None if self.gap_s is None else self.gap_s / speed
        times_s, end_s = self.times_s / speed, self.end_s / speed
        return Trace(times_s, self.values, end_s, self.source, gap_s, self.rows)


def trace_from_rows(
    times_s: Sequence[float],
    values: Sequence[float],
    rows: Sequence[int],
    source: str,
    *,
    gap_s: float | None = None,
    end_s: float | None = None,
) -> Trace:
    """Make a trace of rows in their order. Of consecutive rows with one time, the last is kept.

    Args:
        times_s: Times of the rows, from any origin.
        values: Values of the rows.
        rows: Numbers of the rows in the source, for messages.
        source: The file's name.
        gap_s: Distance of the rows, if the source says that they are sampled.
        end_s: Optional. End of the last value, on the clock of `times_s`. If unset, it is one
            distance after the last row if rows are sampled, else the last row.

    Raises:
        UserError: If the rows make no valid trace.
    """
    times = np.array(times_s, np.float64)
    if len(times) and not np.isfinite(times).all():
        row = rows[int(np.argmin(np.isfinite(times)))]
        raise UserError(f"{source}: row {row} must have a finite time")
    last = np.diff(times, append=math.inf) != 0
    origin_s = times[0] if len(times) else 0.0
    times = times[last] - origin_s
    numbers, kept = np.array(values, np.float64)[last], np.array(rows, np.int64)[last]
    if len(times) and end_s is None:
        end_s = float(times[-1]) + (gap_s or 0.0)
    elif end_s is not None:
        end_s = max(end_s - origin_s, float(times[-1]))
    return Trace(times, numbers, end_s or 0.0, source, gap_s, kept)


def usual_gap_s(times_s: Sequence[float]) -> float | None:
    """Return the distance at which rows were sampled; None if they are events.

    Nine of ten distances must be equal within a hundredth: events seldom are, and a sampled file
    with holes still shows its distance. Two rows with the same time are events.
    """
    distances = np.diff(np.array(times_s, np.float64))
    if not len(distances) or not distances.all():
        return None
    usual = float(np.median(distances))
    alike = np.abs(distances - usual) <= usual / 100
    return usual if alike.mean() >= 0.9 else None


class TraceCursor:
    """Many readers of one trace, each from its own start.

    Only readers whose value ends are updated. A thousand runs of 64 workers are 64,000 readers, and
    a search for each of them at each step would cost more than the simulation.
    """

    def __init__(self, trace: Trace, starts_s: Floats) -> None:
        """Place the readers at time 0.

        Args:
            trace: The trace.
            starts_s: Starts of any shape, on the trace's clock.
        """
        lasting = trace.durations_s > 0
        times, values = trace.times_s[lasting], trace.values[lasting]
        new = np.concatenate(([True], values[1:] != values[:-1]))
        self._times, self._values = times[new], values[new]  # (C,) changes
        self._untils = np.append(self._times[1:], trace.end_s)  # (C,)
        if self._values[0] == self._values[-1]:
            once = len(self._times) == 1
            self._untils[-1] = math.inf if once else trace.end_s + self._times[1]
        self._end_s = trace.end_s
        self._shape = starts_s.shape
        self._starts = np.array(starts_s, np.float64).ravel()
        self._current = np.empty_like(self._starts)
        # Time at which each reader's value ends, on the readers' clock.
        self._until = np.full_like(self._starts, -math.inf)
        self._now_s = -math.inf

    def at(self, now_s: float) -> Floats:
        """Return each reader's value. Reading forwards is cheap, backwards possible."""
        due = self._until <= now_s if now_s >= self._now_s else np.ones_like(self._until, np.bool_)
        readers = np.flatnonzero(due)
        if len(readers):
            self._seek(readers, now_s)
        self._now_s = now_s
        return self._current.reshape(self._shape).copy()

    def next_change_s(self, now_s: float) -> Floats:
        """Return the time of each reader's next change: later than now, inf for never."""
        self.at(now_s)
        return self._until.reshape(self._shape).copy()

    def _seek(self, readers: npt.NDArray[np.int64], now_s: float) -> None:
        starts = self._starts[readers]
        laps, within = np.divmod(starts + now_s, self._end_s)
        index = self._times.searchsorted(within, side="right") - 1
        until = laps * self._end_s + self._untils[index] - starts
        # The readers' clock decides: a change that rounding puts at this moment has happened.
        # Otherwise a caller that waits for the next change could wait forever.
        while (behind := until <= now_s).any():
            index[behind] += 1
            laps[index == len(self._times)] += 1
            index[index == len(self._times)] = 0
            until = laps * self._end_s + self._untils[index] - starts
        self._current[readers] = self._values[index]
        self._until[readers] = until
