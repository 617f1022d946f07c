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
Job = Annotated[str, Field(description="The job's name.", examples=["digits"])]
Time = Annotated[float, Field(description="Seconds since 1970.")]
Version = Annotated[int, Field(ge=0, description="J, the update that made this model.")]
Epoch = Annotated[int, Field(ge=0, description="Of its leader: each has a higher number.")]
Reason = Annotated[str, Field(description="Why this is wanted.")]
Revision = Annotated[int, Field(ge=0, description="Changes of the job's settings so far.")]
SetTo = Annotated[Wanted, Field(description="What is wanted of the job.")]
Slot = Annotated[int, Field(ge=0, description="Of the job's N_tot workers.")]
Pool = Annotated[str, Field(description="The pool of the market.", examples=["on-demand"])]
Kind = Annotated[MachineKind, Field(description="How it is paid; unknown: started by hand.")]
Spent = Annotated[float, Field(description="Of all machines until then.")]


class Answer(BaseModel):
    """Base of all responses, which can be made from objects with attributes of the same names."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


# --- jobs ------------------------------------------------------------------------------------


class EvaluationAnswer(Answer):
    """Quality of the model in its most recent evaluation."""

    version: Count | None = Field(description="Tried on the test set last; null: none was.")
    at_s: float | None = Field(description="When it was tried, since 1970.")
    records: Count = Field(description="Of the test set.")
    test: Metrics = Field(
        description="Means over the test set.", examples=[{"accuracy": 0.97, "loss": 0.11}]
    )
    predicted: Count | None = Field(description="The last version that predicted new records.")
    prequential: dict[str, Metrics] = Field(
        description="By stream: means over records that were predicted before the model learned"
        " from them.",
        examples=[{"clinic-a": {"accuracy": 0.95, "loss": 0.16}}],
    )
    drifts: Count = Field(description="Noticed so far, the last 200 at most.")


class ProgressAnswer(Numbers, Answer):
    """Progress of a job."""

    done: str = Field(description="Why it is over; empty while it is not.")
    evaluation: EvaluationAnswer | None = Field(
        default=None, description="Null: nobody evaluates it, or has not yet."
    )


class ChangeAnswer(Answer):
    """A change of a job, by a person or by its coordinator."""

    at_s: Time
    action: str = Field(
        description="What was done; `submitted`, `deleted`, `purged` also of earlier jobs of the"
        " name.",
        examples=["paused"],
    )
    by: str = Field(description="An API key, a person, a local user, or `coordinator`.")
    role: str = Field(
        description="Of the key or the person; `cli` of a command that writes to Kafka itself."
    )
    revision: Count = Field(description="Of the settings after the change; updates carry theirs.")
    changed: dict[str, float | int | dict[str, Any] | None] = Field(
        description="The new value of each setting, or block of settings, that changed.",
        examples=[{"group_size": 10, "synchronisation": {"mode": "stale"}}],
    )
    reason: str = Field(description="Reason that was given; of requeued batches, which.")


class OriginAnswer(Answer):
    """The checkpoint of another job that a job started from."""

    job: Job
    epoch: Epoch
    version: Version
    sha256: str = Field(description="Of the copy in this job's own folder.")


class JobAnswer(Answer):
    """A job."""

    id: Job
    wanted: SetTo
    reason: Reason
    detail: str = Field(
        default="", description="Of a job that is held: a traceback, or empty where there is none."
    )
    submitted_s: float = Field(description="When it was submitted, since 1970.")
    deadline_s: float | None = Field(description="When it must be done, since 1970.")
    revision: Revision
    changes: tuple[ChangeAnswer, ...] = Field(description="Who did what to it, oldest first.")
    spec: JobSpec = Field(description="As it was submitted, with all defaults and changes.")
    first: tuple[tuple[str, Count, Count], ...] = Field(
        default=(), description="Where it began: topic, partition, position."
    )
    origin: OriginAnswer | None = Field(default=None, description="Null: its own version 0.")
    notes: tuple[str, ...] = Field(
        default=(), description="What to know of its settings, although they are let through."
    )
    state: Word = Field(
        description="How it is now: docs/reference/job-states.md says what each means."
    )
    why: str = Field(default="", description="One line; of a job that is held, the reason.")
    progress: ProgressAnswer = Field(description="How far it is.")


class SubmittedJob(JobAnswer):
    """A job that was just submitted."""

    checked: bool = Field(description="True if its task was checked, and its model's size.")
    unchecked: str = Field(default="", description="Why its task was not checked.")
    beginning: str = Field(
        default="", description="What it takes of another job's checkpoint; empty without one."
    )


class JobSummary(Answer):
    """A job in a list of jobs."""

    id: Job
    wanted: SetTo
    reason: Reason
    submitted_s: float = Field(description="When it was submitted, since 1970.")
    streams: tuple[str, ...] = Field(description="Topics of its datastreams.")
    task: str = Field(description="A built-in task's name, or an entrypoint.")
    batch_size: int = Field(description="b, records per batch.")
    group_size: int = Field(description="K, batches per update.")
    provisioned: bool = Field(description="Whether a provisioner rents its machines.")
    state: Word = Field(description="As in `JobAnswer`.")
    why: str = Field(description="One line; of a job that is held, the reason.")
    version: Count | None = Field(
        description="J, updates made so far. Null, here and below: not known. Of a job that does"
        " not run, this and the fields below may be a minute old."
    )
    loss: float | None = Field(description="Mean per sample over the last updates.")
    accuracy: float | None = Field(description="Likewise, if the task measures it.")
    updates_per_s: float | None = Field(description="Over the last 10 s.")
    workers: Count | None = Field(description="That send heartbeats.")
    lag: Count | None = Field(description="Records in the streams and in no update yet.")
    skipped: Count | None = Field(description="Records that did not decode.")
    quarantined: Count | None = Field(description="Batches that were given up.")
    expired: Count | None = Field(
        description="Records that Kafka deleted before they were trained."
    )
    lost: Count | None = Field(
        description="Records that were trained, and that Kafka lost afterwards."
    )
    spent_usd: float | None = Field(
        default=None, description="Total cost of its machines so far, in US dollars."
    )
    whole: bool = Field(description="As in `progress`: whether these four are of all its history.")


class RemainsAnswer(Answer):
    """Remains of all jobs of a name: what a purge removes, or has removed."""

    topics: dict[str, Count] = Field(
        description="How many records each has.", examples=[{"doll.digits.control": 8104}]
    )
    files: Count = Field(description="In object storage: checkpoints, states, origins.")
    kept: tuple[str, ...] = Field(
        description="What was not removed or is not known, and why: ask for the purge again.",
        examples=[["files: DOLL_BLOBS names no object storage"]],
    )


class UnreadableRecord(Answer):
    """The newest record of a job, if it does not parse."""

    id: str = Field(description="The record's key: a job that had this name goes on as it was.")
    offset: Count = Field(description="In the topic `doll.jobs`.")
    reason: str = Field(description="Why it does not parse.")


class JobList(Answer):
    """A page of the list of jobs."""

    jobs: tuple[JobSummary, ...] = Field(description="In the order that was asked for.")
    states: dict[Word, Count] = Field(
        default={},
        description="Number of jobs in each state, of all jobs.",
        examples=[{"held": 3, "running": 12, "paused": 131}],
    )
    total: Count = Field(default=0, description="Number of jobs that match, on all pages.")
    unreadable: tuple[UnreadableRecord, ...] = Field(
        default=(), description="Records of jobs that do not parse, with the first page alone."
    )
    next: str | None = Field(
        default=None, description="Give it as `after` for more; null: there are no more."
    )


class QuarantineAnswer(Answer):
    """Quarantined batches of a job, oldest first."""

    batches: tuple[QuarantinedBatchAnswer, ...] = Field(description="Oldest first.")
    next: Count | None = Field(description="Give it as `after` for more; null: there are no more.")


class RequeuedBatchAnswer(Answer):
    """Outcome of a request to requeue a quarantined batch."""

    batch: Count = Field(description="Its offset in the control topic.")
    outcome: Outcome = Field(
        description="requeued: it waits for an update as if it were new; before: it had been taken"
        " back already; replayed: somebody was faster and had its records written anew."
    )


class RequeueAnswer(Answer):
    """Outcome of each batch of a requeue; empty if no batch could be requeued."""

    batches: tuple[RequeuedBatchAnswer, ...] = Field(description="By offset.")


class DeadLetterAnswer(Answer):
    """Position of a dead letter's records."""

    partition: Count = Field(description="Of the stream.")
    offset: Count = Field(description="The first.")
    end: Count = Field(description="The one after the last.")


class DeadLettersAnswer(Answer):
    """Dead letters of one stream with the same reason."""

    stream: str = Field(description="The datastream.", examples=["clinic-a"])
    reason: str = Field(description="Why they are here.", examples=["label: is missing"])
    records: Count = Field(description="That did not decode.")
    batches: Count = Field(description="Parts of quarantined batches.")
    replayed: Count = Field(description="Of both, how many were written anew.")
    newest: tuple[DeadLetterAnswer, ...] = Field(description="Some of them, the newest first.")


class DeadLettersPage(Answer):
    """Dead letters of a job, from all of its streams."""

    reasons: tuple[DeadLettersAnswer, ...] = Field(description="By stream, the commonest first.")
    others: Count = Field(description="Dead letters of rarer reasons, which are left out.")


class UpdateAnswer(Answer):
    """An effective update."""

    version: Version
    epoch: Epoch
    at_s: float | None = Field(description="When it was written, since 1970.")
    samples: Count = Field(description="Records in its batches.")
    batches: Count = Field(description="K, or fewer: see `short`.")
    loss: float = Field(description="Mean per sample, at the weights before it.")
    gradient_s: float | None = Field(description="Mean time of one batch's gradient.")
    revision: Count = Field(description="Of the settings that it was made under.")
    short: str = Field(
        description="Why it has fewer than K batches: linger, missing, quarantined, or empty."
    )
    metrics: Metrics = Field(description="Means per sample, such as prequential accuracy.")
    mode: SynchronisationMode = Field(description="How workers were synchronised for it.")
    stale: Count = Field(description="Updates between the oldest of its gradients and itself.")


class UpdatesPage(Answer):
    """Effective updates, by version."""

    updates: tuple[UpdateAnswer, ...] = Field(description="By version, ascending.")
    next: Count | None = Field(description="Give it as `after` for more; null: there are no more.")
    newest: Count = Field(description="J, updates made so far.")
    oldest: Count | None = Field(
        description="The first that can still be had singly; null: there is none."
    )


class KeptVersion(Answer):
    """A model version whose weights are kept."""

    version: Version
    epoch: int = Field(ge=-1, description="Of its leader; -1: of the first weights, before any.")
    kept: str = Field(description="Where.", examples=["the checkpoint 12-400"])
    samples: Count = Field(description="Records in its updates.")
    loss: float | None = Field(
        description="Mean per sample over its last updates, the lowest is `best`; null: none."
    )
    test: Metrics = Field(description="Means over the test set; empty: it was not judged.")


class KeptVersions(Answer):
    """Model versions whose weights are kept."""

    versions: tuple[KeptVersion, ...] = Field(description="Newest first.")


class WorkerAnswer(Answer):
    """A worker, or the slot of a worker that has not started yet."""

    name: str = Field(description="The worker's name.")
    status: WorkerStatus = Field(
        description="silent: its machine runs, but it sends no heartbeat (yet); unknown: Redis is"
        " unavailable."
    )
    slot: Count | None = Field(default=None, description="Null: no machine was rented for it.")
    kind: Kind = "unknown"
    pool: str | None = Field(default=None, description="Of its machine, where one was rented.")
    machine: str | None = Field(default=None, description="The provider's id of its machine.")
    since_s: float | None = Field(default=None, description="When its machine began.")
    samples: Count = Field(default=0, description="In its batches, over the last 10 s.")
    member: bool | None = Field(
        default=None,
        description="Whether it holds the weights and adds up; null: the coordinator does.",
    )
    left_out: str | None = Field(default=None, description="Why the leader gives it no work.")


class WorkersAnswer(Answer):
    """All workers of a job; null if Redis is unavailable."""

    workers: tuple[WorkerAnswer, ...] = Field(description="By name.")
    board_away: str = Field(default="", description="Why heartbeats cannot be read.")


class StreamsAnswer(Answer):
    """All data streams of a job."""

    streams: tuple[StreamAnswer, ...] = Field(description="In the order of the job file.")


# --- curves ----------------------------------------------------------------------------------


class LagCurve(Answer):
    """Lag of a stream over time."""

    stream: Stream
    lag: tuple[int | None, ...] = Field(description="Records, at `lag_at_s`.")


class Life(Answer):
    """Lifetime of a machine, for a timeline."""

    slot: Slot
    worker: str = Field(description="The worker's name.")
    pool: Pool
    kind: Kind
    from_s: float = Field(description="When it began to run, since 1970; if refused, was ordered.")
    to_s: float | None = Field(description="Null: it runs.")
    cause: Literal["preempted", "released", "failed", "refused", "lost"] | None = Field(
        default=None, description="Of its end; null: it runs."
    )


class PrequentialCurve(Answer):
    """Quality of predictions for a stream's records before the model learned from them."""

    stream: Stream
    at_s: tuple[float, ...] = Field(description="When each point was evaluated, since 1970.")
    version: tuple[int, ...] = Field(description="The model's, of each point.")
    metrics: dict[str, tuple[float | None, ...]] = Field(description="Means, at each point.")


class DriftAnswer(Answer):
    """A stream whose prediction errors have risen; also the event `drift`."""

    stream: Stream
    version: Count = Field(description="At which it was noticed.")
    at_s: Time
    before: float = Field(description="Mean error per record, from 0 to 1.")
    after: float = Field(description="Mean error per record, from 0 to 1.")


class EvaluationCurves(Answer):
    """Results of evaluations over time."""

    at_s: tuple[float, ...] = Field(default=(), description="Of each try on the test set.")
    version: tuple[int, ...] = Field(default=(), description="The model's, of each try.")
    test: dict[str, tuple[float | None, ...]] = Field(
        default={}, description="Means over the test set, at each try."
    )
    prequential: tuple[PrequentialCurve, ...] = Field(default=(), description="By stream.")
    drifts: tuple[DriftAnswer, ...] = Field(default=(), description="The last 200 at most.")


class SwitchAnswer(Answer):
    """An update with another synchronisation mode than the one before, by a rule or by a change."""

    version: Version
    at_s: float | None = Field(description="When it was made, since 1970.")
    mode: SynchronisationMode = Field(description="From this update on.")


class CurvesAnswer(Answer):
    """Curves of the live page: columns of equal length, thinned to what can be seen."""

    now_s: Time
    update_at_s: tuple[float, ...] = Field(description="When the update of each point was made.")
    version: tuple[int, ...] = Field(description="Of that update.")
    loss: tuple[float, ...] = Field(description="Mean per sample of that update.")
    metrics: dict[str, tuple[float | None, ...]] = Field(description="Likewise, by name.")
    updates_per_s: tuple[float, ...] = Field(description="Over the 10 s before each point.")
    lag_at_s: tuple[float, ...] = Field(description="When lags were looked at.")
    lag: tuple[LagCurve, ...] = Field(description="By stream.")
    lives: tuple[Life, ...] = Field(description="Machines, in the order of their launch.")
    cost_at_s: tuple[float, ...] = Field(description="When costs were reviewed.")
    spent_usd: tuple[float, ...] = Field(description="At `cost_at_s`.")
    on_demand_only_usd: tuple[float, ...] = Field(
        description="What the updates until `cost_at_s` would have cost that way."
    )
    stability: tuple[float, ...] = Field(
        description="Capacity over arrivals at `cost_at_s`; below 1 updates cannot keep up."
    )
    running: tuple[int, ...] = Field(description="Machines, at `cost_at_s`.")
    evaluation: EvaluationCurves = Field(description="Of versions that were evaluated.")
    switches: tuple[SwitchAnswer, ...] = Field(
        default=(), description="Of synchronisation, the last 200 at most."
    )


# --- provisioning ----------------------------------------------------------------------------


class BelievedAnswer(Answer):
    """An estimate and its uncertainty."""

    value: float = Field(description="The estimate.")
    std: float = Field(description="Its standard deviation.")
    low: float = Field(description="With `high`, where the quantity lies with 90 %.")
    high: float = Field(description="See `low`.")


Estimates = Annotated[
    dict[str, BelievedAnswer],
    Field(description="Estimates by name, such as `arrivals_per_s` and `availability.<pool>`."),
]
Stability = Annotated[
    float, Field(description="Capacity over arrivals; below 1 updates cannot keep up.")
]
Warned = Annotated[str, Field(description="What is wrong with the machines; empty: nothing.")]


class PlanInForce(Answer):
    """A plan that a job's policy decided on; also the event `plan`."""

    number: Count = Field(description="Counts the job's plans, from 1.")
    at_s: Time
    policy: str = Field(description="That decided.", examples=["adaptive"])
    why: str = Field(description="What made it decide.")
    reason: str = Field(description="Why this plan.")
    feasible: bool = Field(description="Whether the deadline can be met.")
    binding: str = Field(description="What limits the plan.", examples=["deadline"])
    spot: Count = Field(description="N_s: workers on spot machines.")
    on_demand: Count = Field(description="Machines on demand.")
    places: dict[str, Count] = Field(description="Machines by pool; `none`: slots without one.")
    updates_left: float = Field(description="Until the job is done.")
    deadline_left_s: float | None = Field(description="Null: the job has none.")
    spent_usd: Spent
    expected_cost_usd: float = Field(description="Of what is left.")
    transfer_usd: float = Field(description="Of that, for what machines and servers send.")
    expected_runtime_s: float = Field(description="Of what is left.")
    on_demand_only_usd: float = Field(description="Of what is left, with every worker on demand.")
    predicted_usd: float = Field(description="Of machines: spent by then, expected from then on.")
    stability: Stability
    usd_per_hour: dict[str, float] = Field(description="Of one machine by pool, when it decided.")
    believed: Estimates
    warning: Warned


class CostAnswer(Answer):
    """Cost of a job so far, compared with machines on demand and with its plan."""

    at_s: Time
    spent_usd: Spent
    on_demand_only_usd: float = Field(description="What its updates would have cost that way.")
    ratio_to_on_demand: float | None = Field(description="Spent, over that.")
    predicted_usd: float | None = Field(description="Of the whole job, by the plan in force.")
    ratio_to_prediction: float | None = Field(description="Of a job that is over.")
    usd_per_hour: float = Field(description="Of the machines that run now.")


class ProvisioningAnswer(Answer):
    """Machines that are rented for a job, and the plans for them."""

    policy: str = Field(description="That the job asks for.", examples=["adaptive"])
    workers: Count = Field(description="N_tot")
    plan: PlanInForce | None = Field(description="The plan in force; null: there is none yet.")
    plans: tuple[PlanInForce, ...] = Field(description="Newest first, at most `limit`.")
    cost: CostAnswer | None = Field(description="Null: nothing was planned yet.")
    believed: Estimates
    stability: float | None = Field(description="As in the plan, as of the last review.")
    warning: Warned
    running: Count = Field(description="Machines.")
    settled: str = Field(description="Why its provisioning is over; empty while it is not.")


class ReplanAnswer(Answer):
    """A replan was requested. The decision follows in the events and in the list of plans."""

    job: Job
    asked_at_s: Time


class PoolAnswer(Answer):
    """A pool of the market."""

    name: Pool
    kind: Kind
    usd_per_hour: float | None = Field(description="Of one machine; null: not known.")
    reason: str = Field(default="", description="Why there is no price.")


class PricesAnswer(Answer):
    """Current prices of machines."""

    at_s: Time
    pools: tuple[PoolAnswer, ...] = Field(description="The on-demand pool first.")


# --- planning --------------------------------------------------------------------------------


class CurveAnswer(Answer):
    """Cost and runtime against the number of spot workers: columns of equal length."""

    spot: tuple[int, ...] = Field(description="N_s, ascending: 0, N_tot and the plan's among them.")
    cost_usd: tuple[float | None, ...] = Field(description="Null: never done.")
    runtime_s: tuple[float | None, ...] = Field(description="Null: never done.")
    in_time: tuple[float, ...] = Field(description="Probability to meet the deadline.")
    enough: tuple[bool, ...] = Field(description="Whether so many do what was asked.")


class PoolPlanAnswer(Answer):
    """Plan with a single pool of spot machines."""

    name: str = Field(description="The pool's name.")
    usd_per_hour: float = Field(description="Of one machine.")
    availability: float = Field(description="Share of the time that a machine is there.")
    cycle_s: float = Field(description="Mean time from one preemption of a machine to its next.")
    feasible: bool = Field(description="Whether the deadline can be met.")
    spot: int = Field(ge=0, description="N_s")
    expected_cost_usd: float | None = Field(description="Null: it is never done.")
    expected_runtime_s: float | None = Field(description="Null: it is never done.")
    deadline_probability: float = Field(ge=0, le=1, description="To meet the deadline.")


class BidAnswer(Answer):
    """Machines that would be requested now."""

    pool: str = Field(description="Of which pool.")
    machines: int = Field(ge=0, description="How many.")
    at_most_usd_per_hour: float | None = Field(
        description="What one may cost before it is taken away; null: on demand."
    )


class PlanAnswer(Answer):
    """Number of workers to run on spot machines, with expected cost and runtime."""

    feasible: bool = Field(description="Whether the deadline can be met; `reason` says why not.")
    spot: int = Field(ge=0, description="N_s", examples=[30])
    on_demand: int = Field(ge=0, description="Workers on demand.", examples=[34])
    expected_cost_usd: float | None = Field(description="Null: it is never done.")
    expected_runtime_s: float | None = Field(description="Null: it is never done.")
    cost_ratio_to_on_demand: float | None = Field(description="Null: it is never done.")
    binding: str = Field(description="What limits the plan.", examples=["deadline"])
    reason: str = Field(description="Why this plan; or why the deadline cannot be met.")
    deadline_probability: float = Field(ge=0, le=1, description="To meet the deadline.")
    spot_workers: tuple[int, ...] | None = Field(
        description="Which workers run on spot machines, where it was asked to name them."
    )
    names: tuple[str, ...] = Field(description="Of all workers, where a job says them.")
    curve: CurveAnswer | None = Field(description="Null: it was not asked for.")
    notes: tuple[str, ...] = Field(description="Where the numbers come from, if not from you.")
    # Inputs of the plan: given, or taken from a job.
    workers: int = Field(ge=1, description="N_tot")
    arrivals_per_s: float = Field(description="Of all workers together.")
    group_size: int = Field(description="K, batches per update.")
    batch_size: int = Field(description="b, records per batch.")
    updates: float = Field(description="J, those that are left.")
    deadline_s: float = Field(description="Seconds that are left.")
    undisturbed_s: float | None = Field(description="theta_0: its time if nothing is preempted.")
    availability: float = Field(description="Share of the time that a spot machine is there.")
    spot_usd_per_hour: float = Field(description="Of one spot machine.")
    on_demand_usd_per_hour: float = Field(description="Of one on-demand machine.")
    on_demand_only_usd: float | None = Field(description="Cost with every worker on demand.")
    cycle_s: float = Field(description="Mean time from one preemption of a machine to its next.")
    pool: str = Field(default="", description="Whose spot machines, where several were asked of.")
    pools: tuple[PoolPlanAnswer, ...] = Field(
        default=(), description="What each of several would come to."
    )
    bids: tuple[BidAnswer, ...] = Field(default=(), description="Of bidbrain.")


# --- events ----------------------------------------------------------------------------------


class UpdateEvent(UpdateAnswer):
    """Event `update`: the newest update, and how many updates it stands for."""

    count: Count = Field(description="Updates since the last such event, this one with them.")


class MemberEvent(Answer):
    """Event `member`: the heartbeats of a worker report a change."""

    worker: str = Field(description="The worker's name.")
    status: Literal["alive", "leaving", "gone"] = Field(description="How it is now.")
    at_s: Time


class MachineEvent(Answer):
    """Event `machine`: a machine was ordered, was seen running, or has ended."""

    launch: Count = Field(description="Counts the job's machines, from 1.")
    slot: Count | None = Field(description="Of the job; null: a spare, which none needs yet.")
    worker: str = Field(description="The worker's name.")
    pool: Pool
    kind: Kind
    state: Literal["ordered", "running", "ended"] = Field(description="How it is now.")
    cause: str = Field(default="", description="Of its end; else empty.")
    detail: str = Field(default="", description="Of its end, in the provider's words.")
    at_s: Time


class ReviewEvent(Answer):
    """Event `review`: status of a job's machines and costs."""

    at_s: Time
    version: Version
    updates_left: float = Field(description="Until the job is done.")
    running: Count = Field(description="Machines.")
    wanted: Count = Field(description="Machines that the plan wants.")
    spent_usd: Spent
    on_demand_only_usd: float = Field(description="What its updates would have cost that way.")
    stability: Stability
    believed: Estimates
    warning: Warned


class EvaluationEvent(Answer):
    """Event `evaluation`: quality of a model version. A version may be reported in two parts."""

    version: Version
    epoch: int = Field(ge=-1, description="Of its leader; -1: of the first weights, before any.")
    at_s: Time
    records: Count = Field(description="Of the test set.")
    test: Metrics = Field(description="Means over the test set.")
    prequential: dict[str, Metrics] = Field(description="By stream, as in `progress`.")


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
