"""Scores of two classes, counted by bins as `common.core.scores` adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import torch

from common.core.scores import BIN_WIDTH, BINS
from common.learning.outputs import check_scores

if TYPE_CHECKING:
    from torch import Tensor

    from common.learning.tasks import Task


class BinaryScores(Protocol):
    """A task of two classes that can say so is measured by AUC, precision and the like, too."""

    def binary_scores(
        self, outputs: Tensor, records: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(n,) logits of the second class, and (n,) whether a record is of it."""


@cache
def _edges(device: torch.device) -> Tensor:
    """(BINS - 1,) between bins, each of the lower one."""
    return BIN_WIDTH * torch.arange(1 - BINS // 2, BINS // 2, device=device)


def count_scores(task: Task, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor | None:
    """(2 * BINS,) records of each class by bin; None where the task has no `binary_scores`.

    Raises:
        WrongTaskError: If they are not of n records.
    """
    if getattr(task, "binary_scores", None) is None:  # to ask the protocol takes 20 us
        return None
    found = cast("BinaryScores", task).binary_scores(outputs, records)
    check_scores(task, found, len(outputs))
    logits, second = found
    bins = torch.bucketize(logits.contiguous(), _edges(logits.device)).add_(
        second.bool(), alpha=BINS
    )
    return torch.bincount(bins, minlength=2 * BINS)
