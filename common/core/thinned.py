"""Samples over time in bounded memory: when there are too many, every second one goes.

capacity 4     a b c d          full: a c e ., from now on every second one is kept
a c e g          full: a e i ., from now on every fourth
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """Samples in order, and always the newest.

    Args:
        capacity: Samples kept, at most; an even number.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept = list[T]()
        self._stride = 1
        self._seen = 0
        self._newest: T | None = None

    def add(self, sample: T) -> None:
        """Take in one more."""
        self._newest = sample
        if self._seen % self._stride == 0:
            if len(self._kept) == self._capacity:
                self._kept = self._kept[::2]
                self._stride *= 2
            self._kept.append(sample)
        self._seen += 1

    def samples(self) -> list[T]:
        """What is kept, and the newest behind it."""
        behind = (self._seen - 1) % self._stride != 0 and self._newest is not None
        return [*self._kept, self._newest] if behind and self._newest is not None else self._kept
