"""Rounds: updates in flight, each from its K batches to its K gradients.

One rule says which weights are too old. The base v of a round is the oldest version that one of its
gradients was computed at. A round with base v and staleness s must be applied while the newest
version is at most v + s. `fits` returns True if all rounds in flight can be applied in time, one
after the other. With s = 0 there is one round in flight, and all its gradients are computed at the
version before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import nan
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from common.core.messages import (
    Assignment,
    Batch,
    GradientReady,
    MetricSum,
    Synchrony,
    UpdateApplied,
    WorkerId,
    reached_mask,
)
from common.core.modes import Scatter, rate_scale

if TYPE_CHECKING:
    from common.core.messages import Gradient
    from common.core.scores import Counts
    from common.core.settings import CoordinatorSettings, Mode


def fits(deadlines: Iterable[int], version: int) -> bool:
    """True if all rounds can be applied in time, one after the other.

    Args:
        deadlines: The newest version at which each round may still be applied.
        version: The newest version.
    """
    return all(version + place <= last for place, last in enumerate(sorted(deadlines)))


class Round:
    """The batches of one update, and which of them have a gradient.

    Args:
        number: Number of the round under this leader.
        mode: Mode of the round to its end, even if the job changes or switches.
        live: Number of living workers.
        settings: Settings of the round to its end.
        batches: The group, in order of fairness.
        worker: Optional. The worker that gets the whole group first. If unset, each batch first
            goes to the worker that claimed it.
    """

    def __init__(
        self,
        number: int,
        mode: Mode,
        live: int,
        settings: CoordinatorSettings,
        batches: Iterable[Batch],
        worker: WorkerId | None = None,
    ) -> None:
        self.number = number
        self.mode = mode
        self.synchrony = mode.synchrony(live)
        self.settings = settings
        self.worker = worker
        # Batches without a gradient.
        self.todo = {batch.offset: batch for batch in batches}
        # Batches whose gradient is in the sum.
        self.counted = dict[int, Batch]()
        # Workers that each batch was assigned to.
        self.asked = dict[int, list[WorkerId]]()
        # True if the round began with fewer than K batches.
        self.lingered = self.missing > 0
        # Reason for applying it with fewer than K batches, once decided.
        self.short = ""
        # Counted gradients that stay in their workers.
        self.ready = list[GradientReady]()
        self._clear()

    def _clear(self) -> None:
        """Reset all sums."""
        # Number of batches in each gradient message.
        self.parts = list[int]()
        self.samples = 0
        self._squares = 0.0  # see `Scatter`
        # Compute time of all counted gradients.
        self.seconds = 0.0
        self.loss_sum = 0.0
        self.metric_sums = dict[str, MetricSum]()
        # Only for a task with two classes.
        self.scores: Counts | None = None
        # Number of gradients that were computed in parts for lack of memory.
        self.cut = 0
        # Oldest version that a counted gradient was computed at.
        self.base: int | None = None
        # Parameter tensors that a counted gradient reached, see `Reached`.
        self.reached = 0

    def __len__(self) -> int:
        return len(self.todo) + len(self.counted)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Batches with and without gradient."""
        return (*self.todo.values(), *self.counted.values())

    @property
    def missing(self) -> int:
        """Number of missing batches."""
        return self.synchrony.group_size - len(self.todo) - len(self.counted)

    @property
    def asked_again(self) -> bool:
        """True if some batch was assigned more than once."""
        return max(map(len, self.asked.values()), default=0) > 1

    def waits_for(self, orders: Iterable[Assignment]) -> bool:
        """True if an order contains a batch of this round without a gradient."""
        return any(batch.offset in self.todo for order in orders for batch in order.batches)

    def fill(self, batches: Iterable[Batch]) -> None:
        """Add batches in place of quarantined ones."""
        self.todo.update((batch.offset, batch) for batch in batches)

    def add(self, gradient: Gradient | GradientReady) -> None:
        """Add a gradient that counts."""
        offsets, samples = gradient.batches, gradient.samples
        for offset in offsets:
            self.counted[offset] = self.todo.pop(offset)
        if isinstance(gradient, GradientReady):
            self.ready.append(gradient)
        self.parts.append(len(offsets))
        version = gradient.model.version
        self.base = version if self.base is None else min(self.base, version)
        self.samples += samples
        self.reached |= reached_mask(gradient.reached)
        self._squares += nan if gradient.square is UNSET else gradient.square / samples
        self.seconds += gradient.seconds
        self.loss_sum += gradient.loss_sum
        for name, (total, count) in gradient.metric_sums.items():
            before, among = self.metric_sums.get(name, (0.0, 0))
            self.metric_sums[name] = MetricSum(before + total, among + count)
        if gradient.scores:
            scores = np.array(gradient.scores)
            self.scores = scores if self.scores is None else self.scores + scores
        self.cut += bool(gradient.cut)

    def uncount(self, lost: Callable[[GradientReady], bool]) -> bool:
        """Remove gradients that are lost with their members. Their batches wait again.

        Args:
            lost: Returns True if a gradient is lost.

        Returns:
            True if any gradient was removed.
        """
        rest = [gradient for gradient in self.ready if not lost(gradient)]
        if len(rest) == len(self.ready):
            return False
        self.ready = []
        self.todo |= self.counted
        self.counted = {}
        self._clear()
        for gradient in rest:
            self.add(gradient)
        return True

    @property
    def scatter(self) -> Scatter:
        """Scatter of the gradients, as a measure of noise. NaN unless all of them have a norm."""
        return Scatter(len(self.parts), len(self.counted), self.samples, self._squares)

    @property
    def averages(self) -> bool:
        """True if this round averages the workers' copies of the model after local steps."""
        return self.synchrony.local_rate > 0 and self.settings.reduction == "mean"

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the step before the update's scale. None for the trainer's own rate."""
        if self.averages:
            return self.synchrony.local_rate
        own = self.mode.learning_rate
        return self.settings.mode.learning_rate if own is None else own

    def _scale(self, staleness: int, before: float, noise_scale: float | None) -> float:
        scale = 1.0
        if self.averages:
            # If each worker takes m = K / p steps, a step at rate m x local rate by the mean of all
            # gradients is the mean of the workers' copies.
            scale = len(self.counted) / len(self.parts)
        elif self.mode.learning_rate is None and self.settings.rate_by_group:
            own = self.settings.mode.group_size
            scale = rate_scale(self.mode.group_size, own, noise_scale)
        scale *= self.settings.schedule.share(before)
        return scale / (1 + staleness) if self.mode.damped else scale

    @property
    def share(self) -> float:
        """Number of updates of the job's own K that this one counts as, short or not."""
        return self.mode.group_size / self.settings.mode.group_size

    def update(
        self, epoch: int, version: int, before: float, noise_scale: float | None = None
    ) -> UpdateApplied:
        """Return the update that the counted batches make.

        Args:
            epoch: Epoch of the leader.
            version: J, after the update.
            before: Progress before the update, in updates of the job's own K.
            noise_scale: Noise scale of the gradients in batches, if known.
        """
        skipped = Counter[str]()
        for batch in self.counted.values():
            if batch.skipped:
                for left_out in batch.skipped:
                    skipped[left_out.topic] += left_out.records
        base = version - 1 if self.base is None else self.base
        progress, rate = before + self.share, self.learning_rate
        scale = self._scale(version - 1 - base, before, noise_scale)
        plain = self.synchrony == Synchrony(self.settings.mode.group_size)
        sums = self.metric_sums
        measured = {n: each.samples for n, each in sums.items() if each.samples != self.samples}
        return UpdateApplied(
            epoch=epoch,
            version=version,
            batches=tuple([b.without_skipped() if b.skipped else b for b in self.counted.values()]),
            samples=self.samples,
            loss=self.loss_sum / self.samples,
            metrics={name: total / count for name, (total, count) in sums.items()},
            short=self.short,
            revision=self.settings.revision,
            gradient_s=self.seconds / len(self.counted),
            skipped=dict(skipped),
            synchrony=UNSET if plain else self.synchrony,
            base=UNSET if base == version - 1 else base,
            parts=tuple(self.parts) if self.synchrony.local_rate else UNSET,
            scale=UNSET if scale == 1 else scale,
            rate=UNSET if rate is None else rate * scale,
            equivalent=UNSET if progress == version else progress,
            measured=measured or UNSET,
            cut=self.cut or UNSET,
        )
