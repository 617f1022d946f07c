"""What evaluators told of a job's versions: the newest, and how it went, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import asdict

from common.api.answers import DriftAnswer, EvaluationAnswer, EvaluationCurves, PrequentialCurve
from common.core.messages import Drifted, Evaluated, ModelId

TESTS = 2000  # kept; of more, every second one goes
PREDICTIONS = 400  # likewise, of each stream
DRIFTS = 200  # the last


class Point(NamedTuple):
    """How good one version is."""

    model: ModelId
    at_s: float
    records: int
    means: dict[str, float]


class Series:
    """Points by version, ascending; several evaluators may tell the same one.

    Args:
        capacity: Points kept, at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.points = list[Point]()

    def add(self, point: Point) -> None:
        """Take in one more; it is passed over where a later version is there."""
        version = point.model.version
        if self.points and self.points[-1].model.version >= version:
            return
        self.points.append(point)
        if len(self.points) > self._capacity:
            self.points = self.points[self._capacity % 2 :: 2]  # the newest stays

    def take_back(self, version: int) -> None:
        """Forget all versions above one."""
        while self.points and self.points[-1].model.version > version:
            self.points.pop()

    def columns(self) -> dict[str, tuple[float | None, ...]]:
        """The values of each metric, one for each point."""
        names = sorted({name for point in self.points for name in point.means})
        return {name: tuple(point.means.get(name) for point in self.points) for name in names}


class Evaluations:
    """All that was told of effective versions."""

    def __init__(self, streams: Iterable[str]) -> None:
        self._tests = Series(TESTS)
        self._predictions = {stream: Series(PREDICTIONS) for stream in streams}
        self._drifts = deque[Drifted](maxlen=DRIFTS)

    def feed(self, record: Evaluated | Drifted) -> None:
        """Take in what was told of an effective version."""
        if isinstance(record, Drifted):
            self._drifts.append(record)
            return
        if record.test:
            self._tests.add(Point(record.model, record.at_s, record.records, record.test))
        for stream, means in record.prequential.items():
            if stream in self._predictions:
                self._predictions[stream].add(Point(record.model, record.at_s, 0, means))

    def take_back(self, version: int) -> None:
        """Forget all that was told of versions above one."""
        for series in (self._tests, *self._predictions.values()):
            series.take_back(version)
        while self._drifts and self._drifts[-1].model.version > version:
            self._drifts.pop()

    def latest(self) -> EvaluationAnswer | None:
        """The newest; None: nothing was told yet."""
        test = self._tests.points[-1] if self._tests.points else None
        found = {name: each.points[-1] for name, each in self._predictions.items() if each.points}
        if test is None and not found:
            return None
        return EvaluationAnswer(
            version=test and test.model.version,
            at_s=test and test.at_s,
            records=test.records if test else 0,
            test=test.means if test else {},
            prequential={name: point.means for name, point in found.items()},
            predicted=max((point.model.version for point in found.values()), default=None),
            drifts=len(self._drifts),
        )

    def curves(self) -> EvaluationCurves:
        """Everything over time."""
        tests = self._tests.points
        return EvaluationCurves(
            at_s=tuple(point.at_s for point in tests),
            version=tuple(point.model.version for point in tests),
            test=self._tests.columns(),
            prequential=tuple(
                PrequentialCurve(
                    stream=stream,
                    at_s=tuple(point.at_s for point in series.points),
                    version=tuple(point.model.version for point in series.points),
                    metrics=series.columns(),
                )
                for stream, series in self._predictions.items()
                if series.points
            ),
            drifts=tuple(map(drift_answer, self._drifts)),
        )


def drift_answer(record: Drifted) -> DriftAnswer:
    """A stream whose errors have risen."""
    return DriftAnswer.model_validate(asdict(record) | {"version": record.model.version})
