"""The end of a job: it is held until a person resumes it, or finished."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from common.core.coordinator import RENEWALS
from common.core.messages import CheckpointStored
from common.errors import ConflictError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from common.core import commands as do
    from common.jobs.store import JobRecord
    from services.coordinator.effects.lease import Lease
    from services.coordinator.effects.publishing import ModelPublisher
    from services.coordinator.effects.records import RecordWriter
    from services.coordinator.effects.snapshots import SnapshotPublisher
    from services.coordinator.leadership import Leadership
    from services.coordinator.replica import JobContext

# Longest wait for the last checkpoint of a job that ends.
UPLOAD_S = 60.0
# Pause between attempts to write that a job is held or finished.
WRITE_RETRY_S = 2.0

_UNNAMED = re.compile(r"`doll job resume(?=`| --)")


class _Waiting(NamedTuple):
    """The end of a job that the jobs topic does not contain yet."""

    end: do.Finish
    # Deadline for the upload of its last checkpoint.
    until: float


class JobEnding:
    """Writes to the jobs topic that a job is held or finished."""

    def __init__(
        self,
        job: JobContext,
        lease: Lease,
        models: ModelPublisher,
        snapshots: SnapshotPublisher,
        records: RecordWriter,
        leadership: Leadership,
    ) -> None:
        self._job = job
        self._lease = lease
        self._models = models
        self._snapshots = snapshots
        self._records = records
        self._leadership = leadership
        # True once all work at the job's end is done.
        self.finished = False
        # The job's record after a hold was written. It says "running" if somebody has resumed the
        # job.
        self.hold_written: JobRecord | None = None
        # A hold that is not written yet, and the record of the job that it was decided for.
        self._held: tuple[do.Hold, JobRecord] | None = None
        self._waiting: _Waiting | None = None
        self._write_at = 0.0

    def due(self) -> float:
        """Return when `poll` has work that no event wakes the actor for."""
        if self._waiting is not None:
            return monotonic() + self._lease.ttl_s / RENEWALS
        return self._write_at if self._held is not None else inf

    def poll(self) -> None:
        """Continue work that waits for Kafka or for an upload."""
        if self._held is not None:
            self._write_hold(*self._held)
        if self._waiting is not None:
            self._go_on_ending(self._waiting)

    def hold(self, command: do.Hold) -> None:
        """Hold the job until a person resumes it."""
        self._held, self._write_at = (command, self._job.record), 0.0
        self._job.log.error("job_held", reason=self.named(command.reason), detail=command.detail)
        self._write_hold(*self._held)

    def named(self, reason: str) -> str:
        """Add the job's name to commands in a reason, because the core does not know the name."""
        return _UNNAMED.sub(f"\\g<0> {self._job.record.spec.name}", reason)

    def _write_hold(self, held: do.Hold, record: JobRecord) -> None:
        """Write why the job is held. Retry until the jobs topic has it, or nobody would know."""
        if monotonic() < self._write_at:
            return
        try:
            if self._job.newest() is not None:
                # The job was deleted meanwhile.
                with suppress(NotFoundError):
                    job_store = self._job.replica.job_store
                    reason = self.named(held.reason)
                    self.hold_written = job_store.hold(record, reason, held.detail)
            self._held = None
        except (UnavailableError, ConflictError) as error:
            self._job.log.warning("hold_not_written", reason=str(error))
            self._write_at = monotonic() + WRITE_RETRY_S

    def finish(self, command: do.Finish) -> None:
        """End the job once its last checkpoint is uploaded."""
        self._job.log.info("job_ends", reason=command.reason)
        if self._job.record.spec.evaluation:
            try:
                # The last version is always evaluated, even if its number is not due.
                self._models.offer()
            except UnavailableError as error:
                self._job.outage.met(error)
        self._job.ends = True
        self._waiting = _Waiting(command, monotonic() + UPLOAD_S)
        self._go_on_ending(self._waiting)

    def _go_on_ending(self, waiting: _Waiting) -> None:
        """Write the end after the last snapshot and its upload, without holding a thread.

        Until then the lease is renewed, so that no other replica leads the job again.
        """
        self._lease.ask()
        now = monotonic()
        if not self._snapshots.all_stored:
            if now < waiting.until:
                return
            self._job.log.error("last_checkpoint_late", waited_s=UPLOAD_S)
        if now < self._write_at:
            return
        # The leader has ended, so it does not order the record that names its last checkpoint.
        if (name := self._snapshots.unnamed) is not None:
            self._snapshots.unnamed = None
            deque(self._records.append(CheckpointStored(*name)), maxlen=0)
        try:
            self._write_end(waiting.end)
        except UnavailableError as error:
            self._job.outage.met(error)
            self._write_at = now + WRITE_RETRY_S
            return
        self._waiting, self.finished, self._job.ends = None, True, False
        self._leadership.stand_by()

    def _write_end(self, end: do.Finish) -> None:
        job, record = self._job, self._job.newest()
        if record is not None and end.stopped and record.wanted != "stopped":
            job.log.info("job_goes_on", reason="an operator resumed the job")
            return
        if record is not None and not end.stopped:
            try:
                # The job was deleted meanwhile.
                with suppress(NotFoundError):
                    job.replica.job_store.finish(job.id, end.reason, end.revision)
            except ConflictError as error:
                # The job may have another deadline now. The next leader decides.
                job.log.info("job_goes_on", reason=str(error))
                return
        job.log.info("job_finished", reason=end.reason)
