"""The coordinator's numbers: gradients summed, an optimizer's step (Algorithm 4, lines 7-11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from common.core.vectors import add_to, numbers_in
from common.errors import CorruptError
from common.learning.checkpoint import pack, unpack
from common.learning.errors import NotFiniteError
from common.learning.optimizers import (
    STATE_NAMES,
    OptimizerSettings,
    make_optimizer,
    set_learning_rate,
)

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.core.vectors import SparseVector
    from common.learning.checkpoint import Layout

Reduction: TypeAlias = Literal["mean", "sum"]


class _Kind(msgspec.Struct, frozen=True):
    """What a snapshot must agree in with whoever goes on from it."""

    optimizer: str
    parameters: int  # P
    buffers: int  # B

    @property
    def size(self) -> str:
        """Of the model, as people read it."""
        return f"{self.parameters:,} parameters, {self.buffers:,} buffers"

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.size}"


class _Held(NamedTuple):
    """What a snapshot holds."""

    kind: _Kind
    weights: Vector  # (P + B,) float32
    state: dict[str, npt.NDArray[Any]]  # of the optimizer, empty before the first update


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
        layout: Layout = (),
    ) -> None:
        """Start from a model's weights, which are copied.

        Args:
            weights: (P + B,) float32 parameters, then buffers.
            parameter_count: P
            settings: The optimizer.
            reduction: What is done with the gradients of an update over its samples.
            layout: Which weights are which tensors: snapshots carry it, so that models can be taken
                out of them by name.

        Raises:
            UserError: If the optimizer's settings make no sense.
        """
        self._weights: Vector = np.array(weights, np.float32)
        self._sum: Vector = np.zeros_like(self._weights)
        self._samples = 0
        self._split = parameter_count
        self._settings = settings
        self._reduction = reduction
        self._layout = layout
        self._parameter = torch.nn.Parameter(torch.from_numpy(self._weights[:parameter_count]))
        self._parameter.grad = torch.from_numpy(self._sum[:parameter_count])
        self._optimizer = make_optimizer(settings, self._parameter)

    @property
    def samples(self) -> int:
        """Samples summed since the last update."""
        return self._samples

    def add(self, vector: Vector | SparseVector, samples: int) -> None:
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
        if not np.isfinite(numbers_in(vector)).all():
            raise NotFiniteError("the gradient", None)
        add_to(self._sum, vector)
        self._samples += samples

    def set_learning_rate(self, learning_rate: float) -> None:
        """Make all further updates at this rate.

        Raises:
            UserError: If it is not above zero and finite.
        """
        set_learning_rate(self._optimizer, learning_rate)

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
            _STATE + name: value.numpy()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        # One entry, see `pack`; whoever restores compares the kind alone.
        head = msgspec.to_builtins(self._kind) | {"layout": self._layout}
        metadata = {"trainer": msgspec.json.encode(head).decode()}
        return pack({"weights": self._weights, **tensors}, metadata)

    def restore(self, data: bytes) -> None:
        """Go on from a snapshot as if nothing had happened, bit for bit; or raise, unchanged.

        Raises:
            CorruptError: If the bytes are not a snapshot, or not of this model and optimizer.
        """
        held = _unpacked(data)
        if held.kind != self._kind:
            raise CorruptError(
                f"it holds {held.kind}, but this job's model has {self._kind}: bring back the"
                " task's code and options of then, or submit a new job"
            )
        self._take(held.weights, held.state)

    def adopt(self, data: bytes) -> str:
        """Begin with the weights of another job's snapshot; or raise, unchanged.

        The optimizer's state comes along where it is of this kind.

        Returns:
            The other's optimizer.

        Raises:
            CorruptError: If the bytes are not a snapshot, or of a model of another size.
        """
        held = _unpacked(data)
        if held.kind != msgspec.structs.replace(self._kind, optimizer=held.kind.optimizer):
            raise CorruptError(
                f"it holds {held.kind.size}, but this job's model has {self._kind.size}"
            )
        same = held.kind == self._kind
        self._take(held.weights, held.state if same else {})
        return held.kind.optimizer

    @property
    def _kind(self) -> _Kind:
        return _Kind(self._settings.name, self._split, len(self._weights) - self._split)

    def _take(self, weights: Vector, state: dict[str, npt.NDArray[Any]]) -> None:
        self._weights[:] = weights
        self._optimizer.state[self._parameter] = {
            name: torch.from_numpy(value) for name, value in state.items()
        }
        self.discard()


_STATE = "optimizer."  # what the names of the optimizer's tensors begin with


def _unpacked(data: bytes) -> _Held:
    """Read a snapshot, and check that it fits itself."""
    tensors, metadata = unpack(data)
    try:
        kind = msgspec.json.decode(metadata.get("trainer", ""), type=_Kind)
    except msgspec.DecodeError as error:
        raise CorruptError(f"it does not say whose snapshot it is: {error}") from error
    weights = tensors.pop("weights", np.empty(0, np.float32))
    length = kind.parameters + kind.buffers
    if weights.shape != (length,) or weights.dtype != np.float32:
        raise CorruptError(f"its weights are {weights.dtype} {weights.shape}, expected ({length},)")
    state = {name.removeprefix(_STATE): value for name, value in tensors.items()}
    expected = STATE_NAMES.get(kind.optimizer)
    if state and state.keys() != expected:
        raise CorruptError(f"{kind.optimizer} comes with {sorted(state)}, expected {expected}")
    for name, value in state.items():
        if value.shape not in ((), (kind.parameters,)):
            raise CorruptError(f"its {name} has shape {value.shape}, expected ({kind.parameters},)")
    return _Held(kind, weights, state)
