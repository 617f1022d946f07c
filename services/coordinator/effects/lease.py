"""The lease in Redis, which decides who may try to lead a job."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from common.core import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core import commands as do
    from services.coordinator.replica import JobContext

# Shortest and longest pause between attempts of a replica that lacks the job's task. Each pause is
# twice the previous one. An attempt is useful once somebody has installed the task, but it keeps
# the lease from other replicas for a moment.
UNABLE_S = (5.0, 60.0)


class Lease:
    """Acquires, renews and releases the lease.

    Args:
        ttl_s: Lifetime of the lease.
    """

    def __init__(self, job: JobContext, ttl_s: float) -> None:
        self._job = job
        self._exchange, self._candidates = job.replica.exchange, job.replica.candidates
        self.ttl_s = ttl_s
        # True after a request, until the lease is released.
        self._asked = False
        # False while too many other jobs are candidates.
        self._may_ask = True
        self._unable_until = 0.0
        self._unable_pause_s = UNABLE_S[0]

    @property
    def unable(self) -> bool:
        """True while this replica leaves the job to others."""
        return monotonic() < self._unable_until

    def poll(self) -> None:
        """Request the lease again if there was no place for another candidate."""
        if not self._may_ask:
            self.ask()

    def ask(self, command: do.AskLease | None = None) -> None:
        """Acquire or renew the lease, unless that would be useless now."""
        job = self._job
        self.ttl_s = self.ttl_s if command is None else command.ttl_s
        if job.role == "standby":
            if self.unable:
                return
            self._may_ask = self._candidates.may_enter(job.id, job.inbox.wake)
            if not self._may_ask:
                return
        self._asked = True
        answered = job.inbox.answer(self._answered, any_role=True)
        self._exchange.hold_lease(job.id, job.replica.name, self.ttl_s, answered, soon=not job.idle)

    def _answered(self, held: bool) -> Iterator[events.CoordinatorEvent]:  # noqa: FBT001 -- an answer
        job = self._job
        # The lease was released meanwhile, or only keeps others away while the job ends.
        if not self._asked or job.ends:
            return
        if job.changes("lease", held) and not held:
            job.log.info("standby")
        if held and job.role == "standby":
            self._may_ask = self._candidates.enter(job.id, job.inbox.wake)
            if not self._may_ask:
                self.release()
                return
        yield events.LeaseAnswered(held)
        if job.role == "standby":
            self._candidates.leave(job.id)

    def release(self, _: do.ReleaseLease | None = None) -> None:
        """Release the lease. While the job ends, keep it until the end is written."""
        if not self._job.ends:
            self._asked = False
            self._exchange.release_lease(self._job.id, self._job.replica.name)

    def close(self) -> None:
        """Release a requested lease, so that others need not wait until it expires."""
        if self._asked:
            self._exchange.release_lease(self._job.id, self._job.replica.name)

    def leave_to_others(self) -> None:
        """Release the lease and pause requests: other replicas may have the task."""
        self._unable_until = monotonic() + self._unable_pause_s
        self._unable_pause_s = min(2 * self._unable_pause_s, UNABLE_S[1])
        self.release()

    def is_able(self) -> None:
        """Reset the pause, because this replica has the task."""
        self._unable_pause_s = UNABLE_S[0]
