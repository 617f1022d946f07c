"""Which jobs a process takes part in: begins with their actors, and tells them what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from common.jobs.store import JobRecord
    from common.runtime.supervisor import Actor, Fault, Supervised, Supervisor

    Wanted: TypeAlias = Callable[[], JobRecord | None]
    MakePart: TypeAlias = Callable[[Wanted, Callable[[], None], Fault | None], Actor]


class _Taken:
    """A job, as it is wanted now."""

    def __init__(self, record: JobRecord) -> None:
        self.first = record
        self.record: JobRecord | None = record
        self.running: Supervised | None = None

    def wanted(self) -> JobRecord | None:
        """None where it was deleted."""
        return self.record

    def tell(self, record: JobRecord | None) -> None:
        """Let the actor see a record, if it is news."""
        if self.record is not record:
            self.record = record
            if self.running is not None:
                self.running.wake()

    @property
    def over(self) -> bool:
        """Whether its actor has come to its end here."""
        return self.running is None or self.running.ended.is_set()


class Jobs:
    """The jobs that one process takes part in, an actor each.

    Args:
        make: Makes the actor of a job, in one of its turns. It gets how to see the job as it is
            wanted now (None: it was deleted), what wakes it, and what ended the one before.
        begins: Whether to begin with a job, or to begin again with one whose actor came to its end;
            and whether it is new to this process.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        make: MakePart,
        begins: Callable[[JobRecord, bool], bool],
    ) -> None:
        self._supervisor = supervisor
        self._make = make
        self._begins = begins
        self._taken = dict[str, _Taken]()

    def follow(self, jobs: Mapping[str, JobRecord]) -> None:
        """Take in all jobs that there are."""
        for job, record in jobs.items():
            taken = self._taken.get(job)
            same = taken is not None and taken.first.is_same_job(record)
            if taken is not None and not taken.over:
                taken.tell(record if same else None)
            elif self._begins(record, not same):
                self._begin(job, record)
        for job in self._taken.keys() - jobs.keys():
            if self._taken[job].over:
                del self._taken[job]
            else:
                self._taken[job].tell(None)

    def _begin(self, job: str, record: JobRecord) -> None:
        taken = self._taken[job] = _Taken(record)
        taken.running = self._supervisor.begin(job, partial(self._made, taken))

    def _made(self, taken: _Taken, wake: Callable[[], None], fault: Fault | None) -> Actor | None:
        if taken.record is None:  # it failed again and again until it was deleted
            return None
        return self._make(taken.wanted, wake, fault)
