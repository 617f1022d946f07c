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
            "Model version that answers predictions, as its number of updates (J); -1 if no"
            " version is loaded yet.",
        ).set_function(version)
        self.gauge(
            "doll_served_behind_seconds",
            "Time since the model server last confirmed that it serves the version that it was"
            " started to serve (such as the newest), in seconds.",
        ).set_function(behind_s)
        self.predictions = self.counter(
            "doll_predictions_total",
            "Total number of prediction requests that the model server answered, by the HTTP"
            " status of the response.",
            ["status"],
        )
        self.request_s = self.histogram(
            "doll_prediction_seconds",
            "Time from the arrival of a prediction request at the model server to its response, in"
            " seconds.",
        )
        self.batch_records = self.histogram(
            "doll_prediction_batch_records",
            "Number of records that the model processed in one forward pass; the records of"
            " several prediction requests can share a pass.",
            buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
        )
        self.shadow_difference = self.gauge(
            "doll_shadow_difference",
            "Mean absolute difference per output between the predictions of the model that answers"
            " requests and of the shadow model (which gets the same records, only for comparison),"
            " in the newest batch.",
        )
        self.not_written = self.counter(
            "doll_predictions_not_written_total",
            "Total number of predictions that were returned to clients but not written to the"
            " predictions topic because Kafka was unavailable.",
        )

    def answered(self, status: int, seconds: float) -> None:
        """Count a request by the HTTP status of its response."""
        self.predictions.labels(str(status)).inc()
        self.request_s.observe(seconds)
