"""What an evaluator tells of its jobs, and no longer once it does not follow them."""

from __future__ import annotations

from common.telemetry.metrics.evaluator import EvaluatorMetrics


def test_a_job_counts_from_zero_and_is_told_until_it_is_forgotten() -> None:
    metrics = EvaluatorMetrics()
    for job in ("one", "two"):
        metrics.follow(job, ["clicks"])
    value = metrics.meters.registry.get_sample_value
    done = {"job_name": "one", "outcome": "done"}
    stream = {"job_name": "one", "stream": "clicks"}
    assert (value("doll_evaluations_total", done), value("doll_drifts_total", stream)) == (0, 0)

    metrics.judged("one", 50)
    metrics.skipped("one", 3)
    metrics.tested("one", {"accuracy": 0.75, "loss": 0.5}, 0.2)
    metrics.predicted("one", "clicks", {"accuracy": 0.5})
    metrics.drifted("one", "clicks")

    assert value("doll_evaluated_version", {"job_name": "one"}) == 50
    assert value("doll_evaluations_total", done) == 1
    assert value("doll_evaluations_total", {**done, "outcome": "skipped"}) == 3
    assert value("doll_test_metric", {"job_name": "one", "metric": "accuracy"}) == 0.75
    assert value("doll_prequential_metric", {**stream, "metric": "accuracy"}) == 0.5
    assert value("doll_evaluation_seconds_count", {"job_name": "one"}) == 1
    assert value("doll_drifts_total", stream) == 1
    metrics.forget("one")
    exposed = metrics.meters.exposed().decode()
    assert 'job_name="one"' not in exposed
    assert 'job_name="two"' in exposed
