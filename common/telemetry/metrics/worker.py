"""Metrics of a worker for one job."""

from __future__ import annotations

from typing import get_args

from common.core.messages import FailedReason
from common.telemetry.metrics.registry import MetricSet

STAGES = ("indicator", "fetch", "gradient", "push")


class WorkerMetrics(MetricSet):
    """Metrics that one worker measures for one job. Threads may share them.

    Args:
        streams: Streams of the job. Their counters begin at zero.
    """

    def __init__(self, streams: tuple[str, ...]) -> None:
        super().__init__()
        counter = self.counter
        self.records_read = counter(
            "doll_records_read_total", "Records that the worker put into batches.", ["stream"]
        )
        self.records_skipped = counter(
            "doll_records_skipped_total", "Records that the worker could not decode.", ["stream"]
        )
        self.records_expired = counter(
            "doll_records_expired_total", "Records that retention deleted unread.", ["stream"]
        )
        self.batches_announced = counter(
            "doll_batches_announced_total", "Batches that the worker claimed."
        )
        self.batches_read_back = counter(
            "doll_batches_read_back_total", "Batches that the worker read from Kafka again."
        )
        self.reading = self.gauge(
            "doll_worker_reading",
            "1 while the worker polls its streams; 0 while it pauses because enough of its batches"
            " wait or because no coordinator leads the job.",
        )
        self.stream_behind_s = self.gauge(
            "doll_stream_behind_seconds",
            "Age difference between the worker's newest record of the partition of the stream that"
            " is furthest behind and the median of its other partitions; 0 if no record waits.",
            ["stream"],
        )
        self.stage_s = self.histogram(
            "doll_worker_stage_seconds",
            "Duration of a stage of the worker's work: indicator (until Kafka has a claim), fetch"
            " (of a model), gradient (computation for one order), push (of a gradient).",
            ["stage"],
        )
        self.gradients_failed = counter(
            "doll_gradients_failed_total",
            "Total number of orders for which the worker could not send a gradient, by reason:"
            " model_missing, unreadable, expired, raised, not_finite or task.",
            ["reason"],
        )
        self.copied_bytes = counter(
            "doll_group_copied_bytes_total",
            "Bytes of weights and optimizer state that the worker copied.",
        )
        self.moved_bytes = counter(
            "doll_worker_moved_bytes_total",
            "Total bytes of weights and gradients that the worker sent or received through Redis"
            " and in collectives (counted as on a ring), without storage.",
            ["direction"],
        )
        for metric, values in (
            (self.records_read, streams),
            (self.records_skipped, streams),
            (self.records_expired, streams),
            (self.stream_behind_s, streams),
            (self.stage_s, STAGES),
            (self.gradients_failed, get_args(FailedReason)),
            (self.moved_bytes, ("sent", "received")),
        ):
            for value in values:
                metric.labels(value)
