"""A model's numbers cut into slices, each with the optimizer's state of it: what one owner steps.

A step over slices gives the bits of the step over all of them. The slices' digests add up to that
of the whole, so each can be taken while others are still on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.core.vectors import squared_norm
from common.learning.optimizers import OptimizerSettings, make_optimizer, set_learning_rate

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector
    from common.learning.optimizers import Reduction

# Slices begin at multiples of so many numbers. Optimizers take a cache line at a time, and may
# round what does not fill one in another way: so only the end of the whole is such a rest.
BLOCK = 1024
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_MIX = 0x9E3779B97F4A7C15  # odd, so that it takes no bit away: 2^64 over the golden ratio


def cut(size: int, count: int) -> tuple[slice, ...]:
    """Cut a vector into slices as equal as blocks allow; of a short one, some are empty."""
    blocks = -(-size // BLOCK)
    edges = [min(size, BLOCK * (blocks * n // count)) for n in range(count)] + [size]
    return tuple(slice(edges[n], edges[n + 1]) for n in range(count))


def lengths(slices: Sequence[slice], owners: Sequence[int], ranks: int) -> list[int]:
    """How many numbers each rank owns, as `Group.exchange` and `Group.gather` want to know it.

    Args:
        slices: One after the other.
        owners: Their ranks.
        ranks: How many members there are.
    """
    found = [0] * ranks
    for place, owner in zip(slices, owners, strict=True):
        found[owner] += place.stop - place.start
    return found


def digest(vector: Vector, start: int = 0) -> int:
    """64 bits of some numbers' bits and of their places, in the time that it takes to read them.

    Another number, or a block in the place of another, gives other bits, but for a chance in 2^64;
    nobody is kept from making up a vector that has the same.

    Args:
        vector: (n,) float32
        start: Where in the whole they begin, a multiple of `BLOCK`. Digests of slices add up,
            modulo 2^64, to that of the whole.
    """
    full = len(vector) // BLOCK * BLOCK
    rest = np.zeros(BLOCK, np.float32)
    rest[: len(vector) - full] = vector[full:]
    words = vector[:full].view(np.uint64).reshape(-1, BLOCK // 2)
    sums = np.append(words.sum(axis=1), rest.view(np.uint64).sum())
    places = 2 * np.arange(start // BLOCK, start // BLOCK + len(sums), dtype=np.uint64) + 1
    return int((sums * (places * np.uint64(_MIX))).sum())


def part_of(state: Mapping[str, npt.NDArray[Any]], place: slice) -> dict[str, npt.NDArray[Any]]:
    """What an optimizer's state holds of a slice; not copied.

    Args:
        state: (P,) of each parameter, or () of all alike.
        place: Of the slice.
    """
    return {name: value[place] if value.ndim else value for name, value in state.items()}


class Slice:
    """One slice at its owner: a step is made beside what counts, and counts once it is committed.

    Args:
        place: Of the slice, in parameters and then buffers.
        parameter_count: P
        reduction: What is done with the gradients of an update over its samples.

    Raises:
        UserError: If the optimizer's settings make no sense.
    """

    def __init__(
        self,
        place: slice,
        parameter_count: int,
        settings: OptimizerSettings,
        reduction: Reduction = "mean",
    ) -> None:
        self.place = place
        self._split = min(max(parameter_count - place.start, 0), place.stop - place.start)
        self._reduction = reduction
        self._clip_norm = settings.clip_norm
        self._parameter = torch.nn.Parameter(torch.zeros(self._split))
        self._optimizer = make_optimizer(settings, self._parameter)
        self._state = self._made()
        self._spare = dict[str, torch.Tensor]()  # that of the step before, or what is prepared

    @property
    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What the optimizer keeps of it, not copied; the arrays are others after a commit."""
        return {name: value.numpy() for name, value in self._state.items()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from an optimizer's state, which is copied."""
        self._state = {name: torch.tensor(value) for name, value in state.items()}
        self._spare = {}

    def square(self, total: Vector) -> float:
        """|sum of gradients|^2 of this slice: that of all slices is their sum.

        Args:
            total: (n,) float32 summed over the samples of the update.
        """
        return squared_norm(total, self._split)

    def prepare(
        self,
        weights: Vector,
        total: Vector,
        samples: int,
        rate: float,
        following: Vector,
        norm: float,
    ) -> None:
        """Make a step; what was prepared before is forgotten.

        Args:
            weights: (n,) float32 that count, of this slice.
            total: (n,) float32 summed over the samples of the update; overwritten.
            samples: How many.
            rate: Learning rate of this step.
            following: (n,) float32, overwritten: the weights after it.
            norm: |gradient| of all slices, by `square`; for settings with a `clip_norm`. It is
                rounded once more than in a step over the whole.

        Raises:
            UserError: If the rate is not above zero and finite.
        """
        following[:] = weights
        following[self._split :] += total[self._split :] / samples
        if not self._split:
            return
        gradient = total[: self._split]
        if self._reduction == "mean":
            gradient /= samples
        if self._clip_norm is not None:
            gradient *= min(1.0, self._clip_norm / (norm + _CLIP_EPS))
        set_learning_rate(self._optimizer, rate)
        for name, value in self._state.items():
            self._spare.setdefault(name, torch.empty_like(value)).copy_(value)
        self._optimizer.state[self._parameter] = self._spare if self._state else {}
        self._parameter.data = torch.from_numpy(following[: self._split])
        self._parameter.grad = torch.from_numpy(gradient)
        self._optimizer.step()
        self._spare = self._made()

    def commit(self) -> None:
        """Let what was prepared count."""
        self._state, self._spare = self._spare, self._state

    def _made(self) -> dict[str, torch.Tensor]:
        state = self._optimizer.state[self._parameter]
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
