"""The coordinator's numbers: sums gradients and steps the optimizer (Algorithm 4, lines 7-11)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from common.core.messages import ALL_REACHED
from common.core.vectors import SparseVector, add_to, squared_norm
from common.errors import CorruptError, OtherModelError
from common.learning.checkpoint import (
    STATE,
    Kind,
    Layout,
    checked_weights,
    digest_of,
    kind_in,
    packed,
    unnamed,
    unpack,
)
from common.learning.optimizers import (
    CPU,
    STATE_NAMES,
    FlatOptimizer,
    OptimizerSettings,
    Step,
)

if TYPE_CHECKING:
    from torch import Tensor

    from common.core.messages import Vector
    from common.learning.optimizers import Reduction


# Remedy for a snapshot of another model.
REMEDY = "restore the task's former code and options, or submit a new job"
# Share of the vector above which scattered access is slower than using the whole vector.
_SCATTERED = 1 / 8


class TrainerState(NamedTuple):
    """Contents of a snapshot."""

    kind: Kind
    weights: Vector  # (P + B,) float32
    # The optimizer's state, empty before the first update.
    state: dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class _Sum:
    """Sum of a round's gradients."""

    vector: Vector  # (P + B,) float32
    samples: int = 0
    indices: list[npt.NDArray[np.integer[Any]]] | None = field(default_factory=list)  # None: all
    # Parameter tensors that some part reached, see `reached_mask`.
    reached: int = 0

    def add(self, vector: Vector | SparseVector, samples: int, reached: int) -> None:
        """Add one part."""
        add_to(self.vector, vector)
        self.samples += samples
        self.reached |= reached
        if not isinstance(vector, SparseVector):
            self.indices = None
        elif self.indices is not None:
            self.indices.append(vector.indices)
            if sum(map(len, self.indices)) > _SCATTERED * len(self.vector):
                self.indices = None

    def where(self) -> slice | npt.NDArray[np.integer[Any]]:
        """Return the indexes that may be nonzero. An index may occur several times."""
        return slice(None) if self.indices is None else np.concatenate(self.indices)


class Trainer:
    """One sequence of weights, on one device.

    The paper steps by the sum over the samples of an update. Here the mean is the default, so that
    the learning rate does not depend on K and b. The two are equal if the rate is scaled by K b.
    """

    def __init__(
        self,
        weights: Vector,
        parameter_count: int,
        settings: OptimizerSettings,
        reduction: Reduction = "mean",
        layout: Layout | None = None,
        base: str = "",
        device: torch.device = CPU,
    ) -> None:
        """Start from a model's weights, which are copied.

        Args:
            weights: (P + B,) float32 parameters, then buffers.
            parameter_count: P
            settings: The optimizer.
            reduction: Reduction of an update's gradient over its samples.
            layout: Optional. Layout of the weights. Snapshots contain it, and only a trainer with
                the same layout can restore them. If unset, the weights belong to no module.
            base: Digest of the model's frozen tensors; see `Kind`.
            device: Device of the weights and the optimizer's state. The sums of rounds are in main
                memory.

        Raises:
            UserError: If the optimizer's settings are invalid.
        """
        # (P + B,) float32, changed in place.
        self.vector = torch.tensor(weights, dtype=torch.float32, device=device)
        # Keyed by round.
        self._sums = dict[int, _Sum]()
        # Vectors of zeros, reused for sums.
        self._spare: list[Vector] = []
        self.parameter_count = parameter_count  # P
        self._settings = settings
        self._reduction = reduction
        buffers = len(weights) - parameter_count
        layout = unnamed(parameter_count, buffers) if layout is None else layout
        self.kind = Kind(settings.kind, parameter_count, buffers, layout, base)
        self.digest = digest_of(layout, base)
        self._parameter = torch.nn.Parameter(self.vector[:parameter_count])
        self._optimizer = FlatOptimizer(settings, self.kind.sizes, device=device)
        self._state = self._optimizer.initial()

    def add(
        self,
        round_: int,
        vector: Vector | SparseVector,
        samples: int,
        reached: int = ALL_REACHED,
    ) -> None:
        """Add a part of an update.

        Args:
            round_: The update that the part belongs to.
            vector: (P + B,) float32, as in `GradientSum`. The receiver has checked its length and
                that it is finite.
            samples: Number of samples in the sum, at least one.
            reached: Parameter tensors that the gradient reached, see `reached_mask`.
        """
        if round_ not in self._sums:
            spare = self._spare
            self._sums[round_] = _Sum(
                spare.pop() if spare else np.zeros(len(self.vector), np.float32)
            )
        self._sums[round_].add(vector, samples, reached)

    def discard(self, round_: int) -> None:
        """Drop the sum of a round."""
        if part := self._sums.pop(round_, None):
            part.vector[part.where()] = 0
            self._spare.append(part.vector)

    def square(self, round_: int) -> float:
        """Return |gradient summed over the samples of a round|^2."""
        return squared_norm(self._sums[round_].vector, self.parameter_count)

    def apply(self, round_: int, learning_rate: float | None = None, scale: float = 1.0) -> None:
        """Make one update from the sum of a round.

        Args:
            round_: The round. Its sum is dropped afterwards.
            learning_rate: Optional. Rate of this update. If unset, the rate of the optimizer's
                settings.
            scale: Factor of that rate.

        Raises:
            ValueError: If nothing was added to the round.
            UserError: If the rate is not positive and finite.
        """
        if round_ not in self._sums:
            raise ValueError("an update needs at least one sample")
        part = self._sums[round_]
        if self._reduction == "mean":
            part.vector[part.where()] /= part.samples
        total = torch.from_numpy(part.vector).to(self.vector.device)
        self._move(total, part.samples, Step(self._rate(learning_rate), scale, part.reached))
        self.discard(round_)

    def step(
        self,
        total: Tensor,
        samples: int,
        learning_rate: float | None = None,
        scale: float = 1.0,
        reached: int = ALL_REACHED,
    ) -> None:
        """Make one update from a sum that was computed elsewhere.

        Args:
            total: (P + B,) float32 on the device, as in `GradientSum`; finite. Overwritten.
            samples: Number of samples in the sum.
            learning_rate: Optional. Rate of this update. If unset, the rate of the optimizer's
                settings.
            scale: Factor of that rate.
            reached: Parameter tensors that the gradients reached, see `reached_mask`.

        Raises:
            UserError: If the rate is not positive and finite.
        """
        if self._reduction == "mean":
            total /= samples
        self._move(total, samples, Step(self._rate(learning_rate), scale, reached))

    def _rate(self, learning_rate: float | None) -> float:
        return self._settings.learning_rate if learning_rate is None else learning_rate

    def _move(self, total: Tensor, samples: int, step: Step) -> None:
        """Make one update from a sum, which is a mean already if the reduction is "mean"."""
        gradient, moved = total[: self.parameter_count], total[self.parameter_count :]
        if self._reduction == "sum":
            moved = moved / samples
        if self._settings.clip_norm is not None:
            self._parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(self._parameter, self._settings.clip_norm)
        self._optimizer.step(self._parameter.data, gradient, self._state, step)
        self.vector[self.parameter_count :] += moved

    def weights(self) -> memoryview:
        """Return the weights' bytes. The CPU's are not copied, and change with the next update."""
        return self._numbers().data.cast("B")

    def _numbers(self) -> Vector:
        return cast("Vector", self.vector.numpy(force=True))

    def snapshot(self, *, optimizer: bool = True) -> bytes:
        """Copy weights and optimizer state, without the sums of rounds.

        Args:
            optimizer: True to include the optimizer's state, which further training needs.
        """
        state = self._state if optimizer else {}
        arrays = {name: value.numpy(force=True) for name, value in state.items()}
        return packed(self.kind, self._numbers(), arrays)

    def restore(self, data: bytes) -> None:
        """Continue from a snapshot, bit for bit. If this raises, nothing has changed.

        Raises:
            CorruptError: If the bytes are not a snapshot.
            OtherModelError: If the snapshot has another model or optimizer.
        """
        held = unpacked(data)
        if misfit := held.kind.misfit(self.kind):
            raise OtherModelError(f"{misfit}: {REMEDY}")
        self.vector.copy_(torch.from_numpy(held.weights))
        device = self.vector.device
        loaded = {name: torch.from_numpy(value).to(device) for name, value in held.state.items()}
        self._state = self._optimizer.initial() | loaded
        for round_ in tuple(self._sums):
            self.discard(round_)


def unpacked(data: bytes) -> TrainerState:
    """Read a snapshot, and check that its parts fit together.

    Raises:
        CorruptError: If it is not a snapshot, or its parts do not fit.
    """
    tensors, metadata = unpack(data)
    kind = kind_in(metadata)
    weights = checked_weights(tensors.pop("weights", None), kind)
    state = {name.removeprefix(STATE): value for name, value in tensors.items()}
    expected = STATE_NAMES.get(kind.optimizer)
    if state and state.keys() != expected:
        raise CorruptError(
            f"the state of {kind.optimizer} has {sorted(state)}, expected {expected}"
        )
    for name, value in state.items():
        count = len(kind.sizes) if name == "step" else kind.parameters
        if value.shape != (count,) and (name != "step" or value.ndim):
            raise CorruptError(f"the state's {name} has shape {value.shape}, expected ({count},)")
    return TrainerState(kind, weights, state)
