"""Operations of people on jobs: submit, change, resume, delete. Services use `JobStore`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from copy import copy
from secrets import token_hex
from time import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from common.core.batching import most_group_size
from common.core.spans import LogPosition, Partition
from common.errors import ConflictError, UnavailableError, UnknownTopicError, UserError
from common.jobs.changes import change_by, local_user
from common.jobs.edit import Value, changed_spec, differences
from common.jobs.store import (
    LASTING,
    REASON_CHARACTERS,
    FreeName,
    JobRecord,
    JobStore,
    StartCheckpoint,
    by_stream,
    check_revision,
    encode_entry,
    incarnation_of,
)
from common.kafka import names as topics
from common.kafka.port import Log, NewTopic
from common.kafka.table import RESTORE, table_topic
from common.telemetry.logging import event_logger

if TYPE_CHECKING:
    from common.core.messages import LogPositions, ReadFrom, Wanted
    from common.jobs.changes import Author, Change
    from common.jobs.spec import JobSpec

_log = event_logger(__name__)

T = TypeVar("T")
# Maximum size of a job's first record. Later changes and a hold add at most 200,000, and Kafka's
# producers write up to 1,000,000, so there is always room to hold or change a job.
SUBMITTED_BYTES = 700_000
# Number of changes kept that created or deleted earlier jobs of a name.
EARLIER_KEPT = 10


class AfterLoss(NamedTuple):
    """Losses that an operator accepts for a job whose records Kafka lost."""

    # True to accept version 0 if no other version is left.
    from_start: bool = False
    # Where to start in streams' topics that were created again.
    read_from: ReadFrom = ""
    # True if a coordinator has recently reported that the job waits for a checkpoint.
    waits: bool = False


class JobOperations(JobStore):
    """Job store with the operations of people.

    Attributes:
        by: Author of changes: the user of this process, unless set by `acting`.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        super().__init__(log, clock)
        self.by: Author = local_user()

    def acting(self, by: Author) -> JobOperations:
        """Return this store for changes by another author, such as the caller of a request."""
        store = copy(self)
        store.by = by
        return store

    def past_ids(self, name: str) -> list[str]:
        """Return the ids of earlier jobs of a name.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        now = incarnation_of(self.table.read().get(name))
        return [topics.job_id(name, each) for each in range(1, now)]

    def check_new(self, spec: JobSpec) -> int:
        """Check that a job can be submitted; return the incarnation it will have.

        Raises:
            ConflictError: If its name is taken.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._check_new(spec, self.table.read().get(spec.name))

    def submit(
        self, spec: JobSpec, origin: StartCheckpoint | None = None, request: str = ""
    ) -> JobRecord:
        """Create a job: its topics, its first positions, its record.

        Args:
            spec: Specification of the job.
            origin: Checkpoint that the job starts from, already stored in its folder.
            request: Fingerprint of the request, stored unchanged.

        Raises:
            ConflictError: If the name belongs to a job, or to the history of an earlier one.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """

        def made(taken: JobRecord | FreeName | None) -> JobRecord:
            incarnation = self._check_new(spec, taken)
            beginning = "" if origin is None else f"begins with {origin}"
            reason = f"submitted, {beginning}" if beginning else "submitted"
            now_s = self._clock()
            earlier = () if taken is None else _earlier(taken.changes)
            record = JobRecord(
                spec,
                "running",
                by_stream(first_positions(spec, self._log)),
                reason,
                now_s,
                origin,
                changes=(*earlier, change_by(self.by, now_s, "submitted", beginning)),
                request=request,
                incarnation=incarnation,
                seal=token_hex(16),
            )
            _check_size(record)
            self._make_topics(record)
            return record

        # Opening a writer makes the log connect to its brokers while the topics are created.
        with closing(self._log.writer()):
            return self._write(spec.name, made)

    def patch(
        self,
        job: str,
        reason: str,
        *,
        changed: Mapping[str, Value] = {},
        wanted: Wanted | None = None,
        after_loss: AfterLoss | None = None,
        revision: int | None = None,
    ) -> JobRecord:
        """Change settings of a job and its wanted state as one change, or not at all.

        Args:
            job: Name of the job.
            reason: Reason that the person gave. A record keeps `REASON_CHARACTERS` of it, a change
                `changes.REASON_CHARACTERS`.
            changed: Settings by name, as in `common.jobs.edit`: `deadline_s` (None for none,
                otherwise counted from the submission), `group_size`, `batch_size`, `learning_rate`,
                `oom`, and whole blocks. Equal settings change nothing.
            wanted: Optional. If unset, the wanted state stays. A stopped job can be resumed where
                it was. A finished job that is to stop stays finished.
            after_loss: Optional. If set, resume the job with what is left. If the job's control or
                updates topic was deleted, it is created again, empty.
            revision: Optional. If set, refuse to change any other revision.

        Raises:
            NotFoundError: If there is no such job.
            UserError: If a field cannot be changed to this value. The message names the field.
            ConflictError: If the job has another revision, or `after_loss` is given for a job that
                neither is held nor waits for a checkpoint.
            OutsideError: If Kafka does not permit the creation of a topic.
            UnavailableError: If Kafka is unavailable for long.
        """

        def patched(record: JobRecord) -> JobRecord:
            if revision is not None:
                check_revision(record, revision)
            record = self._changed(record, changed, reason)
            if after_loss is not None:
                return self._resumed(record, reason, after_loss)
            if wanted in (None, record.wanted):
                return record
            return self._wanted(record, wanted, reason)

        return self._update(job, patched)

    def note(self, job: str, action: str, reason: str) -> None:
        """Record what a person did to a job elsewhere, for example to its quarantined batches.

        Args:
            job: Id of the job.
            action: Past participle, such as "requeued".
            reason: Details, cut off after `changes.REASON_CHARACTERS`.

        Raises:
            NotFoundError: If there is no such job. Its name may belong to another one.
            UnavailableError: If Kafka is unavailable for long.
        """
        name = topics.job_name(job)
        self._update(name, lambda record: self._noted(record, action, reason, self.by), job)

    def delete(self, job: str) -> None:
        """Delete a stopped job. Its name stays taken by its history and its checkpoints.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If the job is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """

        def deleted(entry: JobRecord | FreeName | None) -> FreeName:
            record = _stopped(self._job(job, entry))
            last = change_by(self.by, self._clock(), "deleted", revision=record.revision)
            return FreeName(record.incarnation, _earlier((*record.changes, last)))

        self._write(job, deleted)

    def free(self, job: str) -> None:
        """Free a name. If it has a stopped job, delete the job.

        Raises:
            ConflictError: If the job is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """
        incarnation = 1 + incarnation_of(self.table.read().get(job))

        def freed(entry: JobRecord | FreeName | None) -> JobRecord | FreeName:
            if entry is not None and incarnation_of(entry) >= incarnation:
                # Another purge has freed the name in the meantime.
                return entry
            if isinstance(entry, JobRecord):
                _stopped(entry)
            earlier = () if entry is None else entry.changes
            last = change_by(self.by, self._clock(), "purged")
            return FreeName(incarnation, _earlier((*earlier, last)))

        self._write(job, freed)

    def stopped(self, job: str) -> JobRecord:
        """Return a job, if it is stopped.

        Raises:
            NotFoundError: If there is no such job.
            ConflictError: If the job is not stopped.
            UnavailableError: If Kafka is unavailable for long.
        """
        return _stopped(self.get(job))

    def _check_new(self, spec: JobSpec, taken: JobRecord | FreeName | None) -> int:
        if isinstance(taken, JobRecord):
            raise ConflictError(
                f'name: there is already a job "{spec.name}", which is {taken.wanted}; choose'
                " another name"
            )
        _check_streams(spec, self._log)
        _check_group(spec)
        return incarnation_of(taken)

    def _wanted(self, record: JobRecord, wanted: Wanted, reason: str) -> JobRecord:
        if wanted == "stopped" and record.finished:
            return record
        record = self._noted(record, "resumed" if wanted == "running" else wanted, reason, self.by)
        reason = _reason(record, reason)
        return replace(record, wanted=wanted, reason=reason, held=False, detail="", finished=False)

    def _changed(self, record: JobRecord, changed: Mapping[str, Value], reason: str) -> JobRecord:
        spec = changed_spec(record.spec, changed)
        differs = differences(record.spec, spec)
        if not differs:
            return record
        _check_group(spec)
        record = replace(record, spec=spec, revision=record.revision + 1)
        return self._noted(record, "changed", reason, self.by, changed=differs)

    def _resumed(self, record: JobRecord, reason: str, after_loss: AfterLoss) -> JobRecord:
        if not record.held and not (after_loss.waits and record.wanted == "running"):
            # Otherwise the acceptance would apply to the next loss.
            name = record.spec.name
            raise ConflictError(
                f'after_loss: the job "{name}" is not held, so there is no loss to accept; resume'
                f" it with `doll job resume {name}`"
            )
        self._log.create_topics(_own_topics(record.id))
        record = self._noted(record, "resumed after loss", reason, self.by)
        return replace(
            record,
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
                    f'name: the topic {place.topic} has records of an earlier job "{spec.name}";'
                    f" choose another name. If Kafka has lost that job's record, {RESTORE}"
                )
        wanted = [*own, table_topic(topics.JOBS)]
        refused = list[str]()
        found = self._log.settings([topic.name for topic in wanted], refused)
        if refused:
            _log.warning("topic_settings_unknown", job=spec.name, reason="; ".join(refused))
        lossy = [each for each in topics.differences(wanted, found) if each.loses]
        # The topics existed before, or their settings were changed.
        if lossy:
            raise ConflictError(
                f"Kafka would lose records of the job: {'; '.join(map(str, lossy))}; correct these"
                f" settings and submit again: {topics.remedy(lossy)}"
            )


def _reason(record: JobRecord, given: str) -> str:
    """Return the reason for a record: the given one, or its last change in words."""
    last = record.changes[-1]
    return given[:REASON_CHARACTERS] or f"{last.action} by {last.by}"


def _earlier(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return the changes to earlier jobs that the next job of a name keeps."""
    return tuple(each for each in changes if each.action in LASTING)[-EARLIER_KEPT:]


def _stopped(record: JobRecord) -> JobRecord:
    """Return the job, if it is stopped.

    Raises:
        ConflictError: If it is not stopped.
    """
    if record.wanted != "stopped":
        name = record.spec.name
        raise ConflictError(
            f'the job "{name}" is {record.wanted}; stop it first, with `doll job stop {name}`'
        )
    return record


def _own_topics(job: str) -> list[NewTopic]:
    """Return the control and the updates topic of a job, from which its state follows."""
    names = (topics.control_topic(job), topics.updates_topic(job))
    return [NewTopic(name, kept_forever=True) for name in names]


def first_positions(spec: JobSpec, log: Log) -> LogPositions:
    """Return the position from which a job reads each partition, according to its `start_at`.

    Each position has its topic's id.

    Raises:
        UnavailableError: If Kafka is unavailable.
    """
    places = [place for stream in spec.streams for place in log.partitions(stream)]
    if spec.start_at == "latest" and spec.start_s is None:
        return _all(log.end_positions, places)
    # Read before the positions. Positions of a topic that was created again in between will not
    # agree with this id.
    found = log.describe(spec.streams)
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
    """Return Kafka's answer about partitions that are known to exist.

    Raises:
        UnavailableError: If the answer does not cover all of them.
    """
    found = ask(places)
    if len(found) < len(places):
        silent = ", ".join(str(place) for place in places if place not in found)
        raise UnavailableError(
            f"Kafka did not return the first or last offsets of these partitions: {silent}"
        )
    return found


def _check_streams(spec: JobSpec, log: Log) -> None:
    """Refuse a job whose data streams do not exist.

    Raises:
        UserError: If a stream does not exist. The message says how to create it.
    """
    for stream in spec.streams:
        try:
            log.partitions(stream)
        except UnknownTopicError as error:
            raise UserError(
                f'job file: streams: there is no topic "{stream}" in Kafka; create it, for'
                f" example with `doll produce SOURCE --topic {stream} --create-partitions 4`"
            ) from error


def _check_group(spec: JobSpec) -> None:
    """Refuse a K that would make the record of an update too large for Kafka.

    Raises:
        UserError: If K is too large. The message has the largest allowed K.
    """
    most = most_group_size(spec.streams)
    if spec.largest_group > most:
        raise UserError(
            f"job file: group_size: must be at most {most}, got {spec.largest_group}, because the"
            " record of an update names all of its batches and must fit into 1 MB; use larger"
            " batches (batch_size) instead"
        )


def _check_size(record: JobRecord) -> None:
    """Refuse a job's first record if it leaves no room for later additions.

    Raises:
        UserError: If it is too large.
    """
    size = len(encode_entry(record))
    if size > SUBMITTED_BYTES:
        raise UserError(
            f"job file: streams: the job's record, with {len(record.first)} partitions, must have"
            f" at most {SUBMITTED_BYTES} bytes, got {size}; split it into jobs with fewer streams"
        )
