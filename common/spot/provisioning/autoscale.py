"""How many workers are worth their cost: by what updates were measured to take.

With p workers an update takes d(p) = ceil(K / p) mu_C + o + p m: gradients one after the other,
what is done once, and what is done for each worker, such as its messages. `workers_wanted` makes
time times cost least, p d(p)^2. Cost alone, p d(p), is least with one worker whatever is measured,
since p ceil(K / p) is at least K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

WINDOW_S = 1.0  # of one measurement, at least: records are read some hundredths late
UPDATES = 10  # likewise: one of them may have waited for a slow gradient
SMOOTHING = 0.3  # weight of the newest measurement: the last few count
SAVING = 0.95  # of time times cost: a smaller gain is within what measurements are off by


class FleetSize(NamedTuple):
    """What must not change while updates are measured."""

    workers: int  # that run
    group_size: int  # K


@dataclass(frozen=True, slots=True)
class _Window:
    fleet: FleetSize
    version: int  # J as it began
    at_s: float


class RoundTimes:
    """What updates take besides gradients, by how many workers there were."""

    def __init__(self) -> None:
        self._besides_s = dict[int, float]()  # by workers, smoothed
        self._window: _Window | None = None

    def observe(
        self, fleet: FleetSize, version: int, gradient_s: float, now_s: float, *, backlog: bool
    ) -> None:
        """Take in how far the job is.

        Args:
            fleet: Who works for it.
            version: J, updates made so far.
            gradient_s: mu_C.
            now_s: Since 1970.
            backlog: Whether records wait: else updates take as long as records take to arrive.
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
            if besides_s > 0:  # else they were made earlier, and read together
                before_s = self._besides_s.get(fleet.workers, besides_s)
                besides_s = before_s + SMOOTHING * (besides_s - before_s)
                self._besides_s[fleet.workers] = besides_s

    def update_s(self, group_size: int, gradient_s: float) -> Callable[[int], float] | None:
        """d, by the number of workers; None while nothing was measured.

        While one number of workers was seen, all is taken to be done for each of them.
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
    """The number of workers at which time times cost is least, if that saves enough.

    Args:
        update_s: d, by the number of workers.
        now: That there are.
        most: That there may be.
        updates_per_s: As records arrive: fewer workers than keep up are not wanted, if any number
            of them does.
    """
    numbers = range(1, most + 1)
    enough = [p for p in numbers if update_s(p) * updates_per_s <= 1] or numbers
    best = min(enough, key=lambda p: p * update_s(p) ** 2)
    saves = best * update_s(best) ** 2 < SAVING * now * update_s(now) ** 2
    return best if saves or now not in enough else now
