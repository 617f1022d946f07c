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
            "Mean per record of the loss or of one of the task's metrics on the test set, for the"
            " model version that was evaluated last.",
            ["metric"],
        )
        self.evaluations = self.counter(
            "doll_evaluations_total",
            "Total number of model versions that the job's coordinator offered for evaluation, by"
            " outcome: `done`, or `skipped` because a newer version was offered, a new coordinator"
            " rolled the version back, or the version's file was unreadable.",
            ["outcome"],
        )
        self.test_s = self.histogram(
            "doll_evaluation_seconds",
            "Duration of the evaluation of one model version on the test set, in seconds.",
        )
        self.prequential_means = self.gauge(
            "doll_prequential_metric",
            "Mean per record of the loss or of one of the task's metrics on records of one stream,"
            " computed just before the model was trained on them (prequential).",
            ["stream", "metric"],
        )
        self.drifts = self.counter(
            "doll_drifts_total",
            "Total number of times that the ADWIN algorithm detected a drift: a change of the"
            " model's errors on the stream.",
            ["stream"],
        )
        for outcome in ("done", "skipped"):
            self.evaluations.labels(outcome)
        for stream in streams:
            self.drifts.labels(stream)
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric that has no value at first."""
        meaning = "Model version that was evaluated last, as its number of updates (J)."
        yield gauge("doll_evaluated_version", meaning, self.version)


class TrackerMetrics(MetricSet):
    """Metrics of the tracking of one job in an MLflow server."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.counter(
            "doll_tracking_points_total",
            "Total number of metric values that were sent to the MLflow server and that it"
            " accepted.",
        )
        self.failures = self.counter(
            "doll_tracking_failures_total",
            "Total number of failed attempts to send metric values to the MLflow server.",
        )
        self.waiting: int | None = None
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric that has no value at first."""
        yield gauge(
            "doll_tracking_waiting_records",
            "Number of records of the job's updates topic whose metric values were not sent to the"
            " MLflow server yet.",
            self.waiting,
        )
