"""A job's model on this machine's device, and the records that its versions are evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from common.core.spans import Partition, Span
from common.data.codecs import codec_of
from common.data.fields import Columns, DecodedColumns, concatenate
from common.data.registered import RegisteredCodec
from common.errors import ExpiredError, UnknownTopicError
from common.kafka.schemas import JobSchemas
from common.learning.checkpoint import weights_in
from common.learning.devices import resolve_device
from common.learning.evaluate import per_record
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, fit_base, task_of
from common.telemetry.logging import Changes, EventLogger, event_logger
from services.evaluator.drift import errors_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from common.config.settings import Settings
    from common.jobs.spec import EvaluationSpec, JobSpec
    from common.kafka.port import Bounds, Log, SchemaRegistry

_log = event_logger(__name__)
# Records per forward pass; limits the memory.
AT_ONCE = 256
# Time limit for one span.
READ_S = 10.0
# Time limit for one partition's part of the test set.
TEST_READ_S = 30.0


class Judged(NamedTuple):
    """Results of a version on some records."""

    # Loss and metrics, means per record, and metrics made from scores.
    means: dict[str, float]
    # Scores of a task with two classes; otherwise None.
    scores: npt.NDArray[np.int64] | None
    # Error of each record that has one, from 0 to 1.
    errors: list[float]
    records: int


class ModelEvaluator:
    """A job's model, which is loaded with versions and evaluates records.

    Raises:
        UserError: If the task cannot be built, or the device does not exist.
    """

    def __init__(self, spec: JobSpec, settings: Settings) -> None:
        self._task, self._seed = task_of(spec, settings.tasks), spec.seed
        device = resolve_device(settings.device, _log.warning)
        self._model = FlatModel(build_model(self._task, spec.seed).to(device))

    def load(self, snapshot: bytes, read_base: Callable[[str], bytes]) -> None:
        """Load a version.

        Args:
            snapshot: A trainer's snapshot without optimizer state.
            read_base: Reads frozen tensors by their digest, if this process has others.

        Raises:
            CorruptError: If the snapshot is not of this model; names the first difference.
            UnavailableError: If the frozen tensors cannot be read now.
        """
        weights, kind = weights_in(snapshot)
        self._model.check(kind.layout)
        fit_base(self._model, self._task, self._seed, kind.base, read_base)
        self._model.load(weights)

    def judge(self, records: Columns) -> Judged:
        """Evaluate records with the loaded version.

        Raises:
            TaskError: If the task raises on some of them.
        """
        found = per_record(self._task, self._model, records, AT_ONCE)
        errors = errors_of({name: values.tolist() for name, values in found.columns.items()})
        return Judged(found.means(), found.scores, errors, len(found.columns["loss"]))


class TestRecords:
    """Records for evaluations: the test set, read once, and those that the model learns from next.

    Args:
        job: Id of the job.
        evaluation: Names the test set's topic; the topic's first records are the test set.
        registry: Source of schemas that the job's workers have not seen.
    """

    def __init__(
        self,
        spec: JobSpec,
        job: str,
        evaluation: EvaluationSpec,
        log: Log,
        registry: SchemaRegistry | None,
        logger: EventLogger,
    ) -> None:
        self._source = log
        self._spans = log.spans()
        self._codec = codec_of(spec.records)
        self._schemas = JobSchemas(log, job, registry)
        self._topic = evaluation.stream
        self._most = evaluation.records
        self._log = logger
        self._changes = Changes()
        # Spans that `_test` was read from.
        self._tested = list[Span]()
        self._test: Columns | None = None

    def read(self, spans: Iterable[Span]) -> Columns | None:
        """Read records back from Kafka, without those that are gone; return None if none are left.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        found = list[DecodedColumns]()
        for span in spans:
            with suppress(ExpiredError, UnknownTopicError):
                found.append(self._decoded(span, READ_S))
        return _together(found)

    def test(self) -> Columns | None:
        """Return the test set, which no version has learned from, or None while it is empty.

        Until it is complete, each call checks for more records.

        Raises:
            UnavailableError: If Kafka is unavailable.
        """
        if self._topic and sum(span.end - span.start for span in self._tested) < self._most:
            self._look()
        return self._test

    def close(self) -> None:
        """Close the connection."""
        self._spans.close()

    def _look(self) -> None:
        try:
            places = self._source.partitions(self._topic)
            found = first_spans({place: self._source.bounds(place) for place in places}, self._most)
            if found != self._tested:
                self._take(found)
        except (UnknownTopicError, ExpiredError) as error:
            missing = str(error)
        else:
            missing = "" if self._test is not None else f"{self._topic} has no records"
        if self._changes("missing", missing) and missing:
            self._log.warning("test_set_missing", reason=missing)

    def _take(self, spans: list[Span]) -> None:
        found = [self._decoded(span, TEST_READ_S) for span in spans]
        self._tested, self._test = spans, _together(found)
        self._log.info(
            "test_set_read",
            topic=self._topic,
            records=sum(len(decoded.kept) for decoded in found),
            left_out=sum(len(decoded.skipped) for decoded in found),
        )

    def _decoded(self, span: Span, timeout_s: float) -> DecodedColumns:
        values = [*self._spans.read(span, timeout_s).values]
        if isinstance(self._codec, RegisteredCodec):
            self._schemas.teach(self._codec, values)
        return self._codec.decode(values)


def _together(found: list[DecodedColumns]) -> Columns | None:
    parts = [decoded.records for decoded in found if len(decoded.kept)]
    return concatenate(parts) if parts else None


def first_spans(bounds: Mapping[Partition, Bounds], most: int) -> list[Span]:
    """Return the first records of a topic, equally many of each partition as far as possible."""
    spans = list[Span]()
    by_size = sorted(bounds.items(), key=lambda item: (item[1].end - item[1].start, item[0]))
    for index, (place, (start, end)) in enumerate(by_size):
        count = min(end - start, most // (len(by_size) - index))
        most -= count
        if count:
            spans.append(Span(*place, start, start + count))
    return sorted(spans)
