"""Start-up times of machines of each pool, by the first heartbeats of their workers.

    machine   Started ─────────────────────────────── heartbeats ──▶
    polls          |         |         |         |         |
                                      not seen  └────┬────┘ seen
                                                 start-up ends

Heartbeats also end and begin for other reasons: Redis restarts empty, or a successor has not polled
before. So only machines that started while this process polled are timed. Results are of this
process alone; another one uses the market file's time until it has measured a few.

Times are only learned if each machine's worker has its own name (`reassign`). Under `hold`, a
spare's worker sends no heartbeats before it gets a slot, and a slot's name is also that of the
machine before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.spot.provisioning.events import HeartbeatsSeen
    from common.spot.provisioning.fleet_ledger import Instance
    from common.spot.theory.work import Pool

# Number of start-ups that the market file's time counts for: three measured ones outvote it. The
# median ignores one that waited for a server for minutes.
SAID = 2
# Number kept for each pool: images and types change, and the last dozen are as good as all.
KEPT = 15
ROUNDING = 1e-9


class StartUp(NamedTuple):
    """Time from a machine's start to its first heartbeat, or without one until its end."""

    seconds: float
    # True if the machine ended, or was given up, before a heartbeat.
    censored: bool = False


def median_start_up_s(start_ups: Iterable[StartUp]) -> float:
    """Return the Kaplan-Meier estimate of the median, which includes right-censored times.

    Without the censored ones, which are the longest, the median would be too short. If it is beyond
    all times, the longest one is returned, as Efron proposes. Without censored times, this is the
    usual median.

    Sources: Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", JASA 53
    (1958); Efron, "The Two Sample Problem with Censored Data", Berkeley Symposium 5 (1967).

    Args:
        start_ups: At least one.
    """
    times, share, found = sorted(start_ups), 1.0, 0.0
    for at_risk, (seconds, censored) in zip(range(len(times), 0, -1), times, strict=True):
        if censored and at_risk > 1:
            continue
        if share <= 1 / 2 + ROUNDING:
            return (found + seconds) / 2
        share, found = share * (1 - 1 / at_risk), seconds
        if share < 1 / 2 - ROUNDING:
            break
    return found


class StartUps:
    """Measures start-up times, and finds started machines, by polls of heartbeats.

    Attributes:
        reported: Running machines whose workers have sent heartbeats, by launch.
        patience_s: Longest time between two polls that follow one another.

    Args:
        unique: True if each machine's worker has its own name.
    """

    def __init__(self, *, unique: bool = True) -> None:
        self.unique = unique
        self.reported = frozenset[int]()
        self._took = defaultdict[str, deque[StartUp]](lambda: deque(maxlen=KEPT))
        # Pool and time without a heartbeat of machines that are timed, by launch.
        self._waiting = dict[int, tuple[str, float]]()
        self.patience_s = 0.0
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
        self._looked_s, self.patience_s = now_s, patience_s
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
            if instance.launch not in known and self._reports(instance, seen)
        ]
        self.reported = frozenset(known | {instance.launch for instance in new})
        if self.unique:
            self._time(there, new, now_s)

    def _reports(self, instance: Instance, seen: HeartbeatsSeen) -> bool:
        """Return True if a heartbeat is that of the machine's own worker.

        Under `hold`, the heartbeat of the slot's previous worker may not have expired yet.
        """
        previous_s = 0.0 if self.unique else self.patience_s
        return instance.member in seen.members and seen.as_of_s >= _begun_s(instance) + previous_s

    def _time(self, there: Iterable[Instance], new: Iterable[Instance], now_s: float) -> None:
        """Keep the start-up times of machines that have reported, ended or been given up."""
        waiting = {
            instance.launch: (instance.pool, now_s - instance.started_s)
            for instance in there
            if instance.launch not in self.reported
            and not instance.left
            and instance.started_s is not None
            and self._since_s <= instance.started_s <= now_s
        }
        for launch in self._waiting.keys() - waiting.keys() - self.reported:
            pool, seconds = self._waiting[launch]
            self._took[pool].append(StartUp(seconds, censored=True))
        self._waiting = waiting
        for instance in new:
            started_s, (after_s, by_s) = instance.started_s, self._appeared[instance.member]
            if started_s is not None and self._since_s <= started_s <= by_s:
                between_s = (max(after_s, started_s) + by_s) / 2
                self._took[instance.pool].append(StartUp(between_s - started_s))

    def silent_s(self, instance: Instance) -> float:
        """Return the time for which a machine's worker was expected and sent no heartbeat.

        Only times in which polls followed one another count.
        """
        spare = instance.slot is None and not self.unique
        if instance.launch in self.reported or spare:
            return 0.0
        return max(self._looked_s - max(self._since_s, _begun_s(instance)), 0.0)

    def start_up_s(self, pool: Pool) -> float:
        """Return the time of a pool's machine from its start to its first work."""
        return median_start_up_s([*[StartUp(pool.start_up_s)] * SAID, *self._took[pool.name]])


def _begun_s(instance: Instance) -> float:
    """Return the time from which on a machine's worker may send heartbeats under its name."""
    if instance.started_s is None:
        return float("inf")
    return max(instance.started_s, instance.slot_assigned_s or 0.0)
