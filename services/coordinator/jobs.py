"""The jobs that one replica takes part in: an actor each, on a few threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from services.coordinator.loop import JobCoordinator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.jobs.store import JobRecord
    from common.runtime.supervisor import Supervised, Supervisor
    from services.coordinator.replica import Replica


class _Taken:
    """A job, as it is wanted now."""

    def __init__(self, record: JobRecord) -> None:
        self.record: JobRecord | None = record
        self.running: Supervised | None = None

    def wanted(self) -> JobRecord | None:
        """None where it was deleted."""
        return self.record


class Jobs:
    """Begins with jobs, tells their actors what is wanted of them, and ends with them.

    Args:
        replica: What they share.
        supervisor: Runs them.
    """

    def __init__(self, replica: Replica, supervisor: Supervisor) -> None:
        self._replica = replica
        self._supervisor = supervisor
        self._taken = dict[str, _Taken]()

    def follow(self, jobs: Mapping[str, JobRecord]) -> None:
        """Take in all jobs that there are."""
        for job, record in jobs.items():
            taken = self._taken.get(job)
            if taken is not None and taken.running is not None and not taken.running.ended.is_set():
                if taken.record is not record:
                    taken.record = record
                    taken.running.wake()
            elif record.wanted != "stopped":
                self._begin(job, record)
        for job in self._taken.keys() - jobs.keys():
            self._forget(job, self._taken[job])

    def _begin(self, job: str, record: JobRecord) -> None:
        taken = self._taken[job] = _Taken(record)
        taken.running = self._supervisor.begin(
            job, partial(JobCoordinator, self._replica, taken.wanted)
        )

    def _forget(self, job: str, taken: _Taken) -> None:
        """End with a job that was deleted, once it has heard of that."""
        if taken.running is None or taken.running.ended.is_set():
            del self._taken[job]
        elif taken.record is not None:
            taken.record = None
            taken.running.wake()
