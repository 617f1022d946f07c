"""How far a job is, and when it is done: by its updates, its loss, its deadline, or its owner.

Updates are those of the job's own K: two of half as many batches count as one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.core.messages import UpdateApplied
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot

NEARLY = 1e-6  # of an update: ten tenths may come to a little less than one
LOSS_WINDOW = 20  # updates over which the loss is judged: one lucky batch does not end a job


class Completion:
    """How far a job is, and its end, as its owner set it.

    Attributes:
        progress: Updates of the job's own K that were applied.
        samples: Records in them.
        reason: Why the job ends, once it does.
        announced: True once the leader has said so.
    """

    def __init__(self, settings: CoordinatorSettings, snapshot: Snapshot) -> None:
        self._settings = settings
        self.progress = snapshot.progress
        self.samples = snapshot.samples
        self.reason = ""
        self.announced = False
        self.stop_at = settings.stop_at  # None: it has no deadline
        self._losses = deque[float](snapshot.losses, maxlen=LOSS_WINDOW)
        self._begun = 0.0  # share of the next one, and
        self._loss_sum = 0.0  # the losses in it, times their shares

    @property
    def losses(self) -> tuple[float, ...]:
        """Of the last updates, mean per sample each, oldest first."""
        return tuple(self._losses)

    def put_off(self, stop_at: float | None) -> None:
        """Let a later deadline count already; an earlier one waits for `change`."""
        if stop_at is None or (self.stop_at is not None and stop_at > self.stop_at):
            self.stop_at = stop_at

    def change(self, settings: CoordinatorSettings) -> None:
        """Go by these settings from now on."""
        self._settings = settings
        self.stop_at = settings.stop_at

    def applied(self, update: UpdateApplied, share: float = 1.0) -> None:
        """Take in an update that counts as so many of the job's own K."""
        self.progress = update.progress
        self.samples += update.samples
        self._begun += share
        self._loss_sum += share * update.loss
        while self._begun > 1 - NEARLY:
            mean = self._loss_sum / self._begun
            self._losses.append(mean)
            self._begun, self._loss_sum = self._begun - 1, self._loss_sum - mean

    def reached(self, now: float) -> str:
        """Why the job is done; empty while it is not."""
        settings, progress = self._settings, self.progress
        if settings.stop_updates is not None and progress > settings.stop_updates - NEARLY:
            return f"{progress:.0f} updates applied"
        if settings.stop_loss is not None and len(self._losses) == LOSS_WINDOW:
            loss = sum(self._losses) / LOSS_WINDOW
            if loss <= settings.stop_loss:
                return f"loss {loss:.4g} over the last {LOSS_WINDOW} updates"
        if self.stop_at is not None and now >= self.stop_at:
            return "its deadline has come"
        return ""
