"""Measures a job's demand for workers, which all jobs share.

It also computes both sides of Proposition 1 as loads: below 1, updates keep up with arrivals. The
workers are taken to share the records of all streams evenly.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from common.core.job_placement import JobDemand

if TYPE_CHECKING:
    from common.core.messages import LeaderStatus, Positions
    from common.jobs.spec import JobSpec

# Window over which arrivals shown to people are averaged.
WINDOW_S = 60.0
# Window for the workers' choice of a job. It is short because a burst keeps workers for this
# long after it is trained: with a minute, they would sit at drained jobs while others wait.
ARRIVALS_S = 10.0
# Time after which a measured worker speed counts little: the machine may be another one.
FORGET_S = 30.0


class ArrivalMeter:
    """Computes the arrival rate of records from totals seen at intervals.

    Args:
        window_s: Window over which arrivals are averaged.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # Time and total of each observation; the first may be older than the window.
        self._seen = deque[tuple[float, int]]()

    def add(self, records: int, now: float) -> float | None:
        """Add the current total, and return the mean rate over the window; None at first.

        Args:
            records: Records that have arrived so far.
            now: Monotonic time in seconds.
        """
        self._seen.append((now, records))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(records - before, 0) / (now - since) if now > since else None


class DemandMeter:
    """Measures the demand of one job during one leadership; used by one thread."""

    def __init__(self, first: Positions) -> None:
        self._first = first
        self._arrivals = ArrivalMeter(ARRIVALS_S)
        # Time, records claimed and records unclaimed at the previous call.
        self._before: tuple[float, int, int] | None = None
        # Worker seconds while workers were busy, and records trained in them; both decay.
        self._worker_s = self._trained = 0.0
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
        """Return the job's demand.

        Args:
            spec: The newest specification.
            leader_status: The leader's newest status.
            ends: Ends of all its partitions.
            now: Monotonic time in seconds.
            group_size: The smallest K that may be in force.
            runs: True if the job is neither paused nor held.
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
        """Measure a worker's speed from claims made while workers could not claim everything.

        Some records may be unclaimed although no worker is busy: an open batch of each worker, and
        two groups that wait for each other. More than that means that workers are busy.
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
    """Return the number of waiting records, or 0 if they cannot make an update yet.

    Less than a group waits for more records, unless the job has a linger.

    Args:
        spec: The job.
        unclaimed: Records in no batch yet.
        waiting: Batches that are not settled.
        group_size: The smallest K that may be in force.
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
    """Return the ratio of gradient time to batch interval: mu_C over b / (N lambda_A).

    A value below 1 suffices even if one worker has all K batches of every group. It is not
    necessary: if batches are spread, up to N of them are computed at once.

    Args:
        arrivals_per_s: Records of all workers together, N lambda_A.
        batch_size: b.
        gradient_s: mu_C, the mean time of one gradient and its upload.
    """
    return gradient_s * arrivals_per_s / batch_size


def necessary_load(
    arrivals_per_s: float, workers: int, group_size: int, batch_size: int, gradient_s: float
) -> float:
    """Return the ratio of shortest round to group interval: ceil(K/N) mu_C over K b / (N lambda_A).

    From 1 on, no assignment of batches is stable: some worker has at least ceil(K/N) of the K
    batches, and the round waits for it. Varying gradient times only lengthen a round, because it
    ends with its slowest worker (H_K mu_C for K = N and exponential times).

    Args:
        arrivals_per_s: Records of all workers together, N lambda_A.
        workers: N, at least 1, counting only workers that have records.
        group_size: K.
        batch_size: b.
        gradient_s: mu_C.
    """
    return (
        ceil(group_size / workers)
        * sufficient_load(arrivals_per_s, batch_size, gradient_s)
        / group_size
    )
