"""Poison: batches that give no gradient, and when so many are that the task must be at fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView, Mapping

SETTLED_WINDOW = 100  # batches over which the share of poison is judged


class Suspects:
    """Batches that may be poison: their message died with its worker, raised, or was not finite.

    A suspect travels alone from then on, and only what happens to it alone counts: company
    could have been the cause.

    Args:
        limit: Strikes that a batch may have; one more is poison.
        failure_counts: Where a snapshot left off, by control offset.
    """

    def __init__(self, limit: int, failure_counts: Mapping[int, int] | None = None) -> None:
        self._limit = limit
        self._failures = dict(failure_counts or {})

    @property
    def failure_counts(self) -> dict[int, int]:
        """Strikes of every suspect; a copy."""
        return dict(self._failures)

    @property
    def offsets(self) -> KeysView[int]:
        """Of all that are known of now."""
        return self._failures.keys()

    def blame(self, offset: int, *, alone: bool) -> bool:
        """Suspect a batch, and strike it if it was alone; True where that makes it poison."""
        self._failures[offset] = self._failures.get(offset, 0) + alone
        return self._failures[offset] > self._limit

    def restore(self, failure_counts: Mapping[int, int]) -> None:
        """Know of these, too."""
        self._failures.update(failure_counts)

    def clear(self, offsets: Iterable[int]) -> None:
        """Acquit batches that gave a gradient, or forget those that are settled."""
        if self._failures:
            for offset in offsets:
                self._failures.pop(offset, None)


class PoisonLimits:
    """How much of what was settled last is poison: so much at once is the task's fault, not data's.

    A leader counts anew: after a takeover, and after its job was held for it and resumed.

    Args:
        in_a_row: Poison batches without one applied update between them that are too many.
        share: Of the last `SETTLED_WINDOW` settled batches, more than which are too many.
    """

    def __init__(self, in_a_row: int, share: float) -> None:
        self._most_in_a_row = in_a_row
        self._share = share
        self._in_a_row = 0
        self._settled = deque[bool](maxlen=SETTLED_WINDOW)  # whether each was poison

    def forget(self) -> None:
        """Count anew."""
        self._in_a_row = 0
        self._settled.clear()

    def applied(self, batches: int) -> None:
        """An update of so many batches was applied."""
        self._in_a_row = 0
        self._settled.extend([False] * batches)

    def quarantined(self) -> str:
        """A batch turned out to be poison; says why that is too much, empty where it is not."""
        self._in_a_row += 1
        self._settled.append(True)
        if self._in_a_row >= self._most_in_a_row:
            return f"{self._in_a_row} batches in a row"
        count = sum(self._settled)
        # Of a window that is not full yet, too: the first batch of a job may well be bad.
        if count > self._share * SETTLED_WINDOW:
            return f"{count} of the last {len(self._settled)} batches"
        return ""
