"""Metrics of an evaluator about a job."""

from __future__ import annotations

from common.telemetry.metrics.evaluator import EvaluatorMetrics


def test_job_counts_from_zero_and_has_no_version_before_one_is_evaluated() -> None:
    metrics = EvaluatorMetrics(["clicks"])
    value = metrics.registry.get_sample_value
    assert value("doll_evaluations_total", {"outcome": "done"}) == 0
    assert value("doll_evaluations_total", {"outcome": "skipped"}) == 0
    assert value("doll_drifts_total", {"stream": "clicks"}) == 0
    assert value("doll_evaluated_version") is None
    metrics.version = 50
    assert value("doll_evaluated_version") == 50
