"""What a gradient costs in virtual time, and what it is: nothing here, or real numbers.

The protocol does not know the difference: `Costless` answers with a loss of 0, the learner of
`learning` with real gradients of real data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from common.core.messages import Batch, Vector

DRAWN = 4096  # times drawn at once: a draw costs little, a call much


class Computed(msgspec.Struct, frozen=True):
    """The gradient of some batches; every number is a sum over their samples."""

    loss_sum: float
    vector: Vector | None


NOTHING = Computed(0.0, None)


class Learner(Protocol):
    """The numbers of a job."""

    def gradient(self, batches: Sequence[Batch]) -> Computed:
        """Compute the gradient of these batches at the weights of now."""
        ...

    def add(self, computed: Vector | None, samples: int) -> None:
        """Add a gradient to the sum of the round."""
        ...

    def apply(self, version: int, now: float) -> None:
        """Make one update of the sum."""
        ...

    def discard(self) -> None:
        """Forget the sum of the round."""
        ...


class Costless:
    """Learns nothing: where only time and money are asked for."""

    def gradient(self, batches: Sequence[Batch]) -> Computed:
        """Answer at once."""
        del batches
        return NOTHING

    def add(self, computed: Vector | None, samples: int) -> None:
        """Nothing to add."""

    def apply(self, version: int, now: float) -> None:
        """Nothing to apply."""

    def discard(self) -> None:
        """Nothing to forget."""


class GradientTimes:
    """C, the time of one batch's gradient: gamma distributed, independent of all else.

    Args:
        mean_s: mu_C
        variation: Standard deviation over mean; 0 for always the same, 1 for exponential.
        rng: Draws them.
    """

    def __init__(self, mean_s: float, variation: float, rng: np.random.Generator) -> None:
        self._mean_s = mean_s
        self._shape = variation**-2 if variation > 0 else None
        self._rng = rng
        self._drawn = list[float]()

    def draw(self, batches: int, speed: float) -> float:
        """The time of so many batches, one after the other, on a machine of a speed."""
        if self._shape is None:
            return batches * self._mean_s / speed
        if len(self._drawn) < batches:
            scale_s = self._mean_s / self._shape
            self._drawn += self._rng.gamma(self._shape, scale_s, DRAWN + batches).tolist()
        return sum(self._drawn.pop() for _ in range(batches)) / speed
