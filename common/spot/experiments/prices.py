"""What an hour of a pool's machine costs as time goes on, in each of R runs at once."""

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
        """Tell the price in each run, (R,)."""
        ...

    def changed(self, before_s: float, now_s: float) -> Bools:
        """Tell in which runs the price is another than it was, (R,).

        A price that moved and came back in between has not changed: whoever looks now and then
        cannot know better.
        """
        ...

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:
        """Say what was paid before a run began.

        Args:
            run: Which.
            ahead_s: A recording begins again after its end: of its lap, so much is the run's own
                future and no past.
            most_s: How far to look back.

        Raises:
            ParameterError: If the recording is no longer than what lies ahead.
        """
        ...


class ConstantPrices:
    """The paper's model: the price stays as it is."""

    def __init__(self, usd_per_hour: float, runs: int) -> None:
        self._usd_per_hour = usd_per_hour
        self._runs = runs

    def at(self, now_s: float) -> Floats:  # noqa: ARG002 - the same at all times
        """Tell the price in each run."""
        return np.full(self._runs, self._usd_per_hour)

    def changed(self, before_s: float, now_s: float) -> Bools:  # noqa: ARG002 - it never does
        """Tell in which runs the price is another."""
        return np.zeros(self._runs, np.bool_)

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:  # noqa: ARG002
        """Say what was paid before a run began: the same."""
        return PriceHistory((0.0,), (self._usd_per_hour,), most_s)


class TracePrices:
    """Recorded prices, gone through from a place of its own in each run."""

    def __init__(self, trace: Trace, starts_s: Floats) -> None:
        """Begin each run at a place of the trace.

        Args:
            trace: USD per hour, at the speed at which it is gone through.
            starts_s: (R,) on the clock of `trace`.
        """
        self._trace, self._starts_s = trace, starts_s
        self._cursor = TraceCursor(trace, starts_s)
        self._seen: dict[float, Floats] = {}  # the last two looks: who steps asks for both again

    def at(self, now_s: float) -> Floats:
        """Tell the price in each run."""
        return self._look(now_s).copy()

    def changed(self, before_s: float, now_s: float) -> Bools:
        """Tell in which runs the price is another."""
        before = self._look(before_s)
        return np.not_equal(self._look(now_s), before)

    def past(self, run: int, ahead_s: float, most_s: float) -> PriceHistory:
        """Say what was paid before a run began."""
        trace, start_s = self._trace, float(self._starts_s[run])
        length_s = min(trace.end_s - ahead_s, most_s)
        if length_s <= 0:
            problem = (
                f"{trace.source} lasts {trace.end_s:g} s, and a run may take {ahead_s:g}: it says"
                " nothing of the time before"
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
    """Make the prices that a person asks for.

    Args:
        usd_per_hour: A number, or which trace holds them.
        folder: What the trace's file is relative to.
        runs: R.
        rng: Where in the trace each run begins, unless the trace says so.
        common_s: (R,) where in all traces; None: each somewhere else.

    Raises:
        UserError: If there is no such trace.
    """
    if not isinstance(usd_per_hour, TraceSpec):
        return ConstantPrices(usd_per_hour, runs)
    trace = traced(usd_per_hour, folder)
    return TracePrices(trace, starts_of(usd_per_hour, trace, (runs,), rng, common_s))
