"""What a job needs of the workers that all jobs share, as its leader sees it now and then.

Whether updates keep up with what arrives, too: both sides of Proposition 1, as loads. Below 1 a
load is carried. The records of all streams together are shared evenly by the workers.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from common.core.job_placement import JobDemand

if TYPE_CHECKING:
    from common.core.messages import LeaderStatus, Positions
    from common.jobs.spec import JobSpec

WINDOW_S = 60.0  # over which arrivals are averaged for people
# For workers they are averaged over less. A burst that is trained within seconds keeps workers no
# longer than this: with a minute, they sit at drained jobs while others wait.
ARRIVALS_S = 10.0
FORGET_S = 30.0  # what a worker managed so long ago counts little: its machine may be another one


class ArrivalMeter:
    """How fast records arrive, from totals seen now and then.

    Args:
        window_s: Over which they are averaged.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen = deque[tuple[float, int]]()  # when and how many; the first may be too old

    def add(self, records: int, now: float) -> float | None:
        """Take in the total as of now; returns the mean of the window, None at first.

        Args:
            records: Arrived so far.
            now: Seconds that never go back.
        """
        self._seen.append((now, records))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(records - before, 0) / (now - since) if now > since else None


class DemandMeter:
    """Follows one leadership of a job; belongs to one thread."""

    def __init__(self, first: Positions) -> None:
        self._first = first
        self._arrivals = ArrivalMeter(ARRIVALS_S)
        self._before: tuple[float, int, int] | None = None  # when, records claimed and unclaimed
        self._worker_s = self._trained = 0.0  # of busy workers, fading
        self._unserved_since: float | None = None
        self._number = 0

    def demand(
        self,
        spec: JobSpec,
        leader_status: LeaderStatus,
        ends: Positions,
        now: float,
        group_size: int,
        *,
        runs: bool,
    ) -> JobDemand:
        """What the job needs now.

        Args:
            spec: As it is now.
            leader_status: The leader's newest.
            ends: Of all its partitions.
            now: Seconds that never go back.
            group_size: K that may be in force.
            runs: Neither paused nor held.
        """
        claimed = _between(self._first, leader_status.claimed)
        arrived = _between(self._first, ends)
        unclaimed = max(arrived - claimed, 0)
        self._measure(spec, leader_status.live, claimed, unclaimed, now)
        backlog = backlog_of(spec, unclaimed, leader_status.waiting, group_size)
        if not (runs and backlog) or leader_status.live:
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = now
        self._number += 1
        return JobDemand(
            spec.name,
            self._number,
            backlog,
            arrivals_per_s=self._arrivals.add(arrived, now) or 0.0,
            worker_records_per_s=self._trained / self._worker_s if self._worker_s >= 1.0 else 0.0,
            most_workers=len(self._first),
            weight=spec.weight,
            runs=runs,
            target=spec.provisioning.workers if spec.provisioning is not None else 0,
            unserved_s=now - self._unserved_since if self._unserved_since is not None else 0.0,
            task=spec.task_name,
        )

    def _measure(self, spec: JobSpec, live: int, claimed: int, unclaimed: int, now: float) -> None:
        """What one worker manages: what was claimed while there was more than all could claim.

        As many records may be unclaimed though nobody is busy: an open batch of each worker, and
        two groups that wait for each other.
        """
        before, self._before = self._before, (now, claimed, unclaimed)
        if before is None:
            return
        since, claimed_before, unclaimed_before = before
        busy = min(unclaimed, unclaimed_before) > (live + 2 * spec.group_size) * spec.batch_size
        if live and busy and now > since:
            fades = 1 - min((now - since) / FORGET_S, 1.0)
            self._worker_s = self._worker_s * fades + live * (now - since)
            self._trained = self._trained * fades + max(claimed - claimed_before, 0)


def backlog_of(spec: JobSpec, unclaimed: int, waiting: int, group_size: int) -> int:
    """Records of which an update can be made without any further ones.

    Fewer than a group wait for more to come, unless the job does not wait for that.

    Args:
        spec: The job.
        unclaimed: Records in no batch yet.
        waiting: Batches that are not settled.
        group_size: K that may be in force.
    """
    records = unclaimed + waiting * spec.batch_size
    if spec.group_linger_s is None:
        least = spec.batch_size * group_size
    else:
        least = spec.batch_size if spec.batch_linger_s is None else 1
    return records if records >= least else 0


def _between(first: Positions, positions: Positions) -> int:
    return sum(max(positions.get(place, begin) - begin, 0) for place, begin in first.items())


def sufficient_load(arrivals_per_s: float, batch_size: int, gradient_s: float) -> float:
    """Give the time of one gradient over the time between batches: mu_C over b / (N lambda_A).

    Below 1 is enough even where one worker has all K batches of every group. It is not necessary:
    while batches are spread, up to N of them are computed at once.

    Args:
        arrivals_per_s: Records of all workers together, N lambda_A.
        batch_size: b.
        gradient_s: mu_C, the mean time of one gradient and its upload.
    """
    return gradient_s * arrivals_per_s / batch_size


def necessary_load(
    arrivals_per_s: float, workers: int, group_size: int, batch_size: int, gradient_s: float
) -> float:
    """Give the shortest round over the time between groups: ceil(K/N) mu_C over K b / (N lambda_A).

    From 1 on no assignment of batches is stable: some worker has at least ceil(K/N) of the K
    batches, and the round waits for it. Gradient times that vary only lengthen a round, as it ends
    with its slowest worker (H_K mu_C for K = N and exponential times).

    Args:
        arrivals_per_s: As above.
        workers: N, at least 1; a worker without records is none.
        group_size: K.
        batch_size: b.
        gradient_s: mu_C.
    """
    return (
        ceil(group_size / workers)
        * sufficient_load(arrivals_per_s, batch_size, gradient_s)
        / group_size
    )
