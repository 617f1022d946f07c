"""What a coordinator tells: of the jobs that it leads, and which those are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from common.metrics import catalogue
from common.metrics.meters import Meters

if TYPE_CHECKING:
    from collections.abc import Iterator


class CoordinatorMetrics:
    """The metrics of one coordinator; may be shared between threads."""

    def __init__(self) -> None:
        self.meters = Meters("coordinator")
        self._ages = dict[str, Callable[[], float | None]]()
        self._failures = self.meters.counter(catalogue.CHECKPOINT_FAILURES)
        self.meters.registry.register(self)

    def follow(self, job: str, checkpoint_age_s: Callable[[], float | None]) -> None:
        """Report on a job, until `forget`; its age is asked at each scrape, None is left out."""
        self._ages[job] = checkpoint_age_s
        self._failures.labels(job)  # from now on there is a zero to count from

    def forget(self, job: str) -> None:
        """Report on a job no longer."""
        del self._ages[job]
        self._failures.remove(job)

    def checkpoint_failed(self, job: str) -> None:
        """Count a checkpoint that could not be written this time."""
        self._failures.labels(job).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What the registry asks at each scrape."""
        age = catalogue.CHECKPOINT_AGE
        ages = GaugeMetricFamily(age.name, age.meaning, labels=age.labels)
        for job, checkpoint_age_s in list(self._ages.items()):
            age_s = checkpoint_age_s()
            if age_s is not None:
                ages.add_metric([job], age_s)
        yield ages
