"""Cut a model's numbers into slices. Each has its own optimizer state, and one owner steps it.

A step over slices gives the same bits as a step over the whole. The slices' digests add up to that
of the whole, so a slice's digest can be computed while others are still being received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from common.learning.optimizers import CPU, FlatOptimizer, OptimizerSettings, Step
from common.learning.parameters import square_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from common.learning.optimizers import Reduction

# Slices begin at multiples of this. Optimizers process whole cache lines, and may round a partial
# one differently. So only the end of the whole may be partial.
BLOCK = 1024
# The value of torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6
# 2^64 over the golden ratio, as a signed number. Odd, so that the multiplication loses no bit.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


def cut(size: int, count: int) -> tuple[slice, ...]:
    """Cut a vector into slices as equal as blocks allow. In a short vector, some are empty."""
    blocks = -(-size // BLOCK)
    edges = [min(size, BLOCK * (blocks * n // count)) for n in range(count)] + [size]
    return tuple(slice(edges[n], edges[n + 1]) for n in range(count))


def lengths(slices: Sequence[slice], owners: Sequence[int], ranks: int) -> list[int]:
    """Return how many numbers each rank owns, for `Group.exchange` and `Group.gather`.

    Args:
        slices: Consecutive slices.
        owners: Rank of each slice's owner.
        ranks: Number of members.
    """
    found = [0] * ranks
    for place, owner in zip(slices, owners, strict=True):
        found[owner] += place.stop - place.start
    return found


def digest(vector: Tensor, start: int = 0) -> int:
    """Return 64 bits that depend on the bits and the places of all numbers.

    It takes as long as reading the numbers. Another number, or a block in another place, gives
    another digest, except with a chance of 2^-64. All devices give the same digest. It does not
    protect against deliberate collisions.

    Args:
        vector: (n,) float32
        start: Place of the first number in the whole, a multiple of `BLOCK`. Digests of slices add
            up, modulo 2^64, to that of the whole.
    """
    blocks = len(vector) // BLOCK
    full = vector[: blocks * BLOCK].reshape(blocks, BLOCK)
    rest = vector.new_zeros(1, BLOCK)
    rest[0, : len(vector) - full.numel()] = vector[full.numel() :]
    sums = torch.cat([each.view(torch.int64).sum(1) for each in (full, rest)])
    first = start // BLOCK
    places = 2 * torch.arange(first, first + len(sums), device=vector.device) + 1
    return int((sums * (places * _MIX)).sum()) % (1 << 64)


def part_of(state: Mapping[str, npt.NDArray[Any]], place: slice) -> dict[str, npt.NDArray[Any]]:
    """Return a slice's part of an optimizer's state, as views.

    Args:
        state: (P,) values of the parameters, and `step`, which all slices share.
        place: Place of the slice.
    """
    return {name: value if name == "step" else value[place] for name, value in state.items()}


class Slice:
    """One slice at its owner. A prepared step takes effect once it is committed.

    Args:
        place: Place of the slice in parameters, then buffers.
        sizes: Sizes of the model's parameter tensors, whose sum is P.
        settings: The optimizer.
        reduction: Reduction of an update's gradient over its samples.
        device: Device of the weights, the sums and the optimizer's state.

    Raises:
        UserError: If the optimizer's settings are invalid.
    """

    def __init__(
        self,
        place: slice,
        sizes: Sequence[int],
        settings: OptimizerSettings,
        reduction: Reduction = "mean",
        device: torch.device = CPU,
    ) -> None:
        self.place = place
        self._split = min(max(sum(sizes) - place.start, 0), place.stop - place.start)
        self._reduction = reduction
        self._clip_norm = settings.clip_norm
        self._device = device
        self._optimizer = FlatOptimizer(settings, sizes, place, device)
        self._state = self._optimizer.initial()
        # The state before the last commit, or the prepared state.
        self._spare = dict[str, "Tensor"]()

    @property
    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The optimizer's state, copied only from a GPU. A commit replaces the arrays."""
        return {name: value.numpy(force=True) for name, value in self._state.items()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load an optimizer's state, which is copied."""
        self._state = {
            name: torch.tensor(value, device=self._device) for name, value in state.items()
        }
        self._spare = {}

    def square(self, total: Tensor) -> float:
        """Return |sum of gradients|^2 of this slice. The slices' squares add up to the whole's.

        Args:
            total: (n,) float32 summed over the samples of the update.
        """
        return square_of(total[: self._split])

    def prepare(
        self,
        weights: Tensor,
        total: Tensor,
        samples: int,
        step: Step,
        following: Tensor,
        norm: float,
    ) -> None:
        """Prepare a step, which replaces an earlier prepared one.

        Args:
            weights: (n,) float32, the slice's current weights.
            total: (n,) float32 summed over the samples of the update; overwritten.
            samples: Number of samples.
            step: Rates of the step, and the tensors that it moves.
            following: (n,) float32, overwritten with the weights after the step.
            norm: |gradient| of all slices, computed with `square`; used if the settings have a
                `clip_norm`. It is rounded once more than in a step over the whole.

        Raises:
            UserError: If the rate is not positive and finite.
        """
        following.copy_(weights)
        following[self._split :] += total[self._split :] / samples
        if not self._split:
            return
        gradient = total[: self._split]
        if self._reduction == "mean":
            gradient /= samples
        if self._clip_norm is not None:
            gradient *= min(1.0, self._clip_norm / (norm + _CLIP_EPS))
        spare, self._spare = self._spare, {}
        for name, value in self._state.items():
            same = name in spare and spare[name].shape == value.shape
            self._spare[name] = spare[name].copy_(value) if same else value.clone()
        self._optimizer.step(following[: self._split], gradient, self._spare, step)

    def commit(self) -> None:
        """Put the prepared step in force."""
        self._state, self._spare = self._spare, self._state
