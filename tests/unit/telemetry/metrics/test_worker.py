"""What a scrape of a worker sees: of its one job, and of those before it only what failed."""

from __future__ import annotations

from common.core.messages import BatchReady, Skipped, SpanExpired, WorkerId
from common.core.spans import Span
from common.telemetry.metrics.catalogue import CATALOGUE, JOB_FAULTS
from common.telemetry.metrics.worker import WorkerMetrics

OWN = {metric.name: metric for metric in CATALOGUE if metric.told_by == ("worker",)}
FAULTS = JOB_FAULTS.name
W = WorkerId("w1")


def jobs_told(metrics: WorkerMetrics) -> dict[str, set[str]]:
    """By metric, the jobs that it is told of."""
    return {
        family.name + "_total" * (family.type == "counter"): {
            sample.labels["job_name"] for sample in family.samples
        }
        for family in metrics.meters.registry.collect()
        if family.samples and "job_name" in family.samples[0].labels
    }


def told(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.meters.registry.get_sample_value(name, {"job_name": "digits", **labels})


def test_every_line_of_the_catalogue_has_a_zero_to_count_from() -> None:
    metrics = WorkerMetrics()
    assert jobs_told(metrics) == {}
    metrics.work_for("digits", ("a", "b"))
    assert jobs_told(metrics) == {name: {"digits"} for name in (*OWN, FAULTS)}
    assert told(metrics, "doll_records_read_total", stream="b") == 0


def test_a_worker_that_changes_its_job_forgets_the_old_one_whoever_still_measures_it() -> None:
    metrics = WorkerMetrics()
    old = metrics.work_for("letters", ("a",))
    new = metrics.work_for("digits", ("a",))
    old.gradient_sent()
    old.took("gradient", 1.0)
    new.gradient_sent()
    faults = {FAULTS: {"letters", "digits"}}
    assert jobs_told(metrics) == {name: {"digits"} for name in OWN} | faults
    assert told(metrics, "doll_gradients_sent_total") == 1
    metrics.forget()
    assert jobs_told(metrics) == faults


def test_records_of_a_claim_are_counted_by_their_stream() -> None:
    metrics = WorkerMetrics()
    measures = metrics.work_for("digits", ("a", "b"))
    address = (Span("a", 0, 0, 5), Span("a", 1, 2, 4), Span("b", 0, 7, 9))
    skipped = (Skipped("a", 0, 3, "bad"), Skipped("b", 0, 8, "bad"))
    measures.announced(BatchReady(W, address, 7, skipped), (4, 2, 1))
    measures.announced(SpanExpired(W, (Span("b", 1, 10, 30),)), (0,))
    assert told(metrics, "doll_records_read_total", stream="a") == 6
    assert told(metrics, "doll_records_read_total", stream="b") == 1
    assert told(metrics, "doll_records_skipped_total", stream="a") == 1
    assert told(metrics, "doll_records_expired_total", stream="b") == 20
    assert told(metrics, "doll_batches_announced_total") == 1


def test_a_stage_is_measured_in_seconds() -> None:
    metrics = WorkerMetrics()
    measures = metrics.work_for("digits", ("a",))
    for seconds in (0.002, 0.2, 2.0):
        measures.took("gradient", seconds)
    sums = told(metrics, "doll_worker_stage_seconds_sum", stage="gradient")
    below = told(metrics, "doll_worker_stage_seconds_bucket", stage="gradient", le="0.25")
    assert (sums, below) == (2.202, 2.0)
