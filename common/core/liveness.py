"""Which workers can be given work: a judgement over beats that may all vanish at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import WorkerId

if TYPE_CHECKING:
    from collections.abc import Mapping


LEAVING = "leaving"


class Departures(NamedTuple):
    """What changed since the last look."""

    lost: frozenset[WorkerId]  # gone without notice
    left: frozenset[WorkerId]  # gone after saying that they would


class Liveness:
    """The coordinator's view of its workers.

    Args:
        grace_s: How long all beats may be gone before that means that all workers are. Until then
            a wiped Redis is the likelier cause; longer than two beats, so that everybody is back.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._status = dict[WorkerId, str]()
        self._wiped_until = float("-inf")

    @property
    def live(self) -> frozenset[WorkerId]:
        """Workers that may be given new work."""
        return frozenset(w for w, status in self._status.items() if status != LEAVING)

    def observe(self, seen: Mapping[WorkerId, str], now: float) -> Departures:
        """Take in all beats that are valid now."""
        if self._status and not seen and now >= self._wiped_until + self._grace_s:
            self._wiped_until = now + self._grace_s
        gone = self._status.keys() - seen.keys()
        if now < self._wiped_until:
            gone = set()
        left = {w for w in gone if self._status[w] == LEAVING}
        for worker in gone:
            del self._status[worker]
        self._status.update(seen)
        return Departures(frozenset(gone - left), frozenset(left))
