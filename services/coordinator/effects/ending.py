"""How a job stops: held until a person resumes it, left to a checkpoint, or done."""

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

UPLOAD_S = 60.0  # for the last checkpoint of a job that ends
WRITE_RETRY_S = 2.0  # between attempts to write down that a job is held, or at its end

_UNNAMED = re.compile(r"`doll job resume(?=`| --)")


class _Waiting(NamedTuple):
    """A job that has come to its end, until that is written down."""

    end: do.Finish
    until: float  # how long the upload of its last checkpoint is waited for


class JobEnding:
    """Writes down in the jobs topic that a job is held, or at its end."""

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
        self.finished = False  # all that is to be done at the job's end is done
        # The job as the jobs topic has it after a hold. It runs if somebody resumed it in between.
        self.hold_written: JobRecord | None = None
        # While the jobs topic does not say it: a hold, and the job as it was decided for.
        self._held: tuple[do.Hold, JobRecord] | None = None
        self._waiting: _Waiting | None = None
        self._write_at = 0.0

    def due(self) -> float:
        """When `poll` has something to do that nobody would wake it for."""
        if self._waiting is not None:
            return monotonic() + self._lease.ttl_s / RENEWALS
        return self._write_at if self._held is not None else inf

    def poll(self) -> None:
        """Do what waited for Kafka, or for an upload."""
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
        """Complete the commands in a reason: who decides knows topics at most, and not the name."""
        return _UNNAMED.sub(f"\\g<0> {self._job.record.spec.name}", reason)

    def _write_hold(self, held: do.Hold, record: JobRecord) -> None:
        """Write down why the job is held, until the jobs topic has it: else nobody would know."""
        if monotonic() < self._write_at:
            return
        try:
            if self._job.newest() is not None:
                with suppress(NotFoundError):  # it was deleted since
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
                self._models.offer()  # the last version is worth judging, whatever its number
            except UnavailableError as error:
                self._job.outage.met(error)
        self._job.ends = True
        self._waiting = _Waiting(command, monotonic() + UPLOAD_S)
        self._go_on_ending(self._waiting)

    def _go_on_ending(self, waiting: _Waiting) -> None:
        """Wait for the last snapshot and its upload without holding a thread, then write it down.

        Until then the lease is prolonged, or another replica would lead the job once more.
        """
        self._lease.ask()
        now = monotonic()
        if not self._snapshots.all_stored:
            if now < waiting.until:
                return
            self._job.log.error("last_checkpoint_late", waited_s=UPLOAD_S)
        if now < self._write_at:
            return
        if (name := self._snapshots.unnamed) is not None:  # the leader that would name it has ended
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
            job.log.info("job_goes_on", reason="its owner wants it again")
            return
        if record is not None and not end.stopped:
            try:
                with suppress(NotFoundError):  # it was deleted since
                    job.replica.job_store.finish(job.id, end.reason, end.revision)
            except ConflictError as error:
                # Its deadline may be another: whoever leads it next decides.
                job.log.info("job_goes_on", reason=str(error))
                return
        job.log.info("job_finished", reason=end.reason)
