"""Tasks that are wrong in one way each, for tests of what is refused at submission."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping


class Plain:
    """A linear layer of some inputs; what it prints while it is built is nobody's answer."""

    def __init__(self, inputs: int = 4) -> None:
        if inputs < 1:
            raise ValueError("inputs: must be positive")
        self.width = inputs

    def build(self) -> nn.Module:
        """Make the network."""
        print("building")  # noqa: T201 -- as a user's code may
        return nn.Linear(self.width, 1000)

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """(n, 1000)."""
        outputs: Tensor = module(records["features"])
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 -- as the protocol has it
        """(n,)."""
        return outputs.sum(1)

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002 -- likewise
        """None."""
        return {}


class Raising(Plain):
    """Raises when it is built."""

    def build(self) -> nn.Module:
        """Fail."""
        raise KeyError("no such layer")


class LooksAtValues(Plain):
    """Cannot be built without memory: it looks at what it has drawn."""

    def build(self) -> nn.Module:
        """Make the network."""
        module = nn.Linear(self.width, 1000)
        if float(module.weight[0, 0]) == torch.inf:
            raise ValueError("an odd start")
        return module


class WrongInputs(Plain):
    """Says what it reads in a way of its own."""

    inputs = 4


class Dying(Plain):
    """Ends its process."""

    def build(self) -> nn.Module:
        """End it all."""
        raise SystemExit(3)


class Killed(Plain):
    """Ends its process as the kernel does if memory lacks."""

    def build(self) -> nn.Module:
        """End it all."""
        signal.raise_signal(signal.SIGKILL)
        return super().build()
