"""Operations on jobs for the admin service: submit, change, delete, purge, requeue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import ConflictError, UserError
from common.jobs.models import in_storage, parse_version, pick
from common.jobs.operations import AfterLoss, JobOperations
from common.jobs.purge import Remains, purge, remains_of
from common.jobs.quarantine import Outcome, Quarantine, format_batches
from common.jobs.store import JobRecord, StartCheckpoint
from common.jobs.watching import waits_for_checkpoint
from common.kafka import names as topics
from common.kafka.read import read_decoded
from common.learning.checkpoint import kind_at, optimizer_kind, with_optimizer
from common.storage.store import CheckpointStore
from common.telemetry.logging import event_logger
from common.wire.messages import decode_audit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.core.messages import ReadFrom, Wanted
    from common.jobs.edit import Value
    from common.jobs.servers import Outside
    from common.jobs.spec import JobSpec

_log = event_logger(__name__)


class JobService:
    """Changes jobs, with the store's `by` as author.

    Args:
        store: The jobs topic.
        outside: The external services.
        check_given_back: Raises ConflictError if a machine of a job may still run.
    """

    def __init__(
        self,
        store: JobOperations,
        outside: Outside,
        check_given_back: Callable[[JobRecord], object],
    ) -> None:
        self._store = store
        self._outside = outside
        self._check_given_back = check_given_back

    def submit(
        self, spec: JobSpec, request: str = "", origin: StartCheckpoint | None = None
    ) -> tuple[JobRecord, bool]:
        """Submit a job, unless the same request has already done so; return True if the job is new.

        Args:
            spec: A checked specification.
            request: Key that identifies a repeated request. If empty, repeats are not recognized.
            origin: See `copy_checkpoint`.

        Raises:
            ConflictError: If the name is taken.
            UserError: If a stream does not exist, or the request's key was used for another job.
            UnavailableError: If Kafka is unavailable for long.
        """
        before = self.submitted(request)
        if before is not None:
            return before, False
        try:
            return self._store.submit(spec, origin, request), True
        except ConflictError:
            # Another replica may have submitted it in the meantime, for the same client.
            meanwhile = self.submitted(request)
            if meanwhile is None:
                raise
            return meanwhile, False

    def submitted(self, request: str) -> JobRecord | None:
        """Return the job that a request created; None if it has not created one.

        Raises:
            UserError: If the request's key was used for another job.
            UnavailableError: If Kafka is unavailable for long.
        """
        if not request:
            return None
        key = request.partition(":")[0]
        for name, record in self._store.read().items():
            if record.request.partition(":")[0] == key:
                if record.request == request:
                    return record
                raise UserError(
                    f'Idempotency-Key: was used for the job "{name}" with another body; use a new'
                    " key for a new job"
                )
        return None

    def copy_checkpoint(
        self, spec: JobSpec, source: str, request: str = ""
    ) -> tuple[StartCheckpoint | None, str]:
        """Copy a checkpoint of another job into a new job's folder.

        Needs no torch. The new job's first leader checks that the model is the same.

        Args:
            spec: The new job.
            source: JOB or JOB@VERSION, where the version is a number, `newest` or `best`.
            request: See `submit`.

        Returns:
            The checkpoint that the new job starts from, and a sentence about it; None if the job
            exists already.

        Raises:
            ConflictError: If the new job's name is taken.
            UserError: If there is no such job, no such checkpoint, or no object storage.
            CorruptError: If the checkpoint holds no weights.
            FutureFormatError: If a newer program wrote a checkpoint of that job.
            UnavailableError: If Kafka or object storage is unavailable.
        """
        if self.submitted(request) is not None:
            return None, ""
        if spec.init is not None:
            raise UserError(
                "init: cannot be combined with the start from another job's checkpoint (`from`);"
                " remove one of them"
            )
        name, at, version = source.partition("@")
        selector = parse_version(version) if at else "newest"
        record, outside = self._store.get(name), self._outside
        to = topics.job_id(spec.name, self._store.check_new(spec))
        if not outside.settings.blobs:
            raise UserError(
                f"from: {source} requires object storage, but DOLL_BLOBS of this process is not"
                " set; set it"
            )
        blobs, log = outside.open_blobs(), _log.bind(job=spec.name)

        def report_skipped(parts: str) -> None:
            log.warning("checkpoint_passed_over", reason=parts)

        updates = read_decoded(outside.open_log(), topics.updates_topic(record.id), decode_audit)
        found, data = pick(
            in_storage(blobs, record.id, report_skipped), updates, selector, report_skipped
        )
        own = optimizer_kind(spec.optimizer.name, spec.optimizer.momentum)
        data, other = with_optimizer(data, own)
        store = CheckpointStore(blobs, to)
        if base := kind_at(data).base:
            store.put_base(base, CheckpointStore(blobs, record.id).base(base))
        sha256 = store.put_origin(data)
        origin = StartCheckpoint(name, found.snapshot.by, found.snapshot.made.version, sha256)
        what = (
            f"weights and optimizer state ({own})"
            if other == own
            else f"weights only, because the optimizer was {other} and is {own} now"
        )
        return origin, f"the job starts from {found.title} of {name}: {what}"

    def change(  # noqa: PLR0913 -- what may change
        self,
        job: str,
        reason: str = "",
        *,
        changed: Mapping[str, Value],
        wanted: Wanted | None = None,
        after_loss: bool = False,
        from_start: bool = False,
        read_from: ReadFrom = "",
        revision: int | None = None,
    ) -> JobRecord:
        """Change settings and the wanted state, both or nothing; see `JobOperations.patch`.

        Args:
            job: Name of the job.
            reason: Reason that the person gave.
            changed: Settings, see `JobOperations.patch`.
            wanted: Optional. If unset, the wanted state stays.
            after_loss: True to continue with what is left.
            from_start: True to accept version 0 if no other version is left.
            read_from: Where to start in streams' topics that were created again.
            revision: Optional. If set, refuse to change any other revision.

        Raises:
            NotFoundError: If there is no such job.
            UserError: If a field cannot be changed to this value. The message names the field.
            ConflictError: If the job has another revision, or if `after_loss` is given and the job
                neither is held nor waits for a checkpoint.
            UnavailableError: If Kafka is unavailable for long.
        """
        accepted = None
        if after_loss:
            if wanted != "running":
                raise UserError('after_loss: requires "wanted": "running"')
            waits = waits_for_checkpoint(self._store.get(job), self._outside.open_board)
            accepted = AfterLoss(from_start, read_from, waits)
        elif from_start or read_from:
            field = "from_start" if from_start else "read_from"
            raise UserError(f'{field}: requires "after_loss": true')
        return self._store.patch(
            job, reason, changed=changed, wanted=wanted, after_loss=accepted, revision=revision
        )

    def delete(self, job: str) -> None:
        """Delete a stopped job whose machines have ended.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If the job is not stopped, or not all of its machines are released.
            UnavailableError: If Kafka is unavailable for long.
        """
        self._check_given_back(self._store.get(job))
        self._store.delete(job)

    def remains(self, job: str) -> Remains:
        """Return what a purge would remove; see `remains_of`."""
        return remains_of(job, self._store, self._outside)

    def purge(self, job: str) -> Remains:
        """Free a name, and remove what is left of its jobs; see `common.jobs.purge`.

        Raises:
            NotFoundError: If there never was such a job.
            ConflictError: If the job is not stopped, or not all of its machines are released.
            UnavailableError: If Kafka is unavailable.
        """
        record = self._store.read().get(job)
        if record is not None:
            self._check_given_back(record)
        return purge(job, self._store, self._outside)

    def requeue(self, job: str, batches: Sequence[int] | None, at_s: float) -> dict[int, Outcome]:
        """Requeue quarantined batches, and add a note to the job's record.

        Args:
            job: Id of the job, not its name.
            batches: See `Quarantine.requeue`, also for the errors that it raises.
            at_s: Time of the request, in seconds since 1970.
        """
        quarantine = Quarantine(self._outside.open_log(), job)
        outcomes = quarantine.requeue(batches, self._store.by.name, at_s)
        if requeued := [each for each in sorted(outcomes) if outcomes[each] == "requeued"]:
            self._store.note(job, "requeued", format_batches(requeued))
        return outcomes
