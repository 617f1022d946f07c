"""What an admin service tells: of its requests and streams of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.metrics import catalogue
from common.metrics.meters import Meters

if TYPE_CHECKING:
    from collections.abc import Callable

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class ApiMetrics:
    """The metrics of one admin process; may be shared between threads.

    Args:
        streams_open: Asked at each scrape.
    """

    def __init__(self, streams_open: Callable[[], int]) -> None:
        self.meters = Meters("admin")
        self._requests = self.meters.counter(catalogue.API_REQUESTS)
        self._seconds = self.meters.histogram(catalogue.API_SECONDS)
        self.meters.gauge(catalogue.API_STREAMS).set_function(streams_open)

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
