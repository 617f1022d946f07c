"""A task whose gradients cost nothing at any model size, to measure the protocol alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

ENTRYPOINT = "common.testing.costless:CostlessTask"


class Ballast(nn.Module):
    """One trained weight, and others that the system only has to transfer."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))
        self.ballast = nn.Parameter(torch.zeros(weights - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return multiples of the inputs, (n,). The ballast gets no gradient."""
        return x * self.slope


class CostlessTask:
    """The task. Each record has `x`, float32.

    Args:
        weights: Size of the model, at least 2.
    """

    def __init__(self, weights: int) -> None:
        if weights < 2:
            raise ValueError(f"weights must be at least 2, got {weights}")
        self._weights = weights

    def build(self) -> nn.Module:
        """Return a new model."""
        return Ballast(self._weights)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the model's outputs, (n,)."""
        outputs: Tensor = module(records["x"])
        return outputs

    def losses(self, outputs: Tensor, _records: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs themselves, (n,)."""
        return outputs

    def metrics(self, _outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return no metrics."""
        return {}
