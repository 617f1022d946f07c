"""All jobs, as a fold over the jobs topic: what each is, and what a person wants of it.

The topic is a `common.kafka.table`, keyed by the job's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from copy import copy
from datetime import UTC, datetime
from secrets import token_hex
from time import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from common.core.batching import most_group_size
from common.core.bounds import Count, NonEmpty, Ordinal
from common.core.losses import ReadFrom  # noqa: TC001 -- likewise
from common.core.messages import Wanted  # noqa: TC001 -- msgspec reads it when run
from common.core.spans import LogPosition, Partition
from common.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
    UserError,
    WireError,
)
from common.jobs.changes import COORDINATOR, Change, audit, change_by, local_user
from common.jobs.edit import Value, changed_spec, differences
from common.jobs.spec import JobSpec, check_streams, job_from_json
from common.kafka import names as topics
from common.kafka.port import Log, NewTopic
from common.kafka.table import RESTORE, CompactedTable, Unreadable, table_topic
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from common.core.messages import LogPositions, Positions
    from common.jobs.changes import Author

_log = event_logger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound="JobRecord | FreeName")
REASON_CHARACTERS = 2_000  # of what is wanted: one line
DETAIL_CHARACTERS = 8_000  # of a hold: a long traceback, far below what one record may be
# Of a job's first record. All that is added later, changes and a hold, is 200,000 at most, and
# Kafka's producers write 1,000,000: so who holds a job or changes it finds room.
SUBMITTED_BYTES = 700_000
# Changes that a job's record keeps: it stays small, since its topic is compacted.
CHANGES_KEPT = 50
# Size of these changes. JSON may write six bytes for one character of a reason.
CHANGES_BYTES = 130_000
# Changes that made or deleted earlier jobs of a name.
EARLIER_KEPT = 10
# Actions of changes that no later change displaces.
_LASTING = frozenset({"submitted", "deleted", "purged"})


class StartCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint of another job with whose weights a job begins, copied into its own folder."""

    job: str
    epoch: Count
    version: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the copy

    def __str__(self) -> str:
        return f"{self.job}@{self.version}"


class JobRecord(NamedTuple):
    """One job as the topic has it."""

    spec: JobSpec
    wanted: Wanted
    first: Positions  # where every partition of the job begins, resolved once, before anybody leads
    reason: str  # why it is wanted so
    submitted_s: float  # since 1970; its deadline counts from here
    origin: StartCheckpoint | None = (
        None  # without one, it begins with what the specification makes
    )
    revision: int = 0  # of the specification: changes made so far
    # The last changes, newest last, after those that made and deleted earlier jobs of the name.
    changes: tuple[Change, ...] = ()
    request: str = ""  # who submitted it recognises a request that comes twice by this
    held: bool = False  # paused by a machine that may not decide alone, not by a person
    detail: str = ""  # of what it is held for: a traceback, many lines; empty where there is none
    finished: bool = False  # stopped because it reached its stop rule, not by a person
    incarnation: int = 1  # counts the jobs of this name; those before were purged
    after_loss: int = 0  # how often it was resumed although Kafka lost records that it acknowledged
    from_start: bool = False  # the last time, if need be with version 0
    # What was known of the logs below the first positions, when these were resolved.
    known: LogPositions = {}  # noqa: RUF012 -- read only
    read_from: ReadFrom = ""  # likewise, streams' topics that were created anew
    # Secret by which coordinators know each other's hot snapshots in Redis: it is in Kafka alone.
    # Empty: they believe whatever is there.
    seal: str = ""

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


class _Stored(msgspec.Struct, omit_defaults=True):
    """A job record as JSON: positions by stream, each list by the number of the partition."""

    spec: msgspec.Raw
    wanted: Wanted
    first: dict[str, NonEmpty[list[LogPosition]]]
    reason: str = ""
    submitted_s: float = 0.0
    origin: StartCheckpoint | None = None
    revision: Count = 0
    changes: tuple[Change, ...] = ()
    request: str = ""
    held: bool = False
    detail: str = ""
    finished: bool = False
    incarnation: Ordinal = 1
    after_loss: Count = 0
    from_start: bool = False
    read_from: ReadFrom = ""
    seal: str = ""
    format: int = 1


class _Head(msgspec.Struct):
    """What says how to read the rest."""

    format: int = 1
    next_incarnation: int = 0  # of a name that has no job


_HEAD = msgspec.json.Decoder(_Head)
_FREE_NAME = msgspec.json.Decoder(FreeName)
_STORED = msgspec.json.Decoder(_Stored)


# What stands in a record as it is in `JobRecord`.
_AS_IT_IS = {*_Stored.__struct_fields__} & {*JobRecord._fields} - {"spec", "first"}


class AfterLoss(NamedTuple):
    """What an operator accepts for a job that Kafka lost records of."""

    from_start: bool = False  # version 0, if no other is left
    read_from: ReadFrom = ""  # for streams' topics that were created anew
    waits: bool = False  # a coordinator said lately that the job waits for a checkpoint


class JobStore:
    """Reads and writes the jobs topic. May be shared between threads: one for a process will do.

    Attributes:
        by: Who makes changes: the user of this process, unless `acting` says otherwise.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        self.by: Author = local_user()
        self._log = log
        self._clock = clock
        # Not closed: a job that only a newer program understands goes on as it was.
        self._job_store = CompactedTable[JobRecord | FreeName](
            log, topics.JOBS, _decode, "job", closed=False, clock=clock
        )
        # Entries that `refresh` saw last, and the jobs among them.
        self._shown: tuple[Mapping[str, JobRecord | FreeName], Mapping[str, JobRecord]] = {}, {}

    def acting(self, by: Author) -> JobStore:
        """Return this store for changes by somebody else, such as the caller of a request."""
        store = copy(self)
        store.by = by
        return store

    @property
    def unreadable(self) -> dict[str, Unreadable]:
        """Names whose newest record, as last read, does not parse; a job of an older one goes on.

        A record whose key is no name of a job stands under what its key reads as.
        """
        return self._job_store.unreadable

    def read(self) -> dict[str, JobRecord]:
        """All jobs as of now, by name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        return _jobs(self._job_store.read())

    def refresh(self, timeout_s: float) -> Mapping[str, JobRecord]:
        """Wait up to `timeout_s` for news, then return all jobs as known by then.

        The result is the same object until a job changes.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        entries = self._job_store.refresh(timeout_s)
        if self._shown[0] is not entries:
            self._shown = entries, _jobs(entries)
        return self._shown[1]

    def get(self, job: str) -> JobRecord:
        """One job as of now.

        Raises:
            NotFoundError: If there is none of this name.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._job(job, self._job_store.read().get(job))

    def id_of(self, name: str) -> str:
        """The id of a name's job; where there is none, of the next one that will have the name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        return topics.job_id(name, _incarnation(self._job_store.read().get(name)))

    def past_ids(self, name: str) -> list[str]:
        """The ids of jobs that had a name before.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        now = _incarnation(self._job_store.read().get(name))
        return [topics.job_id(name, each) for each in range(1, now)]

    def check_new(self, spec: JobSpec) -> int:
        """Check that a job can be submitted; returns which one of its name it will be.

        Raises:
            ConflictError: If its name is taken.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._check_new(spec, self._job_store.read().get(spec.name))

    def submit(
        self, spec: JobSpec, origin: StartCheckpoint | None = None, request: str = ""
    ) -> JobRecord:
        """Make a job: its topics, its first positions, its record.

        Args:
            spec: Specification of the job.
            origin: Checkpoint that the job begins with, stored in its folder already.
            request: Fingerprint of the request, kept as it is.

        Raises:
            ConflictError: If the name belongs to a job, or to the history of an earlier one.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """

        def made(taken: JobRecord | FreeName | None) -> JobRecord:
            incarnation = self._check_new(spec, taken)
            known = first_positions(spec, self._log)
            first = {place: position.offset for place, position in known.items()}
            beginning = "" if origin is None else f"begins with {origin}"
            reason = f"submitted, {beginning}" if beginning else "submitted"
            now_s = self._clock()
            earlier = () if taken is None else _earlier(taken.changes)
            record = JobRecord(
                spec,
                "running",
                first,
                reason,
                now_s,
                origin,
                changes=(*earlier, change_by(self.by, now_s, "submitted", beginning)),
                request=request,
                incarnation=incarnation,
                known=known,
                seal=token_hex(16),
            )
            _check_size(record)
            self._make_topics(record)
            return record

        # This writer makes the log find its brokers while the topics are created.
        with closing(self._log.writer()):
            return self._write(spec.name, made)

    def want(self, job: str, wanted: Wanted, reason: str) -> JobRecord:
        """Change what is wanted of a job. A stopped job can be resumed where it was.

        A finished job that is to stop stays as it is.

        Raises:
            NotFoundError: If there is no such job.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._update(job, lambda record: self._wanted(record, wanted, reason))

    def resume_after_loss(
        self,
        job: str,
        reason: str,
        *,
        from_start: bool = False,
        read_from: ReadFrom = "",
        waits: bool = False,
    ) -> JobRecord:
        """Resume a job that is held after a loss, or waits for a checkpoint, with what is left.

        If its control or its updates topic was deleted, this creates the topic again, empty.

        Args:
            job: Name of the job.
            reason: Reason of the person, cut off after `REASON_CHARACTERS`.
            from_start: True to accept version 0 if no other version is left.
            read_from: Where to begin with streams' topics that were created anew.
            waits: True if a coordinator said lately that the job waits for a checkpoint.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If it neither is held nor waits.
            OutsideError: If Kafka does not let us make a topic.
            UnavailableError: If Kafka is unavailable for long.
        """
        after_loss = AfterLoss(from_start, read_from, waits)
        return self._update(job, lambda record: self._resumed(record, reason, after_loss))

    def finish(self, job: str, reason: str, revision: int) -> JobRecord:
        """End a job that has reached its stop rule. A stopped job stays as it is.

        `want` may resume a finished job.

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
            _check_revision(record, revision)
            record = self._noted(record, "finished", reason, by=COORDINATOR)
            return record._replace(
                wanted="stopped", reason=reason, held=False, detail="", finished=True
            )

        return self._update(topics.job_name(job), finished, job)

    def hold(self, job: str, reason: str, detail: str = "") -> JobRecord:
        """Pause a running job for a reason that a person must look at.

        A job that is not running stays as it is.

        Args:
            job: Id of the job.
            reason: Fault and remedy in one line, cut off after `REASON_CHARACTERS`.
            detail: Details for a programmer, such as a traceback, cut off after
                `DETAIL_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job; its name may be another one's.
            UnavailableError: If Kafka is unavailable for long.
        """

        def held(record: JobRecord) -> JobRecord:
            if record.wanted != "running":
                return record
            record = self._noted(record, "held", reason, by=COORDINATOR)
            return record._replace(
                wanted="paused",
                reason=reason[:REASON_CHARACTERS],
                held=True,
                detail=detail[:DETAIL_CHARACTERS],
                finished=False,
            )

        return self._update(topics.job_name(job), held, job)

    def change(self, job: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        """Change settings of a job, which may be stopped. Equal settings change nothing.

        Args:
            job: Name of the job.
            changed: Settings by name, as in `common.jobs.edit`: `deadline_s` (None for none,
                otherwise counted from the submission), `group_size`, `batch_size`,
                `learning_rate`, and whole blocks.
            reason: Reason of the person, cut off after `changes.REASON_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job.
            UserError: Naming the field that cannot be changed so.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._update(job, lambda record: self._changed(record, changed, reason))

    def patch(
        self,
        job: str,
        reason: str,
        *,
        changed: Mapping[str, Value],
        wanted: Wanted | None = None,
        after_loss: AfterLoss | None = None,
        revision: int | None = None,
    ) -> JobRecord:
        """Do several of `change`, `want` and `resume_after_loss` as one change, or nothing.

        Args:
            job: Name of the job.
            reason: Reason of the person.
            changed: Settings, see `change`.
            wanted: Optional. If unset, or wanted already, it stays.
            after_loss: Optional. If set, resume the job, see `resume_after_loss`.
            revision: Optional. If set, refuse to change another revision.

        Raises:
            NotFoundError: If there is no such job.
            UserError: Naming the field that cannot be changed so.
            ConflictError: If the job has another revision, or `after_loss` is given for a job that
                neither is held nor waits for a checkpoint.
            OutsideError: If Kafka does not let us make a topic.
            UnavailableError: If Kafka is unavailable for long.
        """

        def patched(record: JobRecord) -> JobRecord:
            if revision is not None:
                _check_revision(record, revision)
            record = self._changed(record, changed, reason)
            if after_loss is not None:
                return self._resumed(record, reason, after_loss)
            if wanted in (None, record.wanted):
                return record
            return self._wanted(record, wanted, reason)

        return self._update(job, patched)

    def note(self, job: str, action: str, reason: str) -> None:
        """Write down what somebody did to a job elsewhere, as to its quarantined batches.

        Args:
            job: Id of the job.
            action: Past participle, such as "requeued".
            reason: What exactly, cut off after `changes.REASON_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job; its name may be another one's.
            UnavailableError: If Kafka is unavailable for long.
        """
        name = topics.job_name(job)
        self._update(name, lambda record: self._noted(record, action, reason), job)

    def delete(self, job: str) -> None:
        """Take a stopped job out of the list; its history and its checkpoints keep the name.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If it is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """

        def deleted(entry: JobRecord | FreeName | None) -> FreeName:
            record = _stopped(self._job(job, entry))
            last = change_by(self.by, self._clock(), "deleted", revision=record.revision)
            return FreeName(record.incarnation, _earlier((*record.changes, last)))

        self._write(job, deleted)

    def free(self, job: str) -> None:
        """Take a stopped job out of the list, if it is there, and make its name free.

        Raises:
            ConflictError: If it is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """
        incarnation = 1 + _incarnation(self._job_store.read().get(job))

        def freed(entry: JobRecord | FreeName | None) -> JobRecord | FreeName:
            if entry is not None and _incarnation(entry) >= incarnation:
                # Somebody else has freed the name meanwhile.
                return entry
            if isinstance(entry, JobRecord):
                _stopped(entry)
            earlier = () if entry is None else entry.changes
            last = change_by(self.by, self._clock(), "purged")
            return FreeName(incarnation, _earlier((*earlier, last)))

        self._write(job, freed)

    def stopped(self, job: str) -> JobRecord:
        """Return a job that may be deleted.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If it is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """
        return _stopped(self.get(job))

    def repair(self) -> None:
        """See `CompactedTable.repair`; for a process that may write the jobs topic."""
        self._job_store.repair()

    @property
    def missing(self) -> frozenset[str]:
        """Jobs of which the jobs topic has no record any more, see `CompactedTable.missing`."""
        return self._job_store.missing

    def close(self) -> None:
        """Let go of the reader."""
        self._job_store.close()

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
            made = self._job_store.update(name, changed, _encode)
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

    def _check_new(self, spec: JobSpec, taken: JobRecord | FreeName | None) -> int:
        if isinstance(taken, JobRecord):
            raise ConflictError(
                f'the name "{spec.name}" belongs to a job that is {taken.wanted}: choose another'
                " name"
            )
        check_streams(spec, self._log)
        _check_group(spec)
        return _incarnation(taken)

    def _noted(
        self,
        record: JobRecord,
        action: str,
        reason: str,
        by: Author | None = None,
        **more: Any,  # noqa: ANN401 -- as `Change` has them
    ) -> JobRecord:
        """Return a record that says in addition who did something; `more` as in `Change`."""
        at_s, revision = self._clock(), record.revision
        change = change_by(by or self.by, at_s, action, reason, revision=revision, **more)
        return record._replace(changes=_kept((*record.changes, change)))

    def _wanted(self, record: JobRecord, wanted: Wanted, reason: str) -> JobRecord:
        if wanted == "stopped" and record.finished:
            return record
        record = self._noted(record, "resumed" if wanted == "running" else wanted, reason)
        reason = _reason(record, reason)
        return record._replace(wanted=wanted, reason=reason, held=False, detail="", finished=False)

    def _changed(self, record: JobRecord, changed: Mapping[str, Value], reason: str) -> JobRecord:
        spec = changed_spec(record.spec, changed)
        differs = differences(record.spec, spec)
        if not differs:
            return record
        _check_group(spec)
        record = record._replace(spec=spec, revision=record.revision + 1)
        return self._noted(record, "changed", reason, changed=differs)

    def _resumed(self, record: JobRecord, reason: str, after_loss: AfterLoss) -> JobRecord:
        if not record.held and not (after_loss.waits and record.wanted == "running"):
            # Otherwise the acceptance would apply to the next loss.
            name = record.spec.name
            raise ConflictError(
                f'the job "{name}" is not held: there is no loss for it to go on after; resume it'
                f" with `doll job resume {name}`"
            )
        self._log.create_topics(_own_topics(record.id))
        record = self._noted(record, "resumed after loss", reason)
        return record._replace(
            wanted="running",
            reason=_reason(record, reason),
            held=False,
            detail="",
            after_loss=record.after_loss + 1,
            from_start=after_loss.from_start,
            read_from=after_loss.read_from,
        )

    def _make_topics(self, record: JobRecord) -> None:
        spec, own = record.spec, _own_topics(record.id)
        dead_letters = map(topics.dead_letter_topic, spec.streams)
        self._log.create_topics(
            [*own, *(NewTopic(name, kept_forever=True) for name in dead_letters)]
        )
        ends = _all(self._log.ends, [Partition(topic.name, 0) for topic in own])
        for place, end in ends.items():
            if end > 0:
                raise ConflictError(
                    f'the topic {place.topic} holds records of an earlier job "{spec.name}":'
                    f" choose another name; if Kafka has lost that job's record, {RESTORE}"
                )
        wanted = [*own, table_topic(topics.JOBS)]
        refused = list[str]()
        found = self._log.settings([topic.name for topic in wanted], refused)
        if refused:
            _log.warning("topic_settings_unknown", job=spec.name, reason="; ".join(refused))
        lossy = [each for each in topics.differences(wanted, found) if each.loses]
        if lossy:  # somebody made them before us, or changed them
            raise ConflictError(
                f"Kafka would lose records of the job: {'; '.join(map(str, lossy))}; set that right"
                f" and submit again: {topics.remedy(lossy)}"
            )


def _jobs(entries: Mapping[str, JobRecord | FreeName]) -> dict[str, JobRecord]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, JobRecord)}


def _incarnation(entry: JobRecord | FreeName | None) -> int:
    """Return the incarnation of a name's job; without a job, that of the next one."""
    if isinstance(entry, JobRecord):
        return entry.incarnation
    return entry.next_incarnation if isinstance(entry, FreeName) else 1


def _reason(record: JobRecord, given: str) -> str:
    """Return the reason of a record: that which was given, or its last change in words."""
    last = record.changes[-1]
    return given[:REASON_CHARACTERS] or f"{last.action} by {last.by}"


def _kept(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Drop the oldest changes that do not fit, but none that lasts."""
    while len(changes) > CHANGES_KEPT or len(msgspec.json.encode(changes)) > CHANGES_BYTES:
        passing = (at for at, each in enumerate(changes) if each.action not in _LASTING)
        drop = next(passing, 0)
        changes = changes[:drop] + changes[drop + 1 :]
    return changes


def _earlier(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return what the next job of a name says of those before."""
    return tuple(each for each in changes if each.action in _LASTING)[-EARLIER_KEPT:]


def _stopped(record: JobRecord) -> JobRecord:
    """Refuse a job that is not stopped.

    Raises:
        ConflictError: If it is not.
    """
    if record.wanted != "stopped":
        name = record.spec.name
        raise ConflictError(
            f'the job "{name}" is {record.wanted}: stop it first, with `doll job stop {name}`'
        )
    return record


def _check_revision(record: JobRecord, revision: int) -> None:
    """Refuse to change another revision than the one that somebody knows.

    Raises:
        ConflictError: If the job has another one.
    """
    if record.revision != revision:
        raise ConflictError(
            f'the job "{record.spec.name}" is at revision {record.revision}, not {revision}: look'
            " at it again"
        )


def _own_topics(job: str) -> list[NewTopic]:
    """The topics that say what is true about a job."""
    names = (topics.control_topic(job), topics.updates_topic(job))
    return [NewTopic(name, kept_forever=True) for name in names]


def first_positions(spec: JobSpec, log: Log) -> LogPositions:
    """Where each partition of the job begins, by its `start_at`, and what is known of its log.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    places = [place for stream in spec.streams for place in log.partitions(stream)]
    if spec.start_at == "latest" and spec.start_s is None:
        return _all(log.end_positions, places)
    found = log.describe(spec.streams)  # before positions: those of another topic do not agree
    if spec.start_s is not None:
        first = {place: log.position_at(place, spec.start_s) for place in places}
    else:
        first = _all(log.starts, places)
    return {
        place: LogPosition(at, found[place.topic].topic_id if place.topic in found else "")
        for place, at in first.items()
    }


def _all(
    ask: Callable[[Collection[Partition]], dict[Partition, T]], places: Collection[Partition]
) -> dict[Partition, T]:
    """What Kafka says of partitions that are known to be there.

    Raises:
        UnavailableError: If it does not say it of all of them.
    """
    found = ask(places)
    if len(found) < len(places):
        silent = ", ".join(str(place) for place in places if place not in found)
        raise UnavailableError(f"Kafka does not say where these partitions begin or end: {silent}")
    return found


def _check_group(spec: JobSpec) -> None:
    """Refuse a K of which the record of an update could not be written.

    Raises:
        UserError: Saying how large K may be.
    """
    most = most_group_size(spec.streams)
    if spec.largest_group > most:
        raise UserError(
            f"job file: group_size: must be at most {most}, got {spec.largest_group}: the record of"
            " an update names all of its batches, and Kafka takes a megabyte; take larger batches"
            " (batch_size) instead of more"
        )


def _check_size(record: JobRecord) -> None:
    """Refuse a first record that leaves no room for what later ones say.

    Raises:
        UserError: If it is too large.
    """
    size = len(encode_job(record))
    if size > SUBMITTED_BYTES:
        raise UserError(
            f"job file: streams: the job and where its {len(record.first)} partitions begin take"
            f" {size} bytes in the jobs topic, and {SUBMITTED_BYTES} fit: split it into jobs of"
            " fewer streams"
        )


def _encode(entry: JobRecord | FreeName) -> bytes:
    """Write what stands under a name."""
    return encode_job(entry) if isinstance(entry, JobRecord) else msgspec.json.encode(entry)


def encode_job(record: JobRecord) -> bytes:
    """Write a job record."""
    spec = msgspec.Raw(record.spec.model_dump_json().encode())
    first = dict[str, list[LogPosition]]()
    for place, at in sorted(record.first.items()):
        first.setdefault(place.topic, []).append(record.known.get(place, LogPosition(at)))
    stored = _Stored(
        spec=spec,
        first=first,
        **{name: getattr(record, name) for name in _AS_IT_IS},
    )
    return msgspec.json.encode(stored)


def _decode(key: bytes | None, value: bytes) -> JobRecord | FreeName:
    """Read what stands under a name.

    Raises:
        WireError: See `decode_job`.
    """
    try:
        head = _HEAD.decode(value)
        if head.next_incarnation and head.format == 1:
            return _FREE_NAME.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"job record: {error}") from error
    return decode_job(key, value)


def decode_job(key: bytes | None, value: bytes) -> JobRecord:
    """Read a job record.

    Raises:
        WireError: If it does not parse, makes no sense, or stands under another name than its own.
    """
    try:
        stored = _STORED.decode(value)
        if stored.format > 1:  # nothing else in it need make sense here
            raise WireError(f"job record: of format {stored.format}, expected at most 1")
        spec = job_from_json(bytes(stored.spec))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise WireError(f"job record: {error}") from error
    if key != spec.name.encode():
        raise WireError(f"job record: stands under the key {key!r}, its name is {spec.name!r}")
    if stored.first.keys() != set(spec.streams):
        raise WireError("job record: first positions are not those of its streams")
    if stored.changes and stored.changes[-1].revision != stored.revision:
        raise WireError(f"job record: revision {stored.revision} is not that of its last change")
    known = {
        Partition(topic, index): position
        for topic, positions in stored.first.items()
        for index, position in enumerate(positions)
    }
    return JobRecord(
        spec=spec,
        first={place: position.offset for place, position in known.items()},
        known={place: at for place, at in known.items() if at != LogPosition(at.offset)},
        **{name: getattr(stored, name) for name in _AS_IT_IS},
    )
