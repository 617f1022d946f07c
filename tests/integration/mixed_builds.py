"""Counting task with two builds. An environment variable sets the order of the model's layers."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from common.testing.counting import CountingTask

ENTRYPOINT = "tests.integration.mixed_builds:LayeredTask"
ORDER = "TEST_LAYERS"
FROZEN = "tests.integration.mixed_builds:FrozenTask"
ROUNDING = "TEST_ROUNDING"


class _Layered(nn.Module):
    """One weight (records,) per record id, in two layers of equal size."""

    def __init__(self, records: int, order: list[str]) -> None:
        super().__init__()
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.zeros(records // 2)))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the weights (n,) of these ids."""
        weights: Tensor = torch.cat([self.get_parameter("low"), self.get_parameter("high")])[ids]
        return weights


class LayeredTask(CountingTask):
    """Counts records. A worker of the other build would add to the weight of a different record."""

    def build(self) -> nn.Module:
        """Build the model."""
        return _Layered(self._records, os.environ.get(ORDER, "low,high").split(","))


class _Scaled(nn.Module):
    """One weight (records,) per record id, times a frozen number that is 1 in the first build."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(records))
        scale = torch.rand(2)
        scale[0] = 1.0 + float(os.environ.get(ROUNDING, "0"))
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scaled weights (n,) of these ids."""
        weights: Tensor = self.weights[ids] * self.scale[0]
        return weights


class FrozenTask(CountingTask):
    """Counts records. A machine that rounds otherwise draws another frozen tensor."""

    def build(self) -> nn.Module:
        """Build the model."""
        return _Scaled(self._records)
