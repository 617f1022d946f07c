"""Quality of a classifier of two classes, from counts that can be added up.

AUC, precision and similar metrics are not means over records, so the metrics of parts say nothing
about the whole. Instead, the number of records of each class is counted by bins of the score. A
score is the logit of the second class, and its bin depends on nothing else.

    bin        0              31       32              63
    logits    ..-7.75]   (-0.25..0] (0..0.25]     (7.75..       above 0 the second class is likelier
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

BINS = 64
# Measured in logits. One bin is at most 0.06 of a probability.
BIN_WIDTH = 0.25
# Length of a window in seconds, and the number of its slots. It moves by one slot.
WINDOW_S, SLOTS = 60.0, 12
# Metrics of a window that are not means over records. All other metrics of a task are means.
WINDOWED = ("auc", "calibration_error", "f1", "precision", "recall")

# (2 * BINS,) number of records of the first class, then of the second.
Counts: TypeAlias = npt.NDArray[np.int64]

_CENTRES = 1 / (1 + np.exp(-BIN_WIDTH * (np.arange(BINS) - (BINS - 1) / 2)))


def measures(counts: npt.NDArray[np.integer[Any]]) -> dict[str, float]:
    """Return the AUC and the other metrics that these records define.

    The AUC counts a pair of records, one of each class, by half if both are in one bin. So its
    error is at most half the share of such pairs. The calibration error is the expected one (Naeini
    et al. 2015), with the middle of a bin as the probability of its records.

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
        """Add counts and return `measures` of the window.

        Args:
            counts: (2 * BINS,).
            now: In seconds, and never less than before.
        """
        slot = int(now * SLOTS // WINDOW_S)
        while self._slots and self._slots[0][0] <= slot - SLOTS:
            self._total -= self._slots.popleft()[1]
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, np.zeros_like(self._total)))
        self._slots[-1][1][:] += counts
        self._total += counts
        return measures(self._total)
