"""What a line of the catalogue of metrics says."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Service: TypeAlias = Literal[
    "worker", "coordinator", "provisioner", "evaluator", "joiner", "admin", "serve"
]

# Of seconds: a gradient takes milliseconds to seconds, a request what Kafka takes.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    60.0,
)
AGES_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class Metric(NamedTuple):
    """One line of the catalogue."""

    name: str  # as Prometheus shows it; a counter ends with _total
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    told_by: tuple[Service, ...]
    buckets: tuple[float, ...] = ()  # of a histogram


def counter(name: str, unit: str, labels: tuple[str, ...], meaning: str, *by: Service) -> Metric:
    """Write the line of a counter."""
    return Metric(name, "counter", unit, labels, meaning, by)


def gauge(name: str, unit: str, labels: tuple[str, ...], meaning: str, *by: Service) -> Metric:
    """Write the line of a gauge."""
    return Metric(name, "gauge", unit, labels, meaning, by)
