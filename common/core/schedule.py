"""The learning rate over time: which share of it an update has, by how far the model is alone.

A leader that takes over, and whoever replays, so finds the same. What counts is `progress`, in
updates of the job's own K, and not the version: it says how many records were learned from, and
`stop.updates` counts by it, too. Where rules or a tuner take another K, versions are other steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, floor, pi, sqrt
from typing import Literal, TypeAlias

ScheduleKind: TypeAlias = Literal["constant", "step", "cosine", "inverse_sqrt"]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """How the rate rises, and how it then falls."""

    kind: ScheduleKind = "constant"
    warmup: int = 0  # updates in which it rises to all of it, in a line
    updates: int = 1  # n, from then on: to each step, to the cosine's end, to 1 / sqrt(2)
    factor: float = 0.1  # of a step
    final: float = 0.01  # below which no step and no cosine falls: at zero nothing is learned

    def share(self, progress: float) -> float:
        """Of the learning rate, above 0 and at most 1.

        Args:
            progress: Updates of the job's own K before this one.
        """
        warm = min((progress + 1) / self.warmup, 1.0) if self.warmup else 1.0
        return warm * self._decayed(max(progress - self.warmup, 0.0) / self.updates)

    def _decayed(self, time: float) -> float:
        match self.kind:
            case "constant":
                return 1.0
            case "step":
                return max(float(self.factor ** floor(time)), self.final)
            case "cosine":
                return self.final + (1 - self.final) * (1 + cos(pi * min(time, 1.0))) / 2
            case "inverse_sqrt":
                return 1 / sqrt(1 + time)


CONSTANT = RateSchedule()
