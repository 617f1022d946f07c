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
    """Refuses what its job file says."""

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
    """Asks for more memory than there is."""

    def build(self) -> nn.Module:
        """Make, or rather try to make, the model."""
        return _Huge()


class Unlisted(CountingTask):
    """Nothing is wrong with it, but that not every process may import it."""


class EndsItsProcess(CountingTask):
    """Ends the worker at its first loss, as a fault in a library of C would."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """End the process."""
        del outputs, records
        os._exit(7)


class Mended(CountingTask):
    """Has a bug in its loss for as long as a file is there: somebody mends it meanwhile.

    Args:
        records: As of the counting task.
        bug: The file.
    """

    def __init__(self, records: int, bug: str) -> None:
        super().__init__(records)
        self._bug = Path(bug)

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) the weights themselves, once it is mended.

        Raises:
            KeyError: As long as it is not.
        """
        if self._bug.exists():
            return records["lable"]
        return super().losses(outputs, records)


class Normalised(CountingTask):
    """Learns nothing wrong, but its network refuses a batch of one record."""

    def build(self) -> nn.Module:
        """Make the counting model beside a batch normalization."""
        module = super().build()
        module.add_module("norm", nn.BatchNorm1d(1, affine=False))
        return module

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return the weights (n,), plus the normalized ones, which add zero."""
        outputs = super().forward(module, records)
        normalised: Tensor = module.get_submodule("norm")(outputs[:, None])
        return outputs + 0 * normalised[:, 0].detach()


class Detached(CountingTask):
    """Cuts its loss off from the network."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) losses without a gradient."""
        return super().losses(outputs, records).detach()


class NamesLoss(CountingTask):
    """Has a metric of a reserved name."""

    def metrics(self, outputs: Tensor, _records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(n,) under the name of the loss."""
        return {"loss": outputs}


class NoValues(CountingTask):
    """Has a metric that no record has a value of, and one that every other record has one of."""

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(n,) NaN, and 1 for even ids."""
        nan = float("nan")
        return {"none": outputs * nan, "even": torch.where(records["id"] % 2 == 0, 1.0, nan)}


class Averages(CountingTask):
    """Gives the mean of the losses instead of one for each record."""

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """() their mean, which is wrong."""
        return super().losses(outputs, records).mean()
