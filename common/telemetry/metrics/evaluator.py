"""What an evaluator tells: of the jobs whose models it judges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters


class EvaluatorMetrics:
    """The metrics of one evaluator; may be shared between threads."""

    def __init__(self) -> None:
        self.meters = Meters("evaluator")
        self._test = self.meters.gauge(catalogue.TEST_METRIC)
        self._version = self.meters.gauge(catalogue.EVALUATED_VERSION)
        self._evaluations = self.meters.counter(catalogue.EVALUATIONS)
        self._seconds = self.meters.histogram(catalogue.EVALUATION_SECONDS)
        self._prequential = self.meters.gauge(catalogue.PREQUENTIAL)
        self._drifts = self.meters.counter(catalogue.DRIFTS)
        self._sent = self.meters.counter(catalogue.TRACKING_SENT)
        self._failed = self.meters.counter(catalogue.TRACKING_FAILED)
        self._waiting = self.meters.gauge(catalogue.TRACKING_WAITING)

    def follow(self, job: str, streams: Iterable[str]) -> None:
        """Report on a job, until `forget`."""
        for outcome in ("done", "skipped"):  # from now on there are zeros to count from
            self._evaluations.labels(job, outcome)
        for stream in streams:
            self._drifts.labels(job, stream)

    def forget(self, job: str) -> None:
        """Report on a job no longer."""
        labels = {"job_name": job}
        for each in (
            *(self._test, self._version, self._evaluations),
            *(self._seconds, self._prequential, self._drifts),
        ):
            each.remove_by_labels(labels)

    def judged(self, job: str, version: int) -> None:
        """A version was judged, in whatever way there is."""
        self._version.labels(job).set(version)
        self._evaluations.labels(job, "done").inc()

    def skipped(self, job: str, versions: int) -> None:
        """Versions will never be judged: newer ones came, or a leader took them back."""
        self._evaluations.labels(job, "skipped").inc(versions)

    def tested(self, job: str, means: Mapping[str, float], seconds: float) -> None:
        """How good a version is on the test set, and how long that took."""
        self._seconds.labels(job).observe(seconds)
        for metric, mean in means.items():
            self._test.labels(job, metric).set(mean)

    def predicted(self, job: str, stream: str, means: Mapping[str, float]) -> None:
        """How well a stream's records were predicted."""
        for metric, mean in means.items():
            self._prequential.labels(job, stream, metric).set(mean)

    def drifted(self, job: str, stream: str) -> None:
        """A stream's errors have risen."""
        self._drifts.labels(job, stream).inc()

    def track(self, job: str) -> None:
        """Report on what an experiment tracker is told of a job, until `untrack`."""
        self._sent.labels(job)
        self._failed.labels(job)

    def untrack(self, job: str) -> None:
        """Report on that no longer."""
        for each in (self._sent, self._failed, self._waiting):
            each.remove_by_labels({"job_name": job})

    def sent(self, job: str, points: int) -> None:
        """The tracker took points of curves."""
        self._sent.labels(job).inc(points)

    def not_sent(self, job: str) -> None:
        """The tracker, or what it is told of, was unavailable or refused."""
        self._failed.labels(job).inc()

    def waiting(self, job: str, records: int) -> None:
        """So much of the updates topic the tracker was not told yet."""
        self._waiting.labels(job).set(records)
