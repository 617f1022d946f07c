"""All jobs, as a fold over the jobs topic: what each is, and what a person wants of it.

The topic is a `common.topics.table`, keyed by the job's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from time import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from common.core.batching import most_group_size
from common.core.events import Wanted  # noqa: TC001 -- msgspec reads it when run
from common.core.losses import ReadFrom  # noqa: TC001 -- likewise
from common.core.spans import LogPosition, Partition
from common.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
    UserError,
    WireError,
)
from common.jobs.edit import Value, changed_spec, differences
from common.jobs.spec import JobSpec, check_streams, job_from_json
from common.ports.servers import Log, NewTopic
from common.topics import names as topics
from common.topics.table import CompactedTable, Unreadable

if TYPE_CHECKING:
    from common.core.messages import LogPositions, Positions

T = TypeVar("T")
REASON_CHARACTERS = 2_000  # of what is wanted: one line
DETAIL_CHARACTERS = 8_000  # of a hold: a long traceback, far below what one record may be
# Of a job's first record. All that is added later, changes and a hold, is 200,000 at most, and
# Kafka's producers write 1,000,000: so who holds a job or changes it finds room.
SUBMITTED_BYTES = 700_000
CHANGES_KEPT = 50  # of a job, in its record: a record stays small, its topic is compacted
CHANGE_CHARACTERS = 500  # of the reason of each


class Origin(msgspec.Struct, frozen=True):
    """The checkpoint of another job with whose weights a job begins, copied into its own folder."""

    job: str
    epoch: Annotated[int, Meta(ge=0)]
    version: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the copy

    def __str__(self) -> str:
        return f"{self.job}@{self.version}"


class Change(msgspec.Struct, frozen=True):
    """One change of a job's settings by a person."""

    revision: Annotated[int, Meta(ge=1)]  # that it made
    at_s: float  # since 1970
    changed: dict[str, Value]  # what differs from the revision before, as it is now
    reason: str = ""


class JobRecord(NamedTuple):
    """One job as the topic has it."""

    spec: JobSpec
    wanted: Wanted
    first: Positions  # where every partition of the job begins, resolved once, before anybody leads
    reason: str  # why it is wanted so
    submitted_s: float  # since 1970; its deadline counts from here
    origin: Origin | None = None  # without one, it begins with what the specification makes
    revision: int = 0  # of the specification: changes made so far
    changes: tuple[Change, ...] = ()  # the last of them, newest last
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

    @property
    def id(self) -> str:
        """By what everything that it owns is named, see `common.topics.names`."""
        return topics.job_id(self.spec.name, self.incarnation)

    def is_same_job(self, other: JobRecord | None) -> bool:
        """Whether another record is of this job, not of one that later got its name."""
        return other is not None and (other.id, other.submitted_s) == (self.id, self.submitted_s)


class FreeName(msgspec.Struct, frozen=True):
    """A name that a deleted job had; without one, the next job of a name is its first."""

    next_incarnation: Annotated[int, Meta(ge=2)]
    format: int = 3


class _Stored(msgspec.Struct, omit_defaults=True):
    """A job record as JSON: positions as triples, since JSON has no keys but text."""

    spec: msgspec.Raw
    wanted: Wanted
    first: list[tuple[str, int, int]]
    reason: str = ""
    submitted_s: float = 0.0
    origin: Origin | None = None
    revision: Annotated[int, Meta(ge=0)] = 0
    changes: tuple[Change, ...] = ()
    request: str = ""
    held: bool = False
    detail: str = ""
    finished: bool = False
    incarnation: Annotated[int, Meta(ge=1)] = 1
    after_loss: Annotated[int, Meta(ge=0)] = 0
    from_start: bool = False
    topic_ids: dict[str, str] = {}  # Kafka's, of the streams, as far as they are known
    # Kafka's, of the last records below `first`, in that order; none where none is known.
    epochs: list[int] = []
    read_from: ReadFrom = ""
    format: int = 1


# Of the records in the jobs topic; see `JobSpec.format`. 3: the job is not the first of its name.
FORMAT = 3


class _Head(msgspec.Struct):
    """What says how to read the rest."""

    format: int = 1
    next_incarnation: int = 0  # of a name that has no job


# What stands in a record as it is in `JobRecord`.
_AS_IT_IS = {*_Stored.__struct_fields__} & {*JobRecord._fields} - {"spec", "first"}


class JobStore:
    """Reads and writes the jobs topic. May be shared between threads: one for a process will do."""

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        self._log = log
        self._clock = clock
        # Not closed: a job that only a newer program understands goes on as it was.
        self._book = CompactedTable[JobRecord | FreeName](
            log, topics.JOBS, _decode, "job", closed=False
        )

    @property
    def rejected(self) -> int:
        """Records so far that did not parse."""
        return self._book.rejected

    @property
    def unreadable(self) -> dict[str, Unreadable]:
        """Names whose newest record, as last read, does not parse; a job of an older one goes on.

        A record whose key is no name of a job stands under what its key reads as.
        """
        return self._book.unreadable

    def read(self) -> dict[str, JobRecord]:
        """All jobs as of now, by name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        return _jobs(self._book.read())

    def refresh(self, timeout_s: float) -> dict[str, JobRecord]:
        """Wait up to `timeout_s` for news, then return all jobs as known by then.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        return _jobs(self._book.refresh(timeout_s))

    def get(self, job: str) -> JobRecord:
        """One job as of now.

        Raises:
            NotFoundError: If there is none of this name.
            UnavailableError: If Kafka is unavailable for long.
        """
        jobs = self.read()
        if job not in jobs:
            known = ", ".join(sorted(jobs)) or "none yet, submit one with `doll job submit FILE`"
            raise NotFoundError(f'there is no job "{job}"; jobs: {known}')
        return jobs[job]

    def id_of(self, name: str) -> str:
        """The id of a name's job; where there is none, of the next one that will have the name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        entry = self._book.read().get(name)
        return entry.id if isinstance(entry, JobRecord) else topics.job_id(name, _next(entry))

    def past_ids(self, name: str) -> list[str]:
        """The ids of jobs that had a name before.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        entry = self._book.read().get(name)
        now = entry.incarnation if isinstance(entry, JobRecord) else _next(entry)
        return [topics.job_id(name, each) for each in range(1, now)]

    def check_new(self, spec: JobSpec) -> int:
        """Check that a job can be submitted; returns which one of its name it will be.

        Raises:
            ConflictError: If its name is taken.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """
        taken = self._book.read().get(spec.name)
        if isinstance(taken, JobRecord):
            raise ConflictError(
                f'the name "{spec.name}" belongs to a job that is {taken.wanted}: choose another'
                f" name, or make this one free with `doll job delete {spec.name} --purge`"
            )
        check_streams(spec, self._log)
        _check_group(spec)
        return _next(taken)

    def submit(self, spec: JobSpec, origin: Origin | None = None, request: str = "") -> JobRecord:
        """Make a job: its topics, its first positions, its record.

        Args:
            spec: What it is.
            origin: What it begins with, kept in its folder already.
            request: Fingerprint of what asked for it, kept as it is.

        Raises:
            ConflictError: If the name is taken, by a job or by the history of an earlier one, or
                if somebody else wrote a job of this name in the same moment.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """
        # The writer of the record finds its brokers while all else is done.
        with self._book.lock, closing(self._log.writer()):
            incarnation = self.check_new(spec)
            known = first_positions(spec, self._log)
            first = {place: position.offset for place, position in known.items()}
            reason = "submitted" if origin is None else f"submitted, begins with {origin}"
            now_s = self._clock()
            record = JobRecord(
                spec,
                "running",
                first,
                reason,
                now_s,
                origin,
                request=request,
                incarnation=incarnation,
                known=known,
            )
            data = _new(record)  # before topics are made for a job that there will not be
            self._make_topics(record)
            self._book.write(spec.name, data)
            return record

    def want(self, job: str, wanted: Wanted, reason: str) -> JobRecord:
        """Change what is wanted of a job; a stopped one goes on where it was.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If somebody else wrote it in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        reason = reason[:REASON_CHARACTERS]
        return self._rewrite(
            job, wanted=wanted, reason=reason, held=False, detail="", finished=False
        )

    def resume_after_loss(
        self,
        job: str,
        reason: str,
        *,
        from_start: bool = False,
        read_from: ReadFrom = "",
        waits: bool = False,
    ) -> JobRecord:
        """Go on with what is left of a job that is held after a loss, or waits for a checkpoint.

        Where its control or its updates topic was deleted, that is made again, empty.

        Args:
            job: Its name.
            reason: Why, cut off likewise.
            from_start: Whether version 0 will do, where no other is left.
            read_from: From where streams' topics are read that were created anew.
            waits: True if a coordinator said lately that the job waits for a checkpoint.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If it neither is held nor waits, or somebody else wrote it in the same
                moment.
            OutsideError: If Kafka does not let us make a topic.
            UnavailableError: If Kafka is unavailable for long.
        """
        with self._book.lock:
            record = self.get(job)
            # The wish would stay until something else is lost.
            if not record.held and not (waits and record.wanted == "running"):
                raise ConflictError(
                    f'the job "{job}" is not held: there is no loss for it to go on after; resume'
                    f" it with `doll job resume {job}`"
                )
            self._log.create_topics(_own_topics(record.id))
            return self._rewrite(
                job,
                wanted="running",
                reason=reason[:REASON_CHARACTERS],
                held=False,
                detail="",
                after_loss=record.after_loss + 1,
                from_start=from_start,
                read_from=read_from,
            )

    def finish(self, job: str, reason: str) -> JobRecord:
        """End a job that has reached its stop rule; `want` may let it go on all the same.

        Args:
            job: Its id.
            reason: What it has reached.

        Raises:
            NotFoundError: If there is no such job; its name may be another one's.
            ConflictError: If somebody else wrote it in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._rewrite(
            topics.job_name(job),
            job,
            wanted="stopped",
            reason=reason,
            held=False,
            detail="",
            finished=True,
        )

    def hold(self, job: str, reason: str, detail: str = "") -> JobRecord:
        """Pause a job for a reason that a person must look at.

        Args:
            job: Its id.
            reason: What is wrong and what to do, one line; cut off likewise.
            detail: What a programmer wants to see, such as a traceback; its end is cut off where
                it is longer than `DETAIL_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job; its name may be another one's.
            ConflictError: If somebody else wrote it in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._rewrite(
            topics.job_name(job),
            job,
            wanted="paused",
            reason=reason[:REASON_CHARACTERS],
            held=True,
            detail=detail[:DETAIL_CHARACTERS],
            finished=False,
        )

    def change(self, job: str, changed: Mapping[str, Value], reason: str) -> JobRecord:
        """Change settings of a job, of a stopped one too; nothing where nothing differs.

        Args:
            job: Its name.
            changed: By name, as in `common.jobs.edit`: `deadline_s` (None for none, otherwise
                counted from when the job was submitted), `group_size`, `batch_size`,
                `learning_rate`, and whole blocks.
            reason: Why, for those who look at its changes.

        Raises:
            NotFoundError: If there is no such job.
            UserError: Naming the field that cannot be changed so.
            ConflictError: If somebody else wrote it in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        with self._book.lock:
            old = self.get(job)
            spec = changed_spec(old.spec, changed)
            differs = differences(old.spec, spec)
            if not differs:
                return old
            _check_group(spec)
            reason = reason[:CHANGE_CHARACTERS]
            change = Change(old.revision + 1, self._clock(), differs, reason)
            changes = (*old.changes, change)[-CHANGES_KEPT:]
            return self._rewrite(job, spec=spec, revision=change.revision, changes=changes)

    def delete(self, job: str) -> None:
        """Take a stopped job out of the list; its history and its checkpoints keep the name.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If it is not stopped, or if somebody else wrote it in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        with self._book.lock:
            self._free(job, self.stopped(job).incarnation)

    def free(self, job: str) -> None:
        """Take a stopped job out of the list, if it is there, and let another one have its name.

        Raises:
            ConflictError: If it is not stopped, or if somebody else wrote it in the same moment.
            UnavailableError: If Kafka is unavailable for long.
        """
        with self._book.lock:
            entry = self._book.read().get(job)
            is_job = isinstance(entry, JobRecord)
            incarnation = 1 + (self.stopped(job).incarnation if is_job else _next(entry))
            try:
                self._free(job, incarnation)
            except ConflictError:
                now = self._book.read().get(job)
                if isinstance(now, JobRecord) or _next(now) < incarnation:
                    raise  # it was not another one who freed it

    def stopped(self, job: str) -> JobRecord:
        """A job that may be deleted.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If it is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """
        record = self.get(job)
        if record.wanted != "stopped":
            raise ConflictError(
                f'the job "{job}" is {record.wanted}: stop it first, with `doll job stop {job}`'
            )
        return record

    def close(self) -> None:
        """Let go of the reader."""
        self._book.close()

    def _free(self, name: str, incarnation: int) -> None:
        entry = FreeName(incarnation) if incarnation > 1 else None
        self._book.write(name, None if entry is None else msgspec.json.encode(entry))

    def _rewrite(self, name: str, job: str | None = None, **changes: Any) -> JobRecord:  # noqa: ANN401 -- fields of the record
        """Change a job's record, where an id is given of that job alone."""
        with self._book.lock:
            record = self.get(name)
            if job not in (None, record.id):
                raise NotFoundError(f'the job "{name}" was purged: this one is another of its name')
            record = record._replace(**changes)
            self._book.write(name, encode_job(record))
            return record

    def _make_topics(self, record: JobRecord) -> None:
        spec, own = record.spec, _own_topics(record.id)
        letters = map(topics.dead_letter_topic, spec.streams)
        self._log.create_topics([*own, *(NewTopic(name, kept_forever=True) for name in letters)])
        ends = _all(self._log.ends, [Partition(topic.name, 0) for topic in own])
        for place, end in ends.items():
            if end > 0:
                raise ConflictError(
                    f'the topic {place.topic} holds records of an earlier job "{spec.name}":'
                    " choose another name, or make this one free with"
                    f" `doll job delete {spec.name} --purge`"
                )
        wanted = [*own, NewTopic(topics.JOBS, compacted=True)]
        found = self._log.settings([topic.name for topic in wanted])
        lossy = [each for each in topics.differences(wanted, found) if each.loses]
        if lossy:  # somebody made them before us, or changed them
            raise ConflictError(
                f"Kafka would lose records of the job: {'; '.join(map(str, lossy))}; set that right"
                f" and submit again: {topics.remedy(lossy)}"
            )


def _jobs(entries: Mapping[str, JobRecord | FreeName]) -> dict[str, JobRecord]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, JobRecord)}


def _next(entry: JobRecord | FreeName | None) -> int:
    """Which one the next job of a name without a job will be."""
    return entry.next_incarnation if isinstance(entry, FreeName) else 1


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


def _new(record: JobRecord) -> bytes:
    """The first record of a job, that leaves room for what later ones say.

    Raises:
        UserError: If it is too large.
    """
    data = encode_job(record)
    if len(data) > SUBMITTED_BYTES:
        raise UserError(
            f"job file: streams: the job and where its {len(record.first)} partitions begin take"
            f" {len(data)} bytes in the jobs topic, and {SUBMITTED_BYTES} fit: split it into jobs"
            " of fewer streams"
        )
    return data


def encode_job(record: JobRecord) -> bytes:
    """Write a job record."""
    spec = msgspec.Raw(record.spec.model_dump_json().encode())
    first = [(place.topic, place.index, position) for place, position in record.first.items()]
    first.sort()
    known = [
        record.known.get(Partition(topic, index), LogPosition(at)) for topic, index, at in first
    ]
    topic_ids = {at[0]: below.topic_id for at, below in zip(first, known, strict=True)}
    epochs = [below.epoch for below in known]
    stored = _Stored(
        spec=spec,
        first=first,
        topic_ids={topic: topic_id for topic, topic_id in topic_ids.items() if topic_id},
        epochs=epochs if max(epochs, default=-1) >= 0 else [],
        format=_format(record),
        **{name: getattr(record, name) for name in _AS_IT_IS},
    )
    return msgspec.json.encode(stored)


def _format(record: JobRecord) -> int:
    """That of its specification; 2 also while its changes tell of a block that was taken away.

    3 if it is not the first of its name: an older program would take it for that.
    """
    if record.incarnation > 1:
        return FORMAT
    told = (value for change in record.changes for value in change.changed.values())
    return max(record.spec.format, 2 if any(isinstance(value, dict) for value in told) else 1)


def _decode(key: bytes | None, value: bytes) -> JobRecord | FreeName:
    """Read what stands under a name.

    Raises:
        WireError: See `decode_job`.
    """
    try:
        head = msgspec.json.decode(value, type=_Head)
        if head.next_incarnation and head.format <= FORMAT:
            return msgspec.json.decode(value, type=FreeName)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"job record: {error}") from error
    return decode_job(key, value)


def decode_job(key: bytes | None, value: bytes) -> JobRecord:
    """Read a job record.

    Raises:
        WireError: If it does not parse, makes no sense, or stands under another name than its own.
    """
    try:
        stored = msgspec.json.decode(value, type=_Stored)
        if stored.format > FORMAT:  # nothing else in it need make sense here
            raise WireError(f"job record: of format {stored.format}, expected at most {FORMAT}")
        spec = job_from_json(bytes(stored.spec))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise WireError(f"job record: {error}") from error
    if key != spec.name.encode():
        raise WireError(f"job record: stands under the key {key!r}, its name is {spec.name!r}")
    first = {Partition(topic, index): position for topic, index, position in stored.first}
    if {place.topic for place in first} != set(spec.streams) or min(first.values()) < 0:
        raise WireError("job record: first positions are not those of its streams")
    if stored.epochs and len(stored.epochs) != len(stored.first):
        raise WireError("job record: not all of its first positions have a leader epoch")
    if stored.changes and stored.changes[-1].revision != stored.revision:
        raise WireError(f"job record: revision {stored.revision} is not that of its last change")
    return JobRecord(
        spec=spec,
        first=first,
        known=_known(stored) if stored.topic_ids or stored.epochs else {},
        **{name: getattr(stored, name) for name in _AS_IT_IS},
    )


def _known(stored: _Stored) -> LogPositions:
    """What was known of the logs below the first positions."""
    epochs = stored.epochs or [-1] * len(stored.first)
    return {
        Partition(topic, index): LogPosition(position, stored.topic_ids.get(topic, ""), epoch)
        for (topic, index, position), epoch in zip(stored.first, epochs, strict=True)
    }
