"""How training goes, from its audit trail as it comes: pure, and right across takeovers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from common.core.history import History
from common.core.messages import Lead, UpdateApplied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.core.messages import AuditRecord

RECENT_UPDATES = 20  # what "now" means for loss and accuracy
_RATE_WINDOW_S = 5.0


class Course:
    """The effective updates so far, and when they were seen."""

    def __init__(self) -> None:
        self.updates = list[UpdateApplied]()
        self.trained = 0
        self.last_at = 0.0  # when the last of them was seen
        self.longest_pause_s = 0.0  # between two of them
        self._history = History()
        self._window = deque[tuple[float, int]]()  # when, samples

    def feed(self, offset: int, record: AuditRecord | None, now: float) -> bool:
        """Take in one record of the updates topic; True for an update that counts."""
        if not self._history.feed(offset, record):
            return False
        if isinstance(record, Lead):
            taken_back = self.updates[record.base.version :]
            del self.updates[record.base.version :]
            self.trained -= sum(update.samples for update in taken_back)
        if not isinstance(record, UpdateApplied):
            return False
        if self.updates:
            self.longest_pause_s = max(self.longest_pause_s, now - self.last_at)
        self.updates.append(record)
        self.trained += record.samples
        self.last_at = now
        self._window.append((now, record.samples))
        return True

    def recent(self) -> Sequence[UpdateApplied]:
        """The newest updates."""
        return self.updates[-RECENT_UPDATES:]

    def samples_per_s(self, now: float) -> float:
        """Records trained per second of late."""
        while self._window and self._window[0][0] < now - _RATE_WINDOW_S:
            self._window.popleft()
        return sum(samples for _, samples in self._window) / _RATE_WINDOW_S


def mean_loss(updates: Sequence[UpdateApplied]) -> float | None:
    """Mean per sample, at the weights before each update."""
    return _mean([(update.loss, update.samples) for update in updates])


def mean_accuracy(updates: Sequence[UpdateApplied]) -> float | None:
    """Prequential accuracy: each record was judged before it was learned from."""
    return _mean(
        [
            (update.metrics["accuracy"], update.samples)
            for update in updates
            if "accuracy" in update.metrics
        ]
    )


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None
