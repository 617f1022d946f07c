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
        synchrony: Synchrony of the newest update.
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
            "Changes of the members of the group.",
        )
        self.attempts_broken = metrics.counter(
            "doll_group_attempts_broken_total",
            "Total number of attempts at an update that failed because a member of the group died,"
            " hung or lacked a gradient.",
        )
        self.collective_s = metrics.histogram(
            "doll_group_collective_seconds",
            "Duration from the order to reduce gradients in the group until enough members have the"
            " result.",
        )
        self.repair_s = metrics.histogram(
            "doll_group_repair_seconds",
            "Duration from the end of a failed attempt until enough members have the result of a"
            " later attempt.",
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
        self.updates = count("doll_updates_total", "Updates that the leader applied to the model.")
        self.update_batches = count("doll_update_batches_total", "Batches in applied updates.")
        self.update_records = count("doll_update_records_total", "Records in applied updates.")
        self.short_updates = count(
            "doll_short_updates_total",
            "Total number of updates with fewer than K batches, by reason: linger, missing or"
            " quarantined.",
            ["why"],
        )
        self.switches = count(
            "doll_synchronisation_switches_total", "Updates in another mode than the update before."
        )
        self.stage_s = self.histogram(
            "doll_round_seconds",
            "Duration of a stage of a round: wait (from an update until K batches are there),"
            " gradients (from the trigger to the last gradient), apply (from the optimizer's step"
            " until the new model is published).",
            ["stage"],
        )
        self.staleness = self.histogram(
            "doll_gradient_staleness_versions",
            "Number of updates by which a gradient was older than the model when it arrived, by"
            " whether the gradient counted: yes or no.",
            ["counted"],
            buckets=VERSIONS,
        )
        self.record_age_s = self.histogram(
            "doll_record_age_seconds",
            "Duration from the arrival of a batch's newest record in Kafka until its update was"
            " applied.",
            buckets=AGES_S,
        )
        self.claims_accepted = count(
            "doll_claims_accepted_total", "Claims of batches that the leader accepted."
        )
        self.claims_refused = count(
            "doll_claims_refused_total",
            "Total number of claims without effect: repeated, late, unreadable or from a ghost.",
        )
        self.replies_refused = count(
            "doll_replies_refused_total",
            "Total number of messages of workers without effect, by kind: gradient, failed or"
            " leaving (for another round, or repeated), malformed (unreadable).",
            ["kind"],
        )
        self.redispatched = count(
            "doll_batches_redispatched_total",
            "Total number of batches that the leader reassigned because their worker left, died,"
            " failed or was late.",
        )
        self.quarantined = count(
            "doll_batches_quarantined_total",
            "Batches put into quarantine: poison or expired.",
            ["reason"],
        )
        self.dead_letters = count(
            "doll_dead_letters_total", "Records written to dead-letter topics."
        )
        self.checkpoint_failures = count(
            "doll_checkpoint_failures_total", "Failed attempts to write a checkpoint."
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
            "1 if this replica leads the job; 0 if it stands by.",
            float(leading is not None),
        )
        yield gauge(
            "doll_job_held", "1 if the job is held until a person decides; the log has why.", held
        )
        yield gauge(
            "doll_job_paused", "1 if a person has paused the job, so no updates are made.", paused
        )
        yield gauge(
            "doll_checkpoint_age_seconds",
            "Time since the newest checkpoint was made.",
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
            "Epoch of the leader; each new leader has a higher epoch.",
            of(leading, lambda it: it.epoch),
        )
        yield gauge(
            "doll_model_version",
            "Number of updates (J) of the model.",
            of(leading, lambda it: it.version),
        )
        yield gauge(
            "doll_batches_waiting",
            "Number of accepted batches that are in no update yet.",
            of(status, lambda it: it.waiting),
        )
        yield gauge(
            "doll_workers_live",
            "Number of workers that the leader sees.",
            of(status, lambda it: it.live),
        )
        yield gauge(
            "doll_group_members",
            "Number of workers that hold the weights and reduce gradients among themselves"
            " (`aggregation.mode: group`).",
            len(group.members) if group else None,
        )
        yield gauge(
            "doll_group_left_out_workers",
            "Number of live workers that cannot join the group because some members and they do not"
            " reach each other.",
            len(group.left_out) if group else None,
        )

    @staticmethod
    def _of_update(leading: LeaderFigures | None) -> Iterator[Metric]:
        update = leading.update if leading else None
        synchrony = leading.synchrony if leading else None
        means = update.metrics if update else {}
        yield gauge(
            "doll_loss",
            "Mean loss per record of the newest update, with the weights before it (prequential).",
            of(leading, lambda it: it.loss),
        )
        yield gauge(
            "doll_training_metric",
            "Mean per record of a metric of the task for the newest update, with the weights before"
            " it; auc, calibration_error, f1, precision and recall cover the last minute.",
            {name: means[name] for name in sorted(means)[:MOST_METRICS]},
            "metric",
        )
        yield gauge(
            "doll_learning_rate",
            "Learning rate of the newest update, after the job's schedule and synchronisation.",
            of(update, lambda it: it.rate or None),
        )
        yield gauge(
            "doll_synchronisation",
            "Always 1; the label is the synchronisation mode of the newest update: synchronous,"
            " stale, asynchronous or averaging.",
            of(synchrony, lambda it: {it.mode: 1.0}),
            "mode",
        )
        yield gauge(
            "doll_group_size_batches",
            "Group size (K) of the newest update.",
            of(synchrony, lambda it: it.group_size),
        )

    def _of_workers(self, leading: LeaderFigures | None) -> Iterator[Metric]:
        # Copied, because the actor appends to it during the scrape.
        workers = by_worker(tuple(self.gradients)) if leading else {}
        yield gauge(
            "doll_workers_busy_ratio",
            "Share of their time that workers computed in the last 20 updates of the current mode;"
            " 1 before there are 20.",
            of(leading, lambda it: it.busy),
        )
        yield gauge(
            "doll_worker_batches_per_second",
            "Batches per second that the worker computes, over the last 1,000 gradients, for the"
            " 100 workers with the most batches.",
            {worker: it.batches_per_s for worker, it in workers.items()},
            "worker",
        )
        yield gauge(
            "doll_worker_batches_ratio",
            "Share of the worker in the batches of the last 1,000 gradients, for the 100 workers"
            " with the most batches.",
            {worker: it.share for worker, it in workers.items()},
            "worker",
        )


def _of_streams(streams: StreamFigures | None) -> Iterator[Metric]:
    yield counter(
        "doll_stream_records_total",
        "Total number of records that arrived in the stream since the job's first position.",
        of(streams, lambda it: it.records),
        "stream",
    )
    yield gauge(
        "doll_stream_lag_records",
        "Number of records of the stream, before any open transaction, that no worker has claimed"
        " yet; doll_batches_waiting counts the claimed ones.",
        of(streams, lambda it: it.lag),
        "stream",
    )
    yield gauge(
        "doll_arrival_records_per_second",
        "Arrival rate of the records of all streams over the last minute.",
        of(streams, lambda it: it.arrivals_per_s),
    )
    yield gauge(
        "doll_stability_ratio",
        "Work that arrives divided by the work that workers can do (Proposition 1). The job is"
        " stable if `sufficient` is below 1, and needs more or faster workers if `necessary` is"
        " at least 1.",
        of(streams, lambda it: {"sufficient": it.sufficient, "necessary": it.necessary}),
        "bound",
    )
