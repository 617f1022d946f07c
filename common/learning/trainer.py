"""The coordinator's numbers: gradients summed, an optimizer's step (Algorithm 4, lines 7-11)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

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
    STATE_NAMES,
    OptimizerSettings,
    make_optimizer,
    set_learning_rate,
)

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.learning.optimizers import Reduction


EVERYWHERE = slice(None)
# What to do about a snapshot of another model.
REMEDY = "bring back the task's code and options of then, or submit a new job"
_SCATTERED = 1 / 8  # of a vector: numbers here and there take as long as all of them in a row


class TrainerState(NamedTuple):
    """What a snapshot holds."""

    kind: Kind
    weights: Vector  # (P + B,) float32
    state: dict[str, npt.NDArray[Any]]  # of the optimizer, empty before the first update


@dataclass(slots=True)
class _Sum:
    """The sum of a round's gradients."""

    vector: Vector  # (P + B,) float32
    samples: int = 0
    indices: list[npt.NDArray[np.integer[Any]]] | None = field(default_factory=list)  # or all

    def add(self, vector: Vector | SparseVector, samples: int) -> None:
        """Add one part."""
        add_to(self.vector, vector)
        self.samples += samples
        if not isinstance(vector, SparseVector):
            self.indices = None
        elif self.indices is not None:
            self.indices.append(vector.indices)
            if sum(map(len, self.indices)) > _SCATTERED * len(self.vector):
                self.indices = None

    def where(self) -> slice | npt.NDArray[np.integer[Any]]:
        """What of the vector may be anything but zero; the same number may be there twice."""
        return EVERYWHERE if self.indices is None else np.concatenate(self.indices)


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
        layout: Layout | None = None,
    ) -> None:
        """Start from a model's weights, which are copied.

        Args:
            weights: (P + B,) float32 parameters, then buffers.
            parameter_count: P
            settings: The optimizer.
            reduction: What is done with the gradients of an update over its samples.
            layout: Which weights are which tensors: each snapshot carries it, and is restored by a
                trainer of the same layout alone. None: the weights are of no module.

        Raises:
            UserError: If the optimizer's settings make no sense.
        """
        self._weights: Vector = np.array(weights, np.float32)
        self._sums = dict[int, _Sum]()  # by round
        self._spare: list[Vector] = []  # all zeros: what sums are made of
        self.parameter_count = parameter_count  # P: behind them come the buffers
        self._settings = settings
        self._reduction = reduction
        buffers = len(self._weights) - parameter_count
        layout = unnamed(parameter_count, buffers) if layout is None else layout
        self.kind = Kind(settings.kind, parameter_count, buffers, layout)
        self.digest = digest_of(layout)
        self._parameter = torch.nn.Parameter(torch.from_numpy(self._weights[:parameter_count]))
        self._optimizer = make_optimizer(settings, self._parameter)

    def add(self, round_: int, vector: Vector | SparseVector, samples: int) -> None:
        """Add a part of an update.

        Args:
            round_: Which update it is a part of.
            vector: (P + B,) float32, as in `GradientSum`; whoever received it has checked that it
                is of this length and finite.
            samples: How many samples it sums, at least one.
        """
        if round_ not in self._sums:
            self._sums[round_] = _Sum(
                self._spare.pop() if self._spare else np.zeros_like(self._weights)
            )
        self._sums[round_].add(vector, samples)

    def discard(self, round_: int) -> None:
        """Forget what was added to a round."""
        if part := self._sums.pop(round_, None):
            part.vector[part.where()] = 0
            self._spare.append(part.vector)

    def square(self, round_: int) -> float:
        """|gradient summed over the samples of a round|^2."""
        return squared_norm(self._sums[round_].vector, self.parameter_count)

    def apply(self, round_: int, learning_rate: float | None = None, scale: float = 1.0) -> None:
        """Make one update of all that was added to a round.

        Args:
            round_: Which one; it is forgotten then.
            learning_rate: Of this update; None: as the optimizer's settings say.
            scale: Of that rate.

        Raises:
            ValueError: If nothing was added to it.
            UserError: If the rate is not above zero and finite.
        """
        if round_ not in self._sums:
            raise ValueError("an update needs at least one sample")
        part = self._sums[round_]
        self.step(part.vector, part.samples, learning_rate, scale, part.where())
        self.discard(round_)

    def step(
        self,
        total: Vector,
        samples: int,
        learning_rate: float | None = None,
        scale: float = 1.0,
        where: slice | npt.NDArray[np.integer[Any]] = EVERYWHERE,
    ) -> None:
        """Make one update by a sum that was made elsewhere.

        Args:
            total: (P + B,) float32, as in `GradientSum`; finite. Overwritten.
            samples: How many it sums.
            learning_rate: Of this update; None: as the optimizer's settings say.
            scale: Of that rate.
            where: What of it may be anything but zero.

        Raises:
            UserError: If the rate is not above zero and finite.
        """
        rate = self._settings.learning_rate if learning_rate is None else learning_rate
        set_learning_rate(self._optimizer, rate * scale)
        moved = total[self.parameter_count :] / samples
        if self._reduction == "mean":
            total[where] /= samples
        self._parameter.grad = torch.from_numpy(total[: self.parameter_count])
        if self._settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameter, self._settings.clip_norm)
        self._optimizer.step()
        self._weights[self.parameter_count :] += moved

    def weights(self) -> memoryview:
        """The weights' bytes, not copied: they change with the next update."""
        return self._weights.data.cast("B")

    def snapshot(self, *, optimizer: bool = True) -> bytes:
        """Copy weights and optimizer state; sums of rounds are not in it.

        Args:
            optimizer: Whether its state is wanted: nobody can train on without it.
        """
        state = self._optimizer.state[self._parameter] if optimizer else {}
        arrays = {n: value.numpy() for n, value in state.items() if isinstance(value, torch.Tensor)}
        return packed(self.kind, self._weights, arrays)

    def restore(self, data: bytes) -> None:
        """Go on from a snapshot as if nothing had happened, bit for bit; or raise, unchanged.

        Raises:
            CorruptError: If the bytes are not a snapshot.
            OtherModelError: If they are not of this model and optimizer.
        """
        held = unpacked(data)
        if misfit := held.kind.misfit(self.kind):
            raise OtherModelError(f"{misfit}: {REMEDY}")
        self._weights[:] = held.weights
        self._optimizer = make_optimizer(self._settings, self._parameter)
        self._optimizer.state[self._parameter] |= {
            name: torch.from_numpy(value) for name, value in held.state.items()
        }
        for round_ in tuple(self._sums):
            self.discard(round_)


def unpacked(data: bytes) -> TrainerState:
    """Read a snapshot, and check that its parts fit each other.

    Raises:
        CorruptError: If it is no snapshot, or they do not fit.
    """
    tensors, metadata = unpack(data)
    kind = kind_in(metadata)
    weights = checked_weights(tensors.pop("weights", None), kind)
    state = {name.removeprefix(STATE): value for name, value in tensors.items()}
    expected = STATE_NAMES.get(kind.optimizer)
    if state and state.keys() != expected:
        raise CorruptError(f"{kind.optimizer} comes with {sorted(state)}, expected {expected}")
    for name, value in state.items():
        if value.shape not in ((), (kind.parameters,)):
            raise CorruptError(f"its {name} has shape {value.shape}, expected ({kind.parameters},)")
    return TrainerState(kind, weights, state)
