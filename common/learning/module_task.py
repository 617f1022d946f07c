"""A task made of a plain torch module, a loss of torch, and the names of some fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import LABELS, NUMBERS, Input
from common.learning.outputs import tensors_of

if TYPE_CHECKING:
    from common.learning.task_options import LossName

_LOSSES: dict[LossName, Callable[..., Tensor]] = {
    "cross_entropy": functions.cross_entropy,
    "binary_cross_entropy_with_logits": functions.binary_cross_entropy_with_logits,
    "mse_loss": functions.mse_loss,
    "l1_loss": functions.l1_loss,
    "smooth_l1_loss": functions.smooth_l1_loss,
    "huber_loss": functions.huber_loss,
}


@dataclass(frozen=True, slots=True)
class ModuleTask:
    """A module that gets some fields of a record, and a loss that compares it with another field.

    If the module returns several tensors, the loss takes the one named `logits`, or the first.
    """

    network: Callable[[], nn.Module]
    loss: LossName
    # Fields that the module gets, in the order of its arguments.
    fields: tuple[str, ...]
    target: str

    def build(self) -> nn.Module:
        """Make the module."""
        return self.network()

    def inputs(self) -> Mapping[str, Input]:
        """Return the fields of the module and the target, each of any shape."""
        dtypes = LABELS if self.loss == "cross_entropy" else NUMBERS
        fields = {field: Input(None, NUMBERS) for field in self.fields}
        return fields | {self.target: Input(None, dtypes)}

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Return what the module returns."""
        return module(*(records[field] for field in self.fields))

    def losses(self, outputs: object, records: Mapping[str, Tensor]) -> Tensor:
        """Return the loss, (n,): the mean of a record's values if it has several."""
        predicted, target = self._compared(outputs, records)
        values = _LOSSES[self.loss](predicted, target, reduction="none")
        return values if values.ndim == 1 else values.flatten(1).mean(1)

    def metrics(self, outputs: object, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the accuracy of a classifier or the absolute error of a regression, (n,)."""
        predicted, target = self._compared(outputs, records)
        match self.loss:
            case "cross_entropy":
                name, values = "accuracy", (predicted.argmax(1) == target).float()
            case "binary_cross_entropy_with_logits":
                name, values = "accuracy", ((predicted > 0) == (target > 0)).float()
            case _:
                name, values = "absolute_error", (predicted - target).abs()
        return {name: values if values.ndim == 1 else values.flatten(1).mean(1)}

    def _compared(self, outputs: object, records: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the prediction and the target, as the loss takes them."""
        tensors, target = tensors_of(outputs), records[self.target]
        predicted = tensors["logits"] if "logits" in tensors else next(iter(tensors.values()))
        if self.loss == "cross_entropy":
            return predicted, target.long()
        # A last layer with one output gives (n, 1) for a target of (n,).
        return predicted.reshape(target.shape), target.to(predicted.dtype)
