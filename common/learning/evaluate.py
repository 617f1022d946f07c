"""How good weights are on held-out records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Mean loss and metrics over all records, in evaluation mode and without gradients.

    Args:
        task: What is learned.
        model: A model to load the weights into.
        weights: (P + B,) float32 parameters, then buffers.
        records: Columns, contiguous and writable as `concatenate` makes them.
        batch_size: Records per forward pass; bounds the memory, not the result.

    Raises:
        CorruptError: If the weights are not this model's.
        ValueError: If there are no records.
    """
    count = len(next(iter(records.values()), ()))
    if not count:
        raise ValueError("nothing to evaluate: there are no records")
    model.load(weights)
    tensors = {name: torch.from_numpy(column) for name, column in records.items()}
    was_training = model.module.training
    model.module.eval()
    sums: dict[str, float] = {}
    try:
        with torch.inference_mode():
            for start in range(0, count, batch_size):
                batch = {
                    name: column[start : start + batch_size].to(model.state.device)
                    for name, column in tensors.items()
                }
                outputs = task.forward(model.module, batch)
                columns = {
                    "loss": task.losses(outputs, batch),
                    **task.metrics(outputs, batch),
                }
                for name, column in columns.items():
                    sums[name] = sums.get(name, 0.0) + column.sum(dtype=torch.float64).item()
    finally:
        model.module.train(was_training)
    return {name: total / count for name, total in sums.items()}
