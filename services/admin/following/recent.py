"""What the last ten seconds brought: updates and samples per second, samples by worker."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.core.messages import Batch, UpdateApplied

WINDOW_S = 10.0  # long enough to hold some updates, short enough to show a change
_LEAST_S = 1.0  # a rate over less would be noise


class Rates(NamedTuple):
    """Of effective updates."""

    updates_per_s: float
    samples_per_s: float


class _Made(NamedTuple):
    at_s: float
    version: int
    samples: int
    batches: tuple[Batch, ...]


class Recent:
    """The updates of the window; none of those that were taken back."""

    def __init__(self) -> None:
        self._made = deque[_Made]()
        self._samples = 0
        self._by_worker = Counter[str]()
        self._first_s: float | None = None  # when the first update was made, ever

    def add(self, update: UpdateApplied, at_s: float) -> None:
        """Take in an update that was made, or first seen, at this time."""
        self._first_s = at_s if self._first_s is None else min(self._first_s, at_s)
        self._forget(at_s)
        self._made.append(_Made(at_s, update.version, update.samples, update.batches))
        self._samples += update.samples
        for batch in update.batches:
            self._by_worker[batch.worker] += batch.samples

    def take_back(self, version: int) -> None:
        """Forget all updates above a version."""
        while self._made and self._made[-1].version > version:
            self._without(self._made.pop())

    def rates(self, now: float) -> Rates | None:
        """Over the window, or since the first update; None where there was none."""
        self._forget(now)
        if self._first_s is None:
            return None
        span_s = min(WINDOW_S, max(_LEAST_S, now - self._first_s))
        return Rates(len(self._made) / span_s, self._samples / span_s)

    def samples_of(self, now: float) -> Counter[str]:
        """Samples by worker; do not change it."""
        self._forget(now)
        return self._by_worker

    def _forget(self, now: float) -> None:
        while self._made and self._made[-1].at_s > now + WINDOW_S:
            self._without(self._made.pop())  # the clock was set back: they would stay for long
        while self._made and self._made[0].at_s < now - WINDOW_S:
            self._without(self._made.popleft())

    def _without(self, made: _Made) -> None:
        self._samples -= made.samples
        for batch in made.batches:
            self._by_worker[batch.worker] -= batch.samples
            if not self._by_worker[batch.worker]:
                del self._by_worker[batch.worker]
