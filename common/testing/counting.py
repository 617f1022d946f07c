"""The counting model: it proves that every record was used exactly once.

A parameter per record id, a loss that is the sum of the parameters which the batch names, plain
SGD with step 1 on sums. Whatever is killed and when, every weight of the drained job must be
exactly -1: -2 is a record used twice, 0 is a record lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

ENTRYPOINT = "common.testing.counting:CountingTask"


class Counts(nn.Module):
    """(records,) one weight per record id, all 0 at first."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(records))

    def forward(self, ids: Tensor) -> Tensor:
        """(n,) the weights of these ids."""
        return self.weights[ids]


class CountingTask:
    """The task; each record holds its `id`, int64.

    Args:
        records: How many ids there are, from 0.
        poison: An id whose batch always raises, -1 for none.
        seconds: How long the gradient of one batch takes, by a timed wait.
    """

    def __init__(self, records: int, poison: int = -1, seconds: float = 0.0) -> None:
        self._records = records
        self._poison = poison
        self._seconds = seconds

    def build(self) -> nn.Module:
        """Make the model."""
        return Counts(self._records)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) the weights of the batch's ids.

        Raises:
            ValueError: If the poison is among them.
        """
        if self._poison in records["id"]:
            raise ValueError(f"record {self._poison} is poison")
        time.sleep(self._seconds)
        outputs: Tensor = module(records["id"])
        return outputs

    def losses(self, outputs: Tensor, _records: Mapping[str, Tensor]) -> Tensor:
        """(n,) the weights themselves: the gradient of each is 1."""
        return outputs

    def metrics(self, _outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """None."""
        return {}
