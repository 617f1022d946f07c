"""Start-up times of machines of each pool, by the first heartbeats of their workers.

    machine   Started ─────────────────────────────── heartbeats ──▶
    polls          |         |         |         |         |
                                      not seen  └────┬────┘ seen
                                                 start-up ends

Heartbeats also end and begin for other reasons: Redis restarts empty, or a successor has not polled
before. So only machines that started while this process polled are timed. Results are of this
process alone; another one uses the market file's time until it has measured a few.

This only works if each machine's worker has its own name (`reassign`). Under `hold`, a spare's
worker sends no heartbeats before it gets a slot, and a slot's name is also that of the machine
before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.spot.provisioning.events import HeartbeatsSeen
    from common.spot.provisioning.fleet_ledger import Instance
    from common.spot.theory.work import Pool

# Number of start-ups that the market file's time counts for: three measured ones outvote it. The
# median ignores one that waited for a server for minutes.
SAID = 2
# Number kept for each pool: images and types change, and the last dozen are as good as all.
KEPT = 15


class StartUps:
    """Measures start-up times, and finds started machines, by polls of heartbeats.

    Attributes:
        reported: Running machines whose workers have sent heartbeats, by launch.
    """

    def __init__(self) -> None:
        self.reported = frozenset[int]()
        self._took_s = defaultdict[str, deque[float]](lambda: deque(maxlen=KEPT))
        # Times of the polls before and at the first heartbeat, by name.
        self._appeared = dict[str, tuple[float, float]]()
        # Time since which polls have followed one another.
        self._since_s = float("inf")
        self._looked_s = float("-inf")

    def workers_seen(
        self, seen: HeartbeatsSeen, running: Iterable[Instance], patience_s: float
    ) -> None:
        """Add a poll, unless a newer one was added before.

        Args:
            seen: Current heartbeats.
            running: Machines that were seen running and not seen to end.
            patience_s: Longest time between two polls that follow one another.
        """
        before_s, now_s = self._looked_s, seen.as_of_s
        if now_s <= before_s:
            return
        self._looked_s = now_s
        if now_s - before_s > patience_s:
            self._since_s = now_s
        # A heartbeat may come before the start is read back.
        self._appeared = {
            member: self._appeared.get(member, (before_s, now_s)) for member in seen.members
        }
        there = tuple(running)
        known = {instance.launch for instance in there if instance.launch in self.reported}
        new = [
            instance
            for instance in there
            if instance.launch not in known and instance.member in seen.members
        ]
        for instance in new:
            started_s, (after_s, by_s) = instance.started_s, self._appeared[instance.member]
            if started_s is not None and self._since_s <= started_s <= by_s:
                between_s = (max(after_s, started_s) + by_s) / 2
                self._took_s[instance.pool].append(between_s - started_s)
        self.reported = frozenset(known | {instance.launch for instance in new})

    def start_up_s(self, pool: Pool) -> float:
        """Return the time of a pool's machine from its start to its first work."""
        return median([*[pool.start_up_s] * SAID, *self._took_s[pool.name]])
