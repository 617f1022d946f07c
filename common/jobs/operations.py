"""What people do to jobs: submit, change, resume, delete. Services change records in `JobStore`."""

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
# Of a job's first record. All that is added later, changes and a hold, is 200,000 at most, and
# Kafka's producers write 1,000,000: so who holds a job or changes it finds room.
SUBMITTED_BYTES = 700_000
# Changes that made or deleted earlier jobs of a name.
EARLIER_KEPT = 10


class AfterLoss(NamedTuple):
    """What an operator accepts for a job that Kafka lost records of."""

    from_start: bool = False  # version 0, if no other is left
    read_from: ReadFrom = ""  # for streams' topics that were created anew
    waits: bool = False  # a coordinator said lately that the job waits for a checkpoint


class JobOperations(JobStore):
    """A job store for people.

    Attributes:
        by: Who makes changes: the user of this process, unless `acting` says otherwise.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time) -> None:
        super().__init__(log, clock)
        self.by: Author = local_user()

    def acting(self, by: Author) -> JobOperations:
        """Return this store for changes by somebody else, such as the caller of a request."""
        store = copy(self)
        store.by = by
        return store

    def past_ids(self, name: str) -> list[str]:
        """The ids of jobs that had a name before.

        Raises:
            UnavailableError: If Kafka is unavailable for long.
        """
        now = incarnation_of(self.table.read().get(name))
        return [topics.job_id(name, each) for each in range(1, now)]

    def check_new(self, spec: JobSpec) -> int:
        """Check that a job can be submitted; returns which one of its name it will be.

        Raises:
            ConflictError: If its name is taken.
            UserError: If a stream does not exist.
            UnavailableError: If Kafka is unavailable for long.
        """
        return self._check_new(spec, self.table.read().get(spec.name))

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

        # This writer makes the log find its brokers while the topics are created.
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
        """Change settings of a job and what is wanted of it as one change, or nothing.

        Args:
            job: Name of the job.
            reason: Reason of the person. A record keeps `REASON_CHARACTERS` of it, a change
                `changes.REASON_CHARACTERS`.
            changed: Settings by name, as in `common.jobs.edit`: `deadline_s` (None for none,
                otherwise counted from the submission), `group_size`, `batch_size`,
                `learning_rate`, and whole blocks. Equal settings change nothing.
            wanted: Optional. If unset, or wanted already, it stays. A stopped job can be resumed
                where it was; a finished job that is to stop stays as it is.
            after_loss: Optional. If set, resume the job with what is left. A control or updates
                topic of the job that was deleted is created again, empty.
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
                check_revision(record, revision)
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
        self._update(name, lambda record: self._noted(record, action, reason, self.by), job)

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
        incarnation = 1 + incarnation_of(self.table.read().get(job))

        def freed(entry: JobRecord | FreeName | None) -> JobRecord | FreeName:
            if entry is not None and incarnation_of(entry) >= incarnation:
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

    def _check_new(self, spec: JobSpec, taken: JobRecord | FreeName | None) -> int:
        if isinstance(taken, JobRecord):
            raise ConflictError(
                f'the name "{spec.name}" belongs to a job that is {taken.wanted}: choose another'
                " name"
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
                f'the job "{name}" is not held: there is no loss for it to go on after; resume it'
                f" with `doll job resume {name}`"
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


def _reason(record: JobRecord, given: str) -> str:
    """Return the reason of a record: that which was given, or its last change in words."""
    last = record.changes[-1]
    return given[:REASON_CHARACTERS] or f"{last.action} by {last.by}"


def _earlier(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return what the next job of a name says of those before."""
    return tuple(each for each in changes if each.action in LASTING)[-EARLIER_KEPT:]


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


def _check_streams(spec: JobSpec, log: Log) -> None:
    """Refuse a job whose datastreams do not exist.

    Raises:
        UserError: Naming the stream and how to make it.
    """
    for stream in spec.streams:
        try:
            log.partitions(stream)
        except UnknownTopicError as error:
            raise UserError(
                f'job file: streams: there is no topic "{stream}" in this Kafka; create it, for'
                f" example with `doll produce SOURCE --topic {stream} --create-partitions 4`"
            ) from error


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
    size = len(encode_entry(record))
    if size > SUBMITTED_BYTES:
        raise UserError(
            f"job file: streams: the job and where its {len(record.first)} partitions begin take"
            f" {size} bytes in the jobs topic, and {SUBMITTED_BYTES} fit: split it into jobs of"
            " fewer streams"
        )
