"""The specification of a job: what a person posts, checked whole before anything starts."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from common import topics
from common.complaints import complaint, field_names
from common.errors import GivenError, UnknownTopicError, UserError
from common.job_file import as_json, load_text
from common.job_parts import (
    BUILT_IN_TASKS,
    CheckpointSpec,
    Count,
    EvaluationSpec,
    HotSnapshotSpec,
    Needed,
    OptimizerSpec,
    Part,
    Positive,
    ProvisioningSpec,
    RecordsSpec,
    Seconds,
    Share,
    StopSpec,
    SyncSpec,
    TaskSpec,
)
from common.learning.task_options import options_of
from common.names import check_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from common.ports import Log
    from common.theory.policy import PolicyName

_Stream = Annotated[str, Field(json_schema_extra={"pattern": f"^{topics.STREAM.pattern}$"})]


class JobSpec(Part):
    """One training job."""

    name: str = Field(json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,99}$"})
    streams: tuple[_Stream, ...] = Field(min_length=1)  # one Kafka topic per datastream
    records: RecordsSpec
    task: TaskSpec
    batch_size: Count  # b
    group_size: Count  # K
    sync: SyncSpec = SyncSpec()
    optimizer: OptimizerSpec
    reduction: Literal["mean", "sum"] = "mean"  # of the samples of an update, before the step
    seed: int = Field(default=0, ge=0, lt=2**63)
    stop: StopSpec = StopSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    hot_snapshot: HotSnapshotSpec = HotSnapshotSpec()
    on_preemption: Literal["reassign", "hold"] = "reassign"
    on_missing: Literal["redispatch", "proceed"] = "redispatch"
    start_at: str = "earliest"  # or "latest", or a time with its zone
    batch_linger_s: Seconds | None = None  # close a partial batch after so long; None: never
    group_linger_s: Seconds | None = None  # apply a partial group after so long; None: never
    waiting_batches: Count | None = None  # bound per worker; see `waiting_bound`
    memory_mib: Count = 256  # of batches that a worker keeps decoded; past it only addresses stay
    deadline_floor_s: Positive = 0.5  # shortest time that a worker gets for its part of an update
    strikes: Count = 5  # deaths, errors or non-finite results of a batch alone, until quarantine
    # So much poison is a fault of the task, not of the data: the job is held, see docs/tasks.md.
    poison_in_a_row: Count = 3  # poison batches without an applied update between them
    poison_share: Share = 0.1  # of the last hundred settled batches; more than this is too much
    # Skipped or quarantined, of the last 10,000 records: above it the job's state is "degraded".
    degraded_share: float = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: bool = False
    weight: Positive = 1.0  # its share of the workers where jobs need more of them than there are
    provisioning: ProvisioningSpec | None = None
    evaluation: EvaluationSpec | None = None

    @property
    def waiting_bound(self) -> int:
        """Unsettled batches that a worker may own: at least K, so that one survivor fills a group.

        2K unless said: a lone survivor gathers the next group while it computes this one; with K
        alone its stream would stand still during every round.
        """
        return self.waiting_batches or 2 * self.group_size

    @property
    def policy(self) -> PolicyName | None:
        """Who decides on its machines; None where they are not rented."""
        if self.provisioning is None:
            return None
        fitting: PolicyName = "adaptive" if self.on_preemption == "hold" else "reassign"
        return self.provisioning.policy or fitting

    @property
    def start_s(self) -> float | None:
        """The time of `start_at` in seconds since 1970, or None where it is a word."""
        return None if self.start_at in _START_WORDS else _instant(self.start_at)

    @property
    def task_options(self) -> dict[str, Any]:
        """The task's options; sizes that are not given are those of the record's fields."""
        return self.record_sizes | self.task.options

    @property
    def record_sizes(self) -> dict[str, int]:
        """Options of a built-in task that are sizes, as the record's fields have them."""
        return {
            option: size
            for name, needed in self._needed_fields.items()
            for option, size in zip(needed.sizes, self.records.fields[name].shape, strict=True)
        }

    @property
    def _needed_fields(self) -> dict[str, Needed]:
        return BUILT_IN_TASKS.get(self.task.name or "", {})

    @field_validator("name")
    @classmethod
    def _legal_name(cls, value: str) -> str:
        return check_name(value)

    @field_validator("streams")
    @classmethod
    def _legal_streams(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for stream in value:
            topics.check_stream(stream)
            if value.count(stream) > 1:
                raise ValueError(f"{stream!r} is named twice")
        return value

    @field_validator("start_at")
    @classmethod
    def _legal_start(cls, value: str) -> str:
        if value not in _START_WORDS:
            _instant(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.waiting_batches is not None and self.waiting_batches < self.group_size:
            raise ValueError(
                f"waiting_batches: must be at least group_size ({self.group_size}), so that one"
                f" worker can fill a group, got {self.waiting_batches}"
            )
        test = self.evaluation.stream if self.evaluation is not None else ""
        if test and not topics.STREAM.fullmatch(test):
            raise ValueError(f"evaluation.stream: {test!r} cannot be a Kafka topic")
        if test in self.streams:
            raise ValueError(
                f"evaluation.stream: the job learns from {test!r} itself: name a topic of records"
                " that it never sees"
            )
        if self.policy == "reassign" and self.on_preemption == "hold":
            raise ValueError(
                "provisioning.policy: reassign leaves slots without a machine, whose streams nobody"
                " would ever read: add `on_preemption: reassign`"
            )
        for name, needed in self._needed_fields.items():
            found = self.records.fields.get(name)
            if found is None:
                raise ValueError(f"records.fields.{name}: is missing; {self.task.name} needs it")
            if found.dtype not in needed.dtypes or len(found.shape) != len(needed.sizes):
                raise ValueError(
                    f"records.fields.{name}: {self.task.name} needs {needed.words},"
                    f" got {found.dtype} {list(found.shape)}"
                )
        return self


_START_WORDS = ("earliest", "latest")


def _instant(value: str) -> float:
    try:
        instant = datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(
            f"must be earliest, latest or a time such as 2026-01-31T12:00:00Z, got {value!r}"
        ) from error
    if instant.tzinfo is not None and instant.timestamp() < 0:
        raise ValueError(f"the time {value!r} is before 1970")
    if instant.tzinfo is None:
        raise ValueError(f"the time {value!r} needs its zone, such as {value}Z")
    return instant.timestamp()


def parse_job(text: str, allowed_tasks: Collection[str] = ()) -> JobSpec:
    """Read a job from YAML or JSON.

    Args:
        text: The job file.
        allowed_tasks: Entrypoints that may be used besides the built-in tasks (DOLL_TASKS).

    Raises:
        UserError: In one line, with the field's path, what was found and what is allowed.
    """
    spec = job_from_json(as_json(load_text(text)))
    check_task(spec, allowed_tasks)
    return spec


def check_options(spec: JobSpec) -> None:
    """Refuse options that make no sense for a built-in task.

    Raises:
        GivenError: By the field.
    """
    if spec.task.name:
        try:
            options_of(spec.task.name, spec.task_options)
        except UserError as error:
            raise GivenError(("task",), str(error)) from error
    for option, size in spec.record_sizes.items():
        given = spec.task.options.get(option, size)
        if given != size:
            problem = (
                f"the records have {size}, got {given}: change the field or the options of the task"
            )
            raise GivenError((f"task.{option}",), problem)


def check_task(spec: JobSpec, allowed_tasks: Collection[str]) -> None:
    """Refuse a task that is neither built in, with options that make sense, nor allowed.

    Raises:
        UserError: Naming it and what is allowed.
    """
    check_options(spec)
    entrypoint = spec.task.entrypoint
    if entrypoint and entrypoint not in allowed_tasks:
        raise UserError(
            f'job file: task.entrypoint: "{entrypoint}" is not on the allow-list'
            f" ({', '.join(sorted(allowed_tasks)) or 'which is empty'}); add it to DOLL_TASKS here"
            " and on the workers"
        )


def job_from_json(text: str | bytes) -> JobSpec:
    """Read a job that was checked against an allow-list elsewhere, as the jobs topic holds it.

    Raises:
        UserError: As `parse_job`.
    """
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        told = complaint(error, allowed=partial(field_names, JobSpec))
        raise UserError(f"job file: {told}") from error


def check_streams(spec: JobSpec, log: Log) -> None:
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
