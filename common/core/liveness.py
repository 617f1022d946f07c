"""Which workers can be given work: a judgement over beats that may all vanish at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from common.core.messages import WorkerId

ALIVE = "alive"
LEAVING = "leaving"
WAITING = "waiting"  # alive, and what it has read awaits a schema that nobody gives it now
# The worker is alive, and the linger of its open batch is over, but that batch has fewer samples
# than `min_batch`.
TOO_FEW = "too-few"
STATUSES = (ALIVE, LEAVING, WAITING, TOO_FEW)
WORKER = "worker "  # before a worker's name, among processes that cannot do their part of a job


class Departures(NamedTuple):
    """What changed since the last look."""

    lost: frozenset[WorkerId]  # gone without notice
    left: frozenset[WorkerId]  # gone after saying that they would


class Liveness:
    """The coordinator's view of its workers.

    Args:
        grace_s: How long all beats may be gone before that means that all workers are. Until then
            a wiped Redis is the likelier cause; longer than two beats, so that everybody is back.
            A worker that is overdue is doubted for as long: by then its beat runs out, or it lives.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._status = dict[WorkerId, str]()
        # Both follow from the status; asked for at every batch.
        self._there = self._live = frozenset[WorkerId]()
        self._wiped_until = float("-inf")
        self._doubted_until = dict[WorkerId, float]()

    @property
    def live(self) -> frozenset[WorkerId]:
        """Workers that may be given new work."""
        return self._live

    @property
    def there(self) -> frozenset[WorkerId]:
        """All that live, those that leave with them."""
        return self._there

    def trusted(self, now: float) -> frozenset[WorkerId]:
        """Those of them that are not in doubt; all of them where each one is."""
        if not self._doubted_until:
            return self._live
        trusted = {w for w in self._live if now >= self._doubted_until.get(w, now)}
        return frozenset(trusted) or self._live

    def suspect(self, workers: Iterable[WorkerId], now: float) -> None:
        """They did not do in time what they were asked to: others are asked first for a while."""
        self._doubted_until.update(dict.fromkeys(workers, now + self._grace_s))

    def clear(self, worker: WorkerId) -> None:
        """It was heard of."""
        self._doubted_until.pop(worker, None)

    def leave(self, worker: WorkerId) -> None:
        """It said that it leaves."""
        if worker in self._status:
            self._status[worker] = LEAVING
            self._live -= {worker}

    def wiped(self, now: float) -> None:
        """The board is empty, of beats too: who lives will beat again soon."""
        self._wiped_until = now + self._grace_s

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
            self.clear(worker)  # if it comes back, it does so anew
        self._status.update(seen)
        self._there = frozenset(self._status)
        self._live = frozenset(w for w, status in self._status.items() if status != LEAVING)
        return Departures(frozenset(gone - left), frozenset(left))
