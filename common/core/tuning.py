"""K by how noisy gradients are: the gradient noise scale, read off the messages of each round.

The mean gradient of n records is the true one, G, and noise: its squared norm is G² + S / n on
average. Messages of one round are such means at the same weights, and so is their sum, so that
both numbers can be told apart (McCandlish et al., "An Empirical Model of Large-Batch Training",
2018, appendix A.1). The noise scale S / G² is of how many records the noise is as large as the
gradient. An update of many more is hardly a better step; one of fewer goes astray.
"""

from __future__ import annotations

from math import ceil, inf, isfinite
from typing import NamedTuple

# Of K, below which it shrinks, or over which it grows by as much: estimates of 20 rounds of a few
# messages each are seldom better than that, and each move changes the size of a step.
SHRINK = 0.75
MOST_STEP = 2  # by which K is multiplied or divided at a move: one wrong estimate costs little


def rate_scale(group_size: int, own: int, noise_scale: float | None) -> float:
    """Of the learning rate, which belongs to the job's own K, for a mean of another K.

    The best rate by n records is proportional to 1 / (1 + noise scale / n) (McCandlish et al.,
    section 2.2): to K where noise is all there is, and the same for every K where there is none.

    Args:
        group_size: K.
        own: Of the job.
        noise_scale: In batches; None: unknown, and taken for all there is.
    """
    if noise_scale is None or noise_scale == inf:
        return group_size / own
    return (1 + noise_scale / own) / (1 + noise_scale / group_size)


class Scatter(NamedTuple):
    """What the gradient messages of a round say of noise."""

    messages: int
    batches: int
    samples: int
    squares: float  # sum over messages of |gradient summed over n samples|^2 / n


class GroupSizeTuner:
    """Says which K is in force.

    Attributes:
        group_size: K.

    Args:
        group_size: K, to begin with, if it is within the bounds.
        least: Below which it never is.
        most: Above which it never is.
        rounds: That the estimate goes back, and so those before a first move, and from one to the
            next: then most of what it knows is of the K in force.
    """

    def __init__(self, group_size: int, least: int, most: int, rounds: int) -> None:
        self.group_size = min(max(group_size, least), most)
        self._bounds = least, most
        self._rounds = rounds
        self._noise = self._signal = 0.0  # S and G^2, smoothed each by itself: a ratio is biased
        self._batch_samples = 0.0  # mean, likewise
        self._measured = self._moved = 0  # rounds, and how many at the last move

    @property
    def noise_scale(self) -> float | None:
        """S / G², in batches; None while too little was seen."""
        if self._measured < self._rounds:
            return None
        if self._signal <= 0:
            return inf
        return max(self._noise, 0.0) / self._signal / self._batch_samples

    def observe(self, scatter: Scatter, square: float) -> None:
        """Take in an applied round; one of a single message says nothing.

        Args:
            scatter: Of its messages.
            square: |gradient summed over all its samples|^2
        """
        samples = scatter.samples
        if scatter.messages < 2 or not isfinite(scatter.squares + square):
            return
        # How far messages are from each other, as in an analysis of variance: of sizes that differ.
        noise = (scatter.squares - square / samples) / (scatter.messages - 1)
        self._measured += 1
        weight = 1 / min(self._measured, self._rounds)
        self._noise += weight * (noise - self._noise)
        self._signal += weight * (square / samples**2 - noise / samples - self._signal)
        self._batch_samples += weight * (samples / scatter.batches - self._batch_samples)
        if self._measured - self._moved >= self._rounds:
            self._move()

    def _move(self) -> None:
        noise, now = self.noise_scale or 0.0, self.group_size
        least, most = self._bounds
        wanted = max(ceil(min(noise, most)), least)
        if SHRINK * now < wanted < now / SHRINK:
            return
        self._moved = self._measured
        self.group_size = min(max(wanted, ceil(now / MOST_STEP)), MOST_STEP * now)
