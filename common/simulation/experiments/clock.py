"""Virtual time: what is to happen next, in order; nothing takes longer than it says."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class VirtualTime:
    """A clock that jumps from one thing to the next; what is due at one time keeps its order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap = list[tuple[float, int, "Callable[..., None]", tuple[Any, ...]]]()
        self._serial = 0
        self._stopped = False

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Do something at a time; at once, after all else that is due now, if that has passed."""
        self._serial += 1
        heappush(self._heap, (max(time_s, self.now), self._serial, action, arguments))

    def run(self) -> None:
        """Do one thing after the other until somebody stops it, or there is nothing left to do."""
        heap = self._heap
        self._stopped = False
        while heap and not self._stopped:
            self.now, _, action, arguments = heappop(heap)
            action(*arguments)

    def stop(self) -> None:
        """Do nothing further after what is done now."""
        self._stopped = True
