"""Makes the instruments of one process from lines of the catalogue."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from common.telemetry import outages
from common.telemetry.metrics import catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.telemetry.metrics.metric import Metric, Service

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"  # what `Meters.exposed` is


class Meters:
    """The registry of one process; may be shared between threads."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._service: Service = service
        ProcessCollector(registry=self.registry)  # of CPU, memory and open files
        self.gauge(catalogue.BUILD).labels(service, version("doll")).set(1)
        self.registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What the registry asks at each scrape."""
        lasting = self.family(catalogue.OUTAGE)
        for server, seconds in outages.seconds().items():
            lasting.add_metric([server], seconds)
        yield lasting

    def counter(self, metric: Metric) -> Counter:
        """Make the counter of a line."""
        self._check(metric, "counter")
        return Counter(metric.name, metric.meaning, metric.labels, registry=self.registry)

    def gauge(self, metric: Metric) -> Gauge:
        """Make the gauge of a line."""
        self._check(metric, "gauge")
        return Gauge(metric.name, metric.meaning, metric.labels, registry=self.registry)

    def histogram(self, metric: Metric) -> Histogram:
        """Make the histogram of a line."""
        self._check(metric, "histogram")
        return Histogram(
            metric.name,
            metric.meaning,
            metric.labels,
            buckets=metric.buckets,
            registry=self.registry,
        )

    def family(self, metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
        """Make what a collector yields for a line, without any values yet."""
        self._check(metric, "counter" if metric.kind == "counter" else "gauge")
        made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        return made(metric.name, metric.meaning, labels=metric.labels)

    def exposed(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)

    def _check(self, metric: Metric, kind: str) -> None:
        if metric.kind != kind or self._service not in metric.told_by:
            raise ValueError(f"{metric.name} is a {metric.kind} told by {metric.told_by}")
