"""Prints every metric: `python -m common.telemetry.metrics > docs/reference/metrics.md`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from common.telemetry.metrics.catalogue import CATALOGUE

if TYPE_CHECKING:
    from common.telemetry.metrics.metric import Metric, Service

_SERVICES: tuple[tuple[Service, str], ...] = (
    ("worker", "Workers"),
    ("coordinator", "Coordinators"),
    ("provisioner", "Provisioners"),
    ("evaluator", "Evaluators"),
    ("admin", "Admin services"),
    ("serve", "Model servers"),
)
_HEAD = """\
# Metrics

Printed by `python -m common.telemetry.metrics` from `common/telemetry/metrics/catalogue.py`; a test
holds the two together. What is made of them: [dashboards](../howto/operating.md#dashboards),
[alerts](../howto/alerts.md).

Every process with a `DOLL_METRICS_PORT` serves them for Prometheus at `/metrics`, and at `/healthz`
whether its loop turns. A job is labelled `job_name`, as `job` is Prometheus's own word. What is
told by the leader comes from one replica at a time: add over instances what is counted, take the
maximum of what is not. Every process also tells `process_cpu_seconds_total`,
`process_resident_memory_bytes` and the like of itself. Of a histogram there are `_bucket`, `_sum`
and `_count`.
"""
_BY = {
    "coordinator": "All but `doll_leading` by the replica that leads the job.",
    "provisioner": "All but `doll_provisioning` by the replica that is in charge of the job.",
}


def document() -> str:
    """All lines of the catalogue, by the service that tells them."""
    everybody = [metric for metric in CATALOGUE if len(metric.told_by) > 1]
    parts = [_HEAD, _section("Every process", "", everybody)]
    for service, title in _SERVICES:
        own = [metric for metric in CATALOGUE if metric.told_by == (service,)]
        parts.append(_section(title, _BY.get(service, ""), own))
    return "\n".join(parts)


def _section(title: str, note: str, metrics: list[Metric]) -> str:
    lines = [f"## {title}", "", *([note, ""] if note else [])]
    lines += ["| name | kind | unit | labels | meaning |", "| --- | --- | --- | --- | --- |"]
    for it in metrics:
        labels = ", ".join(f"`{label}`" for label in it.labels)
        lines.append(f"| `{it.name}` | {it.kind} | {it.unit} | {labels} | {it.meaning} |")
    return "\n".join((*lines, ""))


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m common.telemetry.metrics",
        description="Prints every metric with unit, labels and meaning: docs/reference/metrics.md.",
        epilog="example: python -m common.telemetry.metrics > docs/reference/metrics.md",
    ).parse_args()
    sys.stdout.write(document())
