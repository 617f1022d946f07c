"""Metrics of an admin service: its requests, its event streams, and the state of each job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.telemetry.metrics.registry import SECONDS, ProcessMetrics, counter, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class ShownJob(NamedTuple):
    """State of a job. Unknown values are None.

    Attributes:
        job: Name of the job.
        state: State of the job.
        lag: Records that are in no update yet.
        skipped: Records.
        quarantined: Batches.
        expired: Records.
        lost: Records.
        open_transactions_s: Time that a transaction has been open, by stream.
    """

    job: str
    state: str
    lag: int | None
    skipped: int | None
    quarantined: int | None
    expired: int | None
    lost: int | None
    open_transactions_s: Mapping[str, float]


class ApiMetrics(ProcessMetrics):
    """Metrics of one admin process. Threads may share them.

    Args:
        streams_open: Returns the number of open event streams.
        jobs: Returns the known jobs that are not stopped.
        missing: Returns the number of entries that have no record in a topic any more, by topic.
    """

    def __init__(
        self,
        streams_open: Callable[[], int],
        jobs: Callable[[], Iterable[ShownJob]],
        missing: Callable[[], Mapping[str, int]],
    ) -> None:
        super().__init__("admin")
        self._shown = jobs
        self._missing = missing
        self._requests = self.counter(
            "doll_api_requests_total",
            "Total number of HTTP requests that the admin service answered; the label `route` is"
            " `none` if the path does not exist.",
            ["route", "method", "status"],
        )
        self._seconds = self.histogram(
            "doll_api_request_seconds",
            "Time from the arrival of an HTTP request at the admin service to the start of its"
            " response, in seconds. Event streams are not measured.",
            ["route", "method"],
            buckets=SECONDS[:-1],
        )
        self.gauge(
            "doll_api_streams_open",
            "Number of event streams (server-sent events) that clients have open at this admin"
            " service.",
        ).set_function(streams_open)

    def answered(self, route: str, method: str, status: int, seconds: float | None) -> None:
        """Count a request.

        Args:
            route: Path with the names of its parameters, so that the number of series is bounded.
            method: HTTP method. Unknown ones are counted as `other`.
            status: HTTP status of the response.
            seconds: Time until the response began; None for an event stream.
        """
        known = method if method in _METHODS else "other"
        self._requests.labels(route, known, str(status)).inc()
        if seconds is not None:
            self._seconds.labels(route, known).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are computed at each scrape."""
        yield from super().collect()
        jobs = list(self._shown())
        yield gauge(
            "doll_job_state",
            "Always 1. The label `state` is the current state of the job (see"
            " docs/reference/job-states.md). Stopped jobs have no series.",
            {(it.job, it.state): 1.0 for it in jobs},
            *("job_name", "state"),
        )
        yield gauge(
            "doll_job_lag_records",
            "Number of records in the job's streams, up to Kafka's high watermark, that no model"
            " update contains yet. Also reported while no coordinator leads the job.",
            {it.job: it.lag for it in jobs},
            "job_name",
        )
        yield gauge(
            "doll_stream_open_transaction_seconds",
            "Estimated age of the longest open Kafka transaction in the stream, in seconds; 0 if"
            " no transaction is open. Readers do not receive the records behind an open"
            " transaction.",
            {(it.job, stream): s for it in jobs for stream, s in it.open_transactions_s.items()},
            *("job_name", "stream"),
        )
        yield counter(
            "doll_job_skipped_records_total",
            "Total number of records that the job skipped because they could not be decoded, since"
            " the job began.",
            {it.job: it.skipped for it in jobs},
            "job_name",
        )
        yield gauge(
            "doll_job_quarantined_batches",
            "Number of the job's batches in quarantine: they could not be trained, and wait until"
            " an operator requeues them (they are trained again) or replays them (their records"
            " are written to the topics again).",
            {it.job: it.quarantined for it in jobs},
            "job_name",
        )
        yield counter(
            "doll_job_expired_records_total",
            "Total number of records that Kafka deleted before the job trained on them, since the"
            " job began.",
            {it.job: it.expired for it in jobs},
            "job_name",
        )
        yield counter(
            "doll_job_lost_records_total",
            "Total number of records that the job trained on and that Kafka lost afterwards, since"
            " the job began.",
            {it.job: it.lost for it in jobs},
            "job_name",
        )
        yield gauge(
            "doll_records_missing",
            "Number of jobs (topic `doll.jobs`) or API keys (topic `doll.keys`) that this admin"
            " service read earlier but whose records are missing from Kafka now; 0 is normal.",
            dict(self._missing()),
            "topic",
        )
