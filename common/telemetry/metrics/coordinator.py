"""What a coordinator tells: which jobs it takes part in, and of those that it leads all the rest.

What counts up goes on for as long as this replica takes part in a job. What is true of a leader is
kept with its leadership and read at the scrape: once that has ended there is nothing to read, and a
former leader never tells a number beside its successor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from common.telemetry.metrics import catalogue
from common.telemetry.metrics.leading import Instruments, JobMetrics, Leading, by_worker, lines
from common.telemetry.metrics.meters import Meters

if TYPE_CHECKING:
    from prometheus_client import Counter
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from common.telemetry.metrics.metric import Metric


class _Followed(NamedTuple):
    """A job that this replica takes part in."""

    metrics: JobMetrics
    checkpoint_age_s: Callable[[], float | None]
    checkpoint_failures: Counter


class CoordinatorMetrics:
    """The metrics of one coordinator; may be shared between threads."""

    def __init__(self) -> None:
        self.meters = Meters("coordinator")
        self._instruments = Instruments(self.meters)
        self._jobs = dict[str, _Followed]()
        self.meters.registry.register(self)

    def follow(self, job: str, checkpoint_age_s: Callable[[], float | None]) -> JobMetrics:
        """Report on a job, until `forget`; its age is asked at each scrape, None is left out."""
        metrics = JobMetrics(job, self._instruments)
        failures = self._instruments.counter(catalogue.CHECKPOINT_FAILURES, job)
        self._jobs[job] = _Followed(metrics, checkpoint_age_s, failures)
        return metrics

    def forget(self, job: str) -> None:
        """Report on a job no longer."""
        del self._jobs[job]
        self._instruments.forget(job)

    def checkpoint_failed(self, job: str) -> None:
        """Count a checkpoint that could not be written this time."""
        followed = self._jobs.get(job)
        if followed is not None:
            followed.checkpoint_failures.inc()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What the registry asks at each scrape."""
        families = {line: self.meters.family(line) for line in lines("gauge")}
        for job, followed in list(self._jobs.items()):
            for line, labels, value in _told(followed):
                families[line].add_metric([job, *labels], value)
        yield from families.values()


def _told(followed: _Followed) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """What is true of a job now: the line, what labels it has beside the job, the value."""
    metrics = followed.metrics
    leading = metrics.leading  # once: it may end meanwhile
    yield catalogue.LEADING, (), float(leading is not None)
    if metrics.held or leading is not None:  # who cannot begin to lead holds a job as well
        yield catalogue.JOB_HELD, (), float(metrics.held)
    yield from _known(catalogue.CHECKPOINT_AGE, followed.checkpoint_age_s())
    if leading is not None:
        yield catalogue.JOB_PAUSED, (), float(metrics.paused and not metrics.held)
        yield from _of_leader(leading)


def _of_leader(leading: Leading) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    yield catalogue.EPOCH, (), leading.epoch
    yield catalogue.VERSION, (), leading.version
    yield from _known(catalogue.LOSS, leading.loss)
    yield from _by(catalogue.TRAINING_METRIC, leading.metrics)
    yield from _known(catalogue.LEARNING_RATE, leading.learning_rate)
    yield from _known(catalogue.BATCHES_WAITING, leading.waiting)
    yield from _known(catalogue.WORKERS_LIVE, leading.live)
    if leading.synchrony is not None:
        yield catalogue.SYNCHRONISATION, (leading.synchrony.mode,), 1.0
        yield catalogue.GROUP_SIZE, (), leading.synchrony.group_size
    yield from _known(catalogue.UPDATE_STALENESS, leading.staleness)
    yield from _known(catalogue.WORKERS_BUSY, leading.busy)
    yield from _known(catalogue.MEMBERS, leading.members)
    yield from _known(catalogue.LEFT_OUT, leading.left_out)
    workers = by_worker(tuple(leading.gradients))  # a copy: others come meanwhile
    yield from _by(catalogue.WORKER_SPEED, {w: it.batches_per_s for w, it in workers.items()})
    yield from _by(catalogue.WORKER_SHARE, {worker: it.share for worker, it in workers.items()})
    streams = leading.streams
    if streams is not None:
        yield from _by(catalogue.STREAM_RECORDS, streams.records)
        yield from _by(catalogue.STREAM_LAG, streams.lag)
        yield from _known(catalogue.ARRIVAL_RATE, streams.arrivals_per_s)
        yield from _known(catalogue.STABILITY, streams.sufficient, "sufficient")
        yield from _known(catalogue.STABILITY, streams.necessary, "necessary")


def _known(
    line: Metric, value: float | None, *labels: str
) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    if value is not None:
        yield line, labels, value


def _by(
    line: Metric, values: Mapping[str, float]
) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    for label, value in values.items():
        yield line, (label,), value
