"""Metrics of a worker for one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from common.core.messages import FailedReason
from common.telemetry.metrics.registry import MetricSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Counter

    from common.core.liveness import Device

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
            "doll_records_read_total",
            "Total number of records that the worker read from the stream and put into batches.",
            ["stream"],
        )
        self.records_skipped = counter(
            "doll_records_skipped_total",
            "Total number of records of the stream that the worker skipped because it could"
            " not decode them.",
            ["stream"],
        )
        self.records_expired = counter(
            "doll_records_expired_total",
            "Total number of records of the stream that Kafka deleted before a worker read them.",
            ["stream"],
        )
        self.batches_announced = counter(
            "doll_batches_announced_total",
            "Total number of batches that the worker claimed. A claim reserves a range of"
            " Kafka records for one batch.",
        )
        self.batches_read_back = counter(
            "doll_batches_read_back_total",
            "Total number of batches that the worker read from Kafka again because it did not"
            " have their records in memory.",
        )
        self.reading = self.gauge(
            "doll_worker_reading",
            "1 while the worker reads the job's streams; 0 while the worker pauses because enough"
            " of its batches wait for an update, or because no coordinator leads the job.",
        )
        self.stream_behind_s = self.gauge(
            "doll_stream_behind_seconds",
            "Delay of the stream's slowest partition on this worker, in seconds: how much older"
            " the newest record read from that partition is than the median of those read from the"
            " worker's other partitions; 0 if no record waits.",
            ["stream"],
        )
        self.stage_s = self.histogram(
            "doll_worker_stage_seconds",
            "Duration of one stage of the worker's work, in seconds: `indicator` (writing of a"
            " claim, which reserves a batch's records, to Kafka), `fetch` (loading of the"
            " weights), `gradient` (computation of all gradients of one request) or `push` (upload"
            " of a gradient).",
            ["stage"],
        )
        self.gradients_failed = counter(
            "doll_gradients_failed_total",
            "Total number of requests for gradients, from the leading coordinator, that the worker"
            " could not answer with a gradient, by reason: `model_missing` (Redis lacks the"
            " weights), `unreadable` (Kafka did not return the records), `expired` (Kafka deleted"
            " the records), `raised` (the task raised an exception), `not_finite` (loss or"
            " gradient is not finite), `task` (the task fails with any data) or `memory` (the"
            " worker's memory is too small, even for parts of the batch).",
            ["reason"],
        )
        self.gradients_cut = counter(
            "doll_gradients_cut_total",
            "Total number of times that the computation of a gradient ran out of memory and was"
            " repeated in smaller parts.",
        )
        self.pass_records = self.gauge(
            "doll_worker_pass_records",
            "Number of records in the largest pass (forward and backward) of the worker's last"
            " gradient. It falls when memory does not suffice for a whole batch.",
        )
        self.device_info = self.gauge(
            "doll_worker_device_info",
            "Always 1. The labels describe the device on which the worker computes: its name, its"
            " kind (`cpu` or `cuda`), and a GPU's driver version and compute capability.",
            ["device", "kind", "driver", "capability"],
        )
        self.device_memory_bytes = self.gauge(
            "doll_worker_device_memory_bytes",
            "Memory of the worker's device, in bytes: `total`, and `used` by all processes. Of the"
            " CPU: the memory that the worker may use, and that its process uses.",
            ["kind"],
        )
        self.copied_bytes = counter(
            "doll_group_copied_bytes_total",
            "Total number of bytes of weights and optimizer state that the worker copied from"
            " another worker or from object storage, to join the workers that hold the weights"
            " (`aggregation.mode: group`) or to catch up with them.",
        )
        self.moved_bytes = counter(
            "doll_worker_moved_bytes_total",
            "Total number of bytes of weights and gradients that the worker `sent` or `received`"
            " through Redis and in direct transfers between workers, without object storage. Sums"
            " among workers count with the bytes of a ring all-reduce.",
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

    def measure_device(self, device: Device, used_bytes: Callable[[], float]) -> None:
        """Expose the device on which the worker computes.

        Args:
            device: The device.
            used_bytes: Returns its used memory, at each scrape.
        """
        labels = device.name, device.kind, device.driver, device.capability
        self.device_info.labels(*labels).set(1)
        self.device_memory_bytes.labels("total").set(device.memory_bytes)
        self.device_memory_bytes.labels("used").set_function(used_bytes)


def lost_gpus(metrics: MetricSet) -> Counter:
    """Declare the number of lost GPUs, by UUID, as a metric of a worker's process."""
    return metrics.counter(
        "doll_worker_gpu_lost_total",
        "Total number of times that the worker could not use one of its GPUs any more, because a"
        " CUDA call failed, by the GPU's UUID.",
        ["gpu"],
    )
