"""What an admin service tells: of its requests and streams of events, and how each job is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class ShownJob(NamedTuple):
    """How a job is; None is what nobody knows."""

    job: str
    state: str
    lag: int | None = None
    # Skipped records, quarantined batches, expired and lost records.
    counts: tuple[int, int, int, int] | None = None
    open_transactions_s: Mapping[str, float] = {}  # by stream


class ApiMetrics:
    """The metrics of one admin process; may be shared between threads.

    Args:
        streams_open: Asked at each scrape.
        jobs: Likewise; those that are not stopped, as far as they are known.
        missing: Returns the number of entries of which a topic has no record any more, by topic.
    """

    def __init__(
        self,
        streams_open: Callable[[], int],
        jobs: Callable[[], Iterable[ShownJob]],
        missing: Callable[[], Mapping[str, int]],
    ) -> None:
        self.meters = Meters("admin")
        self._jobs = jobs
        self._missing = missing
        self.meters.registry.register(self)
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

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What the registry asks at each scrape."""
        state, lag, transactions, *counters = map(self.meters.family, _OF_JOBS)
        for shown in self._jobs():
            state.add_metric([shown.job, shown.state], 1)
            if shown.lag is not None:
                lag.add_metric([shown.job], shown.lag)
            if shown.counts is not None:
                for counter, count in zip(counters, shown.counts, strict=True):
                    counter.add_metric([shown.job], count)
            for stream, age_s in shown.open_transactions_s.items():
                transactions.add_metric([shown.job, stream], age_s)
        missing = self.meters.family(catalogue.RECORDS_MISSING)
        for topic, count in self._missing().items():
            missing.add_metric([topic], count)
        yield from (state, lag, transactions, *counters, missing)


_OF_JOBS = (
    catalogue.JOB_STATE,
    catalogue.JOB_LAG,
    catalogue.OPEN_TRANSACTION,
    catalogue.JOB_SKIPPED,
    catalogue.JOB_QUARANTINED,
    catalogue.JOB_EXPIRED,
    catalogue.JOB_LOST,
)
