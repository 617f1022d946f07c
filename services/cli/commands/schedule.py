"""When records are due: an arrival process as due times, so that whoever is late catches up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_CHUNK = 4096  # due times drawn at once: a draw costs little, a call much


class Schedule:
    """Arrivals at a rate, steady or Poisson (lambda_A of the paper), counted from a start at 0 s.

    Args:
        rate_per_s: Records per second, above 0.
        rng: Draws the times between arrivals; None for a steady stream.
    """

    def __init__(self, rate_per_s: float, rng: np.random.Generator | None = None) -> None:
        self._gap_s = 1 / rate_per_s
        self._rng = rng
        self._passed = 0  # arrivals before those in `_due_s`
        self._due_s = self._draw(0.0)  # ascending

    def due(self, elapsed_s: float) -> int:
        """How many records should have been sent by now; `elapsed_s` never goes back."""
        while self._due_s[-1] <= elapsed_s:
            self._passed += len(self._due_s)
            self._due_s = self._draw(float(self._due_s[-1]))
        return self._passed + int(np.searchsorted(self._due_s, elapsed_s, side="right"))

    def next_s(self, elapsed_s: float) -> float:
        """When the next record is due after those that are."""
        return float(self._due_s[self.due(elapsed_s) - self._passed])

    def _draw(self, last_s: float) -> npt.NDArray[np.float64]:
        if self._rng is None:
            gaps_s = np.full(_CHUNK, self._gap_s)
        else:
            gaps_s = self._rng.exponential(self._gap_s, _CHUNK)
        return last_s + gaps_s.cumsum()
