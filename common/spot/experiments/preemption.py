"""Availability of spot machines, for each worker of each run, step by step.

All answers are on the simulation's grid (the paper samples its chain every 2 s). Changes between
two steps are not seen, which matters for traces at high speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from common.spot.theory.errors import ParameterError
from common.spot.traces.files import starts_of, traced
from common.spot.traces.spec import TraceSpec
from common.spot.traces.trace import Bools, Floats, TraceCursor

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from common.spot.experiments.prices import PoolPrices
    from common.spot.experiments.spec import SpotSpec

STEP_S = 2.0  # section V-A

# Tolerance of differences: 1 - 0.9 is a little less than 0.1.
ROUNDING = 1e-9

_NEVER = np.iinfo(np.int64).max

# Supply of one pool: (R, N) flags of the workers that can have a machine at a time since the run's
# beginning. Called in order of time, once for each step.
Offers: TypeAlias = Callable[[float], Bools]


class TwoStateChain:
    """The paper's two-state chain, sampled every `STEP_S`, one for each worker, from equilibrium.

    At each step, a machine is lost with probability step / (alpha cycle) and returns with step /
    ((1 - alpha) cycle). So it exists for a share alpha of the time, and is preempted once in a mean
    cycle. Times that a machine stays in a state are geometric, and are drawn as a whole: a random
    number for each worker and step would take minutes.

    Limits: availability 1 is never preempted, availability 0 never has a machine.

    Raises:
        ParameterError: If the mean of a stay would be shorter than a step.
    """

    def __init__(
        self,
        availability: float,
        cycle_s: float,
        shape: tuple[int, int],
        rng: np.random.Generator,
    ) -> None:
        """Draw the states at time 0.

        Args:
            availability: alpha, share of the time.
            cycle_s: Mean time from one preemption of a machine to its next.
            shape: (R, N), runs and workers.
            rng: Source of the states and of the lengths of the stays.
        """
        mean_steps = np.array([1 - availability, availability]) * (cycle_s / STEP_S)
        constant = availability in (0, 1)
        if not constant and mean_steps.min() < 1 - ROUNDING:
            shorter_s, least_s = mean_steps.min() * STEP_S, cycle_s / mean_steps.min()
            problem = (
                f"{cycle_s:g} s makes the {'outages' if availability > 0.5 else 'stays'}"
                f" {shorter_s:g} s on average, below the step of {STEP_S:g} s; at this"
                f" availability it must be at least {least_s:g} s"
            )
            raise ParameterError("cycle_s", problem)
        self._shape, self._rng = shape, rng
        self._up = rng.random(shape[0] * shape[1]) < availability
        # Step of the next change of each machine.
        self._change = np.full_like(self._up, _NEVER, np.int64)
        if not constant:
            # Odds of a return and of a loss at each step.
            self._odds = 1 / mean_steps
            self._change = self._stays(self._up)

    def __call__(self, now_s: float) -> Bools:
        """Return the workers that can have a machine now. Time does not go back."""
        # The sum of many steps is not exactly their product.
        step = int(now_s / STEP_S + 1e-6)
        due = np.flatnonzero(self._change <= step)
        while len(due):
            self._up[due] ^= True
            self._change[due] += self._stays(self._up[due])
            due = due[self._change[due] <= step]
        return self._up.reshape(self._shape).copy()

    def _stays(self, up: Bools) -> npt.NDArray[np.int64]:
        # The limit keeps sums of such numbers in range. No simulation gets there.
        return np.minimum(self._rng.geometric(self._odds[up.astype(np.intp)]), _NEVER // 2)


def offers_of(
    spot: SpotSpec,
    prices: PoolPrices,
    folder: Path,
    runs: int,
    workers: int,
    rng: np.random.Generator,
    common_s: Floats | None = None,
) -> Offers:
    """Make the offers of a user's pool.

    Args:
        spot: Availability and bid.
        prices: Prices of the pool, for the bid.
        folder: Folder of the traces' files.
        runs: R.
        workers: N.
        rng: Source of all draws.
        common_s: (R,) starts of the runs in traces that all workers share; if None, each has its
            own.

    Raises:
        UserError: If a trace does not exist, or a number is out of range.
    """
    asked = spot.availability
    if isinstance(asked, TraceSpec):
        together = (common_s,) if spot.together else None
        offers = _recorded(asked, together, folder, (runs, workers), rng)
    else:
        offers = TwoStateChain(asked, spot.cycle_s, (runs, workers), rng)
    bid_usd_per_hour = spot.bid_usd_per_hour
    if bid_usd_per_hour is None:
        return offers
    return lambda now_s: offers(now_s) & (prices.at(now_s) <= bid_usd_per_hour)[:, np.newaxis]


def _recorded(
    spec: TraceSpec,
    # Common starts of all workers; if None, each has its own.
    together: tuple[Floats | None] | None,
    folder: Path,
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> Offers:
    """Offer a machine to worker n (from 0) while the trace has more than n machines."""
    trace = traced(spec, folder)
    runs, workers = shape
    most = int(trace.values.max())
    places = np.arange(workers)
    if most <= 1:
        # The trace says yes or no, not a number.
        places = np.zeros_like(places)
    if together is not None:
        cursor = TraceCursor(trace, starts_of(spec, trace, (runs, 1), rng, *together))
    elif spec.start_s is None:
        cursor = TraceCursor(trace, starts_of(spec, trace, shape, rng))
        places %= max(most, 1)
    else:
        problem = "conflicts with `together: false`, where each worker has its own part; remove it"
        raise ParameterError("start_s", problem)
    return lambda now_s: cursor.at(now_s) > places
