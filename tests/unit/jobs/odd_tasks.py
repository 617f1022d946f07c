"""Tasks with one bug each, for tests of refusals at submission."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping


class Plain:
    """A linear layer. It prints while it is built, which must not disturb the check."""

    def __init__(self, inputs: int = 4) -> None:
        if inputs < 1:
            raise ValueError("inputs: must be positive")
        self.width = inputs

    def build(self) -> nn.Module:
        """Build the network."""
        print("building")  # noqa: T201 -- as a user's code may
        return nn.Linear(self.width, 1000)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return outputs (n, 1000)."""
        outputs: Tensor = module(records["features"])
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 -- signature of the protocol
        """Return losses (n,)."""
        return outputs.sum(1)

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002 -- signature of the protocol
        """Return no metrics."""
        return {}


class Raising(Plain):
    """Raises in `build`."""

    def build(self) -> nn.Module:
        """Raise."""
        raise KeyError("no such layer")


class LooksAtValues(Plain):
    """Cannot be built on the meta device, because it reads the random values."""

    def build(self) -> nn.Module:
        """Build the network."""
        module = nn.Linear(self.width, 1000)
        if float(module.weight[0, 0]) == torch.inf:
            raise ValueError("an odd start")
        return module


class WrongInputs(Plain):
    """Declares inputs that are no inputs."""

    inputs = 4


class Dying(Plain):
    """Exits in `build`."""

    def build(self) -> nn.Module:
        """Exit."""
        raise SystemExit(3)


class Killed(Plain):
    """Kills its process, as the kernel does if memory runs out."""

    def build(self) -> nn.Module:
        """Kill the process."""
        signal.raise_signal(signal.SIGKILL)
        return super().build()
