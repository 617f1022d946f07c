"""Training tasks with targets, whose records touch few weights each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from common.learning.evaluate import evaluate
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, make_task
from load.harness import rows

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.data.records import Records

# Updates between evaluations on the test rows.
LOOK_EVERY = 10
# Number of updates after which the target counts as not reached.
MOST_UPDATES = 400
_JUDGED_TOGETHER = 4_096  # records


@dataclass(frozen=True)
class Learning:
    """A job and its target, with one batch per worker in an update."""

    task: str
    options: Mapping[str, object]
    data: Callable[[], rows.Split]
    optimizer: OptimizerSettings
    batch_size: int
    workers: int
    metric: str
    target: float
    # The target is the root of the metric.
    root: bool = False

    def among(self, workers: int) -> Learning:
        """Return the same with another number of workers, and as many rows in an update."""
        return replace(self, workers=workers, batch_size=self.batch_size * self.workers // workers)


class Judge:
    """Evaluates weights on test rows."""

    def __init__(self, learning: Learning, test: Records) -> None:
        self._learning = learning
        self._test = test
        self._task = make_task(learning.task, learning.options)
        self._model = FlatModel(build_model(self._task, 0))

    def metric(self, weights: bytes | memoryview | Vector) -> float:
        """Return the metric that the target refers to."""
        found = evaluate(self._task, self._model, weights, self._test, _JUDGED_TOGETHER)
        mean = found[self._learning.metric]
        return sqrt(mean) if self._learning.root else mean


CLICKS = Learning(
    "sparse-logistic",
    {"features": rows.FEATURES, "entries": rows.ENTRIES},
    lambda: rows.Split(rows.clicks_like(60_000, 0), rows.clicks_like(8_000, 9)),
    OptimizerSettings("sgd", 0.5),
    batch_size=128,
    workers=8,
    metric="loss",
    target=0.507,
)
RATINGS = Learning(
    "matrix-factorisation",
    {"users": 608, "items": 500, "rank": 20, "regularisation": 0.08},
    rows.ratings,
    OptimizerSettings("momentum", 6.0, {"momentum": 0.9, "nesterov": True}),
    batch_size=64,
    workers=12,
    metric="squared_error",
    target=0.815,
    root=True,
)

# The sets that MLLess compares: sets that resemble real ones, and the small real ones.
SETS = {
    "clicks_like": CLICKS,
    # The numbers of users and films of the Netflix Prize: 40 MB of model.
    "ratings_like": replace(
        RATINGS,
        options={"users": 480_189, "items": 17_770, "rank": 20, "regularisation": 0.08},
        data=rows.ratings_like,
        optimizer=replace(RATINGS.optimizer, learning_rate=14.0),
        batch_size=1_024,
        workers=2,
        target=0.95,
    ),
    "criteo": replace(
        CLICKS,
        data=rows.clicks,
        optimizer=OptimizerSettings("sgd", 0.1),
        batch_size=32,
        target=0.467,
    ),
    "movielens": RATINGS,
}
