"""What is done about a version that counts: it is judged, and what came of it is told.

On the test set at once. By each stream's records that the model learns from next, as soon as these
are known: usually they are by the time the test is over, and one record tells all. What comes later
than a second is told later, until the next version is in hand.
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
    """How patient and how curious an evaluator is; nobody trains faster or slower by it."""

    look_s: float = 0.25  # between looks at the board: 16 bytes, unless there is something new
    together_s: float = 1.0  # that a result on the test set waits for the next update
    # Records of each stream that a version predicts before it learns of them. The accuracy of so
    # many is at most 6 points from that of all, in 95 of 100 cases.
    sample: int = 256


class EvaluatorProcess(NamedTuple):
    """What all jobs of a process share."""

    settings: Settings
    log: Log
    board: Callable[[str], Board]  # by job
    metrics: ProcessMetrics
    logger: EventLogger
    pace: EvaluationPace = EvaluationPace()  # how patient it is


@dataclass(slots=True)
class _Open:
    """The version in hand."""

    name: ModelId
    at_s: float  # when it was judged, since 1970
    since: float  # when something was told of it, or could have been; on the clock of waits
    awaited: set[str]  # streams of which it has predicted nothing yet
    records: int = 0
    test: dict[str, float] | None = None  # not told yet


class EvaluationRunner:
    """Judges the versions of one job, one at a time.

    Args:
        job: Its id.
        evaluation: What it wants of us.
        write: Writes a record to the updates topic.

    Raises:
        UserError: If its task cannot be made here.
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
        self._model_evaluator = ModelEvaluator(spec, process.settings)
        registry = open_registry(process.settings)
        self._records = TestRecords(spec, job, evaluation, process.log, registry, logger)
        self._scores = {stream: ScoreWindow() for stream in spec.streams}
        self._watches = {stream: ErrorWatch() for stream in spec.streams}
        self._changes = Changes()
        self._open: _Open | None = None

    @property
    def name(self) -> ModelId | None:
        """The version in hand that is not done with yet."""
        return None if self._open is None else self._open.name

    def begin(self, name: ModelId, weights: bytes, *, tests: bool, predicts: bool) -> None:
        """Take a version in hand, and try it on the test set; `go_on` was called for the last time.

        Args:
            name: As the history calls it.
            weights: Its bytes.
            tests: Whether nobody has tried it on the test set yet.
            predicts: Likewise on the records that come next.

        Raises:
            CorruptError: If the weights are not of this model.
            UnavailableError: If Kafka is unavailable: begin again.
        """
        records = self._records.test() if tests else None
        self._open = None
        self._model_evaluator.load(weights)
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
        """The version in hand predicts what was learned from next, and what is known is told.

        Args:
            after: By stream, the batches that it learned from next, as far as they are known.
            last: Nothing more will be known: it is done with.

        Raises:
            UnavailableError: If Kafka is unavailable: do so again.
        """
        opened = self._open
        if opened is None:
            return
        known = opened.awaited & after.keys()
        waited = monotonic() >= opened.since + self._pace.together_s
        if not last and known != opened.awaited and not waited:
            return  # more may come at any moment
        # All is read before anything is told: this may be done again.
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
        """The version in hand was taken back."""
        self._open = None

    def close(self) -> None:
        """Let go of the connection."""
        self._records.close()

    # ---------------------------------------------------------------------------------------------

    def _write_found(self, opened: _Open, prequential: dict[str, dict[str, float]]) -> None:
        """Write down what there is, once."""
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
        """How well a stream's records were predicted; empty: the task could not."""
        try:
            judged = self._model_evaluator.judge(records)
        except TaskError as error:
            self._complain(stream, str(error))
            return {}
        if judged.scores is not None:  # of some hundred records alone they say little
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
