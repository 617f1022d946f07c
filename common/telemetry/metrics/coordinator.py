"""Metrics of a coordinator.

Counters exist while this replica takes part in a job. The gauges of a leader are computed at a
scrape from the leader's state, which ends with its leadership. So a former leader reports no
gauges beside those of its successor.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from common.telemetry.metrics.registry import MetricSet, counter, gauge, of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from common.core.messages import LeaderStatus, Synchrony, UpdateApplied

AGES_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHORT = ("linger", "missing", "quarantined")
STAGES = ("wait", "gradients", "apply")
REFUSED = ("gradient", "failed", "leaving", "malformed")
QUARANTINED = ("poison", "expired")
# Workers name the metrics of a task in their gradients, and each name is a series. The bound
# protects against a faulty worker. The built-in tasks have one metric.
MOST_METRICS = 16
# The same bound for workers. Workers with the fewest batches are left out.
MOST_WORKERS = 100
# Number of gradients over which workers are compared: ten rounds of a hundred workers.
RECENT_GRADIENTS = 1000


class RecentGradient(NamedTuple):
    """A gradient that counted."""

    worker: str
    batches: int
    seconds: float


class WorkerFigures(NamedTuple):
    """Recent work of one worker.

    Attributes:
        batches_per_s: Batches per second while the worker computes.
        share: Share of all batches.
    """

    batches_per_s: float
    share: float


def by_worker(gradients: Iterable[RecentGradient]) -> dict[str, WorkerFigures]:
    """Return the recent work of the workers with the most batches."""
    batches, seconds = Counts[str](), dict[str, float]()
    for each in gradients:
        batches[each.worker] += each.batches
        seconds[each.worker] = seconds.get(each.worker, 0.0) + each.seconds
    return {
        worker: WorkerFigures(count / max(seconds[worker], 1e-9), count / batches.total())
        for worker, count in batches.most_common(MOST_WORKERS)
    }


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Figures that follow from the ends of a job's logs. Unknown values are None.

    Attributes:
        records: Records since the job's first position, by stream.
        lag: Records that no claim contains yet, by stream.
        arrivals_per_s: Records per second of all streams.
        sufficient: Proposition 1: the job is stable below 1.
        necessary: Proposition 1: the job is unstable from 1 on.
    """

    records: Mapping[str, int]
    lag: Mapping[str, int]
    arrivals_per_s: float | None = None
    sufficient: float | None = None
    necessary: float | None = None


@dataclass(frozen=True, slots=True)
class LeaderFigures:
    """State of a leader at one moment. It is replaced as a whole when it changes.

    Attributes:
        epoch: Number of the leadership.
        version: J of the newest version.
        loss: Mean loss per sample of the newest update.
        update: Newest update.
        synchrony: Synchronization mode and group size of the newest update.
        status: Newest status that the leader published.
        busy: Share of their time that workers computed.
        group_size: K of an update that would begin now.
    """

    epoch: int
    version: int
    loss: float | None = None
    update: UpdateApplied | None = None
    synchrony: Synchrony | None = None
    status: LeaderStatus | None = None
    busy: float | None = None
    group_size: int | None = None


class GroupMetrics:
    """Metrics of a job whose workers hold the weights."""

    def __init__(self, metrics: MetricSet) -> None:
        self.memberships = metrics.counter(
            "doll_group_membership_changes_total",
            "Total number of times that the set of group members changed. Members are the workers"
            " that hold the model weights (`aggregation.mode: group`).",
        )
        self.attempts_broken = metrics.counter(
            "doll_group_attempts_broken_total",
            "Total number of failed attempts to sum gradients among the group members (the"
            " workers, with `aggregation.mode: group`), because a member died, hung or lacked a"
            " gradient.",
        )
        self.collective_s = metrics.histogram(
            "doll_group_collective_seconds",
            "Time to sum the gradients of one update among the group members (the workers, with"
            " `aggregation.mode: group`), from the leading coordinator's request until enough"
            " members have the result, in seconds.",
        )
        self.repair_s = metrics.histogram(
            "doll_group_repair_seconds",
            "Time to recover from a failed attempt to sum gradients among the group members (the"
            " workers, with `aggregation.mode: group`), from the failure until enough members have"
            " the result of a later attempt, in seconds.",
        )


class CoordinatorMetrics(MetricSet):
    """Metrics of one job. The thread of the job's actor writes them, scrapes read them.

    Args:
        checkpoint_age_s: Returns the age of the newest checkpoint, or None if unknown.
    """

    def __init__(self, checkpoint_age_s: Callable[[], float | None] = lambda: None) -> None:
        super().__init__()
        self.held = False
        self.paused = False
        self.leading: LeaderFigures | None = None
        # Epoch of a leader, and the figures of its streams. The thread that polls them writes it.
        self.streams: tuple[int, StreamFigures | None] = (-1, None)
        self.gradients = deque[RecentGradient](maxlen=RECENT_GRADIENTS)
        self._checkpoint_age_s = checkpoint_age_s
        count = self.counter
        self.updates = count(
            "doll_updates_total",
            "Total number of updates (optimizer steps) that the leading coordinator applied to the"
            " model.",
        )
        self.update_batches = count(
            "doll_update_batches_total",
            "Total number of batches in the updates that the leading coordinator applied to the"
            " model.",
        )
        self.update_records = count(
            "doll_update_records_total",
            "Total number of records in the updates that the leading coordinator applied to the"
            " model.",
        )
        self.short_updates = count(
            "doll_short_updates_total",
            "Total number of updates with fewer batches than `group_size` (K), by reason: `linger`"
            " (no further batch came within `group_linger_s`), `missing` (a gradient never came,"
            " and `on_missing` is `proceed`) or `quarantined` (a batch was put in quarantine).",
            ["why"],
        )
        self.switches = count(
            "doll_synchronisation_switches_total",
            "Total number of updates whose synchronisation mode differs from that of the"
            " previous update.",
        )
        self.stage_s = self.histogram(
            "doll_round_seconds",
            "Duration of one stage of an update, in seconds: `wait` (from the previous update"
            " until workers have claimed enough batches for the next one), `gradients` (from the"
            " coordinator's request to the last gradient) or `apply` (from the optimizer step"
            " until the new model is published).",
            ["stage"],
        )
        self.staleness = self.histogram(
            "doll_gradient_staleness_versions",
            "Age of the weights of a gradient when the gradient arrived at the leading"
            " coordinator: number of updates made after these weights. The label `counted` is `no`"
            " if the coordinator discarded the gradient, otherwise `yes`.",
            ["counted"],
            buckets=VERSIONS,
        )
        self.record_age_s = self.histogram(
            "doll_record_age_seconds",
            "Time from the arrival of a batch's newest record in Kafka until a model that was"
            " trained on the batch was published, in seconds.",
            buckets=AGES_S,
        )
        self.claims_accepted = count(
            "doll_claims_accepted_total",
            "Total number of batches that workers claimed and the leading coordinator accepted. A"
            " claim reserves a range of Kafka records for one batch.",
        )
        self.claims_refused = count(
            "doll_claims_refused_total",
            "Total number of claims (workers' requests to reserve records for a batch) that the"
            " leading coordinator refused because the records were already claimed or do not"
            " follow those of the last accepted claim, or because the message is unreadable.",
        )
        self.replies_refused = count(
            "doll_replies_refused_total",
            "Total number of messages from workers that the leading coordinator ignored, by kind:"
            " `gradient`, `failed` (no gradient) and `leaving` (the worker ends) were repeated or"
            " came after their update was made; `malformed` could not be read.",
            ["kind"],
        )
        self.redispatched = count(
            "doll_batches_redispatched_total",
            "Total number of times that the leading coordinator reassigned a batch to another"
            " worker because the first worker left, died, failed or was late.",
        )
        self.quarantined = count(
            "doll_batches_quarantined_total",
            "Total number of batches put in quarantine (set aside untrained), by reason: `poison`"
            " (the batch crashes workers, raises an exception or gives non-finite numbers) or"
            " `expired` (Kafka deleted the batch's records).",
            ["reason"],
        )
        self.dead_letters = count(
            "doll_dead_letters_total",
            "Total number of records that could not be used and that the leading coordinator wrote"
            " to the dead-letter topics of the job's streams.",
        )
        self.checkpoint_failures = count(
            "doll_checkpoint_failures_total",
            "Total number of failed attempts of the leading coordinator to write a checkpoint to"
            " object storage.",
        )
        self.group = GroupMetrics(self)
        for metric, values in (
            (self.short_updates, SHORT),
            (self.stage_s, STAGES),
            (self.staleness, ("yes", "no")),
            (self.replies_refused, REFUSED),
            (self.quarantined, QUARANTINED),
        ):
            for value in values:
                metric.labels(value)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. Those of a leader come only if this replica leads."""
        # Read once, since the leadership may end during the scrape.
        leading = self.leading
        # A candidate that cannot become leader also holds the job.
        held = float(self.held) if self.held or leading else None
        paused = float(self.paused and not self.held) if leading else None
        yield gauge(
            "doll_leading",
            "1 if this coordinator leads the job; 0 if it stands by to replace the leader.",
            float(leading is not None),
        )
        yield gauge(
            "doll_job_held",
            "1 if the job is held, which means that no updates are made until an operator"
            " resumes it; otherwise 0. `doll job list` shows the reason.",
            held,
        )
        yield gauge(
            "doll_job_paused",
            "1 if an operator has paused the job, so that no updates are made; otherwise 0.",
            paused,
        )
        yield gauge(
            "doll_checkpoint_age_seconds",
            "Age of the job's newest checkpoint in object storage, in seconds.",
            self._checkpoint_age_s(),
        )
        yield from self._of_leader(leading)
        yield from self._of_update(leading)
        yield from self._of_workers(leading)
        epoch, streams = self.streams
        yield from _of_streams(streams if of(leading, lambda it: it.epoch) == epoch else None)

    @staticmethod
    def _of_leader(leading: LeaderFigures | None) -> Iterator[Metric]:
        status = leading.status if leading else None
        group = status.group if status else None
        yield gauge(
            "doll_epoch",
            "Epoch of the job: number of the current leadership. Every new leading coordinator has"
            " a higher epoch, so a change means that the leader changed.",
            of(leading, lambda it: it.epoch),
        )
        yield gauge(
            "doll_model_version",
            "Version of the newest model: the number of updates (J) that it contains.",
            of(leading, lambda it: it.version),
        )
        yield gauge(
            "doll_batches_waiting",
            "Number of batches that workers have claimed (reserved the records of) and that no"
            " model update contains yet.",
            of(status, lambda it: it.waiting),
        )
        yield gauge(
            "doll_workers_live",
            "Number of the job's workers that are alive, judged by their heartbeats in Redis.",
            of(status, lambda it: it.live),
        )
        yield gauge(
            "doll_group_members",
            "Number of workers that hold the model weights and sum gradients among themselves"
            " (`aggregation.mode: group`).",
            len(group.members) if group else None,
        )
        yield gauge(
            "doll_group_left_out_workers",
            "Number of live workers that compute nothing, because they cannot connect to all"
            " workers that hold the model weights (`aggregation.mode: group`).",
            len(group.left_out) if group else None,
        )

    @staticmethod
    def _of_update(leading: LeaderFigures | None) -> Iterator[Metric]:
        update = leading.update if leading else None
        synchrony = leading.synchrony if leading else None
        means = update.metrics if update else {}
        yield gauge(
            "doll_loss",
            "Mean training loss per record of the newest update, computed with the weights before"
            " that update (prequential).",
            of(leading, lambda it: it.loss),
        )
        yield gauge(
            "doll_training_metric",
            "Mean per record of one of the task's metrics for the newest update, computed with the"
            " weights before that update. The metrics auc, calibration_error, f1, precision and"
            " recall cover the last minute instead.",
            {name: means[name] for name in sorted(means)[:MOST_METRICS]},
            "metric",
        )
        yield gauge(
            "doll_learning_rate",
            "Learning rate that the newest update used, after adjustment by the job's schedule and"
            " synchronisation mode.",
            of(update, lambda it: it.rate or None),
        )
        yield gauge(
            "doll_synchronisation",
            "Always 1. The label `mode` is the synchronisation mode of the newest update:"
            " synchronous, stale, asynchronous or averaging.",
            of(synchrony, lambda it: {it.mode: 1.0}),
            "mode",
        )
        yield gauge(
            "doll_group_size_batches",
            "Number of batches that the newest update should contain (K); it has fewer if batches"
            " were missing.",
            of(synchrony, lambda it: it.group_size),
        )

    def _of_workers(self, leading: LeaderFigures | None) -> Iterator[Metric]:
        # Copied, because the actor appends to it during the scrape.
        workers = by_worker(tuple(self.gradients)) if leading else {}
        yield gauge(
            "doll_workers_busy_ratio",
            "Share of time (0 to 1) that workers spent computing gradients, over the last 20"
            " updates in the current synchronisation mode; 1 until there are 20 such updates.",
            of(leading, lambda it: it.busy),
        )
        yield gauge(
            "doll_worker_batches_per_second",
            "Number of batches per second of computing time that the worker processes, over the"
            " job's last 1,000 gradients. Only the 100 workers with the most batches are reported.",
            {worker: it.batches_per_s for worker, it in workers.items()},
            "worker",
        )
        yield gauge(
            "doll_worker_batches_ratio",
            "Share (0 to 1) of the job's batches that the worker computed, over the job's last"
            " 1,000 gradients. Only the 100 workers with the most batches are reported.",
            {worker: it.share for worker, it in workers.items()},
            "worker",
        )


def _of_streams(streams: StreamFigures | None) -> Iterator[Metric]:
    yield counter(
        "doll_stream_records_total",
        "Total number of records that arrived in the stream since the position where the job began"
        " to read.",
        of(streams, lambda it: it.records),
        "stream",
    )
    yield gauge(
        "doll_stream_lag_records",
        "Number of records of the stream that no worker has claimed for a batch yet, without those"
        " behind an open Kafka transaction. Batches that are claimed and wait for an update are"
        " counted by doll_batches_waiting.",
        of(streams, lambda it: it.lag),
        "stream",
    )
    yield gauge(
        "doll_arrival_records_per_second",
        "Arrival rate of records in all of the job's streams over the last minute, in records per"
        " second.",
        of(streams, lambda it: it.arrivals_per_s),
    )
    yield gauge(
        "doll_stability_ratio",
        "Arriving work divided by the work that workers can do (Proposition 1 of the DOLL paper,"
        " Jiang, Zhang and Joe-Wong). The label `bound` names one of two bounds: the job keeps up"
        " if the ratio is below 1 for `sufficient`, and falls behind if it is at least 1 for"
        " `necessary`.",
        of(streams, lambda it: {"sufficient": it.sufficient, "necessary": it.necessary}),
        "bound",
    )
