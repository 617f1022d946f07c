"""The coordinator's numbers: gradients summed, an optimizer's step (Algorithm 4, lines 7-11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from common.errors import CorruptError
from common.learning.checkpoint import pack, unpack
from common.learning.errors import NotFiniteError
from common.learning.optimizers import STATE_NAMES, OptimizerSettings, make_optimizer

if TYPE_CHECKING:
    from common.core.messages import Vector

Reduction: TypeAlias = Literal["mean", "sum"]


class Trainer:
    """One chain of weights, on the CPU.

    The paper steps by the sum over the samples of an update; the mean is the default here, because
    then the learning rate does not depend on K and b. The two are equal with a rate scaled by K b.
    """

    def __init__(
        self,
        weights: Vector,
        parameter_count: int,
        settings: OptimizerSettings,
        reduction: Reduction = "mean",
    ) -> None:
        """Start from a model's weights, which are copied.

        Args:
            weights: (P + B,) float32 parameters, then buffers.
            parameter_count: P
            settings: The optimizer.
            reduction: What is done with the gradients of an update over its samples.

        Raises:
            UserError: If the optimizer's settings make no sense.
        """
        self._weights: Vector = np.array(weights, np.float32)
        self._sum: Vector = np.zeros_like(self._weights)
        self._samples = 0
        self._split = parameter_count
        self._settings = settings
        self._reduction = reduction
        self._parameter = torch.nn.Parameter(torch.from_numpy(self._weights[:parameter_count]))
        self._parameter.grad = torch.from_numpy(self._sum[:parameter_count])
        self._optimizer = make_optimizer(settings, self._parameter)

    @property
    def samples(self) -> int:
        """Samples summed since the last update."""
        return self._samples

    def add(self, vector: Vector, samples: int) -> None:
        """Add a part of an update, or raise and change nothing.

        Args:
            vector: (P + B,) float32, as in `GradientSum`.
            samples: How many samples it sums.

        Raises:
            ValueError: If the length is not this model's or there is no sample.
            NotFiniteError: If a number in it is not finite.
        """
        if vector.shape != self._sum.shape or samples < 1:
            raise ValueError(
                f"a gradient of shape {vector.shape} over {samples} samples does not fit a model "
                f"of shape {self._sum.shape}"
            )
        if not np.isfinite(vector).all():
            raise NotFiniteError("the gradient", None)
        self._sum += vector
        self._samples += samples

    def discard(self) -> None:
        """Forget what was added since the last update."""
        self._sum.fill(0)
        self._samples = 0

    def apply(self) -> None:
        """Make one update of all that was added.

        Raises:
            ValueError: If nothing was added.
        """
        if not self._samples:
            raise ValueError("an update needs at least one sample")
        if self._reduction == "mean":
            self._sum[: self._split] /= self._samples
        self._optimizer.step()
        self._weights[self._split :] += self._sum[self._split :] / self._samples
        self.discard()

    def weights(self) -> memoryview:
        """The weights' bytes, not copied: they change with the next update."""
        return self._weights.data.cast("B")

    def snapshot(self) -> bytes:
        """Copy weights and optimizer state; what was added since the last update is not in it."""
        state = self._optimizer.state[self._parameter]
        tensors = {
            f"optimizer.{name}": value.numpy()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        return pack({"weights": self._weights, **tensors}, self._metadata())

    def restore(self, data: bytes) -> None:
        """Go on from a snapshot as if nothing had happened, bit for bit; or raise, unchanged.

        Raises:
            CorruptError: If the bytes are not a snapshot of this model and optimizer.
        """
        tensors, metadata = unpack(data)
        if metadata != self._metadata():
            raise CorruptError(f"the snapshot is of {metadata}, expected {self._metadata()}")
        weights = tensors.pop("weights", np.empty(0, np.float32))
        expected = STATE_NAMES[self._settings.name]
        found = {name.removeprefix("optimizer.") for name in tensors}
        if found and found != expected:
            raise CorruptError(f"the snapshot holds {sorted(found)}, expected {sorted(expected)}")
        shapes = {name: value.shape for name, value in tensors.items() if value.shape}
        if weights.shape != self._weights.shape or any(
            shape != (self._split,) for shape in shapes.values()
        ):
            raise CorruptError(
                f"the snapshot has {weights.shape} weights and optimizer state {shapes}, expected "
                f"{self._weights.shape} and ({self._split},)"
            )
        self._weights[:] = weights
        self._optimizer.state[self._parameter] = {
            name.removeprefix("optimizer."): torch.from_numpy(value)
            for name, value in tensors.items()
        }
        self.discard()

    def _metadata(self) -> dict[str, str]:
        buffers = len(self._weights) - self._split
        return {"trainer": f"{self._settings.name}, {self._split} parameters, {buffers} buffers"}
