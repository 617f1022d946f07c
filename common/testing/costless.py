"""A task whose gradients cost nothing, whatever the model's size: what remains is the protocol."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

ENTRYPOINT = "common.testing.costless:CostlessTask"


class Ballast(nn.Module):
    """One weight that learns, and others that only have to be carried."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))
        self.ballast = nn.Parameter(torch.zeros(weights - 1))

    def forward(self, x: Tensor) -> Tensor:
        """(n,) multiples of the inputs; no gradient of the ballast is ever computed."""
        return x * self.slope


class CostlessTask:
    """The task; each record holds `x`, float32.

    Args:
        weights: Size of the model, at least 2.
    """

    def __init__(self, weights: int) -> None:
        if weights < 2:
            raise ValueError(f"weights must be at least 2, got {weights}")
        self._weights = weights

    def build(self) -> nn.Module:
        """Make the model."""
        return Ballast(self._weights)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) the model's outputs."""
        outputs: Tensor = module(records["x"])
        return outputs

    def losses(self, outputs: Tensor, _records: Mapping[str, Tensor]) -> Tensor:
        """(n,) the outputs themselves."""
        return outputs

    def metrics(self, _outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """None."""
        return {}
