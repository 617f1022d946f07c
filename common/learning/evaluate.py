"""Evaluate weights on held-out records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.core.scores import measures
from common.learning.outputs import check_losses, check_metrics, check_outputs, count_scores, guest

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.core.messages import Vector
    from common.learning.parameters import FlatModel
    from common.learning.tasks import Task


def evaluate(
    task: Task,
    model: FlatModel,
    weights: bytes | memoryview | Vector,
    records: Mapping[str, npt.NDArray[Any]],
    batch_size: int,
) -> dict[str, float]:
    """Return mean loss and metrics over all records, in evaluation mode and without gradients.

    Args:
        task: The task.
        model: Model that the weights are loaded into.
        weights: (P + B,) float32 parameters, then buffers.
        records: Columns, contiguous and writable, as `concatenate` makes them.
        batch_size: Records per forward pass. Bounds the memory and does not change the result.

    Raises:
        CorruptError: If the weights do not fit the model.
        TaskError: If the task raises on some of the records.
        ValueError: If there are no records.
    """
    model.load(weights)
    return per_record(task, model, records, batch_size).means()


class PerRecord(NamedTuple):
    """Evaluation of each record."""

    columns: dict[str, npt.NDArray[np.float64]]  # `loss` and metrics, (n,) each
    # Counts over all records; None if the task has no `binary_scores`.
    scores: npt.NDArray[np.int64] | None

    def means(self) -> dict[str, float]:
        """Return the means of the columns, and the measures computed from the scores.

        A NaN of a metric counts as no value. A metric without any value is left out.
        """
        means = {"loss": float(self.columns["loss"].mean())}
        for name, values in self.columns.items():
            there = values[~np.isnan(values)]
            if name != "loss" and len(there):
                means[name] = float(there.mean())
        return means if self.scores is None else means | measures(self.scores)


def per_record(
    task: Task,
    model: FlatModel,
    records: Mapping[str, npt.NDArray[Any]],
    batch_size: int,
) -> PerRecord:
    """Evaluate each record with the weights that are loaded. See `evaluate`.

    Raises:
        TaskError: If the task raises on some of the records, or gives no value for some.
        ValueError: If there are no records.
    """
    count = len(next(iter(records.values()), ()))
    if not count:
        raise ValueError("nothing to evaluate: there are no records")
    tensors = {name: torch.from_numpy(column) for name, column in records.items()}
    was_training = model.module.training
    model.module.eval()
    parts, counts = list[dict[str, torch.Tensor]](), list[torch.Tensor]()
    try:
        with torch.inference_mode():
            for start in range(0, count, batch_size):
                batch = {
                    name: column[start : start + batch_size].to(model.state.device)
                    for name, column in tensors.items()
                }
                part, scores = _judged(task, model, batch, len(parts))
                parts.append(part)
                counts += [] if scores is None else [scores.cpu()]
    finally:
        model.module.train(was_training)
    columns = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    return PerRecord(columns, torch.stack(counts).sum(0).numpy() if counts else None)


def _judged(
    task: Task, model: FlatModel, batch: Mapping[str, torch.Tensor], index: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return the values of one batch, (n,) each, on the host, and the counts of its scores."""
    count = len(next(iter(batch.values())))
    with guest(task, index):
        outputs = task.forward(model.module, batch)
        check_outputs(task, outputs)
        losses = task.losses(outputs, batch)
        check_losses(task, losses, count)
        metrics = task.metrics(outputs, batch)
        check_metrics(task, metrics, count)
        scores = count_scores(task, outputs, batch, count)
    columns = {**metrics, "loss": losses}
    return {name: column.to("cpu", torch.float64) for name, column in columns.items()}, scores
