"""A process exposes its own metrics, and those of its jobs while it follows them."""

from __future__ import annotations

import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.telemetry.metrics.__main__ import Declared, sections
from common.telemetry.metrics.registry import Family, MetricSet, ProcessMetrics

DECLARED = [(title, metric) for title, metrics in sections().items() for metric in metrics]
UNITS = "batches|bytes|hour|members|ratio|records|seconds|second|update|usd|versions|workers"


@pytest.mark.parametrize(
    "metric", [metric for _, metric in DECLARED], ids=[metric.name for _, metric in DECLARED]
)
def test_metric_has_name_of_its_kind_and_a_sentence_as_help(metric: Declared) -> None:
    assert re.fullmatch(r"doll_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert re.fullmatch(r"[A-Z0-9].{20,}\.", metric.meaning)
    assert "job" not in metric.labels, "Prometheus calls what it scrapes a job"
    if metric.kind == "histogram":
        assert re.search(rf"_({UNITS})$", metric.name)
    if "per second" in metric.meaning or " rate " in metric.meaning:
        assert metric.name.endswith(("_per_second", "doll_learning_rate"))


def test_metric_names_are_unique() -> None:
    names = [metric.name for _, metric in DECLARED]
    assert len(names) == len(set(names))


class Measures(MetricSet):
    """Metrics of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = self.counter("doll_updates_total", "Updates.")
        self.wait_s = self.histogram("doll_wait_seconds", "Waits.", ["why"])


def test_process_exposes_metrics_of_all_jobs_in_one_family_with_their_names() -> None:
    process, digits, others = ProcessMetrics("coordinator"), Measures(), Measures()
    process.follow("digits", digits)
    process.follow("letters", others)
    digits.updates.inc(2)
    others.updates.inc(3)
    others.wait_s.labels("linger").observe(1.0)
    families = list(text_string_to_metric_families(process.exposed().decode()))
    (updates,) = [family for family in families if family.name == "doll_updates"]
    assert updates.documentation == "Updates."
    values = {s.labels["job_name"]: s.value for s in updates.samples if s.name.endswith("_total")}
    assert values == {"digits": 2, "letters": 3}
    of_others = {"job_name": "letters", "why": "linger"}
    assert process.registry.get_sample_value("doll_wait_seconds_count", of_others) == 1


def test_forgotten_job_has_no_series_even_if_it_still_counts() -> None:
    process, digits, others = ProcessMetrics("coordinator"), Measures(), Measures()
    process.follow("digits", digits)
    process.follow("letters", others)
    process.forget(digits)
    process.forget(digits)
    digits.updates.inc()
    exposed = process.exposed().decode()
    assert "digits" not in exposed
    assert 'doll_updates_total{job_name="letters"} 0.0' in exposed


def test_newer_metrics_of_a_job_survive_forgetting_older_ones() -> None:
    process, old, new = ProcessMetrics("coordinator"), Measures(), Measures()
    process.follow("digits", old)
    old.updates.inc(2)
    process.follow("digits", new)
    process.forget(old)
    assert process.registry.get_sample_value("doll_updates_total", {"job_name": "digits"}) == 0


def test_supervised_job_counts_from_zero_until_it_ends() -> None:
    process = ProcessMetrics("evaluator")
    process.supervise("digits")
    value = process.registry.get_sample_value
    assert value("doll_slow_turns_total", {"job_name": "digits"}) == 0
    for kind in ("fault", "unavailable"):
        assert value("doll_job_faults_total", {"job_name": "digits", "kind": kind}) == 0
    process.unsupervise("digits")
    assert "digits" not in process.exposed().decode()


def test_scrape_adds_up_a_process_and_its_children() -> None:
    # parent   cpu 1 s
    # child    cpu 2 s   records 3   outage of Redis 5 s
    # child              records 4   outage of Redis 2 s
    metrics, children = ProcessMetrics("worker"), [ProcessMetrics("worker") for _ in range(2)]
    for child, records, outage_s in zip(children, (3, 4), (5.0, 2.0), strict=True):
        of_job = MetricSet()
        of_job.counter("doll_records_total", "Records.").inc(records)
        of_job.gauge("doll_outage_of_test_seconds", "Outage.").set(outage_s)
        of_job.gauge("doll_memory_bytes", "Memory.").set(100)
        of_job.histogram("doll_gradient_seconds", "Gradient.", buckets=(1.0,)).observe(0.5)
        child.follow("digits", of_job)
        metrics.include(child.packed)
    text = metrics.exposed().decode()

    assert 'doll_records_total{job_name="digits"} 7.0' in text
    assert 'doll_outage_of_test_seconds{job_name="digits"} 5.0' in text
    assert 'doll_memory_bytes{job_name="digits"} 200.0' in text
    assert 'doll_gradient_seconds_bucket{job_name="digits",le="1.0"} 2.0' in text
    assert text.count("# TYPE doll_records_total counter") == 1
    assert 'doll_build_info{service="worker",version="' in text
    assert text.count("doll_build_info{") == 1
    assert re.search(r"^doll_build_info\{.*\} 1\.0$", text, re.MULTILINE)


def test_metrics_survive_the_way_to_another_process() -> None:
    metrics, of_job = ProcessMetrics("worker"), MetricSet()
    of_job.gauge("doll_not_a_number", "No number.").set(float("nan"))
    of_job.gauge("doll_number", "Number.").set(1.5)
    metrics.follow("digits", of_job)
    data = msgspec.json.encode(metrics.packed())
    found = msgspec.json.decode(data, type=tuple[Family, ...])

    values = {each.name: [sample.value for sample in each.samples] for each in found}
    assert values["doll_not_a_number"] == [None]
    assert values["doll_number"] == [1.5]
