"""What an update costs in traffic, by what workers count themselves.

Each gradient says how many bytes its worker has moved in all. The difference of two counts of one
life, at two versions, is what the updates between took: so a message that never comes only has the
next one say it, and one that comes late, or twice, says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from common.core.messages import Traffic, WorkerId

VERSIONS_KEPT = 1000  # after which a worker that was not heard of is forgotten


class _LastTraffic(NamedTuple):
    version: int
    traffic: Traffic


class UpdateTraffic:
    """Bytes that a worker moves for an update, of one leader's updates."""

    def __init__(self) -> None:
        # Of each worker's last count, the eldest first.
        self._last: dict[WorkerId, _LastTraffic] = {}
        self._moved = self._updates = 0  # since they were taken, of all workers together

    def observe(self, worker: WorkerId, traffic: Traffic, version: int) -> None:
        """Take in a worker's count.

        Args:
            worker: Whose.
            traffic: Its count.
            version: Of the weights that it had then.
        """
        before = self._last.get(worker)
        if before is not None and before.traffic.life == traffic.life:
            moved, updates = traffic.total - before.traffic.total, version - before.version
            if updates <= 0 or moved < 0:
                return
            self._moved += moved
            self._updates += updates
        self._last.pop(worker, None)
        self._last[worker] = _LastTraffic(version, traffic)
        eldest, last = next(iter(self._last.items()))
        if version - last.version > VERSIONS_KEPT:
            del self._last[eldest]

    def take(self) -> int | UnsetType:
        """Mean of what was counted since it was taken last; left out: nothing was."""
        moved, updates, self._moved, self._updates = self._moved, self._updates, 0, 0
        return round(moved / updates) if updates else UNSET
