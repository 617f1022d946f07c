"""Try a task on one batch, like a worker, but without any server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from common.errors import UserError
from common.learning.gradients import GradientComputer
from common.learning.tasks import Task, build_model

if TYPE_CHECKING:
    import numpy.typing as npt

Column: TypeAlias = "npt.NDArray[Any] | torch.Tensor | Sequence[Any]"  # (n, *shape)


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Result of one gradient of a task."""

    samples: int
    # Number of trained float32 numbers, without frozen ones.
    parameters: int
    loss: float  # mean over the samples
    # Means over the samples that have a value.
    metrics: dict[str, float]


def check_task(task: Task, batch: Mapping[str, Column], *, seed: int = 0) -> TaskCheck:
    """Build a task's model, compute one gradient, and check shapes, dtypes and finiteness.

    Args:
        task: An instance of your class.
        batch: By field: (n, *shape) numbers, n at least 1, as an array, a tensor or lists.
            Fractions in lists become float32.
        seed: Seed of the first weights.

    Raises:
        UserError: If `build` does not return a model that can be trained here, or a column of the
            batch is not made of numbers.
        TaskError: If a method raises on this batch.
        WrongTaskError: If a method's return value is unusable for any batch.
        NotFiniteError: If a loss or the gradient is not finite, or a metric is infinite.
    """
    columns = {name: _array(name, column) for name, column in batch.items()}
    module = build_model(task, seed)
    found = GradientComputer(task, module, torch.device("cpu")).compute([columns])
    return TaskCheck(
        samples=found.samples,
        parameters=sum(each.numel() for each in module.parameters() if each.requires_grad),
        loss=found.loss_sum / found.samples,
        metrics={name: total / count for name, (total, count) in found.metric_sums.items()},
    )


def _array(name: str, column: Column) -> npt.NDArray[Any]:
    """Return a writable copy of a column.

    Raises:
        UserError: If it is not made of numbers.
    """
    try:
        if not isinstance(column, np.ndarray):
            column = torch.as_tensor(column).numpy(force=True)
        found = np.array(column)
        torch.from_numpy(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f'batch: "{name}" cannot be read as numbers: {error}') from error
    return found
