"""All jobs, as a fold over the jobs topic: what each is, and what a person wants of it.

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
REASON_CHARACTERS = 2_000  # of what is wanted: one line
DETAIL_CHARACTERS = 8_000  # of a hold: a long traceback, far below what one record may be
# Changes that a job's record keeps: it stays small, since its topic is compacted.
CHANGES_KEPT = 50
# Size of these changes. JSON may write six bytes for one character of a reason.
CHANGES_BYTES = 130_000
# Actions of changes that no later change displaces.
LASTING = frozenset({"submitted", "deleted", "purged"})
_RESUMED = frozenset({"resumed", "resumed after loss"})


class StartCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint of another job with whose weights a job begins, copied into its own folder."""

    job: str
    epoch: Count
    version: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the copy

    def __str__(self) -> str:
        return f"{self.job}@{self.version}"


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """One job as the topic has it."""

    spec: JobSpec
    wanted: Wanted
    # Where the job begins and what was known of the log below, resolved once, before anybody leads:
    # by stream, each list by the number of the partition.
    positions: dict[str, NonEmpty[list[LogPosition]]] = msgspec.field(name="first")
    reason: str = ""  # why it is wanted so
    submitted_s: float = 0.0  # since 1970; its deadline counts from here
    # Without one, it begins with what the specification makes.
    origin: StartCheckpoint | None = None
    revision: Count = 0  # of the specification: changes made so far
    # The last changes, newest last, after those that made and deleted earlier jobs of the name.
    changes: tuple[Change, ...] = ()
    request: str = ""  # who submitted it recognises a request that comes twice by this
    held: bool = False  # paused by a machine that may not decide alone, not by a person
    detail: str = ""  # of what it is held for: a traceback, many lines; empty where there is none
    finished: bool = False  # stopped because it reached its stop rule, not by a person
    incarnation: Ordinal = 1  # counts the jobs of this name; those before were purged
    after_loss: Count = 0  # how often it was resumed although Kafka lost what it acknowledged
    from_start: bool = False  # the last time, if need be with version 0
    read_from: ReadFrom = ""  # likewise, streams' topics that were created anew
    # Secret by which coordinators know each other's hot snapshots in Redis: it is in Kafka alone.
    # Empty: they believe whatever is there.
    seal: str = ""

    @cached_property
    def known(self) -> LogPositions:
        """Where every partition of the job begins, and what was known of its log below."""
        return {
            Partition(stream, index): position
            for stream, positions in self.positions.items()
            for index, position in enumerate(positions)
        }

    @cached_property
    def first(self) -> Positions:
        """Offset at which every partition of the job begins."""
        return {place: position.offset for place, position in self.known.items()}

    @property
    def id(self) -> str:
        """By what everything that it owns is named, see `common.kafka.names`."""
        return topics.job_id(self.spec.name, self.incarnation)

    def is_same_job(self, other: JobRecord | None) -> bool:
        """Whether another record is of this job, not of one that later got its name."""
        return other is not None and (other.id, other.submitted_s) == (self.id, self.submitted_s)


class FreeName(msgspec.Struct, frozen=True):
    """A name that a deleted job had; without one, the next job of a name is its first."""

    next_incarnation: Ordinal
    # Who made and deleted the jobs of the name, newest last.
    changes: tuple[Change, ...] = ()


class _Head(msgspec.Struct):
    """What says how to read the rest."""

    format: int = 1
    next_incarnation: int = 0  # of a name that has no job


_HEAD = msgspec.json.Decoder(_Head)
_FREE_NAME = msgspec.json.Decoder(FreeName)
_JOB = msgspec.json.Decoder(
    JobRecord, dec_hook=lambda _, spec: job_from_json(msgspec.json.encode(spec))
)


class JobStore:
    """Reads and writes the jobs topic. May be shared between threads: one for a process will do.

    Attributes:
        table: Records by name.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        self._log = log
        self._clock = clock
        # Not closed: a job that only a newer program understands goes on as it was.
        self.table = CompactedTable[JobRecord | FreeName](
            log, topics.JOBS, decode_entry, "job", closed=False, clock=clock
        )
        # Entries that `refresh` saw last, and the jobs among them.
        self._shown: tuple[Mapping[str, JobRecord | FreeName], Mapping[str, JobRecord]] = {}, {}

    def read(self) -> dict[str, JobRecord]:
        """All jobs as of now, by name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        return _jobs(self.table.read())

    def refresh(self, timeout_s: float) -> Mapping[str, JobRecord]:
        """Wait up to `timeout_s` for news, then return all jobs as known by then.

        The result is the same object until a job changes.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        entries = self.table.refresh(timeout_s)
        if self._shown[0] is not entries:
            self._shown = entries, _jobs(entries)
        return self._shown[1]

    def get(self, job: str) -> JobRecord:
        """One job as of now.

        Raises:
            NotFoundError: If there is none of this name.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._job(job, self.table.read().get(job))

    def id_of(self, name: str) -> str:
        """The id of a name's job; where there is none, of the next one that will have the name.

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
            revision: Revision of the job whose stop rule that is.

        Raises:
            NotFoundError: If there is no such job; its name may be another one's.
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
        """Pause a running job for a reason that a person must look at.

        A job stays as it is if it is not running, or if somebody has resumed it since.

        Args:
            job: The job as it was when the fault was found.
            reason: Fault and remedy in one line, cut off after `REASON_CHARACTERS`.
            detail: Details for a programmer, such as a traceback, cut off after
                `DETAIL_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job; its name may be another one's.
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

    def close(self) -> None:
        """Let go of the reader."""
        self.table.close()

    def _update(
        self, name: str, change: Callable[[JobRecord], JobRecord], job: str | None = None
    ) -> JobRecord:
        """Change a job's record; if an id is given, the record of that job only."""

        def changed(entry: JobRecord | FreeName | None) -> JobRecord:
            record = self._job(name, entry)
            if job not in (None, record.id):
                raise NotFoundError(f'the job "{name}" was purged: this one is another of its name')
            return change(record)

        return self._write(name, changed)

    def _write(self, name: str, change: Callable[[JobRecord | FreeName | None], E]) -> E:
        """Change the entry of a name, and log who did it; see `CompactedTable.update`."""
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
        known = ", ".join(sorted(self.read())) or "none yet, submit one with `doll job submit FILE`"
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
        """Return a record that says in addition who did something; `more` as in `Change`."""
        at_s, revision = self._clock(), record.revision
        change = change_by(by, at_s, action, reason, revision=revision, **more)
        return replace(record, changes=_kept((*record.changes, change)))


def _jobs(entries: Mapping[str, JobRecord | FreeName]) -> dict[str, JobRecord]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, JobRecord)}


def incarnation_of(entry: JobRecord | FreeName | None) -> int:
    """Return the incarnation of a name's job; without a job, that of the next one."""
    if isinstance(entry, JobRecord):
        return entry.incarnation
    return entry.next_incarnation if isinstance(entry, FreeName) else 1


def _kept(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Drop the oldest changes that do not fit, but none that lasts."""
    while len(changes) > CHANGES_KEPT or len(msgspec.json.encode(changes)) > CHANGES_BYTES:
        passing = (at for at, each in enumerate(changes) if each.action not in LASTING)
        drop = next(passing, 0)
        changes = changes[:drop] + changes[drop + 1 :]
    return changes


def check_revision(record: JobRecord, revision: int) -> None:
    """Refuse to change another revision than the one that somebody knows.

    Raises:
        ConflictError: If the job has another one.
    """
    if record.revision != revision:
        raise ConflictError(
            f'the job "{record.spec.name}" is at revision {record.revision}, not {revision}: look'
            " at it again"
        )


def by_stream(first: Mapping[Partition, int | LogPosition]) -> dict[str, list[LogPosition]]:
    """Return positions of all partitions as a record has them."""
    found = dict[str, list[LogPosition]]()
    for place, at in sorted(first.items()):
        found.setdefault(place.topic, []).append(LogPosition.of(at))
    return found


def encode_entry(entry: JobRecord | FreeName) -> bytes:
    """Write what stands under a name."""
    return msgspec.json.encode(
        entry, enc_hook=lambda spec: msgspec.Raw(spec.model_dump_json().encode())
    )


def decode_entry(key: bytes | None, value: bytes) -> JobRecord | FreeName:
    """Read what stands under a name.

    Raises:
        WireError: If it does not parse, makes no sense, or stands under another name than its own.
    """
    try:
        head = _HEAD.decode(value)
        if head.format > 1:  # nothing else in it need make sense here
            raise WireError(f"job record: of format {head.format}, expected at most 1")
        if head.next_incarnation:
            return _FREE_NAME.decode(value)
        record = _JOB.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise WireError(f"job record: {error}") from error
    spec = record.spec
    if key != spec.name.encode():
        raise WireError(f"job record: stands under the key {key!r}, its name is {spec.name!r}")
    if record.positions.keys() != set(spec.streams):
        raise WireError("job record: first positions are not those of its streams")
    if record.changes and record.changes[-1].revision != record.revision:
        raise WireError(f"job record: revision {record.revision} is not that of its last change")
    return record
