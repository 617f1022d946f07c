"""The metrics of a process and of its jobs, as objects of prometheus_client.

The module of a service declares each metric once, with a sentence that explains it. The metrics of
a job are in a registry of their own and don't name the job: `ProcessMetrics` adds the label
`job_name` at a scrape. The series of a job end when its registry is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.telemetry import outages

# Media type of `ProcessMetrics.exposed`.
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
# Buckets of durations: a gradient takes milliseconds to seconds.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    60.0,
)

_START = "process_start_time_seconds"
MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]
# One value, or a value for each label or tuple of labels; unknown values are left out.
Values: TypeAlias = float | Mapping[Any, float | None] | None
T = TypeVar("T")
F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)


class MetricSet:
    """Metrics in a registry of their own; those of a job do not name the job."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gauge = partial(Gauge, registry=self.registry)
        self.counter = partial(Counter, registry=self.registry)
        # Buckets are those of durations unless a metric names its own.
        self.histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a metric, as one process sends it to another."""

    name: str
    labels: dict[str, str]
    # None if it is not a finite number.
    value: float | None


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its samples, as one process sends it to another."""

    name: str
    documentation: str
    type: MetricType
    samples: tuple[Sample, ...]


class ProcessMetrics(MetricSet):
    """The registry of one process and those of its jobs; threads may share it.

    Args:
        service: Name of the service.
    """

    def __init__(self, service: str) -> None:
        # The `_created` series of counters would only double their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client's
        super().__init__()
        self._jobs = dict[tuple[str, type[MetricSet]], CollectorRegistry]()
        # Return the metrics of this process's children.
        self._children = list[Callable[[], Iterable[Family]]]()
        self._lock = threading.Lock()
        ProcessCollector(registry=self.registry)
        self.gauge(
            "doll_build_info",
            "Always 1. The labels are the name of the service and the version of DOLL that this"
            " process runs.",
            ["service", "version"],
        ).labels(service, version("doll")).set(1)
        self.job_faults = self.counter(
            "doll_job_faults_total",
            "Total number of times that this process restarted its work on a job, by kind: `fault`"
            " (an exception) or `unavailable` (a server that the job needs could not be used).",
            ["job_name", "kind"],
        )
        self.slow_turns = self.counter(
            "doll_slow_turns_total",
            "Total number of times that the work on a job kept a thread that several jobs share"
            " busy for more than 50 ms without a break.",
            ["job_name"],
        )
        self.registry.register(self)

    def count_faults(self, job: str) -> None:
        """Expose the fault counters of a job, which begin at zero."""
        for kind in ("fault", "unavailable"):
            self.job_faults.labels(job, kind)

    def supervise(self, job: str) -> None:
        """Expose the fault and slow-turn counters of a job from zero on, until `unsupervise`."""
        self.count_faults(job)
        self.slow_turns.labels(job)

    def unsupervise(self, job: str) -> None:
        """Stop exposing the fault and slow-turn counters of a job."""
        self.job_faults.remove_by_labels({"job_name": job})
        self.slow_turns.remove_by_labels({"job_name": job})

    def follow(self, job: str, metrics: MetricSet) -> None:
        """Expose the metrics of a job until `forget`, in place of older ones of the same class."""
        with self._lock:
            self._jobs[job, type(metrics)] = metrics.registry

    def forget(self, metrics: MetricSet) -> None:
        """Stop exposing these metrics. May be called twice."""
        with self._lock:
            for key, registry in list(self._jobs.items()):
                if registry is metrics.registry:
                    del self._jobs[key]

    def include(self, child: Callable[[], Iterable[Family]]) -> None:
        """Add the metrics that this function returns at each scrape to those of this process."""
        with self._lock:
            self._children.append(child)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all jobs, each family once."""
        yield gauge(
            "doll_outage_seconds",
            "Time since this process lost the use of a server, in seconds; 0 while the server is"
            " available. Servers: kafka, redis, storage (checkpoints), schema_registry, tracking"
            " (MLflow), fleet (the provider of machines), prices (of machines) and notices (of"
            " preemptions).",
            *(outages.seconds(), "server"),
        )
        families = dict[str, Metric]()
        with self._lock:
            jobs = list(self._jobs.items())
        for (job, _), registry in jobs:
            for own in registry.collect():
                empty = Metric(own.name, own.documentation, own.type)
                family = families.setdefault(own.name, empty)
                for sample in own.samples:
                    labels = {"job_name": job, **sample.labels}
                    family.add_sample(sample.name, labels, sample.value)
        yield from families.values()

    def exposed(self) -> bytes:
        """Return the answer to a scrape."""
        with self._lock:
            children = tuple(self._children)
        theirs = chain.from_iterable(child() for child in children)
        return generate_latest(_Combined([*self.registry.collect(), *map(_unpacked, theirs)]))

    def packed(self) -> tuple[Family, ...]:
        """Return all metrics of this process for the process that serves them."""
        return tuple(
            Family(
                metric.name,
                metric.documentation,
                cast("MetricType", metric.type),
                tuple(Sample(each.name, each.labels, each.value) for each in metric.samples),
            )
            for metric in self.registry.collect()
        )


def _unpacked(family: Family) -> Metric:
    metric = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        if sample.value is not None:
            metric.add_sample(sample.name, sample.labels, sample.value)
    return metric


class _Combined:
    """Metrics of several processes, each series once.

    Counters, histograms, bytes and open files add up. Of other gauges, the largest value counts. Of
    the start, the first value counts.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._values = dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]()
        self._metrics = dict[str, Metric]()
        for metric in metrics:
            first = self._metrics.setdefault(metric.name, metric)
            values = self._values.setdefault(metric.name, {})
            if metric.type != first.type or (metric is not first and metric.name == _START):
                continue
            adds_up = metric.type != "gauge" or metric.name.endswith(("_bytes", "_open_fds"))
            for sample in metric.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = values.get(key)
                if before is None:
                    values[key] = sample.value
                else:
                    values[key] = before + sample.value if adds_up else max(before, sample.value)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once."""
        for name, metric in self._metrics.items():
            combined = Metric(name, metric.documentation, metric.type)
            for (sample, labels), value in self._values[name].items():
                combined.add_sample(sample, dict(labels), value)
            yield combined


def of(it: T | None, value: Callable[[T], Values]) -> Values:
    """Return a value of `it`, or None if `it` is unknown."""
    return None if it is None else value(it)


def _computed(kind: type[F], name: str, meaning: str, values: Values, *labels: str) -> F:
    """Return a metric with values that were computed for a scrape."""
    family = kind(name, meaning, labels=labels)
    if isinstance(values, Mapping):
        for label, value in values.items():
            if value is not None:
                family.add_metric([label] if isinstance(label, str) else label, value)
    elif values is not None:
        family.add_metric([], values)
    return family


gauge, counter = partial(_computed, GaugeMetricFamily), partial(_computed, CounterMetricFamily)
