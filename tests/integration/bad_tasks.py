"""Tasks that pass submission if they are registered, each with a bug of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.testing.counting import CountingTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class RefusesOptions(CountingTask):
    """Rejects the options in its job file."""

    def __init__(self, records: int) -> None:
        super().__init__(records)
        raise ValueError(f"{records} records are odd")


class RaisesInBuild(CountingTask):
    """Raises where it builds its model."""

    def build(self) -> nn.Module:
        """Raise.

        Raises:
            KeyError: Always.
        """
        raise KeyError("layers")


class _Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(2**50))  # 4 PiB

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.weights[ids]
        return found


class TooLarge(CountingTask):
    """Needs more memory than the machine has."""

    def build(self) -> nn.Module:
        """Try to build the model."""
        return _Huge()


class Unlisted(CountingTask):
    """Has no bug, but only some processes may import it."""


class EndsItsProcess(CountingTask):
    """Kills the worker at its first loss, as a fault in a C library would."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Kill the process."""
        del outputs, records
        os._exit(7)


class Mended(CountingTask):
    """Has a bug in its loss while a file exists. A test deletes the file to fix the bug.

    Args:
        records: See `CountingTask`.
        bug: The file.
    """

    def __init__(self, records: int, bug: str) -> None:
        super().__init__(records)
        self._bug = Path(bug)

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights (n,), once the bug is fixed.

        Raises:
            KeyError: While the bug exists.
        """
        if self._bug.exists():
            return records["lable"]
        return super().losses(outputs, records)


class Normalised(CountingTask):
    """Learns correctly, but its network refuses a batch of one record."""

    def build(self) -> nn.Module:
        """Build the counting model beside a batch normalization."""
        module = super().build()
        module.add_module("norm", nn.BatchNorm1d(1, affine=False))
        return module

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights (n,), plus the normalized ones, which add zero."""
        outputs = super().forward(module, records)
        normalised: Tensor = module.get_submodule("norm")(outputs[:, None])
        return outputs + 0 * normalised[:, 0].detach()


class Detached(CountingTask):
    """Detaches its loss from the network."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return losses (n,) without a gradient."""
        return super().losses(outputs, records).detach()


class NamesLoss(CountingTask):
    """Has a metric with a reserved name."""

    def metrics(self, outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a metric (n,) under the name of the loss."""
        return {"loss": outputs}


class NoValues(CountingTask):
    """Has a metric without values, and one with a value for every other record."""

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return NaN, and 1 for even ids, (n,) each."""
        nan = float("nan")
        return {"none": outputs * nan, "even": torch.where(records["id"] % 2 == 0, 1.0, nan)}


class Averages(CountingTask):
    """Returns the mean loss instead of one loss per record."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the mean, (), which is wrong."""
        return super().losses(outputs, records).mean()
