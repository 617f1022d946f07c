"""Metrics of a model server."""

from __future__ import annotations

from collections.abc import Callable

from common.telemetry.metrics.registry import MetricSet


class ServeMetrics(MetricSet):
    """Metrics of the job whose model a server serves. Threads may share them.

    Args:
        version: Returns J of the version that answers.
        behind_s: Returns the time since the server last confirmed that this version is the wanted
            one.
    """

    def __init__(self, version: Callable[[], int], behind_s: Callable[[], float]) -> None:
        super().__init__()
        self.gauge(
            "doll_served_version",
            "Number of updates (J) of the version that answers; -1 if there is no version yet.",
        ).set_function(version)
        self.gauge(
            "doll_served_behind_seconds",
            "Time since the server last confirmed that the version that answers is the wanted one.",
        ).set_function(behind_s)
        self.predictions = self.counter(
            "doll_predictions_total",
            "Total number of requests for predictions, by the HTTP status of the response.",
            ["status"],
        )
        self.request_s = self.histogram(
            "doll_prediction_seconds",
            "Duration from the arrival of a request for predictions to its response.",
        )
        self.batch_records = self.histogram(
            "doll_prediction_batch_records",
            "Number of records that the network processed in one pass.",
            buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
        )
        self.shadow_difference = self.gauge(
            "doll_shadow_difference",
            "Mean absolute difference per output between the predictions and the shadow model's"
            " predictions, in the newest batch.",
        )
        self.not_written = self.counter(
            "doll_predictions_not_written_total",
            "Total number of answered records that were not written to the topic of predictions"
            " because Kafka was unavailable.",
        )

    def answered(self, status: int, seconds: float) -> None:
        """Count a request by the HTTP status of its response."""
        self.predictions.labels(str(status)).inc()
        self.request_s.observe(seconds)
