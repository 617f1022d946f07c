"""Prices of a pool's machines over time, in each of R runs at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.spot.machines import PriceHistory
from common.spot.theory.errors import ParameterError
from common.spot.traces.files import starts_of, traced
from common.spot.traces.spec import TraceSpec
from common.spot.traces.trace import Bools, Floats, Trace, TraceCursor

if TYPE_CHECKING:
    from pathlib import Path


class PoolPrices(Protocol):
    """Prices of one pool, in USD per hour of one machine."""

    def at(self, now_s: float) -> Floats:
        """Return (R,) prices of the runs."""
        ...

    def changed(self, before_s: float, now_s: float) -> Bools:
        """Return (R,) True for runs whose price has changed.

        A price that changed and returned in between has not changed, because a policy that sees
        prices only at these two times cannot notice it.
        """
        ...

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:
        """Return prices from before a run began.

        Args:
            run: The run.
            ahead_s: Part of the recording that is the run's own future. A recording starts again
                after its end, so this part is not past.
            most_s: Maximum length of the past.

        Raises:
            ParameterError: If the recording is no longer than `ahead_s`.
        """
        ...


class ConstantPrices:
    """The paper's model: a constant price."""

    def __init__(self, usd_per_hour: float, runs: int) -> None:
        self._usd_per_hour = usd_per_hour
        self._runs = runs

    def at(self, now_s: float) -> Floats:  # noqa: ARG002 - the same at all times
        """Return the price in each run."""
        return np.full(self._runs, self._usd_per_hour)

    def changed(self, before_s: float, now_s: float) -> Bools:  # noqa: ARG002 - it never does
        """Return the runs whose price has changed."""
        return np.zeros(self._runs, np.bool_)

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:  # noqa: ARG002
        """Return the same constant price."""
        return PriceHistory((0.0,), (self._usd_per_hour,), most_s)


class TracePrices:
    """Recorded prices, from a separate place in each run."""

    def __init__(self, trace: Trace, starts_s: Floats) -> None:
        """Start each run at a place of the trace.

        Args:
            trace: USD per hour, at its replay speed.
            starts_s: (R,) starts of the runs, on the clock of `trace`.
        """
        self._trace, self._starts_s = trace, starts_s
        self._cursor = TraceCursor(trace, starts_s)
        # Prices at the last two times, because each step needs both again.
        self._seen: dict[float, Floats] = {}

    def at(self, now_s: float) -> Floats:
        """Return the price in each run."""
        return self._look(now_s).copy()

    def changed(self, before_s: float, now_s: float) -> Bools:
        """Return the runs whose price has changed."""
        before = self._look(before_s)
        return np.not_equal(self._look(now_s), before)

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:
        """Return prices from before a run began."""
        trace, start_s = self._trace, float(self._starts_s[run])
        length_s = min(trace.end_s - ahead_s, most_s)
        if length_s <= 0:
            problem = (
                f"{trace.source} must be longer than a run ({ahead_s:g} s), to have earlier prices,"
                f" got {trace.end_s:g} s"
            )
            raise ParameterError("past prices", problem)
        since_s = start_s - length_s
        times_s = np.concatenate((trace.times_s - trace.end_s, trace.times_s))
        within = (times_s > since_s) & (times_s < start_s)
        first = float(trace.value_at(since_s % trace.end_s))
        return PriceHistory(
            [0.0, *(times_s[within] - since_s).tolist()],
            [first, *np.tile(trace.values, 2)[within].tolist()],
            length_s,
        )

    def _look(self, time_s: float) -> Floats:
        if time_s not in self._seen:
            if len(self._seen) > 1:
                del self._seen[next(iter(self._seen))]
            self._seen[time_s] = self._cursor.at(time_s)
        return self._seen[time_s]


def prices_of(
    usd_per_hour: float | TraceSpec,
    folder: Path,
    runs: int,
    rng: np.random.Generator,
    common_s: Floats | None = None,
) -> PoolPrices:
    """Make the prices of a user's pool.

    Args:
        usd_per_hour: A number, or a trace.
        folder: Folder of the trace's file.
        runs: R.
        rng: Source of the runs' starts, unless the trace has one.
        common_s: (R,) starts in all traces; if None, each is drawn.

    Raises:
        UserError: If a trace does not exist.
    """
    if not isinstance(usd_per_hour, TraceSpec):
        return ConstantPrices(usd_per_hour, runs)
    trace = traced(usd_per_hour, folder)
    return TracePrices(trace, starts_of(usd_per_hour, trace, (runs,), rng, common_s))
