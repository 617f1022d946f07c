"""A clock that stands still until it is moved."""

from __future__ import annotations


class ManualClock:
    """Seconds that pass when a test says so; call it to read it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """The time that it shows."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: If it would go back.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} s")
        self._now += seconds
