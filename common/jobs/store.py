"""All jobs, a fold over the jobs topic: each job's record, and what a person wants of it.

The topic is a `common.kafka.table`, keyed by the job's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from time import time
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from common.core.field_types import Count, NonEmpty, Ordinal
from common.core.messages import ReadFrom, Wanted  # noqa: TC001 -- msgspec reads it when run
from common.core.spans import LogPosition, Partition
from common.errors import (
    ConflictError,
    NotFoundError,
    UnknownOutcomeError,
    UserError,
    WireError,
)
from common.jobs.changes import COORDINATOR, Change, audit, change_by
from common.jobs.spec import JobSpec, job_from_json
from common.kafka import names as topics
from common.kafka.table import CompactedTable
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from common.core.messages import LogPositions, Positions
    from common.jobs.changes import Author
    from common.kafka.port import Log

_log = event_logger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound="JobRecord | FreeName")
# Maximum length of the reason for the wanted state, which is one line.
REASON_CHARACTERS = 2_000
# Maximum length of the details of a hold: a long traceback, far below the limit of a record.
DETAIL_CHARACTERS = 8_000
# Number of changes that a job's record keeps. The record stays small, since its topic is compacted.
CHANGES_KEPT = 50
# Maximum size of these changes. JSON may need six bytes for one character of a reason.
CHANGES_BYTES = 130_000
# Actions of changes that are never dropped for later ones.
LASTING = frozenset({"submitted", "deleted", "purged"})
_RESUMED = frozenset({"resumed", "resumed after loss"})


class StartCheckpoint(msgspec.Struct, frozen=True):
    """Checkpoint of another job whose weights a job starts from, copied into its own folder."""

    job: str
    epoch: Count
    version: Count
    # Checksum of the copy.
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    def __str__(self) -> str:
        return f"{self.job}@{self.version}"


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A job in the jobs topic."""

    spec: JobSpec
    wanted: Wanted
    # First position of each partition, with the topic's id and leader epoch if they were known.
    # Resolved once, before the job has a leader. Keyed by stream; a list's index is the number of
    # the partition.
    positions: dict[str, NonEmpty[list[LogPosition]]] = msgspec.field(name="first")
    # Reason for the wanted state.
    reason: str = ""
    # Seconds since 1970. The deadline counts from here.
    submitted_s: float = 0.0
    # If None, the job starts with the model that its specification describes.
    origin: StartCheckpoint | None = None
    # Number of changes made to the specification.
    revision: Count = 0
    # Changes, newest last: those that created and deleted earlier jobs of the name, then the last
    # ones of this job.
    changes: tuple[Change, ...] = ()
    # Fingerprint of the request that submitted the job. It identifies a repeated request.
    request: str = ""
    # True if a process paused the job because only a person may decide how to continue.
    held: bool = False
    # Details of the hold, such as a traceback; may be empty.
    detail: str = ""
    # True if the job stopped because it reached its stop rule, not by a person.
    finished: bool = False
    # Counts the jobs of this name. Earlier ones were purged.
    incarnation: Ordinal = 1
    # Number of times that the job was resumed although Kafka had lost acknowledged records.
    after_loss: Count = 0
    # True if the last of these resumptions permits a start from version 0.
    from_start: bool = False
    # Where the last of these resumptions starts in streams' topics that were created again.
    read_from: ReadFrom = ""
    # Secret with which coordinators seal hot snapshots in Redis. It is only in Kafka. If it is
    # empty, they trust any snapshot in Redis.
    seal: str = ""

    @cached_property
    def known(self) -> LogPositions:
        """First position of every partition, as in `positions`."""
        return {
            Partition(stream, index): position
            for stream, positions in self.positions.items()
            for index, position in enumerate(positions)
        }

    @cached_property
    def first(self) -> Positions:
        """First offset of every partition."""
        return {place: position.offset for place, position in self.known.items()}

    @property
    def id(self) -> str:
        """Identifier used in the names of all of the job's resources; see `common.kafka.names`."""
        return topics.job_id(self.spec.name, self.incarnation)

    def is_same_job(self, other: JobRecord | None) -> bool:
        """True if another record is of this job, not of a later job of the same name."""
        return other is not None and (other.id, other.submitted_s) == (self.id, self.submitted_s)


class FreeName(msgspec.Struct, frozen=True):
    """Entry of a name whose job was deleted; without it, the next job of the name is its first."""

    next_incarnation: Ordinal
    # Creations and deletions of jobs of the name, newest last.
    changes: tuple[Change, ...] = ()


class _Head(msgspec.Struct):
    """Fields that determine how to decode an entry."""

    format: int = 1
    # Not 0 if the name has no job.
    next_incarnation: int = 0


_HEAD = msgspec.json.Decoder(_Head)
_FREE_NAME = msgspec.json.Decoder(FreeName)
_JOB = msgspec.json.Decoder(
    JobRecord, dec_hook=lambda _, spec: job_from_json(msgspec.json.encode(spec))
)


class JobStore:
    """Reads and writes the jobs topic. Threads may share it; one per process is enough.

    Attributes:
        table: Records by name.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        self._log = log
        self._clock = clock
        # `closed` is False, so that a job's previous record stays valid if only a newer program can
        # read the newest one.
        self.table = CompactedTable[JobRecord | FreeName](
            log, topics.JOBS, decode_entry, "job", closed=False, clock=clock
        )
        # Entries that `refresh` last read, and the jobs among them.
        self._shown: tuple[Mapping[str, JobRecord | FreeName], Mapping[str, JobRecord]] = {}, {}

    def read(self) -> dict[str, JobRecord]:
        """Return all current jobs by name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        return _jobs(self.table.read())

    def refresh(self, timeout_s: float) -> Mapping[str, JobRecord]:
        """Wait up to `timeout_s` for changes, then return all jobs by name.

        The result is the same object until a job changes.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        entries = self.table.refresh(timeout_s)
        if self._shown[0] is not entries:
            self._shown = entries, _jobs(entries)
        return self._shown[1]

    def get(self, job: str) -> JobRecord:
        """Return the current record of a job.

        Raises:
            NotFoundError: If there is no job of this name.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._job(job, self.table.read().get(job))

    def id_of(self, name: str) -> str:
        """Return the id of a name's job; if there is no job, the id that its next one will have.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        return topics.job_id(name, incarnation_of(self.table.read().get(name)))

    def finish(self, job: str, reason: str, revision: int) -> JobRecord:
        """End a job that has reached its stop rule. A stopped job stays as it is.

        A person may resume a finished job.

        Args:
            job: Id of the job.
            reason: Stop rule that the job has reached.
            revision: Revision of the job that has this stop rule.

        Raises:
            NotFoundError: If there is no such job. Its name may belong to another one.
            ConflictError: If the job has another revision now.
            UnavailableError: If Kafka is unavailable for long.
        """

        def finished(record: JobRecord) -> JobRecord:
            if record.wanted == "stopped":
                return record
            check_revision(record, revision)
            record = self._noted(record, "finished", reason, COORDINATOR)
            return replace(
                record, wanted="stopped", reason=reason, held=False, detail="", finished=True
            )

        return self._update(topics.job_name(job), finished, job)

    def hold(self, job: JobRecord, reason: str, detail: str = "") -> JobRecord:
        """Pause a running job for a reason that needs a person's decision.

        The job stays as it is if it is not running, or if it has been resumed since the fault was
        found.

        Args:
            job: Record of the job when the fault was found.
            reason: Fault and remedy in one line, cut off after `REASON_CHARACTERS`.
            detail: Details for a programmer, such as a traceback, cut off after
                `DETAIL_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job. Its name may belong to another one.
            UnavailableError: If Kafka is unavailable for long.
        """

        def held(record: JobRecord) -> JobRecord:
            resumed = (each for each in record.changes if each.action in _RESUMED)
            if record.wanted != "running" or any(each not in job.changes for each in resumed):
                return record
            record = self._noted(record, "held", reason, COORDINATOR)
            return replace(
                record,
                wanted="paused",
                reason=reason[:REASON_CHARACTERS],
                held=True,
                detail=detail[:DETAIL_CHARACTERS],
                finished=False,
            )

        return self._update(job.spec.name, held, job.id)

    def initialised(self, job: JobRecord, reason: str) -> JobRecord:
        """Record which pretrained weights a job starts with, unless its record says so already.

        Args:
            job: Record of the job.
            reason: Names of tensors, cut off after `changes.REASON_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job. Its name may belong to another one.
            UnavailableError: If Kafka is unavailable for long.
        """

        def noted(record: JobRecord) -> JobRecord:
            if any(each.action == "initialised" for each in record.changes):
                return record
            return self._noted(record, "initialised", reason, COORDINATOR)

        return self._update(job.spec.name, noted, job.id)

    def close(self) -> None:
        """Close the reader."""
        self.table.close()

    def _update(
        self, name: str, change: Callable[[JobRecord], JobRecord], job: str | None = None
    ) -> JobRecord:
        """Change a job's record; if an id is given, the record of that job only."""

        def changed(entry: JobRecord | FreeName | None) -> JobRecord:
            record = self._job(name, entry)
            if job not in (None, record.id):
                raise NotFoundError(
                    f'the job "{name}" was purged; there is now another job of this name'
                )
            return change(record)

        return self._write(name, changed)

    def _write(self, name: str, change: Callable[[JobRecord | FreeName | None], E]) -> E:
        """Change the entry of a name, and log the author; see `CompactedTable.update`."""
        new = list[Change]()

        def changed(entry: JobRecord | FreeName | None) -> E:
            new.clear()
            made = change(entry)
            before = set[int]() if entry is None else set(map(id, entry.changes))
            new.extend(each for each in made.changes if id(each) not in before)
            return made

        try:
            made = self.table.update(name, changed, encode_entry)
        except UnknownOutcomeError:
            audit(new, "unknown", job=name)
            raise
        audit(new, job=name)
        return made

    def _job(self, name: str, entry: JobRecord | FreeName | None) -> JobRecord:
        if isinstance(entry, JobRecord):
            return entry
        known = ", ".join(sorted(self.read())) or "none yet; submit one with `doll job submit FILE`"
        gone = ""
        if entry is not None and entry.changes:
            last = entry.changes[-1]
            gone = f" (it was {last.action} by {last.by}, {datetime.fromtimestamp(last.at_s, UTC)})"
        raise NotFoundError(f'there is no job "{name}"{gone}; jobs: {known}')

    def _noted(
        self,
        record: JobRecord,
        action: str,
        reason: str,
        by: Author,
        **more: Any,  # noqa: ANN401 -- as `Change` has them
    ) -> JobRecord:
        """Return the record with one more change; `more` has further fields of `Change`."""
        at_s, revision = self._clock(), record.revision
        change = change_by(by, at_s, action, reason, revision=revision, **more)
        return replace(record, changes=_kept((*record.changes, change)))


def _jobs(entries: Mapping[str, JobRecord | FreeName]) -> dict[str, JobRecord]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, JobRecord)}


def incarnation_of(entry: JobRecord | FreeName | None) -> int:
    """Return the incarnation of a name's job; if the name has no job, that of the next one."""
    if isinstance(entry, JobRecord):
        return entry.incarnation
    return entry.next_incarnation if isinstance(entry, FreeName) else 1


def _kept(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Drop the oldest changes that do not fit, except `LASTING` ones."""
    while len(changes) > CHANGES_KEPT or len(msgspec.json.encode(changes)) > CHANGES_BYTES:
        passing = (at for at, each in enumerate(changes) if each.action not in LASTING)
        drop = next(passing, 0)
        changes = changes[:drop] + changes[drop + 1 :]
    return changes


def check_revision(record: JobRecord, revision: int) -> None:
    """Check that a job still has the revision that its editor knows.

    Raises:
        ConflictError: If the job has another revision.
    """
    if record.revision != revision:
        raise ConflictError(
            f'revision: the job "{record.spec.name}" is at revision {record.revision}, got'
            f" {revision}; read the job again, then repeat the change"
        )


def by_stream(first: Mapping[Partition, int | LogPosition]) -> dict[str, list[LogPosition]]:
    """Return positions of all partitions in the form of a record."""
    found = dict[str, list[LogPosition]]()
    for place, at in sorted(first.items()):
        found.setdefault(place.topic, []).append(LogPosition.of(at))
    return found


def encode_entry(entry: JobRecord | FreeName) -> bytes:
    """Encode the entry of a name."""
    return msgspec.json.encode(
        entry, enc_hook=lambda spec: msgspec.Raw(spec.model_dump_json().encode())
    )


def decode_entry(key: bytes | None, value: bytes) -> JobRecord | FreeName:
    """Decode the entry of a name.

    Raises:
        WireError: If it does not parse, is inconsistent, or its key is not its name.
    """
    try:
        head = _HEAD.decode(value)
        # The rest of a later format may mean something else.
        if head.format > 1:
            raise WireError(f"job record: of format {head.format}, expected at most 1")
        if head.next_incarnation:
            return _FREE_NAME.decode(value)
        record = _JOB.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise WireError(f"job record: {error}") from error
    spec = record.spec
    if key != spec.name.encode():
        raise WireError(
            f"job record: must have its name {spec.name!r} as the record's key, got {key!r}"
        )
    if record.positions.keys() != set(spec.streams):
        raise WireError("job record: first positions are of other streams than the job's")
    if record.changes and record.changes[-1].revision != record.revision:
        raise WireError(
            f"job record: revision {record.revision} differs from the revision of its last change"
        )
    return record
