"""What the API answers about jobs: the models behind the OpenAPI document, each with an example.

Times are seconds since 1970. What is not known (nobody leads, Redis is away) is null, never 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.core.events import Wanted  # noqa: TC001 -- pydantic reads it when run
from common.jobs.progress import Word  # noqa: TC001 -- likewise
from common.jobs.quarantine import Final, Outcome  # noqa: TC001 -- likewise
from common.jobs.spec import JobSpec  # noqa: TC001 -- likewise

Count = Annotated[int, Field(ge=0)]
MachineKind = Literal["on-demand", "spot", "unknown"]  # unknown: started by hand


class Answer(BaseModel):
    """What all answers share."""

    model_config = ConfigDict(frozen=True)


class EvaluationAnswer(Answer):
    """How good the model is, as an evaluator told last."""

    version: Count | None = Field(description="Tried on the test set last; null: none was.")
    at_s: float | None
    records: Count = Field(description="Of the test set.")
    test: dict[str, float] = Field(examples=[{"accuracy": 0.97, "loss": 0.11}])
    predicted: Count | None = Field(description="The last version that predicted new records.")
    prequential: dict[str, dict[str, float]] = Field(
        description="By stream: means over records that were predicted before the model learned"
        " from them.",
        examples=[{"clinic-a": {"accuracy": 0.95, "loss": 0.16}}],
    )
    drifts: Count = Field(description="Noticed so far, the last 200 at most.")


class Progress(Answer):
    """How far a job is."""

    version: Count = Field(description="J, updates made so far.", examples=[412])
    samples: Count = Field(description="Records trained.", examples=[2109440])
    loss: float | None = Field(description="Mean per sample over the last updates.")
    metrics: dict[str, float] = Field(description="Likewise, such as prequential accuracy.")
    updates_per_s: float | None = Field(description="Over the last 10 s.")
    samples_per_s: float | None = Field(description="Over the last 10 s.")
    lag: Count | None = Field(description="Records in the streams and in no update yet.")
    workers: Count | None = Field(description="That give signs of life.")
    waiting: Count | None = Field(description="Batches that wait for an update.")
    skipped: Count = Field(description="Records that did not decode.")
    quarantined: Count = Field(description="Batches that were given up.")
    requeueable: Count = Field(description="Of these, those that an operator may take back.")
    expired: Count = Field(description="Records that Kafka deleted before they were trained.")
    whole: bool = Field(
        description="False: the beginning of its history is gone from Kafka; `samples`, `skipped`,"
        " `quarantined` and `expired` are of the rest."
    )
    led: bool | None = Field(description="Whether a coordinator leads the job; null: Redis away.")
    last_update_s: float | None
    done: str = Field(description="Why it is over; empty while it is not.")
    evaluation: EvaluationAnswer | None = Field(
        default=None, description="Null: nobody evaluates it, or has not yet."
    )


class Change(Answer):
    """A change of a job's settings while it ran."""

    revision: Count = Field(description="Updates carry the revision that they were made under.")
    at_s: float
    changed: dict[str, float | int | None] = Field(examples=[{"group_size": 10}])
    reason: str


class OriginAnswer(Answer):
    """The checkpoint of another job that a job began with."""

    job: str
    epoch: Count
    version: Count
    sha256: str


class JobAnswer(Answer):
    """One job."""

    id: str = Field(description="Its name.", examples=["digits"])
    wanted: Wanted
    reason: str = Field(description="Why it is wanted so.")
    detail: str = Field(
        default="", description="Of a job that is held: a traceback, or empty where there is none."
    )
    submitted_s: float
    deadline_s: float | None = Field(description="When it must be done, since 1970.")
    revision: Count
    changes: tuple[Change, ...]
    spec: JobSpec
    first: tuple[tuple[str, Count, Count], ...] = Field(
        default=(), description="Where it began: topic, partition, position."
    )
    origin: OriginAnswer | None = Field(default=None, description="Null: its own version 0.")
    state: Word = Field(
        description="How it is now: docs/reference/job-states.md says what each means."
    )
    why: str = Field(default="", description="One line; of a job that is held, the reason.")
    progress: Progress


class JobSummary(Answer):
    """One job in a list."""

    id: str
    wanted: Wanted
    reason: str
    submitted_s: float
    streams: tuple[str, ...]
    task: str
    batch_size: int
    group_size: int
    provisioned: bool = Field(description="Whether a provisioner rents its machines.")
    state: Word
    why: str = Field(description="One line; of a job that is held, the reason.")
    lag: Count | None = Field(description="Null: not known, as that of a job that is stopped.")
    skipped: Count | None = Field(description="Records that did not decode.")
    quarantined: Count | None = Field(description="Batches that were given up.")
    expired: Count | None = Field(
        description="Records that Kafka deleted before they were trained."
    )
    whole: bool = Field(description="As in `progress`: whether these three are of all its history.")


class UnreadableRecord(Answer):
    """The newest record of a job, where it does not parse."""

    id: str = Field(description="The record's key: a job that had this name goes on as it was.")
    offset: Count = Field(description="In the topic `doll.jobs`.")
    reason: str


class JobList(Answer):
    """Jobs by name."""

    jobs: tuple[JobSummary, ...]
    unreadable: tuple[UnreadableRecord, ...] = Field(
        default=(), description="Records of jobs that do not parse, with the first page alone."
    )
    next: str | None = Field(description="Give it as `after` for more; null: there are no more.")


class QuarantinedBatchAnswer(Answer):
    """A batch that is quarantined."""

    batch: Count = Field(description="What it is called: its offset in the control topic.")
    records: Count
    spans: tuple[tuple[str, Count, Count, Count], ...] = Field(
        description="What it is made of: topic, partition, first position and the one after the"
        " last.",
        examples=[[["clinic-a", 0, 128, 192]]],
    )
    reason: str = Field(examples=["poison: raised: KeyError: 'label'"])
    final: Final = Field(description="Why nobody can take it back; empty: an operator may.")


class QuarantineAnswer(Answer):
    """What is quarantined in a job, oldest batch first."""

    batches: tuple[QuarantinedBatchAnswer, ...]
    next: Count | None = Field(description="Give it as `after` for more; null: there are no more.")


class RequeuedBatchAnswer(Answer):
    """What became of the wish to take a batch back."""

    batch: Count
    outcome: Outcome = Field(
        description="requeued: it waits for an update as if it were new; before: it had been taken"
        " back already; replayed: somebody was faster and had its records written anew."
    )


class RequeueAnswer(Answer):
    """What became of each batch; none where none could be taken back."""

    batches: tuple[RequeuedBatchAnswer, ...]


class UpdateAnswer(Answer):
    """One effective update."""

    version: Count
    epoch: Count = Field(description="Of the leader that made it: each has a higher number.")
    at_s: float | None
    samples: Count
    batches: Count
    loss: float
    metrics: dict[str, float]
    gradient_s: float | None = Field(description="Mean time of one batch's gradient.")
    revision: Count
    short: str = Field(description="Why it has fewer than K batches: linger, missing, or empty.")


class UpdatesPage(Answer):
    """Effective updates, by version."""

    updates: tuple[UpdateAnswer, ...]
    next: Count | None = Field(description="Give it as `after` for more; null: there are no more.")
    newest: Count
    oldest: Count | None = Field(
        description="The first that can still be had singly; null: there is none."
    )


class WorkerAnswer(Answer):
    """One worker, or the slot of one that is to come."""

    name: str
    status: Literal["alive", "leaving", "silent", "unknown"] = Field(
        description="silent: its machine runs, but it gives no sign of life (yet); unknown: Redis"
        " is away."
    )
    slot: Count | None = None
    kind: MachineKind = "unknown"
    pool: str | None = None
    machine: str | None = None
    since_s: float | None = Field(default=None, description="When its machine began.")
    samples: Count = Field(default=0, description="In its batches, of late.")


class WorkersAnswer(Answer):
    """All workers; null where Redis is away."""

    workers: tuple[WorkerAnswer, ...]
    board_away: str = Field(default="", description="Why signs of life cannot be read.")


class StreamAnswer(Answer):
    """One datastream, as this job sees it."""

    stream: str
    partitions: Count
    rate_per_s: float | None = Field(description="Records that arrive.")
    lag: Count | None
    settled: Count | None = Field(description="Records in updates that a checkpoint covers.")
    dead_lettered: Count = Field(description="Records that did not decode or were quarantined.")


class StreamsAnswer(Answer):
    """All datastreams of a job."""

    streams: tuple[StreamAnswer, ...]


class LagCurve(Answer):
    """Lag of one stream over time."""

    stream: str
    lag: tuple[int | None, ...]  # at `lag_at_s`


class Life(Answer):
    """One machine's life, for a timeline."""

    slot: Count
    worker: str
    pool: str
    kind: MachineKind
    from_s: float
    to_s: float | None = Field(description="Null: it runs.")
    cause: Literal["preempted", "released", "failed", "refused", "lost"] | None = None


class PrequentialCurve(Answer):
    """How well a stream's records were predicted before the model learned from them."""

    stream: str
    at_s: tuple[float, ...]
    version: tuple[int, ...]
    metrics: dict[str, tuple[float | None, ...]]


class DriftAnswer(Answer):
    """A stream whose errors have risen."""

    stream: str
    version: Count = Field(description="At which it was noticed.")
    at_s: float
    before: float = Field(description="Mean error per record, from 0 to 1.")
    after: float


class EvaluationCurves(Answer):
    """What evaluators told."""

    at_s: tuple[float, ...] = ()  # of versions that were tried on the test set
    version: tuple[int, ...] = ()
    test: dict[str, tuple[float | None, ...]] = {}
    prequential: tuple[PrequentialCurve, ...] = ()
    drifts: tuple[DriftAnswer, ...] = ()


class CurvesAnswer(Answer):
    """What a page draws: columns of equal length, thinned to what an eye can tell apart."""

    now_s: float
    update_at_s: tuple[float, ...]
    version: tuple[int, ...]
    loss: tuple[float, ...]
    metrics: dict[str, tuple[float | None, ...]]
    updates_per_s: tuple[float, ...]
    lag_at_s: tuple[float, ...]
    lag: tuple[LagCurve, ...]
    lives: tuple[Life, ...]
    cost_at_s: tuple[float, ...]
    spent_usd: tuple[float, ...]
    on_demand_only_usd: tuple[float, ...]
    stability: tuple[float, ...]  # at `cost_at_s`
    running: tuple[int, ...]  # machines, at `cost_at_s`
    evaluation: EvaluationCurves = EvaluationCurves()


# --- provisioning ----------------------------------------------------------------------------


class BelievedAnswer(Answer):
    """An estimate and how sure it is."""

    value: float
    std: float
    low: float = Field(description="With `high`, where the quantity lies with 90 %.")
    high: float


class PlanInForce(Answer):
    """One decision of a job's policy."""

    number: Count
    at_s: float
    policy: str
    why: str = Field(description="What made it decide.")
    reason: str = Field(description="Why this plan.")
    feasible: bool
    binding: str
    spot: Count
    on_demand: Count
    places: dict[str, Count] = Field(description="Slots by pool; `none`: without a machine.")
    updates_left: float
    deadline_left_s: float | None
    spent_usd: float
    expected_cost_usd: float
    expected_runtime_s: float
    on_demand_only_usd: float
    predicted_usd: float = Field(description="Spent by then, and expected from then on.")
    stability: float
    usd_per_hour: dict[str, float]
    believed: dict[str, BelievedAnswer]
    warning: str


class CostAnswer(Answer):
    """What a job has cost so far, and against what."""

    at_s: float
    spent_usd: float
    on_demand_only_usd: float = Field(description="What its updates would have cost that way.")
    ratio_to_on_demand: float | None
    predicted_usd: float | None = Field(description="Of the whole job, by the plan in force.")
    ratio_to_prediction: float | None = Field(description="Of a job that is over.")
    usd_per_hour: float = Field(description="Of the machines that run now.")


class ProvisioningAnswer(Answer):
    """How a job's machines are rented."""

    policy: str
    workers: Count = Field(description="N_tot")
    plan: PlanInForce | None
    plans: tuple[PlanInForce, ...] = Field(description="Newest first, at most `limit`.")
    cost: CostAnswer | None
    believed: dict[str, BelievedAnswer]
    stability: float | None
    warning: str
    running: Count
    settled: str = Field(description="Why its provisioning is over; empty while it is not.")


class ReplanAnswer(Answer):
    """A replan was asked for; the decision comes with the events and in the history."""

    job: str
    asked_at_s: float


class PoolAnswer(Answer):
    """One pool of the market."""

    name: str
    kind: MachineKind
    usd_per_hour: float | None
    reason: str = Field(default="", description="Why there is no price.")


class PricesAnswer(Answer):
    """What machines cost now."""

    at_s: float
    pools: tuple[PoolAnswer, ...]
