"""Metrics of an evaluator: evaluation and tracking of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from common.telemetry.metrics.registry import MetricSet, gauge

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


class EvaluatorMetrics(MetricSet):
    """Metrics of the evaluation of one job.

    Args:
        streams: Streams of the job. Their counters begin at zero.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        super().__init__()
        # Version (J) that was evaluated last.
        self.version: int | None = None
        self.test_means = self.gauge(
            "doll_test_metric",
            "Mean per record of the loss or of a metric of the task on the test set, for the"
            " version that was evaluated last.",
            ["metric"],
        )
        self.evaluations = self.counter(
            "doll_evaluations_total",
            "Total number of versions that were evaluated (done), or skipped because a newer one"
            " was offered or a leader took the version back (skipped).",
            ["outcome"],
        )
        self.test_s = self.histogram(
            "doll_evaluation_seconds",
            "Duration of the evaluation of one version on the test set.",
        )
        self.prequential_means = self.gauge(
            "doll_prequential_metric",
            "Mean per record of the loss or of a metric of the task on records of a stream, just"
            " before the model learned from them.",
            ["stream", "metric"],
        )
        self.drifts = self.counter(
            "doll_drifts_total",
            "Drifts that ADWIN detected in the errors of a stream.",
            ["stream"],
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


class TrackerMetrics(MetricSet):
    """Metrics of the tracking of one job in an MLflow server."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.counter(
            "doll_tracking_points_total", "Points of curves that the MLflow server accepted."
        )
        self.failures = self.counter(
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
