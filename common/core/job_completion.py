"""Progress of a job, and its end: by updates, loss, deadline, or its owner.

Updates are those of the job's own K: two with half as many batches count as one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.core.messages import UpdateApplied
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot

# Tolerance of rounding errors: ten tenths may be slightly less than one.
NEARLY = 1e-6
# Number of updates that the loss is averaged over, so that one lucky batch does not end a job.
LOSS_WINDOW = 20


class Completion:
    """Progress of a job, and the conditions of its end.

    Attributes:
        progress: Number of applied updates of the job's own K.
        samples: Number of records in them.
        reason: Reason why the job ends. Empty until then.
        announced: True once the leader has reported the end.
    """

    def __init__(self, settings: CoordinatorSettings, snapshot: Snapshot) -> None:
        self._settings = settings
        self.progress = snapshot.progress
        self.samples = snapshot.samples
        self.reason = ""
        self.announced = False
        # None if there is no deadline.
        self.stop_at = settings.stop_at
        self._losses = deque[float](snapshot.losses, maxlen=LOSS_WINDOW)
        # Share of the next update of the job's own K that is complete.
        self._begun = 0.0
        # Sum of the losses of the updates in that share, each times its own share.
        self._loss_sum = 0.0

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss per sample of the last updates, oldest first."""
        return tuple(self._losses)

    def put_off(self, stop_at: float | None) -> None:
        """Apply a later deadline immediately. An earlier one waits for `change`."""
        if stop_at is None or (self.stop_at is not None and stop_at > self.stop_at):
            self.stop_at = stop_at

    def change(self, settings: CoordinatorSettings) -> None:
        """Apply changed settings."""
        self._settings = settings
        self.stop_at = settings.stop_at

    def applied(self, update: UpdateApplied, share: float = 1.0) -> None:
        """Add an update that counts as `share` updates of the job's own K."""
        self.progress = update.progress
        self.samples += update.samples
        self._begun += share
        self._loss_sum += share * update.loss
        while self._begun > 1 - NEARLY:
            mean = self._loss_sum / self._begun
            self._losses.append(mean)
            self._begun, self._loss_sum = self._begun - 1, self._loss_sum - mean

    def reached(self, now: float) -> str:
        """Return why the job is finished. Empty if it is not."""
        settings, progress = self._settings, self.progress
        if settings.stop_updates is not None and progress > settings.stop_updates - NEARLY:
            return f"{progress:.0f} updates applied"
        if settings.stop_loss is not None and len(self._losses) == LOSS_WINDOW:
            loss = sum(self._losses) / LOSS_WINDOW
            if loss <= settings.stop_loss:
                return f"loss {loss:.4g} over the last {LOSS_WINDOW} updates"
        if self.stop_at is not None and now >= self.stop_at:
            return "its deadline has passed"
        return ""
