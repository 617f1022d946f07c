"""A job's model on this machine's device: loads versions, and judges records by the one loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.errors import ExpiredError, UnknownTopicError
from common.evaluation.drift import errors_of
from common.jobs.build import codec_of, task_of
from common.learning.evaluate import per_record
from common.learning.fields import Columns, concatenate
from common.learning.gradients import resolve_device
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.config.settings import Settings
    from common.evaluation.sampling import Piece
    from common.jobs.spec import JobSpec
    from common.ports.servers import SpanReader

AT_ONCE = 256  # records of one forward pass: bounds the memory
READ_S = 10.0  # for one piece


class Judged(NamedTuple):
    """How a version does on some records."""

    means: dict[str, float]  # loss and metrics, per record
    errors: list[float]  # of each record, from 0 to 1


class Examiner:
    """Weights in, verdicts out.

    Args:
        spec: The job.
        settings: Of the process.
        spans: Reads records back.

    Raises:
        UserError: If the task cannot be made, or there is no such device.
    """

    def __init__(self, spec: JobSpec, settings: Settings, spans: SpanReader) -> None:
        self._task = task_of(spec, settings.tasks)
        device = resolve_device(settings.device or spec.device)
        self._model = FlatModel(build_model(self._task, spec.seed).to(device))
        self._codec = codec_of(spec)
        self._spans = spans

    def load(self, weights: bytes) -> None:
        """Take over a version.

        Raises:
            CorruptError: If it is none of this model.
        """
        self._model.load(weights)

    def judge(self, records: Columns) -> Judged:
        """Judge records by the version that was loaded.

        Raises:
            TaskError: If the task raises on some of them.
        """
        columns = per_record(self._task, self._model, records, AT_ONCE)
        means = {name: float(values.mean()) for name, values in columns.items()}
        errors = errors_of({name: values.tolist() for name, values in columns.items()})
        return Judged(means, errors)

    def read(self, pieces: Iterable[Piece]) -> Columns | None:
        """Read records back from Kafka; what is no longer there is left out. None: nothing is.

        Raises:
            UnavailableError: If Kafka is away.
        """
        parts = list[Columns]()
        for span, skipped in pieces:
            try:
                fetched = self._spans.read(span, READ_S)
            except (ExpiredError, UnknownTopicError):
                continue
            pairs = zip(fetched.offsets, fetched.values, strict=True)
            decoded = self._codec.decode([value for at, value in pairs if at not in skipped])
            if len(decoded.kept):
                parts.append(decoded.records)
        return concatenate(parts) if parts else None
