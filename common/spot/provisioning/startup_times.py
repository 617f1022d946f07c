"""How long machines of each pool take to start up, by when their workers are first heard of.

    machine   Started ─────────────────────────────── heartbeats ──▶
    looks          |         |         |         |         |
                                       not heard └────┬────┘ heard
                                                  start-up ends

Heartbeats end and begin for other reasons, too: Redis comes back empty, and who takes over has not
looked before. So only machines are timed that started while somebody looked. What is known is of
this process alone: another one believes the market file until it has seen a few.

Only where each machine's worker has a name of its own (`reassign`). Under `hold` a spare's worker
sends no heartbeats before it is seated, and a slot's name is that of the machine before, too.
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

# Start-ups that count for what the market file says: three that were seen outvote it. The median,
# since one that waited for a server is no reason to plan with minutes.
SAID = 2
KEPT = 15  # of a pool: images and types change, and the last dozen say as much as all


class StartUps:
    """Fed with looks at heartbeats; says how long a start-up takes, and who has started up.

    Attributes:
        reported: Machines that run and whose workers were heard of, by launch.
    """

    def __init__(self) -> None:
        self.reported = frozenset[int]()
        self._took_s = defaultdict[str, deque[float]](lambda: deque(maxlen=KEPT))
        self._appeared = dict[str, tuple[float, float]]()  # by name: between which looks
        self._since_s = float("inf")  # looks have followed one another since then
        self._looked_s = float("-inf")

    def workers_seen(
        self, seen: HeartbeatsSeen, running: Iterable[Instance], patience_s: float
    ) -> None:
        """Take in a look, unless a later one was taken in before.

        Args:
            seen: Whose heartbeats there are.
            running: Machines that were seen running and not seen to end.
            patience_s: Looks farther apart than that do not follow one another.
        """
        before_s, now_s = self._looked_s, seen.as_of_s
        if now_s <= before_s:
            return
        self._looked_s = now_s
        if now_s - before_s > patience_s:
            self._since_s = now_s
        # It may be heard of before its start is read back.
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
        """Say how long a machine of a pool takes from its start to its first work."""
        return median([*[pool.start_up_s] * SAID, *self._took_s[pool.name]])
