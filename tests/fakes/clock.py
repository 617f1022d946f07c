"""A manual clock."""

from __future__ import annotations


class ManualClock:
    """Clock that only a test advances. Call it to read it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Return the current time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time.

        Raises:
            ValueError: If the time would decrease.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} s")
        self._now += seconds
