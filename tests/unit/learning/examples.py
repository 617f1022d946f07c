"""Tasks, networks and data for several tests of learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from common.learning.tasks import Task, make_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.data.fields import Columns

CPU = torch.device("cpu")


def images(seed: int, count: int, side: int = 8, classes: int = 4) -> Columns:
    """Return noise with labels."""
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(0, 256, (count, 1, side, side)).astype(np.uint8),
        "label": random.integers(0, classes, count),
    }


def image_task(side: int = 8, classes: int = 4) -> Task:
    """Return the built-in classifier of small images."""
    return make_task("image-classifier", {"classes": classes, "height": side, "width": side})


@dataclass
class Counting:
    """A parameter per record id; the loss of a record is its parameter."""

    ids: int = 10

    def build(self) -> nn.Module:
        """Return one weight per id, all zero."""
        return nn.Embedding(self.ids, 1, _weight=torch.zeros(self.ids, 1))

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the (n,) weights that the records name."""
        outputs: Tensor = module(records["id"])
        return outputs.squeeze(1)

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights themselves."""
        del records
        return outputs

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return no metrics."""
        del outputs, records
        return {}


@dataclass
class Regression:
    """Squared error of any network on fields x and y."""

    network: nn.Module

    def build(self) -> nn.Module:
        """Return the given network."""
        return self.network

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,) predictions."""
        outputs: Tensor = module(records["x"])
        return outputs.squeeze(1)

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return (n,) squared errors."""
        return (outputs - records["y"]) ** 2

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return (n,) absolute errors."""
        return {"error": (outputs - records["y"]).abs()}


def points(seed: int, count: int, features: int = 3) -> Columns:
    """Return noise for a regression."""
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(count, features)).astype(np.float32),
        "y": random.normal(size=count).astype(np.float32),
    }


def normalised() -> nn.Module:
    """Return a network with batch normalisation, a constant buffer and dropout."""

    class Scaled(nn.Module):
        """Divides by a constant that is saved with the model."""

        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([0.3, 1.7, 0.9]))

        def forward(self, inputs: Tensor) -> Tensor:
            """Map (n, 3) to (n, 3)."""
            return inputs / self.scale

    torch.manual_seed(0)
    return nn.Sequential(
        Scaled(), nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Linear(5, 1)
    )
