"""The number of workers that are worth their cost, by measured times of updates.

With p workers, an update takes d(p) = ceil(K / p) mu_C + o + p m: gradients in sequence, mu_C each;
work o that is done once; and work m for each worker, such as its messages. `workers_wanted`
minimizes time times cost, p d(p)^2. Cost alone, p d(p), would always be least with one worker,
since p ceil(K / p) is at least K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

# Minimum time of one measurement, because updates are read some hundredths of a second late.
WINDOW_S = 1.0
# Minimum updates of one measurement: one of them may have waited for a slow gradient.
UPDATES = 10
# Weight of the newest measurement, so that the last few count.
SMOOTHING = 0.3
# Time times cost after a change must be below this share of the current value. A smaller gain is
# within the error of measurements.
SAVING = 0.95


class FleetSize(NamedTuple):
    """Quantities that must not change while updates are measured."""

    workers: int  # running workers
    group_size: int  # K


@dataclass(frozen=True, slots=True)
class _Window:
    fleet: FleetSize
    version: int  # J at its beginning
    at_s: float


class RoundTimes:
    """Time of updates besides gradients, by the number of workers."""

    def __init__(self) -> None:
        self._besides_s = dict[int, float]()  # keyed by workers, smoothed
        self._window: _Window | None = None

    def observe(
        self, fleet: FleetSize, version: int, gradient_s: float, now_s: float, *, backlog: bool
    ) -> None:
        """Add the job's current state.

        Args:
            fleet: Workers of the job.
            version: J, updates made so far.
            gradient_s: mu_C.
            now_s: Seconds since 1970.
            backlog: True if records wait. Otherwise updates take as long as records take to arrive.
        """
        window = self._window
        if not backlog or not fleet.workers:
            self._window = None
        elif window is None or window.fleet != fleet or version < window.version:
            self._window = _Window(fleet, version, now_s)
        elif now_s >= window.at_s + WINDOW_S and version >= window.version + UPDATES:
            self._window = _Window(fleet, version, now_s)
            each_s = (now_s - window.at_s) / (version - window.version)
            besides_s = each_s - ceil(fleet.group_size / fleet.workers) * gradient_s
            # A negative time means that the updates were made earlier and read together.
            if besides_s > 0:
                before_s = self._besides_s.get(fleet.workers, besides_s)
                besides_s = before_s + SMOOTHING * (besides_s - before_s)
                self._besides_s[fleet.workers] = besides_s

    def update_s(self, group_size: int, gradient_s: float) -> Callable[[int], float] | None:
        """Return d by the number of workers; None before a measurement.

        If only one number of workers was measured, all time besides gradients counts as work for
        each worker.
        """
        if not self._besides_s:
            return None
        workers = np.array(list(self._besides_s), float)
        besides_s = np.array(list(self._besides_s.values()))
        each_s, once_s = float(workers @ besides_s / (workers @ workers)), 0.0
        if len(workers) > 1:
            slope_s, level_s = np.polyfit(workers, besides_s, 1)
            if slope_s < 0:
                each_s, once_s = 0.0, float(besides_s.mean())
            elif level_s > 0:
                each_s, once_s = float(slope_s), float(level_s)
        return lambda p: ceil(group_size / p) * gradient_s + once_s + p * each_s


def workers_wanted(
    update_s: Callable[[int], float], now: int, most: int, updates_per_s: float = 0.0
) -> int:
    """Return the number of workers with the least time times cost, if it saves enough.

    Args:
        update_s: d, by the number of workers.
        now: Current number of workers.
        most: Maximum number of workers.
        updates_per_s: Rate of arrivals. The result keeps up with it, if any number of workers does.
    """
    numbers = range(1, most + 1)
    enough = [p for p in numbers if update_s(p) * updates_per_s <= 1] or numbers
    best = min(enough, key=lambda p: p * update_s(p) ** 2)
    saves = best * update_s(best) ** 2 < SAVING * now * update_s(now) ** 2
    return best if saves or now not in enough else now
