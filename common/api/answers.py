"""Models of the API's responses, which make the OpenAPI document, for both ends of a connection.

The admin service creates them, its events carry them, and the command line reads them, or creates
them itself if it reaches Kafka. Times are seconds since 1970. Values that are not known (no leader,
Redis unavailable) are null, never 0.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from common.core.messages import (
    SynchronisationMode,
    Wanted,
)
from common.jobs.progress import Count, Numbers, Stream, StreamAnswer, Word
from common.jobs.quarantine import Outcome, QuarantinedBatchAnswer  # noqa: TC001 -- pydantic needs it
from common.jobs.spec import JobSpec  # noqa: TC001 -- pydantic needs it

Metrics = dict[str, float]
# `unknown`: the machine was started by hand.
MachineKind = Literal["on-demand", "spot", "unknown"]
WorkerStatus: TypeAlias = Literal["alive", "leaving", "silent", "unknown"]

# Fields that several responses share.
Job = Annotated[str, Field(description="Name of the job.", examples=["digits"])]
Version = Annotated[
    int,
    Field(
        ge=0,
        description="Version of the model (J): number of updates (optimizer steps) that it"
        " contains.",
    ),
]
Epoch = Annotated[
    int,
    Field(
        ge=0,
        description="Epoch of the job's leader (a coordinator) that made this version of the"
        " model. Each new leader has a higher epoch than all leaders before it.",
    ),
]
ModelEpoch = Annotated[
    int,
    Field(
        ge=-1,
        description="Epoch of the job's leader (a coordinator) that made this version of the"
        " model. Each new leader has a higher epoch than all leaders before it. -1 for the initial"
        " weights, which no leader made.",
    ),
]
Reason = Annotated[str, Field(description="Reason for the job's desired state (`wanted`).")]
Revision = Annotated[
    int, Field(ge=0, description="Number of times that the job's settings were changed.")
]
SetTo = Annotated[
    Wanted,
    Field(
        description="Desired state of the job: also `paused` if DOLL holds the job until a person"
        " decides, and `stopped` if the job has finished."
    ),
]
Slot = Annotated[
    int,
    Field(
        ge=0,
        description="Number, from 0, of the slot that the machine fills. A job has one slot for"
        " each worker that it needs.",
    ),
]
Pool = Annotated[
    str,
    Field(
        description="Name of the pool of machines that the machine was rented from. A pool is"
        " machines of one kind at one price; the file that DOLL_MARKET names lists all pools.",
        examples=["on-demand"],
    ),
]
Kind = Annotated[
    MachineKind,
    Field(
        description="Kind of the machine: `on-demand`, or `spot` (cheaper, but the provider may"
        " take the machine away at any time). `unknown` if the machine was started by hand or its"
        " pool is not in the plan."
    ),
]
Spent = Annotated[
    float, Field(description="Cost of all machines of the job up to `at_s`, in US dollars.")
]


class Answer(BaseModel):
    """Base of all responses, which can be made from objects with attributes of the same names."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


# --- jobs ------------------------------------------------------------------------------------


class EvaluationAnswer(Answer):
    """Quality of the model in its most recent evaluation."""

    version: Count | None = Field(
        description="Version of the model that was last evaluated on the test set; null if none"
        " was."
    )
    at_s: float | None = Field(
        description="Time of the last evaluation on the test set, in seconds since 1970; null if"
        " there was none."
    )
    records: Count = Field(
        description="Number of records of the test set that were used in the last evaluation on"
        " it; 0 if there was none."
    )
    test: Metrics = Field(
        description="Loss and metrics of the last evaluation on the test set, by name, as means"
        " per record; empty if there was none.",
        examples=[{"accuracy": 0.97, "loss": 0.11}],
    )
    predicted: Count | None = Field(
        description="Newest version of the model that was evaluated on new records, before the"
        " model learned from them; null if none was."
    )
    prequential: dict[str, Metrics] = Field(
        description="By stream: loss and metrics of the model's predictions for new records,"
        " before the model learned from them, as means per record.",
        examples=[{"clinic-a": {"accuracy": 0.95, "loss": 0.16}}],
    )
    drifts: Count = Field(
        description="Number of drifts detected so far. A drift is a rise of the model's prediction"
        " errors for a stream. At most 200 are counted."
    )


class ProgressAnswer(Numbers, Answer):
    """Progress of a job."""

    done: str = Field(
        description="Reason why the job has stopped or finished; empty if it has not."
    )
    evaluation: EvaluationAnswer | None = Field(
        default=None, description="Most recent evaluation of the model; null if there is none yet."
    )


class ChangeAnswer(Answer):
    """A change of a job's settings or desired state, by a person or by the job's coordinator."""

    at_s: float = Field(description="Time of the change, in seconds since 1970.")
    action: str = Field(
        description="Kind of change, such as `paused`, `resumed` or `changed`. `submitted`,"
        " `deleted` and `purged` may refer to earlier jobs of the same name.",
        examples=["paused"],
    )
    by: str = Field(
        description="Author of the change: name of an API key, a person who signed in, a local"
        " user, or `coordinator`."
    )
    role: str = Field(
        description="Role of the author of the change, such as `operator`; `cli` for a command"
        " that writes to Kafka directly."
    )
    revision: Count = Field(
        description="Revision of the job's settings after the change: number of changes of"
        " settings so far."
    )
    changed: dict[str, float | int | str | dict[str, Any] | None] = Field(
        description="New value of each setting of the job file, or block of settings, that"
        " changed; empty if none did.",
        examples=[{"group_size": 10, "synchronisation": {"mode": "stale"}}],
    )
    reason: str = Field(
        description="Reason that the author gave for the change; empty if none. For requeued"
        " batches: their numbers."
    )


class OriginAnswer(Answer):
    """The checkpoint of another job whose model this job started from."""

    job: Annotated[
        str,
        Field(description="Name of the job that wrote the checkpoint.", examples=["digits"]),
    ]
    epoch: Epoch
    version: Version
    sha256: str = Field(
        description="SHA-256, in hexadecimal, of the checkpoint as it was copied to the new job's"
        " folder in object storage."
    )


class JobAnswer(Answer):
    """A training job: its job file, state, history of changes and progress."""

    id: Job
    wanted: SetTo
    reason: Reason
    detail: str = Field(
        default="",
        description="If DOLL holds the job until a person decides: details of the reason, such as"
        " a traceback; otherwise empty.",
    )
    submitted_s: float = Field(
        description="Time at which the job was submitted, in seconds since 1970."
    )
    deadline_s: float | None = Field(
        description="Deadline of the job, in seconds since 1970; null if it has none."
    )
    revision: Revision
    changes: tuple[ChangeAnswer, ...] = Field(description="Changes of the job, oldest first.")
    spec: JobSpec = Field(
        description="Job file of the job, with all defaults filled in and all changes applied."
    )
    first: tuple[tuple[str, Count, Count], ...] = Field(
        default=(),
        description="For each partition of the job's streams: topic, partition, and offset of the"
        " first record that the job reads.",
    )
    origin: OriginAnswer | None = Field(
        default=None,
        description="Checkpoint of another job that this job started from; null if it started from"
        " initial weights.",
    )
    notes: tuple[str, ...] = Field(
        default=(),
        description="Warnings about accepted settings of the job file that may not have the"
        " intended effect.",
    )
    state: Word = Field(
        description="Current state of the job. docs/reference/job-states.md defines each state."
    )
    why: str = Field(
        default="",
        description="Reason why the job is in its current `state`, in one line; empty if there is"
        " none.",
    )
    progress: ProgressAnswer = Field(
        description="Progress of the job: version and loss of the model, records trained and lost,"
        " and lag."
    )


class SubmittedJob(JobAnswer):
    """A job that was just submitted."""

    checked: bool = Field(
        description="True if the job's task was built and the size of its model was checked before"
        " the job was accepted."
    )
    unchecked: str = Field(
        default="",
        description="Reason why the job was accepted without a check of its task; empty if the"
        " task was checked.",
    )
    beginning: str = Field(
        default="",
        description="Parts, such as the weights, that the job takes from the checkpoint of another"
        " job that it starts from; empty if it starts from initial weights.",
    )


class JobSummary(Answer):
    """A job as one row in the list of jobs."""

    id: Job
    wanted: SetTo
    reason: Reason
    submitted_s: float = Field(
        description="Time at which the job was submitted, in seconds since 1970."
    )
    streams: tuple[str, ...] = Field(description="Kafka topics that the job reads.")
    task: str = Field(
        description="Task that the job learns: name of a built-in task, or the class"
        " (`package.module:Class`) of another one."
    )
    batch_size: int = Field(description="Number of records per batch (b).")
    group_size: int = Field(description="Number of batches per update of the model (K).")
    provisioned: bool = Field(
        description="True if DOLL rents the job's machines; false if workers are started by hand."
    )
    state: Word = Field(
        description="Current state of the job. docs/reference/job-states.md defines each state."
    )
    why: str = Field(
        description="Reason why the job is in its current `state`, in one line; empty if there is"
        " none."
    )
    version: Count | None = Field(
        description="Newest version of the model (J): number of updates so far; null if unknown."
        " Progress of a job that is not running may be up to a minute old."
    )
    loss: float | None = Field(
        description="Mean loss per record over the last 20 updates; null if unknown."
    )
    accuracy: float | None = Field(
        description="Mean accuracy over the last 20 updates, on records before the model learned"
        " from them; null if unknown or if the task does not measure accuracy."
    )
    updates_per_s: float | None = Field(
        description="Updates of the model per second over the last 10 seconds; null if unknown."
    )
    workers: Count | None = Field(
        description="Number of the job's workers that send heartbeats; null if unknown."
    )
    lag: Count | None = Field(
        description="Number of records in the job's streams that no update of the model contains"
        " yet; null if unknown."
    )
    skipped: Count | None = Field(
        description="Number of records of the job's streams that could not be decoded and were"
        " skipped; null if unknown."
    )
    quarantined: Count | None = Field(
        description="Number of batches that were given up without training (quarantined), for"
        " example because the task fails on them; null if unknown."
    )
    expired: Count | None = Field(
        description="Number of records that Kafka deleted before the model was trained on them;"
        " null if unknown."
    )
    lost: Count | None = Field(
        description="Number of records that the model was trained on and that Kafka lost"
        " afterwards; null if unknown."
    )
    spent_usd: float | None = Field(
        default=None,
        description="Total cost of the job's machines so far, in US dollars; null if unknown, or if"
        " no machine was rented.",
    )
    whole: bool = Field(
        description="True if `skipped`, `quarantined`, `expired` and `lost` cover the job's entire"
        " history. False if Kafka no longer has the beginning of that history; the numbers then"
        " cover the rest."
    )


class RemainsAnswer(Answer):
    """Topics and files of all jobs of one name that a purge would remove, or has removed."""

    topics: dict[str, Count] = Field(
        description="Number of records in each Kafka topic that DOLL created for the jobs.",
        examples=[{"doll.digits.control": 8104}],
    )
    files: Count = Field(
        description="Number of the jobs' files in object storage, such as checkpoints."
    )
    kept: tuple[str, ...] = Field(
        description="Topics and files that could not be removed or listed, each with the reason."
        " Repeat the purge to remove them.",
        examples=[["files: DOLL_BLOBS names no object storage"]],
    )


class UnreadableRecord(Answer):
    """A stored job that cannot be read: its newest record in the Kafka topic `doll.jobs`."""

    id: str = Field(
        description="Key of the record in the Kafka topic `doll.jobs`, usually the name of a job."
        " That job continues with the record before this one."
    )
    offset: Count = Field(
        description="Offset of the unreadable record in the Kafka topic `doll.jobs`."
    )
    reason: str = Field(
        description="Reason why the record in the Kafka topic `doll.jobs` cannot be parsed."
    )


class JobList(Answer):
    """A page of the list of jobs."""

    jobs: tuple[JobSummary, ...] = Field(
        description="Jobs on this page of the list, in the requested order."
    )
    states: dict[Word, Count] = Field(
        default={},
        description="Number of jobs in each state, over all jobs, including those that do not"
        " match the request.",
        examples=[{"held": 3, "running": 12, "paused": 131}],
    )
    total: Count = Field(
        default=0, description="Number of jobs that match the request, over all pages."
    )
    unreadable: tuple[UnreadableRecord, ...] = Field(
        default=(),
        description="Stored jobs that cannot be read: records in the Kafka topic `doll.jobs`,"
        " where DOLL keeps all jobs, that cannot be parsed. Only the first page lists them.",
    )
    next: str | None = Field(
        default=None,
        description="Value of `after` for a request for the next page; null on the last page.",
    )


class QuarantineAnswer(Answer):
    """Quarantined batches of a job: batches that were given up without training."""

    batches: tuple[QuarantinedBatchAnswer, ...] = Field(
        description="Quarantined batches on this page of the list, oldest first."
    )
    next: Count | None = Field(
        description="Value of `after` for a request for the next page; null on the last page."
    )


class RequeuedBatchAnswer(Answer):
    """Outcome of a request to requeue a quarantined batch."""

    batch: Count = Field(
        description="Number of the batch: offset, in the job's control topic in Kafka, of the"
        " record that created it."
    )
    outcome: Outcome = Field(
        description="Outcome for the batch. `requeued`: it waits for training again; `before`: an"
        " earlier request had requeued it; `replayed`: it cannot be requeued, because its records"
        " were written to their stream again."
    )


class RequeueAnswer(Answer):
    """Outcome of a request to take batches out of quarantine."""

    batches: tuple[RequeuedBatchAnswer, ...] = Field(
        description="Outcome for each requested batch, in the order of their numbers; empty if no"
        " batch could be requeued."
    )


class DeadLetterAnswer(Answer):
    """Offsets, in a partition of a stream, of a dead letter: records that a job could not use."""

    partition: Count = Field(
        description="Partition of the stream (a Kafka topic) that contains the records of the dead"
        " letter."
    )
    offset: Count = Field(
        description="Offset of the first record of the dead letter in its partition of the stream."
    )
    end: Count = Field(
        description="Offset after the last record of the dead letter in its partition of the"
        " stream."
    )


class DeadLettersAnswer(Answer):
    """Dead letters of one stream with the same reason: records that a job could not use."""

    stream: str = Field(
        description="Kafka topic that the records of the dead letters were read from.",
        examples=["clinic-a"],
    )
    reason: str = Field(
        description="Reason why the records of the dead letters could not be used.",
        examples=["label: is missing"],
    )
    records: Count = Field(
        description="Number of records of the stream that could not be decoded for this reason."
    )
    batches: Count = Field(
        description="Number of dead letters of the stream with this reason that come from"
        " quarantined batches: one for each partition that a batch has records of."
    )
    replayed: Count = Field(
        description="Number of dead letters of the stream with this reason whose records were"
        " written to the stream again."
    )
    newest: tuple[DeadLetterAnswer, ...] = Field(
        description="The newest dead letters of the stream with this reason, at most 5, newest"
        " first, each as the partition and offsets of its records."
    )


class DeadLettersPage(Answer):
    """Dead letters of a job, from all of its streams: records that the job could not use."""

    reasons: tuple[DeadLettersAnswer, ...] = Field(
        description="Dead letters by stream and reason, at most `limit` entries. Within a stream,"
        " the most frequent reason comes first."
    )
    others: Count = Field(
        description="Number of dead letters that the response leaves out, because it lists only"
        " `limit` entries (an entry counts the dead letters of one stream and reason)."
    )


class UpdateAnswer(Answer):
    """An update of the model that was not rolled back after a failure of the coordinator."""

    version: Version
    epoch: Epoch
    at_s: float | None = Field(
        description="Time at which the update was written to Kafka, in seconds since 1970; null if"
        " unknown."
    )
    samples: Count = Field(
        description="Number of records in the update: those that the model was trained on in this"
        " step."
    )
    batches: Count = Field(
        description="Number of batches in the update: the job's `group_size` (K), or fewer for the"
        " reason in `short`."
    )
    loss: float = Field(
        description="Mean loss per record of the update, at the weights before the update."
    )
    gradient_s: float | None = Field(
        description="Mean time to compute the gradient of one batch of the update, in seconds;"
        " null if unknown."
    )
    revision: Count = Field(
        description="Revision of the job's settings that the update was made with: number of"
        " earlier changes of settings."
    )
    short: str = Field(
        description="Reason why the update has fewer batches than the job's `group_size` (K):"
        " `linger` (the time limit for a partial update), `missing` (batches of lost workers were"
        " left out) or `quarantined` (batches were given up). Empty if it has K batches."
    )
    metrics: Metrics = Field(
        description="Metrics of the update by name, such as accuracy: means per record, at the"
        " weights before the update."
    )
    mode: SynchronisationMode = Field(
        description="Synchronisation mode of the workers for this update: one of the values of"
        " `synchronisation.mode` in a job file."
    )
    stale: Count = Field(
        description="Staleness of the update: number of updates between the weights that its"
        " oldest gradient was computed with and the update itself."
    )


class UpdatesPage(Answer):
    """A page of the list of a job's updates of the model."""

    updates: tuple[UpdateAnswer, ...] = Field(
        description="Updates on this page of the list, by ascending version of the model."
    )
    next: Count | None = Field(
        description="Value of `after` for a request for the next page; null on the last page."
    )
    newest: Count = Field(
        description="Newest version of the model (J): number of updates of the job so far."
    )
    oldest: Count | None = Field(
        description="Version of the model of the oldest update that can still be listed; null if"
        " there is none."
    )


class KeptVersion(Answer):
    """A model version whose weights are kept, so that they can be downloaded."""

    version: Version
    epoch: ModelEpoch
    kept: str = Field(
        description="Checkpoint or snapshot that contains the weights of this version of the"
        " model.",
        examples=["the checkpoint 12-400"],
    )
    samples: Count = Field(
        description="Number of records in all updates of this version of the model."
    )
    loss: float | None = Field(
        description="Mean loss per record over the last updates before this version of the model;"
        " null if unknown. The version with the lowest loss is `best`."
    )
    test: Metrics = Field(
        description="Loss and metrics of this version of the model on the test set, by name, as"
        " means per record; empty if it was not evaluated."
    )


class KeptVersions(Answer):
    """Versions of a job's model whose weights are kept, so that they can be downloaded."""

    versions: tuple[KeptVersion, ...] = Field(
        description="Kept versions of the model, newest first."
    )


class DeviceAnswer(Answer):
    """The processor or GPU on which a worker computes."""

    kind: Literal["cpu", "cuda"] = Field(
        description="Kind of the device: `cuda` if it is a GPU, otherwise `cpu`."
    )
    name: str = Field(description="Model of the device.", examples=["NVIDIA L4"])
    memory_bytes: Count = Field(
        description="Memory of the GPU, or memory that the worker may use on the CPU, in bytes; 0"
        " if unknown."
    )
    driver: str = Field(description="Version of the GPU's driver; empty if unknown or no GPU.")
    capability: str = Field(
        description="CUDA compute capability of the GPU; empty if the device is no GPU.",
        examples=["8.9"],
    )


class WorkerAnswer(Answer):
    """A worker of a job, or a rented machine whose worker has not started yet."""

    name: str = Field(description="Name of the worker.")
    status: WorkerStatus = Field(
        description="Status of the worker. `alive`: it sends heartbeats; `leaving`: it is shutting"
        " down; `silent`: its machine is rented, but it does not send heartbeats, or not yet;"
        " `unknown`: Redis is unavailable."
    )
    slot: Count | None = Field(
        default=None,
        description="Number, from 0, of the slot that the worker's machine fills. A job has one"
        " slot for each worker that it needs. Null if the machine has no slot, or if none was"
        " rented for the worker.",
    )
    kind: Kind = "unknown"
    pool: str | None = Field(
        default=None,
        description="Name of the pool (machines of one kind at one price) that the worker's"
        " machine was rented from; null if none was rented.",
    )
    machine: str | None = Field(
        default=None,
        description="The provider's identifier of the worker's machine; null if unknown, or if"
        " none was rented.",
    )
    since_s: float | None = Field(
        default=None,
        description="Time at which the worker's machine started, in seconds since 1970; null if it"
        " has not started, or if none was rented.",
    )
    samples: Count = Field(
        default=0,
        description="Number of records in this worker's batches that entered updates in the last"
        " 10 seconds.",
    )
    member: bool | None = Field(
        default=None,
        description="True if the worker is a member of the group of workers that hold the weights"
        " and sum gradients; false if it is not; null if the coordinator does both.",
    )
    left_out: str | None = Field(
        default=None,
        description="Reason why the coordinator assigns no work to this worker; null if it assigns"
        " work.",
    )
    device: DeviceAnswer | None = Field(
        default=None,
        description="Device on which the worker computes; null if the worker has not reported it.",
    )


class WorkersAnswer(Answer):
    """All workers of a job."""

    workers: tuple[WorkerAnswer, ...] = Field(description="Workers of the job, by name.")
    board_away: str = Field(
        default="",
        description="Reason why the workers' heartbeats cannot be read from Redis; empty if they"
        " can.",
    )


class StreamsAnswer(Answer):
    """All data streams of a job."""

    streams: tuple[StreamAnswer, ...] = Field(
        description="Data streams of the job, in the order of the job file."
    )


# --- curves ----------------------------------------------------------------------------------


class LagCurve(Answer):
    """Lag of a data stream over time."""

    stream: Stream
    lag: tuple[int | None, ...] = Field(
        description="Number of records of the stream that no update of the model contains yet, at"
        " each time of `lag_at_s`; null if unknown."
    )


class Life(Answer):
    """Lifetime of one of the job's machines, for a timeline."""

    slot: Slot
    worker: str = Field(description="Name of the worker that the machine runs.")
    pool: Pool
    kind: Kind
    from_s: float = Field(
        description="Time at which the machine started, in seconds since 1970. If it never"
        " started, the time at which it was ordered."
    )
    to_s: float | None = Field(
        description="Time at which the machine ended, in seconds since 1970; null if it is running."
    )
    cause: Literal["preempted", "released", "failed", "refused", "lost"] | None = Field(
        default=None,
        description="Reason why the machine ended, such as `preempted` (taken away by the"
        " provider); null if it is running.",
    )


class PrequentialCurve(Answer):
    """Quality of predictions for a stream's records before the model learned from them."""

    stream: Stream
    at_s: tuple[float, ...] = Field(
        description="Time of each evaluation of the stream's predictions, in seconds since 1970,"
        " in ascending order."
    )
    version: tuple[int, ...] = Field(
        description="Version of the model at each evaluation in `at_s`."
    )
    metrics: dict[str, tuple[float | None, ...]] = Field(
        description="By metric: the mean per record of the stream at each evaluation in `at_s`;"
        " null if unknown."
    )


class DriftAnswer(Answer):
    """A rise of the model's prediction errors for a stream; also the data of the event `drift`."""

    stream: Stream
    version: Count = Field(description="Version of the model at which the drift was detected.")
    at_s: float = Field(description="Time at which the drift was detected, in seconds since 1970.")
    before: float = Field(
        description="Mean prediction error per record of the stream before the drift, from 0 to 1."
    )
    after: float = Field(
        description="Mean prediction error per record of the stream after the drift, from 0 to 1."
    )


class EvaluationCurves(Answer):
    """Results of evaluations of the model over time."""

    at_s: tuple[float, ...] = Field(
        default=(), description="Time of each evaluation on the test set, in seconds since 1970."
    )
    version: tuple[int, ...] = Field(
        default=(), description="Version of the model that was evaluated, at each time in `at_s`."
    )
    test: dict[str, tuple[float | None, ...]] = Field(
        default={},
        description="By metric: the mean per record of the test set at each evaluation in `at_s`;"
        " null if unknown.",
    )
    prequential: tuple[PrequentialCurve, ...] = Field(
        default=(),
        description="For each stream, the quality of predictions for new records before the model"
        " learned from them.",
    )
    drifts: tuple[DriftAnswer, ...] = Field(
        default=(),
        description="Rises of the model's prediction errors that were detected, at most the last"
        " 200.",
    )


class SwitchAnswer(Answer):
    """An update whose synchronisation mode differs from that of the update before it."""

    version: Version
    at_s: float | None = Field(
        description="Time of the update, in seconds since 1970; null if unknown."
    )
    mode: SynchronisationMode = Field(
        description="Mode of `synchronisation` in the job file that applies from this update on."
    )


class CurvesAnswer(Answer):
    """A job's history as curves of about 2,000 points: columns of equal length."""

    now_s: float = Field(description="Time at which the curves were made, in seconds since 1970.")
    update_at_s: tuple[float, ...] = Field(
        description="Time of each update of the model that the curves contain, in seconds since"
        " 1970."
    )
    version: tuple[int, ...] = Field(
        description="Version of the model at each point of `update_at_s`."
    )
    loss: tuple[float, ...] = Field(
        description="Mean loss per record of the update at each point of `update_at_s`."
    )
    metrics: dict[str, tuple[float | None, ...]] = Field(
        description="By metric: the mean per record of the update at each point of `update_at_s`;"
        " null if the update does not have the metric."
    )
    updates_per_s: tuple[float, ...] = Field(
        description="Updates of the model per second over the 10 seconds before each point of"
        " `update_at_s`."
    )
    lag_at_s: tuple[float, ...] = Field(
        description="Time of each measurement of the lag of the job's streams, in seconds since"
        " 1970."
    )
    lag: tuple[LagCurve, ...] = Field(
        description="Lag of each stream of the job over time, in records."
    )
    lives: tuple[Life, ...] = Field(
        description="Lifetimes of the job's machines, in the order of their launch."
    )
    cost_at_s: tuple[float, ...] = Field(
        description="Time of each periodic review of the cost of the job's machines, in seconds"
        " since 1970."
    )
    spent_usd: tuple[float, ...] = Field(
        description="Cost of all machines of the job until each time of `cost_at_s`, in US dollars."
    )
    on_demand_only_usd: tuple[float, ...] = Field(
        description="Cost that the updates until each time of `cost_at_s` would have had with only"
        " on-demand machines, in US dollars."
    )
    stability: tuple[float, ...] = Field(
        description="Rate of records that the job's machines can process divided by the rate of"
        " arriving records, at each time of `cost_at_s`. Below 1, the lag grows."
    )
    running: tuple[int, ...] = Field(
        description="Number of running machines of the job at each time of `cost_at_s`."
    )
    evaluation: EvaluationCurves = Field(
        description="Results of evaluations of the model over time."
    )
    switches: tuple[SwitchAnswer, ...] = Field(
        default=(),
        description="Updates at which the mode of `synchronisation` changed, at most the last 200.",
    )


# --- provisioning ----------------------------------------------------------------------------


class BelievedAnswer(Answer):
    """An estimate used to decide which machines to rent, such as the arrival rate of records."""

    value: float = Field(
        description="Estimated value, in the unit that the end of the estimate's name says:"
        " `per_s` per second, `_s` seconds, `_mb` megabytes; an `availability` is a share from 0"
        " to 1."
    )
    std: float = Field(description="Standard deviation of the estimate, in the unit of `value`.")
    low: float = Field(
        description="Lower end of the interval that contains the true value with probability 0.9,"
        " in the unit of `value`."
    )
    high: float = Field(
        description="Upper end of the interval that contains the true value with probability 0.9,"
        " in the unit of `value`."
    )


Estimates = Annotated[
    dict[str, BelievedAnswer],
    Field(
        description="Estimates that the policy uses to decide which machines to rent, by name,"
        " such as `arrivals_per_s` (records per second) and `availability.<pool>` (share of the"
        " time that a spot machine of the pool runs)."
    ),
]
Stability = Annotated[
    float,
    Field(
        description="Rate of records that the job's machines can process divided by the rate of"
        " arriving records. Below 1, the lag grows."
    ),
]
Warned = Annotated[
    str, Field(description="Problem with the job's rented machines; empty if there is none.")
]


class PlanInForce(Answer):
    """A plan of the machines to rent for a job; also the data of the event `plan`."""

    number: Count = Field(description="Number of the plan among the job's plans, from 1.")
    at_s: float = Field(description="Time at which the plan was made, in seconds since 1970.")
    policy: str = Field(
        description="Policy (rule that decides which machines to rent) that made the plan.",
        examples=["adaptive"],
    )
    why: str = Field(
        description="Event that caused the plan, such as the start of the job, a changed price or"
        " a request."
    )
    reason: str = Field(description="Reason why the policy chose this plan; a sentence for people.")
    feasible: bool = Field(description="True if the plan is expected to meet the job's deadline.")
    binding: str = Field(
        description="Limit that keeps the plan from being cheaper: for example, `deadline` if it"
        " would be missed, or `capacity` if a pool has no more machines.",
        examples=["deadline"],
    )
    spot: Count = Field(description="Number of workers that the plan runs on spot machines (N_s).")
    on_demand: Count = Field(description="Number of on-demand machines in the plan.")
    places: dict[str, Count] = Field(
        description="Number of machines that the plan rents from each pool (machines of one kind"
        " at one price). `none` counts workers without a machine."
    )
    updates_left: float = Field(
        description="Number of updates of the model until the job is done, at the time of the plan."
    )
    deadline_left_s: float | None = Field(
        description="Seconds until the job's deadline, at the time of the plan; null if the job"
        " has none."
    )
    spent_usd: float = Field(
        description="Cost of all machines of the job until the time of the plan, in US dollars."
    )
    expected_cost_usd: float = Field(
        description="Expected cost of the job's remaining updates with this plan, in US dollars."
    )
    transfer_usd: float = Field(
        description="Part of `expected_cost_usd` for network traffic between machines and servers,"
        " in US dollars."
    )
    expected_runtime_s: float = Field(
        description="Expected time for the job's remaining updates with this plan, in seconds."
    )
    on_demand_only_usd: float = Field(
        description="Expected cost of the job's remaining updates with only on-demand machines, in"
        " US dollars."
    )
    predicted_usd: float = Field(
        description="Predicted cost of the machines for the whole job, in US dollars: the cost"
        " until the plan plus the expected remaining cost, without network traffic."
    )
    stability: Stability
    usd_per_hour: dict[str, float] = Field(
        description="Price of one machine of each pool (machines of one kind at one price) at the"
        " time of the plan, in US dollars per hour."
    )
    believed: Estimates
    warning: Warned


class CostAnswer(Answer):
    """Cost of a job's machines so far, compared with on-demand machines and with its plan."""

    at_s: float = Field(description="Time until which costs are counted, in seconds since 1970.")
    spent_usd: Spent
    on_demand_only_usd: float = Field(
        description="Cost that the job's updates so far would have had with only on-demand"
        " machines, in US dollars."
    )
    ratio_to_on_demand: float | None = Field(
        description="`spent_usd` divided by `on_demand_only_usd`; null if the latter is 0."
    )
    predicted_usd: float | None = Field(
        description="Predicted cost of the machines for the whole job, by the current plan, in US"
        " dollars; null if there is no plan."
    )
    ratio_to_prediction: float | None = Field(
        description="`spent_usd` divided by `predicted_usd`; null until the job is done."
    )
    usd_per_hour: float = Field(
        description="Current cost of all running machines of the job, in US dollars per hour."
    )


class ProvisioningAnswer(Answer):
    """Machines that are rented for a job, and the plans for them."""

    policy: str = Field(
        description="Policy (rule) that decides which machines are rented for the job.",
        examples=["adaptive"],
    )
    workers: Count = Field(description="Number of workers that the job file requests (N_tot).")
    plan: PlanInForce | None = Field(
        description="Current plan of the job's machines; null before the first plan."
    )
    plans: tuple[PlanInForce, ...] = Field(
        description="Plans of the job's machines, newest first, at most `limit`."
    )
    cost: CostAnswer | None = Field(
        description="Cost of the job's machines so far; null before the first plan."
    )
    believed: Estimates
    stability: float | None = Field(
        description="Rate of records that the job's machines can process divided by the rate of"
        " arriving records, at the last plan or review. Below 1, the lag grows. Null before the"
        " first plan."
    )
    warning: Warned
    running: Count = Field(description="Number of running machines of the job.")
    settled: str = Field(
        description="Reason why no more machines are rented for the job, for example because it"
        " finished; empty while renting continues."
    )


class ReplanAnswer(Answer):
    """Confirmation of a request for a new plan of a job's machines.

    The plan follows later, as an event `plan` and in the list of plans.
    """

    job: Job
    asked_at_s: Annotated[
        float, Field(description="Time of the request for a new plan, in seconds since 1970.")
    ]


class PoolAnswer(Answer):
    """Current price of a pool: machines of one kind at one price, on demand or spot."""

    name: Annotated[
        str,
        Field(
            description="Name of the pool (machines of one kind at one price) in the file that"
            " DOLL_MARKET names.",
            examples=["on-demand"],
        ),
    ]
    kind: Kind = Field(
        description="Kind of the pool's machines: `on-demand`, or `spot` (cheaper, but the"
        " provider may take a machine away at any time)."
    )
    usd_per_hour: float | None = Field(
        description="Current price of one machine of the pool, in US dollars per hour; null if"
        " unknown."
    )
    reason: str = Field(
        default="",
        description="Reason why the current price of the pool's machines is unknown; empty if it"
        " is known.",
    )


class PricesAnswer(Answer):
    """Current prices of the machines that can be rented."""

    at_s: float = Field(description="Time of the prices, in seconds since 1970.")
    pools: tuple[PoolAnswer, ...] = Field(
        description="Pools (machines of one kind at one price) with their current prices, the"
        " on-demand pool first."
    )


# --- planning --------------------------------------------------------------------------------


class CurveAnswer(Answer):
    """Cost and runtime of a job by the number of spot workers: columns of equal length."""

    spot: tuple[int, ...] = Field(
        description="Numbers of workers on spot machines (N_s), ascending. They include 0, the"
        " number of all workers, and the number that the plan chose."
    )
    cost_usd: tuple[float | None, ...] = Field(
        description="Expected cost of the job for each number of spot workers in `spot`, in US"
        " dollars; null if the job would never be done."
    )
    runtime_s: tuple[float | None, ...] = Field(
        description="Expected runtime of the job for each number of spot workers in `spot`, in"
        " seconds; null if the job would never be done."
    )
    in_time: tuple[float, ...] = Field(
        description="Probability of meeting the deadline for each number of spot workers in"
        " `spot`, from 0 to 1."
    )
    enough: tuple[bool, ...] = Field(
        description="For each number of spot workers in `spot`: true if it meets the deadline with"
        " the requested probability, or on average if none was requested."
    )


class PoolPlanAnswer(Answer):
    """Plan that uses a single pool (machines of one kind at one price) of spot machines."""

    name: str = Field(description="Name of the pool of spot machines, as in the request.")
    usd_per_hour: float = Field(
        description="Price of one spot machine of the pool, in US dollars per hour."
    )
    availability: float = Field(
        description="Availability of a spot machine of the pool: share of the time that it runs,"
        " from 0 to 1."
    )
    cycle_s: float = Field(
        description="Mean time from one preemption of a spot machine of the pool to its next, in"
        " seconds."
    )
    feasible: bool = Field(
        description="True if the plan with this pool is expected to meet the deadline."
    )
    spot: int = Field(
        ge=0, description="Number of workers on spot machines of the pool (N_s) in the plan."
    )
    expected_cost_usd: float | None = Field(
        description="Expected cost of the job's remaining updates with this pool, in US dollars;"
        " null if the job would never be done."
    )
    expected_runtime_s: float | None = Field(
        description="Expected time for the job's remaining updates with this pool, in seconds;"
        " null if the job would never be done."
    )
    deadline_probability: float = Field(
        ge=0, le=1, description="Probability of meeting the deadline with this pool, from 0 to 1."
    )


class BidAnswer(Answer):
    """Machines that the policy `bidbrain` would request now from one pool, and its bid."""

    pool: str = Field(
        description="Name of the pool (machines of one kind at one price) to request machines from."
    )
    machines: int = Field(ge=0, description="Number of machines to request from the pool now.")
    at_most_usd_per_hour: float | None = Field(
        description="Bid for one machine, in US dollars per hour: if the price rises above the"
        " bid, the provider takes the machine away. Null for on-demand machines."
    )


class PlanAnswer(Answer):
    """Number of workers to run on spot machines, with expected cost and runtime of the job."""

    feasible: bool = Field(
        description="True if the plan is expected to meet the deadline; if false, `reason`"
        " explains why."
    )
    spot: int = Field(
        ge=0,
        description="Number of workers that the plan runs on spot machines (N_s).",
        examples=[30],
    )
    on_demand: int = Field(
        ge=0,
        description="Number of workers that the plan runs on on-demand machines.",
        examples=[34],
    )
    expected_cost_usd: float | None = Field(
        description="Expected cost of the job's remaining updates with this plan, in US dollars;"
        " null if the job would never be done."
    )
    expected_runtime_s: float | None = Field(
        description="Expected time for the job's remaining updates with this plan, in seconds;"
        " null if the job would never be done."
    )
    cost_ratio_to_on_demand: float | None = Field(
        description="Expected cost of the plan divided by the cost with only on-demand machines;"
        " null if the job would never be done."
    )
    binding: str = Field(
        description="Limit that keeps the plan from being cheaper: for example, `deadline` if it"
        " would be missed, or `cost` if more spot machines would cost more.",
        examples=["deadline"],
    )
    reason: str = Field(
        description="Reason for this plan, or why the deadline cannot be met; a sentence for"
        " people."
    )
    deadline_probability: float = Field(
        ge=0, le=1, description="Probability of meeting the deadline with this plan, from 0 to 1."
    )
    spot_workers: tuple[int, ...] | None = Field(
        description="Indexes, from 0, of the workers that the plan runs on spot machines; null"
        " unless `list_workers` was set in the request."
    )
    names: tuple[str, ...] = Field(
        description="Names of all workers, in the order of their indexes; empty unless the request"
        " named a job that supplied the arrival rates."
    )
    curve: CurveAnswer | None = Field(
        description="Cost and runtime for other numbers of spot workers; null unless `curve` was"
        " set in the request."
    )
    notes: tuple[str, ...] = Field(
        description="Sources of numbers that were not in the request, and warnings about the plan."
    )
    # Inputs of the plan: given, or taken from a job.
    workers: int = Field(ge=1, description="Number of workers (N_tot) that the plan is for.")
    arrivals_per_s: float = Field(
        description="Rate of records that the plan assumes, in records per second of all workers"
        " together."
    )
    group_size: int = Field(
        description="Number of batches per update of the model (K) that the plan assumes."
    )
    batch_size: int = Field(description="Number of records per batch (b) that the plan assumes.")
    updates: float = Field(
        description="Number of remaining updates of the model (J) that the plan assumes."
    )
    deadline_s: float = Field(
        description="Time until the deadline that the plan assumes, in seconds."
    )
    undisturbed_s: float | None = Field(
        description="Runtime of the job's remaining updates if no machine is ever preempted"
        " (theta_0), in seconds; null if the job would never be done."
    )
    availability: float = Field(
        description="Availability of spot machines that the plan assumes: share of the time that"
        " such a machine runs, from 0 to 1."
    )
    spot_usd_per_hour: float = Field(
        description="Price of one spot machine that the plan assumes, in US dollars per hour."
    )
    on_demand_usd_per_hour: float = Field(
        description="Price of one on-demand machine that the plan assumes, in US dollars per hour."
    )
    on_demand_only_usd: float | None = Field(
        description="Expected cost of the job's remaining updates with only on-demand machines, in"
        " US dollars; null if the job would never be done."
    )
    cycle_s: float = Field(
        description="Mean time that the plan assumes from one preemption of a spot machine to its"
        " next, in seconds."
    )
    pool: str = Field(
        default="",
        description="Name of the pool of spot machines that the plan uses; empty unless the"
        " request named several pools.",
    )
    pools: tuple[PoolPlanAnswer, ...] = Field(
        default=(),
        description="One plan for each pool (spot machines of one kind at one price), the best"
        " first; empty unless the request named several pools.",
    )
    bids: tuple[BidAnswer, ...] = Field(
        default=(),
        description="Machines to request now and the bids for them; empty unless `policy` in the"
        " request is `bidbrain`.",
    )


# --- events ----------------------------------------------------------------------------------


class UpdateEvent(UpdateAnswer):
    """Event `update`: the newest update, and the number of updates since the last such event."""

    count: Count = Field(
        description="Number of updates since the previous `update` event, including this one."
    )


class MemberEvent(Answer):
    """Event `member`: a worker of the job came alive, is leaving, is gone, or has failed."""

    worker: str = Field(description="Name of the worker whose status changed.")
    status: Literal["alive", "leaving", "gone", "failed"] = Field(
        description="New status of the worker: `alive`, `leaving` (it is shutting down), `gone`"
        " (its heartbeats have stopped) or `failed` (it cannot work for the job, for example"
        " because its process for the job has died; it tries again after a pause)."
    )
    reason: str = Field(
        default="",
        description="Reason why the worker has failed, for a process with the signal or exit status"
        " and the last output; empty for other statuses.",
    )
    at_s: float = Field(
        description="Time at which the worker's status changed, in seconds since 1970."
    )


class MachineEvent(Answer):
    """Event `machine`: a machine of the job was ordered, was seen running, or has ended."""

    launch: Count = Field(
        description="Number of the machine among all machines that were ordered for the job, from"
        " 1."
    )
    slot: Count | None = Field(
        description="Number, from 0, of the slot that the machine fills. A job has one slot for"
        " each worker that it needs. Null for a machine without a slot, such as a spare."
    )
    worker: str = Field(description="Name of the worker that the machine runs.")
    pool: Pool
    kind: Kind
    state: Literal["ordered", "running", "ended"] = Field(
        description="New state of the machine: `ordered`, `running` or `ended`."
    )
    cause: str = Field(
        default="",
        description="Reason why the machine ended, such as `preempted` (taken away by the"
        " provider); empty if it has not ended.",
    )
    detail: str = Field(
        default="",
        description="The provider's message about the end of the machine; empty if there is none.",
    )
    at_s: float = Field(
        description="Time at which the machine was ordered, seen running or ended, in seconds"
        " since 1970."
    )


class ReviewEvent(Answer):
    """Event `review`: periodic report on a job's rented machines and their cost."""

    at_s: float = Field(description="Time of the review, in seconds since 1970.")
    version: Version
    updates_left: float = Field(description="Number of updates of the model until the job is done.")
    running: Count = Field(description="Number of running machines of the job.")
    wanted: Count = Field(description="Number of machines that the current plan of the job rents.")
    spent_usd: Spent
    on_demand_only_usd: float = Field(
        description="Cost that the job's updates so far would have had with only on-demand"
        " machines, in US dollars."
    )
    stability: Stability
    believed: Estimates
    warning: Warned


class EvaluationEvent(Answer):
    """Event `evaluation`: quality of a version of the model.

    A version may be reported in two parts: on the test set, and on new records.
    """

    version: Version
    epoch: ModelEpoch
    at_s: float = Field(description="Time of the evaluation, in seconds since 1970.")
    records: Count = Field(
        description="Number of records of the test set that were used; 0 if there is no test set."
    )
    test: Metrics = Field(
        description="Loss and metrics of the version on the test set, by name, as means per"
        " record; empty if this event reports only predictions for new records."
    )
    prequential: dict[str, Metrics] = Field(
        description="By stream: loss and metrics of the model's predictions for new records,"
        " before the model learned from them, as means per record."
    )


# Data of each event, by the event's name.
EVENT_DATA: dict[str, type[Answer]] = {
    "job": JobAnswer,
    "update": UpdateEvent,
    "evaluation": EvaluationEvent,
    "drift": DriftAnswer,
    "member": MemberEvent,
    "machine": MachineEvent,
    "plan": PlanInForce,
    "review": ReviewEvent,
}
