"""All metrics of the product, and how they are served; the one place that names them.

| metric                         | unit    | label | meaning                                       |
| ------------------------------ | ------- | ----- | --------------------------------------------- |
| doll_checkpoint_age_seconds    | seconds | job   | since the newest checkpoint was made; told by |
|                                |         |       | the replica that leads the job, by no other   |
| doll_checkpoint_failures_total | count   | job   | attempts to write one that failed; each is    |
|                                |         |       | repeated, unless a newer one comes meanwhile  |
| doll_api_requests_total        | count   | route | requests that were answered, also by method   |
|                                |         |       | and status; route `none`: there is no such    |
| doll_api_request_seconds       | seconds | route | until the answer began, by method; streams of |
|                                |         |       | events apart                                  |
| doll_api_streams_open          | count   | -     | streams of events that are open               |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily

from common.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_JOB = ["job"]
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"  # what `ApiMetrics.exposed` is
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
# Of seconds: what is answered from memory takes under a millisecond, a plan up to 100, a change of
# a job what Kafka takes.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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


class ApiMetrics:
    """The metrics of one admin process; may be shared between threads.

    Args:
        streams_open: Asked at each scrape.
    """

    def __init__(self, streams_open: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "doll_api_requests",
            "Requests that were answered.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "doll_api_request_seconds",
            "Until the answer began.",
            ["route", "method"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        streams = Gauge(
            "doll_api_streams_open", "Streams of events that are open.", registry=self._registry
        )
        streams.set_function(streams_open)

    def answered(self, route: str, method: str, status: int, seconds: float | None) -> None:
        """Count a request.

        Args:
            route: Its path with the names of parameters: as many as there are routes.
            method: Of HTTP; what we do not know is another.
            status: Of the answer.
            seconds: Until the answer began; None: a stream of events, whose length is no latency.
        """
        known = method if method in _METHODS else "other"
        self._requests.labels(route, known, str(status)).inc()
        if seconds is not None:
            self._seconds.labels(route, known).observe(seconds)

    def exposed(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self._registry)
