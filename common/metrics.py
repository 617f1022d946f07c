"""All metrics of the product, and how they are served; the one place that names them.

| metric                         | unit    | label | meaning                                       |
| ------------------------------ | ------- | ----- | --------------------------------------------- |
| doll_checkpoint_age_seconds    | seconds | job   | since the newest checkpoint was made; told by |
|                                |         |       | the replica that leads the job, by no other   |
| doll_checkpoint_failures_total | count   | job   | attempts to write one that failed; each is    |
|                                |         |       | repeated, unless a newer one comes meanwhile  |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import GaugeMetricFamily

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_JOB = ["job"]


class Metrics:
    """The metrics of one process; may be shared between threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ages = dict[str, Callable[[], float | None]]()
        self._failures = Counter(
            "doll_checkpoint_failures",
            "Attempts to write a checkpoint that failed.",
            _JOB,
            registry=self.registry,
        )
        self.registry.register(self)

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
        ages = GaugeMetricFamily(
            "doll_checkpoint_age_seconds", "Since the newest checkpoint was made.", labels=_JOB
        )
        for job, checkpoint_age_s in list(self._ages.items()):
            age_s = checkpoint_age_s()
            if age_s is not None:
                ages.add_metric([job], age_s)
        yield ages

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes from a thread of its own, until the process ends; returns the port.

        Args:
            host: The address.
            port: 0 for any that is free.

        Raises:
            UserError: If the address cannot be had.
        """
        try:
            server, _ = start_http_server(port, host, self.registry)
        except OSError as error:
            raise UserError(
                f"metrics cannot be served on {host}:{port}: {error}; set DOLL_METRICS_PORT and"
                " DOLL_METRICS_HOST, one port for each replica of a machine"
            ) from error
        return int(server.server_port)
