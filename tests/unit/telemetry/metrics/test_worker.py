"""Metrics of a worker about its job."""

from __future__ import annotations

from common.core.liveness import Device
from common.telemetry.metrics.__main__ import sections
from common.telemetry.metrics.registry import MetricSet
from common.telemetry.metrics.worker import WorkerMetrics, lost_gpus

OWN = {metric.name for metric in sections()["Workers"]}


def test_every_worker_metric_starts_at_zero() -> None:
    metrics, of_process = WorkerMetrics(("a", "b")), MetricSet()
    metrics.measure_device(Device("cpu", "AMD EPYC", 1 << 30), lambda: 0.0)
    lost_gpus(of_process).labels("GPU-1")
    names = {
        family.name + "_total" * (family.type == "counter")
        for each in (metrics, of_process)
        for family in each.registry.collect()
        if family.samples
    }
    assert names == OWN
    assert metrics.registry.get_sample_value("doll_records_read_total", {"stream": "b"}) == 0


def test_device_is_described_and_its_memory_is_read_at_each_scrape() -> None:
    metrics, used = WorkerMetrics(()), [1.0]
    gpu = Device("cuda", "NVIDIA L4", 24 << 30, "580.65.06", "8.9")
    metrics.measure_device(gpu, lambda: used[0])
    value = metrics.registry.get_sample_value
    labels = {"device": gpu.name, "kind": "cuda", "driver": "580.65.06", "capability": "8.9"}
    assert value("doll_worker_device_info", labels) == 1
    assert value("doll_worker_device_memory_bytes", {"kind": "used"}) == 1
    used[0] = 2.0
    assert value("doll_worker_device_memory_bytes", {"kind": "used"}) == 2
    assert value("doll_worker_device_memory_bytes", {"kind": "total"}) == 24 << 30


def test_stage_is_measured_in_seconds() -> None:
    metrics = WorkerMetrics(("a",))
    for seconds in (0.002, 0.2, 2.0):
        metrics.stage_s.labels("gradient").observe(seconds)
    value = metrics.registry.get_sample_value
    assert value("doll_worker_stage_seconds_sum", {"stage": "gradient"}) == 2.202
    below = {"stage": "gradient", "le": "0.25"}
    assert value("doll_worker_stage_seconds_bucket", below) == 2.0
