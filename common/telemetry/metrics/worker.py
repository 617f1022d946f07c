"""What a worker tells: of the one job that it works for, and of those that failed here."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from common.core.messages import BatchReady, Claim, FailedReason
from common.telemetry.metrics import catalogue
from common.telemetry.metrics.meters import Meters
from common.telemetry.metrics.supervision import KINDS, Kind

Direction: TypeAlias = Literal["sent", "received"]
Stage: TypeAlias = Literal["indicator", "fetch", "gradient", "push"]


class WorkerMetrics:
    """The metrics of one worker; may be shared between threads."""

    def __init__(self) -> None:
        self.meters = Meters("worker")
        self._faults = self.meters.counter(catalogue.JOB_FAULTS)
        self._instruments = _Instruments(self.meters)

    def work_for(self, job: str, streams: tuple[str, ...]) -> JobMeasures:
        """Tell of this job from now on, and of no other."""
        self.forget()
        for kind in KINDS:  # from now on there are zeros to count from
            self._faults.labels(job, kind)
        return JobMeasures(self._instruments, job, streams)

    def job_failed(self, job: str, kind: Kind) -> None:
        """Something ended this worker's part in a job; told even after it works for another."""
        self._faults.labels(job, kind).inc()

    def forget(self) -> None:
        """Tell of no job any more; whoever still measures one does so to no effect."""
        for instrument in vars(self._instruments).values():
            instrument.clear()


class _Instruments:
    def __init__(self, meters: Meters) -> None:
        self.read = meters.counter(catalogue.RECORDS_READ)
        self.skipped = meters.counter(catalogue.RECORDS_SKIPPED)
        self.expired = meters.counter(catalogue.RECORDS_EXPIRED)
        self.announced = meters.counter(catalogue.BATCHES_ANNOUNCED)
        self.read_back = meters.counter(catalogue.BATCHES_READ_BACK)
        self.reading = meters.gauge(catalogue.WORKER_READING)
        self.behind = meters.gauge(catalogue.STREAM_BEHIND)
        self.stages = meters.histogram(catalogue.WORKER_STAGE)
        self.sent = meters.counter(catalogue.GRADIENTS_SENT)
        self.failed = meters.counter(catalogue.GRADIENTS_FAILED)
        self.copied = meters.counter(catalogue.BYTES_COPIED)
        self.moved = meters.counter(catalogue.BYTES_MOVED)


class JobMeasures:
    """What is measured of one job's work: each series is found once, not at each batch."""

    def __init__(self, instruments: _Instruments, job: str, streams: tuple[str, ...]) -> None:
        # From now on there is a zero of each to count from.
        it = instruments
        self._read = {stream: it.read.labels(job, stream) for stream in streams}
        self._skipped = {stream: it.skipped.labels(job, stream) for stream in streams}
        self._expired = {stream: it.expired.labels(job, stream) for stream in streams}
        self._announced = it.announced.labels(job)
        self._read_back = it.read_back.labels(job)
        self._reading = it.reading.labels(job)
        self._behind = {stream: it.behind.labels(job, stream) for stream in streams}
        self._stages = {stage: it.stages.labels(job, stage) for stage in get_args(Stage)}
        self._sent = it.sent.labels(job)
        self._copied = it.copied.labels(job)
        self._moved = {way: it.moved.labels(job, way) for way in get_args(Direction)}
        self._failed = {reason: it.failed.labels(job, reason) for reason in get_args(FailedReason)}

    def announced(self, claim: Claim, counts: tuple[int, ...]) -> None:
        """A claim goes to the control topic.

        Args:
            claim: Which.
            counts: Records that decoded, for each span of its address.
        """
        if isinstance(claim, BatchReady):
            self._announced.inc()
            for span, count in zip(claim.address, counts, strict=True):
                self._read[span.topic].inc(count)
            for left_out in claim.skipped:
                self._skipped[left_out.topic].inc(left_out.records)
        else:
            for span in claim.address:
                self._expired[span.topic].inc(span.end - span.start)

    def reading(self, *, reading: bool) -> None:
        """It begins to poll its streams, or pauses."""
        self._reading.set(float(reading))

    def behind(self, stream: str, seconds: float) -> None:
        """How far the partition of a stream that is furthest behind lags the others in time."""
        self._behind[stream].set(seconds)

    def took(self, stage: Stage, seconds: float) -> None:
        """A stage of its work is done."""
        self._stages[stage].observe(seconds)

    def read_back(self) -> None:
        """A batch was not in memory and is read from Kafka."""
        self._read_back.inc()

    def copied(self, size: int) -> None:
        """So many bytes of weights and optimizer state were taken over."""
        self._copied.inc(size)

    def moved(self, size: int, direction: Direction) -> None:
        """So many bytes of weights and gradients were sent or received."""
        self._moved[direction].inc(size)

    def gradient_sent(self) -> None:
        """An order has its gradient."""
        self._sent.inc()

    def gradient_failed(self, reason: FailedReason) -> None:
        """An order came to nothing."""
        self._failed[reason].inc()
