"""Tasks that a coordinator cannot load, each for another reason, and some that it can."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.learning.tasks import Classifier
from common.testing.counting import CountingTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


def _task(build: Callable[[], nn.Module]) -> Classifier:
    return Classifier(build, ("image",), (1, 8, 8), 10)


def Rare(**_options: object) -> Classifier:  # noqa: N802 -- an entrypoint
    """Return a task that works."""
    return _task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def Raises(**_options: object) -> Classifier:  # noqa: N802 -- an entrypoint
    """Return a task whose network cannot be built."""

    def build() -> nn.Module:
        raise KeyError("hidden")

    return _task(build)


def RefusesOptions(**options: object) -> Classifier:  # noqa: N802 -- an entrypoint
    """Reject all options."""
    raise ValueError(f"what is {options}?")


def Exits(**_options: object) -> Classifier:  # noqa: N802 -- an entrypoint
    """Exit the process."""
    sys.exit(3)


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(10_000_000_000))


def TooLarge(**_options: object) -> Classifier:  # noqa: N802 -- an entrypoint
    """Return a task with ten thousand million weights."""
    return _task(_Large)


def Frozen(**_options: object) -> Classifier:  # noqa: N802 -- an entrypoint
    """Return a task with a frozen constant."""

    def build() -> nn.Module:
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        network.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
        return network

    return _task(build)


class LosesGpu(CountingTask):
    """Counts until a pass, which raises the error of a GPU that is lost to its process."""

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Fail.

        Raises:
            AcceleratorError: Always.
        """
        del module, records
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
