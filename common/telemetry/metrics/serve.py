"""What a model server tells: of its answers, and of the version that gives them."""

from __future__ import annotations

from typing import Protocol

from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters


class Served(Protocol):
    """The model that answers."""

    @property
    def number(self) -> int:
        """J of the version; -1: there is none yet."""

    def behind_s(self) -> float:
        """How long there may have been a newer one."""


class ServeMetrics:
    """The metrics of one model server; may be shared between threads.

    Args:
        served: Asked at each scrape.
    """

    def __init__(self, job: str, served: Served) -> None:
        self.meters = Meters("serve")
        self._job = job
        version = self.meters.gauge(catalogue.SERVED_VERSION).labels(job)
        version.set_function(lambda: served.number)
        behind_s = self.meters.gauge(catalogue.SERVED_BEHIND).labels(job)
        behind_s.set_function(served.behind_s)
        self._predictions = self.meters.counter(catalogue.PREDICTIONS)
        self._seconds = self.meters.histogram(catalogue.PREDICTION_SECONDS).labels(job)
        self._batches = self.meters.histogram(catalogue.PREDICTION_BATCH).labels(job)
        self._apart = self.meters.gauge(catalogue.SHADOW_DIFFERENCE).labels(job)
        self._lost = self.meters.counter(catalogue.PREDICTIONS_NOT_WRITTEN).labels(job)

    def answered(self, status: int, seconds: float) -> None:
        """A request was answered with a status of HTTP."""
        self._predictions.labels(self._job, str(status)).inc()
        self._seconds.observe(seconds)

    def computed(self, rows: int) -> None:
        """So many records were answered in one pass."""
        self._batches.observe(rows)

    def shadowed(self, difference: float) -> None:
        """How far the shadow's outputs were from what was answered, in the mean."""
        self._apart.set(difference)

    def not_written(self, rows: int) -> None:
        """Predictions did not go to their topic."""
        self._lost.inc(rows)
