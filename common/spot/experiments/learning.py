"""Real SGD in virtual time: gradients of real data at the weights that the protocol names.

Every stream repeats the records of its own shard of the training part, as in the paper's
experiments (section V-A). So an address names the same rows for every reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.data.digits import Split, load_digits
from common.data.fields import records_per_pass
from common.data.readers import read_records
from common.data.records import Records, count, take
from common.errors import UserError
from common.learning.evaluate import evaluate
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.tasks import Task, build_model, make_task
from common.learning.trainer import Trainer
from common.spot.experiments.protocol import NOTHING, Computed, Learner
from common.spot.experiments.results import LearningPoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.core import commands as do
    from common.core.messages import Batch, Vector
    from common.core.order_queue import Compute
    from common.spot.experiments.spec import LearningSpec

HELD_OUT_SHARE = 0.2
EVALUATED_AT_ONCE = 1024
GREY_LEVELS = 255.0


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """The task, the data and the method of a training."""

    task: Task
    train: Records
    optimizer: OptimizerSettings
    # Evaluates weights. Arguments: their version, the time, and the weights.
    look: Callable[[int, float, memoryview], LearningPoint]
    look_every: int  # updates


class Sgd(Learner):
    """A `Learner` with a task, a data set and an optimizer; runs on the CPU.

    Args:
        streams: Number of streams that share the training part.
        staleness: Maximum number of updates between a gradient's weights and its own update.
        seed: Seed of the shards and the first weights.

    Attributes:
        curve: Evaluations, before the first update and then every `look_every` updates.
    """

    def __init__(self, training: Training, streams: int, staleness: int, seed: int) -> None:
        # Gradients this small are four times slower on two cores.
        torch.set_num_threads(1)
        self._lesson = training
        order = np.random.default_rng(seed).permutation(count(training.train))
        self._shards = [order[stream::streams] for stream in range(streams)]
        network = build_model(training.task, seed)
        record_bytes = sum(column[:1].nbytes for column in training.train.values())
        self._computer = GradientComputer(
            training.task,
            network,
            torch.device("cpu"),
            pass_records=records_per_pass(record_bytes),
        )
        model = self._computer.model
        self._trainer = Trainer(model.state.numpy(), model.parameter_count, training.optimizer)
        self._staleness = staleness
        self._weights = {0: bytes(self._trainer.weights())}  # keyed by version
        self._loaded = -1
        self.curve = [training.look(0, 0.0, self._trainer.weights())]

    def gradient(self, compute: Compute) -> Computed:
        """Compute a gradient at its weights."""
        version = compute.model.version
        if version not in self._weights:
            # The gradient is not needed any more.
            return NOTHING
        if self._loaded != version:
            self._computer.load(self._weights[version])
            self._loaded = version
        batches = [take(self._lesson.train, self._rows(batch)) for batch in compute.batches]
        computed = self._computer.compute(batches, compute.local_rate)
        return Computed(computed.loss_sum, computed.vector)

    def add(self, round_: int, computed: Vector | None, samples: int) -> None:
        """Add a gradient to the sum of a round."""
        if computed is not None:
            self._trainer.add(round_, computed, samples)

    def apply(self, command: do.Apply, now: float) -> None:
        """Apply an update from the sum."""
        update = command.update
        self._trainer.apply(command.round, command.learning_rate, update.scale or 1.0)
        self._weights[update.version] = bytes(self._trainer.weights())
        self._weights.pop(update.version - self._staleness - 1, None)
        if update.version % self._lesson.look_every == 0:
            self.curve.append(self._lesson.look(update.version, now, self._trainer.weights()))

    def discard(self, round_: int) -> None:
        """Drop the sum of a round."""
        self._trainer.discard(round_)

    def _rows(self, batch: Batch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        parts = []
        for span in batch.address:
            shard = self._shards[span.partition]
            parts.append(shard[np.arange(span.start, span.end) % len(shard)])
        return np.concatenate(parts)


def sgd_of(spec: LearningSpec, folder: Path, streams: int, staleness: int, seed: int) -> Sgd:
    """Make an experiment's learner.

    Args:
        spec: The experiment's learning part.
        folder: Folder of the data set's file.
        streams: See `Sgd`.
        staleness: See `Sgd`.
        seed: See `Sgd`; also the seed of the split.

    Raises:
        UserError: If the data set cannot be read, or has fewer records than streams.
    """
    split = _load(spec, folder, seed)
    train, held_out = _flat(split.train), _flat(split.held_out)
    if (found := count(train)) < streams:
        raise UserError(
            f"learning.data: must have at least {streams} records, one per stream, got {found}"
        )
    classes = 1 + int(max(part["label"].max() for part in (train, held_out)))
    task = _task(spec, train["features"].shape[1], classes)
    model = FlatModel(build_model(task, seed))

    def look(version: int, now: float, weights: memoryview) -> LearningPoint:
        found = evaluate(task, model, weights, held_out, EVALUATED_AT_ONCE)
        return LearningPoint(version, now, found["accuracy"], found["loss"])

    optimizer = OptimizerSettings(spec.optimizer, spec.learning_rate)
    training = Training(task, train, optimizer, look, spec.evaluate_every)
    return Sgd(training, streams, staleness, seed)


def _task(spec: LearningSpec, features: int, classes: int) -> Task:
    options: dict[str, object] = {"features": features, "classes": classes}
    if not spec.hidden:
        return make_task("logistic-regression", options)
    return make_task("tabular-mlp", options | {"hidden": spec.hidden})


def _load(spec: LearningSpec, folder: Path, seed: int) -> Split:
    if spec.data == "digits":
        return load_digits()
    records = read_records(folder / spec.data)
    if "label" not in records:
        raise UserError(f"learning.data: {spec.data} has no labels, only {', '.join(records)}")
    order = np.random.default_rng(seed).permutation(count(records))
    held_out = round(HELD_OUT_SHARE * len(order))
    return Split(take(records, order[held_out:]), take(records, order[:held_out]))


def _flat(records: Records) -> Records:
    """Convert images to features: a row of numbers for each record."""
    if "image" not in records:
        return records
    images = records["image"]
    pixels = images.reshape(len(images), -1).astype(np.float32) / GREY_LEVELS
    return {"features": pixels, "label": records["label"]}
