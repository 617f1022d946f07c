"""Poison: batches that give no gradient, and the limit above which the task must be at fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView, Mapping

# Number of settled batches that the share of poison refers to.
SETTLED_WINDOW = 100


class Suspects:
    """Batches that may be poison: their worker died, or the gradient failed or was not finite.

    An order then contains only the suspect. Failures of orders with more batches do not count,
    because another batch could have been the cause.

    Args:
        limit: Number of failures allowed. One more makes the batch poison.
        failure_counts: Failures in the snapshot, by control offset.
    """

    def __init__(self, limit: int, failure_counts: Mapping[int, int] | None = None) -> None:
        self._limit = limit
        self._failures = dict(failure_counts or {})

    @property
    def failure_counts(self) -> dict[int, int]:
        """Copy of the failures of every suspect."""
        return dict(self._failures)

    @property
    def offsets(self) -> KeysView[int]:
        """Control offsets of all suspects."""
        return self._failures.keys()

    def blame(self, offset: int, *, alone: bool) -> bool:
        """Suspect a batch, and count a failure if it was alone. Return True if it is poison now."""
        self._failures[offset] = self._failures.get(offset, 0) + alone
        return self._failures[offset] > self._limit

    def restore(self, failure_counts: Mapping[int, int]) -> None:
        """Add suspects with their failures."""
        self._failures.update(failure_counts)

    def clear(self, offsets: Iterable[int]) -> None:
        """Remove batches that gave a gradient or are settled."""
        if self._failures:
            for offset in offsets:
                self._failures.pop(offset, None)


class PoisonLimits:
    """Limits of recent poison. More is the fault of the task, not of the data.

    The count starts from zero after a takeover, and after a job held for this reason was resumed.

    Args:
        in_a_row: Number of poison batches, without an update between them, that are too many.
        share: Share of the last `SETTLED_WINDOW` settled batches above which poison is too much.
    """

    def __init__(self, in_a_row: int, share: float) -> None:
        self._most_in_a_row = in_a_row
        self._share = share
        self._in_a_row = 0
        self._settled = deque[bool](maxlen=SETTLED_WINDOW)  # True for poison

    def forget(self) -> None:
        """Reset the counts."""
        self._in_a_row = 0
        self._settled.clear()

    def applied(self, batches: int) -> None:
        """Record an update of `batches` batches."""
        self._in_a_row = 0
        self._settled.extend([False] * batches)

    def quarantined(self) -> str:
        """Record a poison batch. Return why that is too much, or an empty text."""
        self._in_a_row += 1
        self._settled.append(True)
        if self._in_a_row >= self._most_in_a_row:
            return f"{self._in_a_row} batches in a row"
        count = sum(self._settled)
        # Relative to a full window even before it is full, because a job's first batch may well be
        # bad.
        if count > self._share * SETTLED_WINDOW:
            return f"{count} of the last {len(self._settled)} batches"
        return ""
