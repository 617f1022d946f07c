"""How well two classes are told apart, from counts alone: they add up, whoever counted them.

AUC, precision and the like are no means of records: those of parts say nothing of the whole. How
many records of each class have a score in which bin does: a score is the logit of the second class,
and its bin is a function of it alone.

    bin        0              31       32              63
    logits    ..-7.75]   (-0.25..0] (0..0.25]     (7.75..       above 0 the second class is likelier
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

BINS = 64
BIN_WIDTH = 0.25  # of logits: at most 0.06 of a probability
WINDOW_S, SLOTS = 60.0, 12  # of a window; it moves by a twelfth
# Not means of records, and of a window; everything else that a task measures is a mean.
WINDOWED = ("auc", "calibration_error", "f1", "precision", "recall")

Counts: TypeAlias = npt.NDArray[np.int64]  # (2 * BINS,) records of the first class, then the second

_CENTRES = 1 / (1 + np.exp(-BIN_WIDTH * (np.arange(BINS) - (BINS - 1) / 2)))


def measures(counts: npt.NDArray[np.integer[Any]]) -> dict[str, float]:
    """AUC and the rest, as far as the records allow.

    The AUC takes two records of one bin for equal: it is wrong by at most half of the pairs of
    both classes that share a bin. The calibration error is the expected one (Naeini et al. 2015),
    with a bin's middle for the probability of what is in it.

    Args:
        counts: (2 * BINS,).
    """
    first, second = counts.reshape(2, BINS)
    negatives, positives = int(first.sum()), int(second.sum())
    taken, right = int(counts.reshape(2, 2, -1)[:, 1].sum()), int(second[BINS // 2 :].sum())
    found = dict[str, float]()
    if negatives and positives:
        below = first.cumsum() - first / 2
        found["auc"] = float(second @ below) / (negatives * positives)
    if negatives + positives:
        gaps = np.abs((first + second) * _CENTRES - second)
        found["calibration_error"] = float(gaps.sum()) / (negatives + positives)
    if positives + taken:
        found["f1"] = 2 * right / (positives + taken)
    if taken:
        found["precision"] = right / taken
    if positives:
        found["recall"] = right / positives
    return found


class ScoreWindow:
    """The counts of the last minute, in bounded memory."""

    def __init__(self) -> None:
        self._slots = deque[tuple[int, Counts]]()
        self._total = np.zeros(2 * BINS, np.int64)

    def add(self, counts: npt.NDArray[np.integer[Any]], now: float) -> dict[str, float]:
        """Take in counts; returns `measures` of the window.

        Args:
            counts: (2 * BINS,).
            now: In seconds; never less than before.
        """
        slot = int(now * SLOTS // WINDOW_S)
        while self._slots and self._slots[0][0] <= slot - SLOTS:
            self._total -= self._slots.popleft()[1]
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, np.zeros_like(self._total)))
        self._slots[-1][1][:] += counts
        self._total += counts
        return measures(self._total)
