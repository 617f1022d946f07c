"""A task made of a plain torch module, a loss of torch, and the names of some fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import LABELS, NUMBERS, Input
from common.learning.errors import WrongTaskError
from common.learning.named_outputs import tensors_of
from common.learning.sparse_tasks import check_inside

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

    If the module returns several tensors, loss and metrics use the one named `logits`; without that
    name, they use the first one.

    Args:
        network: Class of the module, or a function that makes it.
        loss: Name of a loss in `torch.nn.functional`.
        fields: Fields that the module gets, in the order of its arguments.
        target: Field that the loss compares with.
        arguments: Arguments of `network`.
    """

    network: Callable[..., nn.Module]
    loss: LossName
    fields: tuple[str, ...]
    target: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """Package of the user's code. An error is reported at a line of this package."""
        return self.network.__module__.partition(".")[0]

    def build(self) -> nn.Module:
        """Make the module."""
        return self.network(**self.arguments)

    def inputs(self) -> Mapping[str, Input]:
        """Return the fields of the module and the target, each of any shape."""
        dtypes = LABELS if self.loss == "cross_entropy" else NUMBERS
        fields = {name: Input(None, NUMBERS) for name in self.fields}
        return fields | {self.target: Input(None, dtypes)}

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Return what the module returns."""
        return module(*(records[name] for name in self.fields))

    def losses(self, outputs: object, records: Mapping[str, Tensor]) -> Tensor:
        """Return the loss, (n,). If a record has several values, its loss is their mean."""
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
        """Return the prediction and the target, as the loss takes them.

        Raises:
            WrongTaskError: If their shapes do not fit.
            ValueError: If a target of cross_entropy is no index of a class.
        """
        tensors, target = tensors_of(outputs), records[self.target]
        predicted = tensors["logits"] if "logits" in tensors else next(iter(tensors.values()))
        given, shape = tuple(predicted.shape), tuple(target.shape)
        if self.loss == "cross_entropy":
            if len(given) < 2 or (given[0], *given[2:]) != shape:
                self._refuse(given, f"({shape[0]}, classes{''.join(f', {n}' for n in shape[1:])})")
            return predicted, check_inside(self.target, target, given[1])
        # A last layer with one output gives (n, 1) for a target of (n,).
        if given not in (shape, (*shape, 1)):
            self._refuse(given, str(shape))
        return predicted.reshape(shape), target.to(predicted.dtype)

    def _refuse(self, given: tuple[int, ...], needed: str) -> NoReturn:
        what = (
            f"the module's output has shape {given}: {self.loss} with the target {self.target!r}"
            f" needs {needed}"
        )
        # The user can correct the class, not this file.
        place = self.network if hasattr(self.network, "forward") else self
        raise WrongTaskError(place, "forward", what)
