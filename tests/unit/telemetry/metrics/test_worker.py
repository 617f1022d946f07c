"""Metrics of a worker about its job."""

from __future__ import annotations

from common.telemetry.metrics.__main__ import sections
from common.telemetry.metrics.worker import WorkerMetrics

OWN = {metric.name for metric in sections()["Workers"]}


def test_every_worker_metric_starts_at_zero() -> None:
    metrics = WorkerMetrics(("a", "b"))
    names = {
        family.name + "_total" * (family.type == "counter")
        for family in metrics.registry.collect()
        if family.samples
    }
    assert names == OWN
    assert metrics.registry.get_sample_value("doll_records_read_total", {"stream": "b"}) == 0


def test_stage_is_measured_in_seconds() -> None:
    metrics = WorkerMetrics(("a",))
    for seconds in (0.002, 0.2, 2.0):
        metrics.stage_s.labels("gradient").observe(seconds)
    value = metrics.registry.get_sample_value
    assert value("doll_worker_stage_seconds_sum", {"stage": "gradient"}) == 2.202
    below = {"stage": "gradient", "le": "0.25"}
    assert value("doll_worker_stage_seconds_bucket", below) == 2.0
