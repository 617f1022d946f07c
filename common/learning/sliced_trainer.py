"""A member's numbers if slices of the weights have owners: all weights, some optimizer state.

    in force       weights, and optimizer state of the slices held here
    prepared       the weights after a step, and state of the slices owned in this step

A step is prepared beside the numbers in force, so a step that is never committed changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from common.core.messages import ALL_REACHED
from common.errors import CorruptError, OtherModelError
from common.learning.checkpoint import (
    SLICES,
    WEIGHTS,
    Kind,
    Layout,
    SlicesHead,
    pack,
    packed,
    slice_state,
    slices_head,
    unnamed,
    unpack,
)
from common.learning.optimizers import CPU, Step
from common.learning.slices import Slice, cut, part_of
from common.learning.trainer import REMEDY, unpacked

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from common.core.messages import Vector
    from common.learning.optimizers import OptimizerSettings, Reduction


class SlicedTrainer:
    """One member's numbers.

    Args:
        weights: (P + B,) float32 parameters, then buffers; copied.
        parameter_count: P
        settings: The optimizer.
        reduction: Reduction of an update's gradient over its samples.
        layout: Optional. Layout of the weights. If unset, the weights belong to no module.
        base: Digest of the model's frozen tensors; see `Kind`.
        count: Number of slices.
        device: Device of all numbers.

    Attributes:
        weights: (P + B,) float32 on the device. A commit replaces the tensor.
        following: (P + B,) float32 on the device: the prepared weights.
        places: Places of the slices in the weights.

    Raises:
        UserError: If the optimizer's settings are invalid.
    """

    def __init__(  # noqa: PLR0913 -- those of `Trainer`, and the number of slices
        self,
        weights: Vector,
        parameter_count: int,
        settings: OptimizerSettings,
        reduction: Reduction = "mean",
        layout: Layout | None = None,
        base: str = "",
        *,
        count: int,
        device: torch.device = CPU,
    ) -> None:
        self.weights = torch.tensor(weights, dtype=torch.float32, device=device)
        self.following = torch.empty_like(self.weights)
        self.places = cut(len(weights), count)
        buffers = len(weights) - parameter_count
        layout = unnamed(parameter_count, buffers) if layout is None else layout
        self._kind = Kind(settings.kind, parameter_count, buffers, layout, base)
        self._settings = settings
        self._reduction = reduction
        # All slices can be held at first, because there is no state yet.
        self._held = {number: self._made(number) for number in range(count)}

    def _made(self, number: int) -> Slice:
        parts = self.places[number], self._kind.sizes, self._settings, self._reduction
        return Slice(*parts, self.weights.device)

    def square(self, totals: Mapping[int, Tensor]) -> float:
        """Return |sum of gradients|^2 of some slices.

        Args:
            totals: By slice, (n,) float32 summed over the samples of the update.
        """
        return sum(self._held[number].square(total) for number, total in totals.items())

    def prepare(
        self,
        totals: Mapping[int, Tensor],
        samples: int,
        square: float,
        learning_rate: float | None = None,
        scale: float = 1.0,
        reached: int = ALL_REACHED,
    ) -> None:
        """Prepare a step of some slices. Afterwards `following` has their next weights.

        Args:
            totals: By slice, (n,) float32 summed over the samples of the update; overwritten.
            samples: Number of samples.
            square: |sum of gradients|^2 of all slices.
            learning_rate: Optional. Rate of this step. If unset, the rate of the optimizer's
                settings.
            scale: Factor of that rate.
            reached: Parameter tensors that the gradients reached, see `reached_mask`.

        Raises:
            UserError: If the rate is not positive and finite.
        """
        rate = self._settings.learning_rate if learning_rate is None else learning_rate
        step = Step(rate, scale, reached)
        norm = square**0.5 / (samples if self._reduction == "mean" else 1)
        for number, total in totals.items():
            place = self.places[number]
            weights, following = self.weights[place], self.following[place]
            self._held[number].prepare(weights, total, samples, step, following, norm)

    def commit(self, owned: Collection[int]) -> None:
        """Put the prepared step in force; drop the state of slices that were not owned in it."""
        self.weights, self.following = self.following, self.weights
        self._held = {number: self._held[number] for number in owned}
        for each in self._held.values():
            each.commit()

    def snapshot(self, numbers: Collection[int], *, whole: bool = True) -> bytes:
        """Copy the optimizer state of slices, with all weights if `whole`, else with their own."""
        tensors = {
            f"{number}.{name}": array for number in numbers for name, array in self._of(number)
        }
        weights = self.weights.numpy(force=True)
        if whole:
            tensors[WEIGHTS] = weights
        else:
            tensors |= {f"{n}.{WEIGHTS}": weights[self.places[n]] for n in numbers}
        head = SlicesHead(self._kind, len(self.places), tuple(numbers))
        return pack(tensors, {SLICES: msgspec.json.encode(head).decode()})

    def _of(self, number: int) -> Iterable[tuple[str, npt.NDArray[Any]]]:
        return self._held[number].state.items()

    def model(self) -> bytes:
        """Return the weights as a trainer's snapshot."""
        return packed(self._kind, self.weights.numpy(force=True), {})

    def restore(self, data: bytes, numbers: Collection[int]) -> None:
        """Load weights, and the optimizer's state of some slices. Nothing changes if this raises.

        Args:
            data: Result of `snapshot` with all weights, or a trainer's snapshot.
            numbers: Slices to hold.

        Raises:
            CorruptError: If the bytes are no such snapshot.
            OtherModelError: If they are of another model or optimizer.
        """
        weights, states = self._read(data, numbers)
        if weights is None:
            raise CorruptError("it lacks the weights")
        self.weights.copy_(torch.from_numpy(weights))
        self._held = dict(starmap(self._restored, states.items()))

    def adopt(self, other: SlicedTrainer, numbers: Collection[int]) -> None:
        """Add slices that another trainer holds of the same version."""
        self._held = {number: other._held[number] for number in numbers} | self._held

    def _restored(self, number: int, state: dict[str, npt.NDArray[Any]]) -> tuple[int, Slice]:
        made = self._made(number)
        made.restore(state)
        return number, made

    def _read(
        self, data: bytes, numbers: Collection[int]
    ) -> tuple[Vector | None, dict[int, dict[str, npt.NDArray[Any]]]]:
        tensors, metadata = unpack(data)
        if SLICES in metadata:
            head = slices_head(metadata)
            kind, weights = head.kind, tensors.get(WEIGHTS)
            if lacking := set(numbers) - set(head.numbers):
                raise CorruptError(f"it lacks slices {sorted(lacking)}")
            states = {number: slice_state(tensors, number) for number in numbers}
        else:
            held = unpacked(data)
            kind, weights = held.kind, held.weights
            places = {number: self.places[number] for number in numbers}
            split = self._kind.parameters
            states = {
                number: part_of(held.state, place) if place.start < split else {}
                for number, place in places.items()
            }
        if misfit := kind.misfit(self._kind):
            raise OtherModelError(f"{misfit}: {REMEDY}")
        return weights, states
