"""Prints every metric: `python -m common.telemetry.metrics > docs/reference/metrics.md`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from common.telemetry.metrics.api import ApiMetrics
from common.telemetry.metrics.coordinator import CoordinatorMetrics
from common.telemetry.metrics.evaluator import EvaluatorMetrics, TrackerMetrics
from common.telemetry.metrics.provisioner import ProvisionerMetrics
from common.telemetry.metrics.registry import MetricSet, ProcessMetrics
from common.telemetry.metrics.serve import ServeMetrics
from common.telemetry.metrics.worker import WorkerMetrics, lost_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

_HEAD = """\
# Metrics

Printed by `python -m common.telemetry.metrics`; a test compares this page with the code. The
[dashboards](../howto/operating.md#dashboards) and [alerts](../howto/alerts.md) use these metrics.
The [glossary](glossary.md) explains terms such as batch, claim and update.

Every process with a `DOLL_METRICS_PORT` serves its metrics for Prometheus at `/metrics`, and its
health at `/healthz`: 200, or 503 if one of its loops makes no progress. The label of a job is
`job_name`, because Prometheus itself uses `job`. Only the replica that leads reports the gauges of
a leader: sum counters over instances, and take the maximum of gauges. Every process also reports
`process_cpu_seconds_total`, `process_resident_memory_bytes` and the like. A histogram has the
series `_bucket`, `_sum` and `_count`.
"""


class Declared(NamedTuple):
    """A metric as its service declares it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def sections() -> dict[str, tuple[Declared, ...]]:
    """Return all metrics, by the processes that report them."""
    every = tuple(_declared(ProcessMetrics("doll").registry))
    admin = ApiMetrics(lambda: 0, tuple, dict).registry
    lost_gpus(of_worker := MetricSet())
    others = {
        "Workers": (*_of_jobs(WorkerMetrics(()).registry), *_declared(of_worker.registry)),
        "Coordinators": _of_jobs(CoordinatorMetrics().registry),
        "Provisioners": _of_jobs(ProvisionerMetrics().registry),
        "Evaluators": _of_jobs(EvaluatorMetrics(()).registry, TrackerMetrics().registry),
        "Admin services": _declared(admin),
        "Model servers": _of_jobs(ServeMetrics(int, float).registry),
    }
    return {"Every process": every} | {
        title: tuple(metric for metric in metrics if metric not in every)
        for title, metrics in others.items()
    }


def document() -> str:
    """Return the page."""
    return "\n".join((_HEAD, *(_section(*section) for section in sections().items())))


def _of_jobs(*registries: CollectorRegistry) -> Iterator[Declared]:
    for registry in registries:
        for metric in _declared(registry):
            yield metric._replace(labels=("job_name", *metric.labels))


def _declared(registry: CollectorRegistry) -> Iterator[Declared]:
    """Yield the metrics of a registry, whether they have series or not."""
    for collector in registry._collector_to_names:  # noqa: SLF001 -- no other way to metrics
        families = list(collector.collect())
        of_collector = isinstance(collector, MetricWrapperBase)
        for family in families:
            # Only the objects themselves know the labels of a metric without series.
            labels = getattr(collector if of_collector else family, "_labelnames", ())
            name = family.name + "_total" * (family.type == "counter")
            if name.startswith("doll_"):
                yield Declared(name, family.type, tuple(labels), family.documentation)


def _section(title: str, metrics: tuple[Declared, ...]) -> str:
    lines = [f"## {title}", "", "| name | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for it in metrics:
        labels = ", ".join(f"`{label}`" for label in it.labels)
        lines.append(f"| `{it.name}` | {it.kind} | {labels} | {it.meaning} |")
    return "\n".join((*lines, ""))


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m common.telemetry.metrics",
        description="Prints docs/reference/metrics.md: every metric with its labels and meaning.",
        epilog="example: python -m common.telemetry.metrics > docs/reference/metrics.md",
    ).parse_args()
    sys.stdout.write(document())
