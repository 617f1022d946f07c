"""Evaluates versions of a job's model, and writes records of the results.

A version is evaluated on the test set at once, and on each stream's records that the model learns
from next as soon as these are known. They usually are when the test ends, and then one record
reports everything. Results that take more than a second longer are reported separately, until the
next version begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from time import monotonic, time
from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import Batch, Drifted, Evaluated, ModelId
from common.core.scores import ScoreWindow
from common.kafka.schemas import open_registry
from common.learning.errors import TaskError
from common.storage.port import open_blobs
from common.storage.store import CheckpointStore
from common.telemetry.logging import Changes, EventLogger
from services.evaluator.drift import ErrorWatch
from services.evaluator.model_evaluator import ModelEvaluator, TestRecords
from services.evaluator.sampling import sample

if TYPE_CHECKING:
    from common.config.settings import Settings
    from common.core.spans import Span
    from common.data.fields import Columns
    from common.jobs.spec import EvaluationSpec, JobSpec
    from common.kafka.port import Log
    from common.redis.port import Board
    from common.telemetry.metrics.evaluator import EvaluatorMetrics
    from common.telemetry.metrics.registry import ProcessMetrics


class EvaluationPace(NamedTuple):
    """Timing and sample size of an evaluator; neither affects the training."""

    # Seconds between polls of the board, which transfer 16 bytes unless there is something new.
    look_s: float = 0.25
    # Time that a result on the test set waits for the next update.
    together_s: float = 1.0
    # Most records of each stream that a version predicts before the model learns from them. In 95
    # of 100 cases, the accuracy on this many differs by at most 6 percentage points from the
    # accuracy on all records.
    sample: int = 256


class EvaluatorProcess(NamedTuple):
    """State that all jobs of a process share."""

    settings: Settings
    log: Log
    # Opens the board of a job.
    board: Callable[[str], Board]
    metrics: ProcessMetrics
    logger: EventLogger
    pace: EvaluationPace = EvaluationPace()


@dataclass(slots=True)
class _Open:
    """Version that is being evaluated."""

    name: ModelId
    # Start of the evaluation in seconds since 1970.
    at_s: float
    # Time of the last report, or of the start, on the clock `monotonic`.
    since: float
    # Streams whose next records the version has not predicted yet.
    awaited: set[str]
    records: int = 0
    # Result on the test set until it is reported.
    test: dict[str, float] | None = None


class EvaluationRunner:
    """Evaluates the versions of one job, one at a time.

    Args:
        job: Id of the job.
        evaluation: The job's settings for evaluations.
        write: Writes a record to the updates topic.

    Raises:
        UserError: If the task cannot be built here.
    """

    def __init__(
        self,
        spec: JobSpec,
        job: str,
        evaluation: EvaluationSpec,
        process: EvaluatorProcess,
        metrics: EvaluatorMetrics,
        write: Callable[[Evaluated | Drifted], None],
        logger: EventLogger,
    ) -> None:
        self._most = process.pace.sample
        self._pace = process.pace
        self._write = write
        self._metrics = metrics
        self._log = logger
        self._settings, self._job = process.settings, job
        self._model_evaluator = ModelEvaluator(spec, process.settings)
        registry = open_registry(process.settings)
        self._records = TestRecords(spec, job, evaluation, process.log, registry, logger)
        self._scores = {stream: ScoreWindow() for stream in spec.streams}
        self._watches = {stream: ErrorWatch() for stream in spec.streams}
        self._changes = Changes()
        self._open: _Open | None = None

    @property
    def name(self) -> ModelId | None:
        """Version that is being evaluated, or None."""
        return None if self._open is None else self._open.name

    def _read_base(self, digest: str) -> bytes:
        return CheckpointStore(open_blobs(self._settings), self._job).base(digest)

    def begin(self, name: ModelId, weights: bytes, *, tests: bool, predicts: bool) -> None:
        """Start with a version: load it, and evaluate it on the test set if `tests`.

        The caller has finished the previous version with `go_on`.

        Args:
            name: Id of the version in the updates topic.
            weights: Serialized weights.
            tests: True if no evaluator has evaluated it on the test set yet.
            predicts: True if no evaluator has evaluated it yet on the records that the model learns
                from next.

        Raises:
            CorruptError: If the weights are not of this model.
            UnavailableError: If Kafka or object storage is unavailable; call again.
            UserError: If frozen tensors must be read and no object storage is configured.
        """
        records = self._records.test() if tests else None
        self._open = None
        self._model_evaluator.load(weights, self._read_base)
        awaited = set(self._watches) if predicts else set[str]()
        self._open = opened = _Open(name, time(), monotonic(), awaited)
        self._metrics.version = name.version
        self._metrics.evaluations.labels("done").inc()
        if records is not None:
            started = monotonic()
            try:
                judged = self._model_evaluator.judge(records)
            except TaskError as error:
                self._complain("test set", str(error))
                return
            opened.records, opened.test = judged.records, self._finite("test", judged.means)
            self._metrics.test_s.observe(monotonic() - started)
            for metric, mean in opened.test.items():
                self._metrics.test_means.labels(metric).set(mean)

    def go_on(self, after: Mapping[str, tuple[Batch, ...]], *, last: bool) -> None:
        """Evaluate the version on the records that the model learned from next, and report results.

        Args:
            after: Batches that the model learned from next, by stream, as far as they are known.
            last: True if no more batches will be known, so that the version is finished.

        Raises:
            UnavailableError: If Kafka is unavailable; call again.
        """
        opened = self._open
        if opened is None:
            return
        known = opened.awaited & after.keys()
        waited = monotonic() >= opened.since + self._pace.together_s
        if not last and known != opened.awaited and not waited:
            # More batches may arrive at any moment.
            return
        # All records are read before anything is reported, because this call may be repeated.
        read = {
            stream: self._records.read(sample(_spans_of(stream, after[stream]), self._most))
            for stream in sorted(known)
        }
        means = {
            stream: found
            for stream, records in read.items()
            if records is not None and (found := self._predicted(opened.name, stream, records))
        }
        opened.awaited -= known
        opened.since = monotonic()
        self._write_found(opened, means)
        if last or not opened.awaited:
            self._open = None

    def drop_version(self) -> None:
        """Forget the version, which was taken back."""
        self._open = None

    def close(self) -> None:
        """Close the connection."""
        self._records.close()

    # ---------------------------------------------------------------------------------------------

    def _write_found(self, opened: _Open, prequential: dict[str, dict[str, float]]) -> None:
        """Report results that are not reported yet."""
        records, test = (opened.records, opened.test) if opened.test is not None else (0, {})
        opened.test = None
        if not test and not prequential:
            return
        self._write(Evaluated(opened.name, opened.at_s, records, test, prequential))
        self._log.info(
            "evaluated",
            version=opened.name.version,
            **{f"test_{metric}": mean for metric, mean in test.items()},
            streams=len(prequential),
        )

    def _predicted(self, name: ModelId, stream: str, records: Columns) -> dict[str, float]:
        """Return means over a stream's predicted records; empty if the task failed."""
        try:
            judged = self._model_evaluator.judge(records)
        except TaskError as error:
            self._complain(stream, str(error))
            return {}
        # Scores are collected over several versions, because a few hundred are too noisy.
        if judged.scores is not None:
            judged.means.update(self._scores[stream].add(judged.scores, monotonic()))
        means = self._finite(stream, judged.means)
        for metric, mean in means.items():
            self._metrics.prequential_means.labels(stream, metric).set(mean)
        self._watch(name, stream, judged.errors)
        return means

    def _watch(self, name: ModelId, stream: str, errors: list[float]) -> None:
        rise = self._watches[stream].feed(errors)
        if rise is None:
            return
        self._log.warning(
            "stream_drifted",
            stream=stream,
            version=name.version,
            before=rise.before,
            after=rise.after,
        )
        self._metrics.drifts.labels(stream).inc()
        self._write(Drifted(name, time(), stream, rise.before, rise.after))

    def _finite(self, what: str, means: dict[str, float]) -> dict[str, float]:
        found = {metric: mean for metric, mean in means.items() if isfinite(mean)}
        lost = sorted(means.keys() - found.keys())
        if self._changes(f"finite {what}", lost) and lost:
            self._log.warning("evaluation_not_finite", of=what, metrics=",".join(lost))
        return found

    def _complain(self, what: str, reason: str) -> None:
        if self._changes(what, reason):
            self._log.warning("evaluation_failed", of=what, reason=reason)


def _spans_of(stream: str, batches: Iterable[Batch]) -> list[Span]:
    return [span for batch in batches for span in batch.address if span.topic == stream]
