"""Samples over time in bounded memory: if there are too many, every second one is dropped.

capacity 4     a b c d          one more: a c e, from now on every second one is kept
a c e g        one more: a e i, from now on every fourth
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """Samples in order: the first, the newest, and equal steps between.

    Args:
        capacity: Maximum number of samples, even.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._samples = list[T]()
        self._stride = 1
        self._seen = 0

    def add(self, sample: T) -> None:
        """Add a sample."""
        if (self._seen - 1) % self._stride:
            # The previous newest sample is between two steps.
            self._samples.pop()
        self._samples.append(sample)
        self._seen += 1
        if len(self._samples) > self._capacity:
            self._samples = self._samples[::2]
            self._stride *= 2

    def take_back(self, stays: Callable[[T], bool]) -> None:
        """Remove the newest samples until one of them stays."""
        before = len(self._samples)
        while self._samples and not stays(self._samples[-1]):
            self._samples.pop()
        if not self._samples:
            self._stride, self._seen = 1, 0
        elif len(self._samples) < before:
            self._seen = (len(self._samples) - 1) * self._stride + 1

    def samples(self) -> list[T]:
        """Return the samples, the newest last. The caller must not change the list."""
        return self._samples
