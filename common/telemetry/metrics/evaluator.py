"""The metrics of an evaluator: of the evaluation and of the tracking of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.telemetry.metrics.registry import SECONDS, gauge

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


class EvaluatorMetrics:
    """The metrics of the evaluation of one job.

    Args:
        streams: The job's, whose counters begin at zero.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self.version: int | None = None  # J of the version that was evaluated last
        self.test_means = Gauge(
            "doll_test_metric",
            "Mean per record of the loss or of a metric of the task on the test set, for the"
            " version that was evaluated last.",
            ["metric"],
            registry=self.registry,
        )
        self.evaluations = Counter(
            "doll_evaluations_total",
            "Total number of versions that were evaluated (done), or skipped because a newer one"
            " was offered or a leader took the version back (skipped).",
            ["outcome"],
            registry=self.registry,
        )
        self.test_s = Histogram(
            "doll_evaluation_seconds",
            "Duration of the evaluation of one version on the test set.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.prequential_means = Gauge(
            "doll_prequential_metric",
            "Mean per record of the loss or of a metric of the task on records of a stream, just"
            " before the model learned from them.",
            ["stream", "metric"],
            registry=self.registry,
        )
        self.drifts = Counter(
            "doll_drifts_total",
            "Drifts that ADWIN detected in the errors of a stream.",
            ["stream"],
            registry=self.registry,
        )
        for outcome in ("done", "skipped"):
            self.evaluations.labels(outcome)
        for stream in streams:
            self.drifts.labels(stream)
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric that has no value at first."""
        meaning = "Number of updates (J) of the version that was evaluated last."
        yield gauge("doll_evaluated_version", meaning, self.version)


class TrackerMetrics:
    """The metrics of one job's tracking by an MLflow server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.sent = counter(
            "doll_tracking_points_total", "Points of curves that the MLflow server accepted."
        )
        self.failures = counter(
            "doll_tracking_failures_total", "Failed attempts to send to the MLflow server."
        )
        self.waiting: int | None = None
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric that has no value at first."""
        yield gauge(
            "doll_tracking_waiting_records",
            "Number of records of the updates topic that were not sent to the MLflow server yet.",
            self.waiting,
        )
