"""Pure fold from records of a job's updates topic to points of a tracker's curves.

    record      UpdateApplied 1 ... n       Evaluated J           Drifted
    points      train/loss at n: a mean     test/loss at J        drift/clinic-a
                                            prequential/clinic-a/loss

The step is the version J, and the time is the record's own. So a process that reads the topic
again, after a crash or beside another process, makes the same points, and a tracker keeps the same
point once. Points of updates that a takeover took back stay in the tracker, with an earlier time
than those that replaced them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite

from common.core.messages import (
    AuditRecord,
    Drifted,
    Evaluated,
    Lead,
    MetricSum,
    ModelId,
    UpdateApplied,
)
from common.core.partial_history import PartialHistory
from common.core.scores import WINDOWED
from common.core.snapshot_publishing import is_offered
from common.tracking.port import Metric

# Matches characters that are not allowed in a metric's name.
_ILLEGAL = re.compile(r"[^\w.-]")
# Maximum length of a metric's name in MLflow.
_NAME_CHARACTERS = 250
# Newest evaluations kept; a checkpoint is registered long before this many follow.
_KEPT_TESTS = 1000


class TrackedMetrics:
    """Fold over a job's updates topic, in bounded memory.

    Attributes:
        history: Decides which updates are part of the job's history.

    Args:
        every_updates: Number of updates that each point is a mean over.
        start: Offset of the first record that still exists.
    """

    def __init__(self, every_updates: int, start: int = 0) -> None:
        self._every = every_updates
        self.history = PartialHistory(start)
        # The last update since the Lead in force.
        self._last: UpdateApplied | None = None
        # Time when it was written.
        self._at_s = 0.0
        # Sums of metrics over the updates since the last point.
        self._sums = dict[str, MetricSum]()
        # Newest values of metrics that are not means.
        self._newest = dict[str, float]()
        # Results on the test set; the newest is last.
        self._tests = dict[ModelId, dict[str, float]]()

    def test_of(self, made: ModelId) -> dict[str, float]:
        """Return loss and metrics of a version on the test set; empty if they are not known."""
        return self._tests.get(made, {})

    def feed(self, offset: int, at_s: float, record: AuditRecord | None) -> list[Metric]:
        """Fold the record at `offset`, written at `at_s`; return the points that it completes.

        Raises:
            ValueError: If `offset` was fed before.
        """
        counts = self.history.feed(offset, record)
        match record:
            case Lead() if counts:
                self._forget()
                self._last = None
                return []
            case UpdateApplied() if counts:
                return self._learned(at_s, record)
            case Evaluated() if self.history.holds(record.model):
                self._keep_test(record)
                by_folder = {"test": record.test} | {
                    f"prequential/{stream}": means for stream, means in record.prequential.items()
                }
                step = record.model.version
                return [
                    point
                    for folder, means in by_folder.items()
                    for point in _points(folder, means, record.at_s, step)
                ]
            case Drifted() if self.history.holds(record.model):
                after, step = {record.stream: record.after}, record.model.version
                return list(_points("drift", after, record.at_s, step))
            case _:
                return []

    def rest(self) -> list[Metric]:
        """Return the point of the updates since the last point, for the end of the job."""
        if self._last is None:
            return []
        return list(_points("train", self._means(), self._at_s, self._last.version))

    def _learned(self, at_s: float, update: UpdateApplied) -> list[Metric]:
        before = self._last.progress if self._last else update.progress - 1
        self._last, self._at_s = update, at_s
        means = {"loss": update.loss} | update.metrics
        # The loss takes precedence over a task's metric with the name "loss".
        means["loss"] = update.loss
        for name, value in means.items():
            if name in WINDOWED:
                self._newest[name] = value
            else:
                total, among = self._sums.get(name, (0.0, 0))
                samples = update.samples_with(name)
                self._sums[name] = MetricSum(total + value * samples, among + samples)
        if isinstance(update.rate, float):
            self._newest["learning_rate"] = update.rate
        if not is_offered(before, update.progress, self._every):
            return []
        points = self.rest()
        self._forget()
        return points

    def _keep_test(self, evaluated: Evaluated) -> None:
        if evaluated.test:
            self._tests.pop(evaluated.model, None)
            self._tests[evaluated.model] = evaluated.test
        if len(self._tests) > _KEPT_TESTS:
            del self._tests[next(iter(self._tests))]

    def _means(self) -> dict[str, float]:
        means = {name: total / max(samples, 1) for name, (total, samples) in self._sums.items()}
        return means | self._newest

    def _forget(self) -> None:
        self._sums.clear()
        self._newest.clear()


def _points(folder: str, means: Mapping[str, float], at_s: float, step: int) -> Iterator[Metric]:
    for name, value in means.items():
        if isfinite(value):
            legal = f"{folder}/{_ILLEGAL.sub('_', name)}"[:_NAME_CHARACTERS]
            yield Metric(legal, value, at_s, step)
