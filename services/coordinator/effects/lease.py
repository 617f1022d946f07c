"""The lease in Redis: it says who may try to lead the job."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from common.core import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core import commands as do
    from services.coordinator.replica import JobContext

# Between attempts to begin with a job whose task is not here: somebody may install it, but an
# attempt keeps the lease from others for a moment.
UNABLE_S = (5.0, 60.0)  # the first, and doubled up to this


class Lease:
    """Asks for the lease, prolongs it and gives it back.

    Args:
        ttl_s: Lifetime of the lease.
    """

    def __init__(self, job: JobContext, ttl_s: float) -> None:
        self._job = job
        self._exchange, self._candidates = job.replica.exchange, job.replica.candidates
        self.ttl_s = ttl_s
        self._asked = False  # since it was given back last
        self._may_ask = True  # else it waits until there may be another candidate
        self._unable_until = 0.0
        self._unable_pause_s = UNABLE_S[0]

    @property
    def unable(self) -> bool:
        """True if it leaves the job to others for now."""
        return monotonic() < self._unable_until

    def poll(self) -> None:
        """Ask again if there was no place for a further candidate."""
        if not self._may_ask:
            self.ask()

    def ask(self, command: do.AskLease | None = None) -> None:
        """Take or prolong it, unless that would be of no use now."""
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
        # Either it was given back meanwhile, or it only keeps others from beginning.
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
        """Give it back; while the job ends, others must not begin before that is written down."""
        if not self._job.ends:
            self._asked = False
            self._exchange.release_lease(self._job.id, self._job.replica.name)

    def close(self) -> None:
        """Give it back if it was asked for, so that others need not wait for it to run out."""
        if self._asked:
            self._exchange.release_lease(self._job.id, self._job.replica.name)

    def leave_to_others(self) -> None:
        """Give it back, and ask for none for a while: other replicas may have the task."""
        self._unable_until = monotonic() + self._unable_pause_s
        self._unable_pause_s = min(2 * self._unable_pause_s, UNABLE_S[1])
        self.release()

    def is_able(self) -> None:
        """This replica has the task: a next pause is a first one."""
        self._unable_pause_s = UNABLE_S[0]
