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
Time = Annotated[float, Field(description="Time, in seconds since 1970.")]
Version = Annotated[
    int, Field(ge=0, description="Version of the model (J): number of updates that it contains.")
]
Epoch = Annotated[
    int,
    Field(
        ge=0,
        description="Epoch of the leader that made this version: the number of its leadership,"
        " higher than all before it.",
    ),
]
ModelEpoch = Annotated[
    int,
    Field(
        ge=-1,
        description="Epoch of the leader that made this version: the number of its leadership,"
        " higher than all before it. -1 for the initial weights, which no leader made.",
    ),
]
Reason = Annotated[str, Field(description="Reason for the job's desired state.")]
Revision = Annotated[
    int, Field(ge=0, description="Number of times that the job's settings were changed.")
]
SetTo = Annotated[
    Wanted,
    Field(
        description="Desired state of the job. A held job has `paused`, a finished job `stopped`."
    ),
]
Slot = Annotated[
    int,
    Field(
        ge=0,
        description="Number of the machine's place among the job's places for machines, from 0.",
    ),
]
Pool = Annotated[
    str,
    Field(description="Name of the machine's pool in the market file.", examples=["on-demand"]),
]
Kind = Annotated[
    MachineKind,
    Field(
        description="How the machine is paid for: on demand or spot; `unknown` if it was started"
        " by hand or its pool is not in the plan."
    ),
]
Spent = Annotated[
    float, Field(description="Cost of all machines of the job until this time, in US dollars.")
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
    records: Count = Field(description="Number of records of the test set that were used.")
    test: Metrics = Field(
        description="Loss and metrics of the last evaluation on the test set, as means per record.",
        examples=[{"accuracy": 0.97, "loss": 0.11}],
    )
    predicted: Count | None = Field(
        description="Newest version of the model that was evaluated on new records, before the"
        " model learned from them; null if none was."
    )
    prequential: dict[str, Metrics] = Field(
        description="Loss and metrics of predictions for new records, before the model learned"
        " from them, as means per record. By stream.",
        examples=[{"clinic-a": {"accuracy": 0.95, "loss": 0.16}}],
    )
    drifts: Count = Field(
        description="Number of drifts detected so far: rises of a stream's prediction errors. At"
        " most 200 are counted."
    )


class ProgressAnswer(Numbers, Answer):
    """Progress of a job."""

    done: str = Field(description="Reason why the job has stopped or finished; otherwise empty.")
    evaluation: EvaluationAnswer | None = Field(
        default=None, description="Most recent evaluation of the model; null if there is none yet."
    )


class ChangeAnswer(Answer):
    """A change of a job, by a person or by its coordinator."""

    at_s: Time
    action: str = Field(
        description="Kind of change. `submitted`, `deleted` and `purged` may refer to earlier jobs"
        " of the same name.",
        examples=["paused"],
    )
    by: str = Field(
        description="Author of the change: name of an API key, a person who signed in, a local"
        " user, or `coordinator`."
    )
    role: str = Field(
        description="Role of the author; `cli` for a command that writes to Kafka directly."
    )
    revision: Count = Field(
        description="Revision of the job's settings after the change. Each update names the"
        " revision that it was made with."
    )
    changed: dict[str, float | int | dict[str, Any] | None] = Field(
        description="New value of each setting, or block of settings, that changed.",
        examples=[{"group_size": 10, "synchronisation": {"mode": "stale"}}],
    )
    reason: str = Field(
        description="Reason that the author gave; empty if none. For requeued batches: which ones."
    )


class OriginAnswer(Answer):
    """The checkpoint of another job that a job started from."""

    job: Annotated[
        str,
        Field(description="Name of the job that wrote the checkpoint.", examples=["digits"]),
    ]
    epoch: Epoch
    version: Version
    sha256: str = Field(
        description="SHA-256 of the copy of the checkpoint in the new job's folder, in hexadecimal."
    )


class JobAnswer(Answer):
    """A job."""

    id: Job
    wanted: SetTo
    reason: Reason
    detail: str = Field(
        default="",
        description="Details of why the job is held, such as a traceback; empty if there are none.",
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
        description="First position of the job in each partition: topic, partition, offset.",
    )
    origin: OriginAnswer | None = Field(
        default=None,
        description="Checkpoint of another job that this job started from; null if it started from"
        " initial weights.",
    )
    notes: tuple[str, ...] = Field(
        default=(),
        description="Warnings about settings that were accepted but may not do what is expected.",
    )
    state: Word = Field(
        description="Current state of the job. docs/reference/job-states.md defines each state."
    )
    why: str = Field(
        default="",
        description="Reason for the current state, in one line; empty if there is none.",
    )
    progress: ProgressAnswer = Field(description="Progress of the job.")


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
        description="What the job takes from the other job's checkpoint that it starts from; empty"
        " if it starts from initial weights.",
    )


class JobSummary(Answer):
    """A job in a list of jobs."""

    id: Job
    wanted: SetTo
    reason: Reason
    submitted_s: float = Field(
        description="Time at which the job was submitted, in seconds since 1970."
    )
    streams: tuple[str, ...] = Field(description="Kafka topics that the job reads.")
    task: str = Field(description="Name of the built-in task, or the entrypoint of another task.")
    batch_size: int = Field(description="Number of records per batch (b).")
    group_size: int = Field(description="Number of batches per update (K).")
    provisioned: bool = Field(
        description="True if the provisioner rents the job's machines; false if workers are"
        " started by hand."
    )
    state: Word = Field(
        description="Current state of the job. docs/reference/job-states.md defines each state."
    )
    why: str = Field(
        description="Reason for the current state, in one line; empty if there is none."
    )
    version: Count | None = Field(
        description="Newest version of the model (J): number of updates so far; null if unknown."
        " Progress of a job that is not running may be up to a minute old."
    )
    loss: float | None = Field(
        description="Mean loss per record over the last updates; null if unknown."
    )
    accuracy: float | None = Field(
        description="Mean accuracy over the last updates, on records before the model learned from"
        " them; null if unknown or if the task does not measure accuracy."
    )
    updates_per_s: float | None = Field(
        description="Updates per second over the last 10 seconds; null if unknown."
    )
    workers: Count | None = Field(
        description="Number of workers that send heartbeats; null if unknown."
    )
    lag: Count | None = Field(
        description="Number of records in the streams that no update contains yet; null if unknown."
    )
    skipped: Count | None = Field(
        description="Number of records that could not be decoded and were skipped; null if unknown."
    )
    quarantined: Count | None = Field(
        description="Number of batches in quarantine, which were given up without training; null if"
        " unknown."
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
        " history. False if Kafka no longer has its beginning; they then cover the rest."
    )


class RemainsAnswer(Answer):
    """Topics and files of all jobs of a name that a purge would remove, or has removed."""

    topics: dict[str, Count] = Field(
        description="Number of records in each Kafka topic of the jobs.",
        examples=[{"doll.digits.control": 8104}],
    )
    files: Count = Field(
        description="Number of the jobs' files in object storage, such as checkpoints."
    )
    kept: tuple[str, ...] = Field(
        description="Parts that could not be removed or listed, each with the reason. Repeat the"
        " purge to remove them.",
        examples=[["files: DOLL_BLOBS names no object storage"]],
    )


class UnreadableRecord(Answer):
    """The newest record of a job in the jobs topic, if it cannot be parsed."""

    id: str = Field(
        description="Key of the record, usually the name of a job. That job continues with its"
        " previous record."
    )
    offset: Count = Field(description="Offset of the record in the Kafka topic `doll.jobs`.")
    reason: str = Field(description="Reason why the record cannot be parsed.")


class JobList(Answer):
    """A page of the list of jobs."""

    jobs: tuple[JobSummary, ...] = Field(description="Jobs of this page, in the requested order.")
    states: dict[Word, Count] = Field(
        default={},
        description="Number of jobs in each state, over all jobs.",
        examples=[{"held": 3, "running": 12, "paused": 131}],
    )
    total: Count = Field(
        default=0, description="Number of jobs that match the request, over all pages."
    )
    unreadable: tuple[UnreadableRecord, ...] = Field(
        default=(),
        description="Records of jobs that cannot be parsed. Only the first page lists them.",
    )
    next: str | None = Field(
        default=None,
        description="Value of `after` for a request for the next page; null on the last page.",
    )


class QuarantineAnswer(Answer):
    """Quarantined batches of a job, oldest first."""

    batches: tuple[QuarantinedBatchAnswer, ...] = Field(
        description="Quarantined batches of this page, oldest first."
    )
    next: Count | None = Field(
        description="Value of `after` for a request for the next page; null on the last page."
    )


class RequeuedBatchAnswer(Answer):
    """Outcome of a request to requeue a quarantined batch."""

    batch: Count = Field(
        description="Number of the batch: offset of its claim in the job's control topic."
    )
    outcome: Outcome = Field(
        description="`requeued`: the batch waits for training again; `before`: it had been requeued"
        " earlier; `replayed`: it cannot be requeued, because its records were written to the"
        " stream again."
    )


class RequeueAnswer(Answer):
    """Outcome for each batch of a requeue; empty if no batch could be requeued."""

    batches: tuple[RequeuedBatchAnswer, ...] = Field(
        description="Outcome for each batch, by the batch's number."
    )


class DeadLetterAnswer(Answer):
    """Address in a stream of the records of one dead letter."""

    partition: Count = Field(description="Partition of the stream.")
    offset: Count = Field(description="Offset of the first record.")
    end: Count = Field(description="Offset after the last record.")


class DeadLettersAnswer(Answer):
    """Dead letters of one stream with the same reason."""

    stream: str = Field(
        description="Kafka topic that the records were read from.", examples=["clinic-a"]
    )
    reason: str = Field(
        description="Reason why the records could not be used.", examples=["label: is missing"]
    )
    records: Count = Field(
        description="Number of records that could not be decoded for this reason."
    )
    batches: Count = Field(
        description="Number of dead letters that are spans of quarantined batches, one for each"
        " partition of a batch."
    )
    replayed: Count = Field(
        description="Number of these dead letters whose records were written to the stream again."
    )
    newest: tuple[DeadLetterAnswer, ...] = Field(
        description="Addresses of up to 5 of these dead letters, newest first."
    )


class DeadLettersPage(Answer):
    """Dead letters of a job, from all of its streams."""

    reasons: tuple[DeadLettersAnswer, ...] = Field(
        description="Dead letters by stream and reason. Within a stream, the most frequent reason"
        " comes first."
    )
    others: Count = Field(
        description="Number of dead letters with further reasons, beyond the requested limit."
    )


class UpdateAnswer(Answer):
    """An effective update."""

    version: Version
    epoch: Epoch
    at_s: float | None = Field(
        description="Time at which the update was written to Kafka, in seconds since 1970; null if"
        " unknown."
    )
    samples: Count = Field(description="Number of records that the model was trained on.")
    batches: Count = Field(
        description="Number of batches in the update: K, or fewer for the reason in `short`."
    )
    loss: float = Field(
        description="Mean loss per record, at the weights before the update (prequential)."
    )
    gradient_s: float | None = Field(
        description="Mean time to compute the gradient of one batch, in seconds; null if unknown."
    )
    revision: Count = Field(
        description="Revision of the job's settings that the update was made with."
    )
    short: str = Field(
        description="Reason why the update has fewer than K batches: `linger` (the time limit for a"
        " partial update), `missing` (batches of lost workers were left out) or `quarantined`."
        " Empty if it has K."
    )
    metrics: Metrics = Field(
        description="Metrics of the update, such as accuracy: means per record, at the weights"
        " before the update (prequential)."
    )
    mode: SynchronisationMode = Field(
        description="Synchronisation mode of the workers for this update, as in a job file."
    )
    stale: Count = Field(
        description="Staleness: number of updates between the weights of the oldest gradient in the"
        " update and the update itself."
    )


class UpdatesPage(Answer):
    """Effective updates, by version."""

    updates: tuple[UpdateAnswer, ...] = Field(
        description="Updates of this page, by ascending version."
    )
    next: Count | None = Field(
        description="Value of `after` for a request for the next page; null on the last page."
    )
    newest: Count = Field(description="Newest version of the model (J): number of updates so far.")
    oldest: Count | None = Field(
        description="Version of the oldest update that can still be listed; null if there is none."
    )


class KeptVersion(Answer):
    """A model version whose weights are kept."""

    version: Version
    epoch: ModelEpoch
    kept: str = Field(
        description="Place where the weights are kept.", examples=["the checkpoint 12-400"]
    )
    samples: Count = Field(
        description="Number of records in all updates of this version of the model."
    )
    loss: float | None = Field(
        description="Mean loss per record over the last updates of this version; null if unknown."
        " The version with the lowest loss is `best`."
    )
    test: Metrics = Field(
        description="Loss and metrics on the test set, as means per record; empty if this version"
        " was not evaluated."
    )


class KeptVersions(Answer):
    """Model versions whose weights are kept."""

    versions: tuple[KeptVersion, ...] = Field(description="Kept versions, newest first.")


class WorkerAnswer(Answer):
    """A worker, or a rented machine whose worker has not started yet."""

    name: str = Field(description="Name of the worker.")
    status: WorkerStatus = Field(
        description="`alive`: the worker sends heartbeats; `leaving`: it is shutting down;"
        " `silent`: its machine is rented, but the worker sends no heartbeats (yet); `unknown`:"
        " Redis is unavailable."
    )
    slot: Count | None = Field(
        default=None,
        description="Number of the machine's place among the job's places for machines, from 0;"
        " null if no machine was rented for the worker.",
    )
    kind: Kind = "unknown"
    pool: str | None = Field(
        default=None,
        description="Name of the pool that the machine was rented from; null if none was rented.",
    )
    machine: str | None = Field(
        default=None,
        description="The provider's identifier of the machine; null if unknown, or if none was"
        " rented.",
    )
    since_s: float | None = Field(
        default=None,
        description="Time at which the machine started, in seconds since 1970; null if it has not"
        " started, or if none was rented.",
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
        description="Reason why the leader assigns no work to this worker; null if it does.",
    )


class WorkersAnswer(Answer):
    """All workers of a job."""

    workers: tuple[WorkerAnswer, ...] = Field(description="Workers, by name.")
    board_away: str = Field(
        default="",
        description="Reason why heartbeats cannot be read from Redis; empty if they can.",
    )


class StreamsAnswer(Answer):
    """All data streams of a job."""

    streams: tuple[StreamAnswer, ...] = Field(
        description="Data streams, in the order of the job file."
    )


# --- curves ----------------------------------------------------------------------------------


class LagCurve(Answer):
    """Lag of a stream over time."""

    stream: Stream
    lag: tuple[int | None, ...] = Field(
        description="Number of records of the stream in no update yet, at each time of `lag_at_s`;"
        " null if unknown."
    )


class Life(Answer):
    """Lifetime of a machine, for a timeline."""

    slot: Slot
    worker: str = Field(description="Name of the machine's worker.")
    pool: Pool
    kind: Kind
    from_s: float = Field(
        description="Time at which the machine started, in seconds since 1970. If it never started,"
        " the time of its order."
    )
    to_s: float | None = Field(
        description="Time at which the machine ended, in seconds since 1970; null if it is running."
    )
    cause: Literal["preempted", "released", "failed", "refused", "lost"] | None = Field(
        default=None, description="Reason why the machine ended; null if it is running."
    )


class PrequentialCurve(Answer):
    """Quality of predictions for a stream's records before the model learned from them."""

    stream: Stream
    at_s: tuple[float, ...] = Field(
        description="Time of each evaluation, in seconds since 1970, in ascending order."
    )
    version: tuple[int, ...] = Field(
        description="Version of the model at each evaluation in `at_s`."
    )
    metrics: dict[str, tuple[float | None, ...]] = Field(
        description="By metric: the mean per record at each evaluation in `at_s`; null if unknown."
    )


class DriftAnswer(Answer):
    """A rise of the prediction errors for a stream; also the data of the event `drift`."""

    stream: Stream
    version: Count = Field(description="Version of the model at which the drift was detected.")
    at_s: Time
    before: float = Field(description="Mean error per record before the drift, from 0 to 1.")
    after: float = Field(description="Mean error per record after the drift, from 0 to 1.")


class EvaluationCurves(Answer):
    """Results of evaluations over time."""

    at_s: tuple[float, ...] = Field(
        default=(), description="Time of each evaluation on the test set, in seconds since 1970."
    )
    version: tuple[int, ...] = Field(
        default=(), description="Version of the model at each evaluation in `at_s`."
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
        description="Rises of prediction errors that were detected, at most the last 200.",
    )


class SwitchAnswer(Answer):
    """An update with another synchronisation mode than the one before, by a rule or by a change."""

    version: Version
    at_s: float | None = Field(
        description="Time of the update, in seconds since 1970; null if unknown."
    )
    mode: SynchronisationMode = Field(
        description="Synchronisation mode from this update on, as in a job file."
    )


class CurvesAnswer(Answer):
    """Curves of the live page: columns of equal length, thinned to what can be seen."""

    now_s: Time
    update_at_s: tuple[float, ...] = Field(
        description="Time of the update at each point, in seconds since 1970."
    )
    version: tuple[int, ...] = Field(
        description="Version of the model at each point of `update_at_s`."
    )
    loss: tuple[float, ...] = Field(
        description="Mean loss per record of the update at each point of `update_at_s`."
    )
    metrics: dict[str, tuple[float | None, ...]] = Field(
        description="By metric: the mean per record of the update at each point of `update_at_s`;"
        " null if the update has no value."
    )
    updates_per_s: tuple[float, ...] = Field(
        description="Updates per second over the 10 seconds before each point of `update_at_s`."
    )
    lag_at_s: tuple[float, ...] = Field(
        description="Time of each measurement of the lag, in seconds since 1970."
    )
    lag: tuple[LagCurve, ...] = Field(description="Lag of each stream over time.")
    lives: tuple[Life, ...] = Field(
        description="Lifetimes of the job's machines, in the order of their launch."
    )
    cost_at_s: tuple[float, ...] = Field(
        description="Time of each periodic review of costs, in seconds since 1970."
    )
    spent_usd: tuple[float, ...] = Field(
        description="Cost of all machines until each time of `cost_at_s`, in US dollars."
    )
    on_demand_only_usd: tuple[float, ...] = Field(
        description="Cost that the updates until each time of `cost_at_s` would have had with only"
        " on-demand machines, in US dollars."
    )
    stability: tuple[float, ...] = Field(
        description="Capacity of the machines divided by the rate of arriving records, at each time"
        " of `cost_at_s`. Below 1, updates cannot keep up."
    )
    running: tuple[int, ...] = Field(
        description="Number of running machines at each time of `cost_at_s`."
    )
    evaluation: EvaluationCurves = Field(description="Results of evaluations over time.")
    switches: tuple[SwitchAnswer, ...] = Field(
        default=(),
        description="Changes of the synchronisation mode, at most the last 200.",
    )


# --- provisioning ----------------------------------------------------------------------------


class BelievedAnswer(Answer):
    """An estimate and its uncertainty."""

    value: float = Field(description="Estimated value.")
    std: float = Field(description="Standard deviation of the estimate.")
    low: float = Field(
        description="Lower end of the interval that contains the true value with probability 0.9."
    )
    high: float = Field(
        description="Upper end of the interval that contains the true value with probability 0.9."
    )


Estimates = Annotated[
    dict[str, BelievedAnswer],
    Field(
        description="Estimates that the policy plans with, by name, such as `arrivals_per_s` and"
        " `availability.<pool>`."
    ),
]
Stability = Annotated[
    float,
    Field(
        description="Capacity of the machines divided by the rate of arriving records. Below 1,"
        " updates cannot keep up."
    ),
]
Warned = Annotated[
    str, Field(description="Problem with the job's machines; empty if there is none.")
]


class PlanInForce(Answer):
    """A plan that a job's policy decided on; also the data of the event `plan`."""

    number: Count = Field(description="Number of the plan among the job's plans, from 1.")
    at_s: Time
    policy: str = Field(description="Policy that made the plan.", examples=["adaptive"])
    why: str = Field(
        description="Event that made the policy decide, such as the first plan, a changed price or"
        " a request."
    )
    reason: str = Field(description="Reason why the policy chose this plan.")
    feasible: bool = Field(description="True if the plan is expected to meet the deadline.")
    binding: str = Field(
        description="Limit that keeps the plan from being cheaper, such as `deadline` or"
        " `capacity`.",
        examples=["deadline"],
    )
    spot: Count = Field(description="Number of workers on spot machines (N_s).")
    on_demand: Count = Field(description="Number of on-demand machines.")
    places: dict[str, Count] = Field(
        description="Number of machines by pool. `none` counts places without a machine."
    )
    updates_left: float = Field(
        description="Number of updates until the job is done, at the time of the plan."
    )
    deadline_left_s: float | None = Field(
        description="Seconds until the deadline, at the time of the plan; null if the job has none."
    )
    spent_usd: Spent
    expected_cost_usd: float = Field(
        description="Expected cost of the remaining updates, in US dollars."
    )
    transfer_usd: float = Field(
        description="Part of `expected_cost_usd` for network traffic between machines and servers,"
        " in US dollars."
    )
    expected_runtime_s: float = Field(
        description="Expected time for the remaining updates, in seconds."
    )
    on_demand_only_usd: float = Field(
        description="Cost of the remaining updates if every worker were on demand, in US dollars."
    )
    predicted_usd: float = Field(
        description="Predicted cost of the machines for the whole job, in US dollars: the cost"
        " until the plan plus the expected remaining cost, without network traffic."
    )
    stability: Stability
    usd_per_hour: dict[str, float] = Field(
        description="Price of one machine of each pool at the time of the plan, in US dollars per"
        " hour."
    )
    believed: Estimates
    warning: Warned


class CostAnswer(Answer):
    """Cost of a job so far, compared with machines on demand and with its plan."""

    at_s: Time
    spent_usd: Spent
    on_demand_only_usd: float = Field(
        description="Cost that the updates so far would have had with only on-demand machines, in"
        " US dollars."
    )
    ratio_to_on_demand: float | None = Field(
        description="`spent_usd` divided by `on_demand_only_usd`; null if the latter is 0."
    )
    predicted_usd: float | None = Field(
        description="Predicted cost of the machines for the whole job, by the current plan, in US"
        " dollars; null without a plan."
    )
    ratio_to_prediction: float | None = Field(
        description="`spent_usd` divided by `predicted_usd`; null until the job is done."
    )
    usd_per_hour: float = Field(
        description="Current cost of all running machines, in US dollars per hour."
    )


class ProvisioningAnswer(Answer):
    """Machines that are rented for a job, and the plans for them."""

    policy: str = Field(
        description="Policy that decides which machines the job rents.", examples=["adaptive"]
    )
    workers: Count = Field(description="Number of workers in the job file (N_tot).")
    plan: PlanInForce | None = Field(description="Current plan; null before the first one.")
    plans: tuple[PlanInForce, ...] = Field(
        description="Plans of the job, newest first, at most `limit`."
    )
    cost: CostAnswer | None = Field(
        description="Cost of the job so far; null before the first plan."
    )
    believed: Estimates
    stability: float | None = Field(
        description="Capacity of the machines divided by the rate of arriving records, at the last"
        " plan or review. Below 1, updates cannot keep up. Null before the first plan."
    )
    warning: Warned
    running: Count = Field(description="Number of running machines.")
    settled: str = Field(
        description="Reason why provisioning of the job has ended; empty while it continues."
    )


class ReplanAnswer(Answer):
    """A replan was requested. The decision follows in the events and in the list of plans."""

    job: Job
    asked_at_s: Annotated[
        float, Field(description="Time of the request for a new plan, in seconds since 1970.")
    ]


class PoolAnswer(Answer):
    """A pool of the market."""

    name: Annotated[
        str, Field(description="Name of the pool in the market file.", examples=["on-demand"])
    ]
    kind: Kind
    usd_per_hour: float | None = Field(
        description="Current price of one machine, in US dollars per hour; null if unknown."
    )
    reason: str = Field(
        default="", description="Reason why the price is unknown; empty if it is known."
    )


class PricesAnswer(Answer):
    """Current prices of machines."""

    at_s: Time
    pools: tuple[PoolAnswer, ...] = Field(
        description="Pools of the market with their prices, the on-demand pool first."
    )


# --- planning --------------------------------------------------------------------------------


class CurveAnswer(Answer):
    """Cost and runtime against the number of spot workers: columns of equal length."""

    spot: tuple[int, ...] = Field(
        description="Numbers of spot workers (N_s), ascending. They include 0, N_tot and the plan's"
        " own number."
    )
    cost_usd: tuple[float | None, ...] = Field(
        description="Expected cost for each number in `spot`, in US dollars; null if the job would"
        " never be done."
    )
    runtime_s: tuple[float | None, ...] = Field(
        description="Expected runtime for each number in `spot`, in seconds; null if the job would"
        " never be done."
    )
    in_time: tuple[float, ...] = Field(
        description="Probability of meeting the deadline for each number in `spot`, from 0 to 1."
    )
    enough: tuple[bool, ...] = Field(
        description="True if this number of spot workers meets the deadline: on average, or with"
        " the requested probability. For each number in `spot`."
    )


class PoolPlanAnswer(Answer):
    """Plan with a single pool of spot machines."""

    name: str = Field(description="Name of the pool.")
    usd_per_hour: float = Field(
        description="Price of one spot machine of the pool, in US dollars per hour."
    )
    availability: float = Field(
        description="Availability of a spot machine of the pool: share of the time that it runs,"
        " from 0 to 1."
    )
    cycle_s: float = Field(
        description="Mean time from one preemption of a machine to its next, in seconds."
    )
    feasible: bool = Field(
        description="True if the plan with this pool is expected to meet the deadline."
    )
    spot: int = Field(ge=0, description="Number of workers on spot machines of the pool (N_s).")
    expected_cost_usd: float | None = Field(
        description="Expected cost with this pool, in US dollars; null if the job would never be"
        " done."
    )
    expected_runtime_s: float | None = Field(
        description="Expected runtime with this pool, in seconds; null if the job would never be"
        " done."
    )
    deadline_probability: float = Field(
        ge=0, le=1, description="Probability of meeting the deadline with this pool, from 0 to 1."
    )


class BidAnswer(Answer):
    """Machines that would be requested now."""

    pool: str = Field(description="Name of the pool to request machines from.")
    machines: int = Field(ge=0, description="Number of machines to request.")
    at_most_usd_per_hour: float | None = Field(
        description="Bid for one machine, in US dollars per hour: if its price rises above the bid,"
        " the provider takes the machine away. Null for on-demand machines."
    )


class PlanAnswer(Answer):
    """Number of workers to run on spot machines, with expected cost and runtime."""

    feasible: bool = Field(
        description="True if the plan is expected to meet the deadline; if false, `reason` says"
        " why."
    )
    spot: int = Field(ge=0, description="Number of workers on spot machines (N_s).", examples=[30])
    on_demand: int = Field(
        ge=0, description="Number of workers on on-demand machines.", examples=[34]
    )
    expected_cost_usd: float | None = Field(
        description="Expected cost of the remaining updates, in US dollars; null if the job would"
        " never be done."
    )
    expected_runtime_s: float | None = Field(
        description="Expected time for the remaining updates, in seconds; null if the job would"
        " never be done."
    )
    cost_ratio_to_on_demand: float | None = Field(
        description="Expected cost divided by the cost with every worker on demand; null if the job"
        " would never be done."
    )
    binding: str = Field(
        description="Limit that keeps the plan from being cheaper, such as `deadline` or"
        " `capacity`.",
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
        description="Indexes of the workers to run on spot machines, from 0; null unless"
        " `list_workers` was set."
    )
    names: tuple[str, ...] = Field(
        description="Names of all workers, by index; empty unless the arrival rates were taken from"
        " a job."
    )
    curve: CurveAnswer | None = Field(
        description="Cost and runtime for other numbers of spot workers; null unless `curve` was"
        " set."
    )
    notes: tuple[str, ...] = Field(
        description="Sources of numbers that were not in the request, and caveats."
    )
    # Inputs of the plan: given, or taken from a job.
    workers: int = Field(ge=1, description="Number of workers (N_tot) that the plan is for.")
    arrivals_per_s: float = Field(
        description="Records per second of all workers together that the plan assumes."
    )
    group_size: int = Field(description="Batches per update (K) that the plan assumes.")
    batch_size: int = Field(description="Records per batch (b) that the plan assumes.")
    updates: float = Field(description="Number of remaining updates (J) that the plan assumes.")
    deadline_s: float = Field(description="Seconds until the deadline that the plan assumes.")
    undisturbed_s: float | None = Field(
        description="Runtime of the remaining updates without any preemption (theta_0), in seconds;"
        " null if the job would never be done."
    )
    availability: float = Field(
        description="Availability that the plan assumes: share of the time that a spot machine"
        " runs, from 0 to 1."
    )
    spot_usd_per_hour: float = Field(
        description="Price of one spot machine that the plan assumes, in US dollars per hour."
    )
    on_demand_usd_per_hour: float = Field(
        description="Price of one on-demand machine that the plan assumes, in US dollars per hour."
    )
    on_demand_only_usd: float | None = Field(
        description="Cost of the remaining updates if every worker were on demand, in US dollars;"
        " null if the job would never be done."
    )
    cycle_s: float = Field(
        description="Mean time from one preemption of a spot machine to its next that the plan"
        " assumes, in seconds."
    )
    pool: str = Field(
        default="",
        description="Name of the spot pool that the plan uses; empty unless the request named"
        " several pools.",
    )
    pools: tuple[PoolPlanAnswer, ...] = Field(
        default=(),
        description="Plan with each single pool, the best first; empty unless the request named"
        " several pools.",
    )
    bids: tuple[BidAnswer, ...] = Field(
        default=(),
        description="Machines to request now and the bids for them; empty unless `policy` is"
        " `bidbrain`.",
    )


# --- events ----------------------------------------------------------------------------------


class UpdateEvent(UpdateAnswer):
    """Event `update`: the newest update, and how many updates it stands for."""

    count: Count = Field(
        description="Number of updates since the previous `update` event, including this one."
    )


class MemberEvent(Answer):
    """Event `member`: the heartbeats of a worker report a change."""

    worker: str = Field(description="Name of the worker.")
    status: Literal["alive", "leaving", "gone"] = Field(
        description="New status of the worker: `alive`, `leaving` (it is shutting down) or `gone`"
        " (its heartbeats have stopped)."
    )
    at_s: Time


class MachineEvent(Answer):
    """Event `machine`: a machine was ordered, was seen running, or has ended."""

    launch: Count = Field(description="Number of the machine among the job's machines, from 1.")
    slot: Count | None = Field(
        description="Number of the machine's place among the job's places for machines, from 0;"
        " null for a spare machine without a place."
    )
    worker: str = Field(description="Name of the machine's worker.")
    pool: Pool
    kind: Kind
    state: Literal["ordered", "running", "ended"] = Field(description="New state of the machine.")
    cause: str = Field(
        default="",
        description="Reason why the machine ended, such as `preempted`; empty if it has not ended.",
    )
    detail: str = Field(
        default="",
        description="The provider's message about the end of the machine; empty if there is none.",
    )
    at_s: Time


class ReviewEvent(Answer):
    """Event `review`: status of a job's machines and costs."""

    at_s: Time
    version: Version
    updates_left: float = Field(description="Number of updates until the job is done.")
    running: Count = Field(description="Number of running machines.")
    wanted: Count = Field(description="Number of machines in the current plan.")
    spent_usd: Spent
    on_demand_only_usd: float = Field(
        description="Cost that the updates so far would have had with only on-demand machines, in"
        " US dollars."
    )
    stability: Stability
    believed: Estimates
    warning: Warned


class EvaluationEvent(Answer):
    """Event `evaluation`: quality of a model version. A version may be reported in two parts."""

    version: Version
    epoch: ModelEpoch
    at_s: Time
    records: Count = Field(
        description="Number of records of the test set that were used; 0 if there is no test set."
    )
    test: Metrics = Field(
        description="Loss and metrics on the test set, as means per record; empty if this event"
        " reports only predictions."
    )
    prequential: dict[str, Metrics] = Field(
        description="Loss and metrics of predictions for new records, before the model learned"
        " from them, as means per record. By stream."
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
