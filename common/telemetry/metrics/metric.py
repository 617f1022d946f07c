"""What a line of the catalogue of metrics says."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Service: TypeAlias = Literal["worker", "coordinator", "provisioner", "evaluator", "admin", "serve"]

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


class Lines:
    """Writes lines of what the same services tell: each of a job, or of something else.

    Args:
        told_by: The services.
        each: The labels that all of them have; a line may have more.
    """

    def __init__(self, *told_by: Service, each: tuple[str, ...] = ("job_name",)) -> None:
        self._told_by = told_by
        self._each = each

    def counter(self, name: str, unit: str, meaning: str, *more: str) -> Metric:
        """Write the line of a counter."""
        return Metric(name, "counter", unit, (*self._each, *more), meaning, self._told_by)

    def gauge(self, name: str, unit: str, meaning: str, *more: str) -> Metric:
        """Write the line of a gauge."""
        return Metric(name, "gauge", unit, (*self._each, *more), meaning, self._told_by)

    def histogram(
        self, name: str, unit: str, meaning: str, *more: str, buckets: tuple[float, ...] = SECONDS
    ) -> Metric:
        """Write the line of a histogram."""
        labels = *self._each, *more
        return Metric(name, "histogram", unit, labels, meaning, self._told_by, buckets)
