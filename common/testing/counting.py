"""The counting model, which proves that every record was used exactly once.

It has one parameter per record id. The loss is the sum of the parameters of the batch's ids, and
plain SGD makes steps of 1 on sums. After the job has drained, every weight must be exactly -1, no
matter which process was killed when: -2 is a record used twice, 0 is a record lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

ENTRYPOINT = "common.testing.counting:CountingTask"


class Counts(nn.Module):
    """One weight per record id, (records,), initially 0."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(records))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the weights of these ids, (n,)."""
        return self.weights[ids]


class CountingTask:
    """The task. Each record has its `id`, int64.

    Args:
        records: Number of ids, from 0 on.
        poison: Id whose batch always raises; -1 for none.
        seconds: Time that the gradient of one batch takes, as a sleep.
    """

    def __init__(self, records: int, poison: int = -1, seconds: float = 0.0) -> None:
        self._records = records
        self._poison = poison
        self._seconds = seconds

    def build(self) -> nn.Module:
        """Return a new model."""
        return Counts(self._records)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights of the batch's ids, (n,).

        Raises:
            ValueError: If the poison is among the ids.
        """
        if self._poison in records["id"]:
            raise ValueError(f"record {self._poison} is poison")
        time.sleep(self._seconds)
        outputs: Tensor = module(records["id"])
        return outputs

    def losses(self, outputs: Tensor, _records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights themselves, (n,), so that each gradient is 1."""
        return outputs

    def metrics(self, _outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return no metrics."""
        return {}
