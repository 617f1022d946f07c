"""Real SGD in virtual time: the gradients of real data at the weights that the protocol says.

Every stream gives the records of its own shard of the training part, over and over, as in the
paper's experiments (section V-A); so an address names the same rows whoever reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from common.datasets.digits import Split, load_digits
from common.datasets.readers import read_records
from common.datasets.records import count, take
from common.errors import UserError
from common.learning.evaluate import evaluate
from common.learning.gradients import GradientComputer
from common.learning.optimizers import OptimizerSettings
from common.learning.tasks import build_model, make_task
from common.learning.trainer import Trainer
from common.simulation.experiments.protocol import NOTHING, Computed
from common.simulation.experiments.results import Point

if TYPE_CHECKING:
    from pathlib import Path

    from common.core import commands as do
    from common.core.assignments import Compute
    from common.core.messages import Batch, Vector
    from common.datasets.records import Records
    from common.learning.tasks import Task
    from common.simulation.experiments.spec import LearningSpec

HELD_OUT_SHARE = 0.2
EVALUATED_AT_ONCE = 1024
GREY_LEVELS = 255.0


class Sgd:
    """A `Learner` with a network, a data set and an optimizer; runs on the CPU.

    Args:
        spec: What is learned, and how.
        folder: What the data set's file is relative to.
        streams: How many share the training part.
        staleness: Versions since the weights of a gradient that counts, at most.
        seed: Of the split, the shards and the first weights.

    Attributes:
        curve: Accuracy and loss on the held-out part, before the first update and then as often as
            the spec says.

    Raises:
        UserError: If the data set cannot be read, or has fewer records than streams.
    """

    def __init__(
        self, spec: LearningSpec, folder: Path, streams: int, staleness: int, seed: int
    ) -> None:
        torch.set_num_threads(1)  # so small gradients are four times slower shared by two cores
        split = _load(spec, folder, seed)
        self._train, self._held_out = _flat(split.train), _flat(split.held_out)
        if count(self._train) < streams:
            found = count(self._train)
            raise UserError(f"learning.data: {found} records cannot be shared by {streams} streams")
        order = np.random.default_rng(seed).permutation(count(self._train))
        self._shards = [order[stream::streams] for stream in range(streams)]
        classes = 1 + int(max(part["label"].max() for part in (self._train, self._held_out)))
        self._task = _task(spec, self._train["features"].shape[1], classes)
        network = build_model(self._task, seed)
        self._computer = GradientComputer(self._task, network, torch.device("cpu"))
        state = self._computer.model.state.numpy()
        parameters = sum(parameter.numel() for parameter in network.parameters())
        settings = OptimizerSettings(spec.optimizer, spec.learning_rate)
        self._trainer = Trainer(state, parameters, settings)
        self._every = spec.evaluate_every
        self._staleness = staleness
        self._weights = {0: bytes(self._trainer.weights())}  # by version
        self._loaded = -1
        self.curve = list[Point]()
        self._evaluate(0, 0.0)

    def gradient(self, compute: Compute) -> Computed:
        """Compute a gradient at its weights."""
        version = compute.model.version
        if version not in self._weights:
            return NOTHING  # nobody waits for it any more
        if self._loaded != version:
            self._computer.load(self._weights[version])
            self._loaded = version
        batches = [take(self._train, self._rows(batch)) for batch in compute.batches]
        computed = self._computer.compute(batches, compute.local_rate)
        return Computed(computed.loss_sum, computed.vector)

    def add(self, round_: int, computed: Vector | None, samples: int) -> None:
        """Add a gradient to the sum of a round."""
        if computed is not None:
            self._trainer.add(round_, computed, samples)

    def apply(self, command: do.Apply, now: float) -> None:
        """Make one update of the sum, and look now and then how good the model is."""
        update = command.update
        self._trainer.apply(command.round, command.learning_rate, update.scale or 1.0)
        self._weights[update.version] = bytes(self._trainer.weights())
        self._weights.pop(update.version - self._staleness - 1, None)
        if update.version % self._every == 0:
            self._evaluate(update.version, now)

    def discard(self, round_: int) -> None:
        """Forget the sum of a round."""
        self._trainer.discard(round_)

    def _rows(self, batch: Batch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        parts = []
        for span in batch.address:
            shard = self._shards[span.partition]
            parts.append(shard[np.arange(span.start, span.end) % len(shard)])
        return np.concatenate(parts)

    def _evaluate(self, version: int, now: float) -> None:
        found = evaluate(
            self._task,
            self._computer.model,
            self._trainer.weights(),
            self._held_out,
            EVALUATED_AT_ONCE,
        )
        self._loaded = version
        self.curve.append(Point(version, now, found["accuracy"], found["loss"]))


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
    """Make features of images: a row of numbers for each record."""
    if "image" not in records:
        return records
    images = records["image"]
    pixels = images.reshape(len(images), -1).astype(np.float32) / GREY_LEVELS
    return {"features": pixels, "label": records["label"]}
