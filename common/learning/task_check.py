"""Tries a task on one batch, as a worker would, without any server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from common.learning.gradients import GradientComputer
from common.learning.tasks import Task, build_model

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What one gradient of a task gave."""

    samples: int
    parameters: int  # float32 numbers that are learned
    loss: float  # mean over the samples
    metrics: dict[str, float]  # likewise


def check_task(task: Task, batch: Mapping[str, npt.NDArray[Any]], *, seed: int = 0) -> TaskCheck:
    """Build a task's model and compute one gradient: shapes, dtypes, and whether all is finite.

    Args:
        task: An instance of your class.
        batch: By field: (n, *shape) numbers, n at least 1.
        seed: Of the first weights.

    Raises:
        UserError: If `build` does not make a model that can be trained here.
        TaskError: If a method raises on this batch.
        WrongTaskError: If what a method returns cannot be used, whatever the batch.
        NotFiniteError: If a loss, a metric or the gradient is not finite.
    """
    computer = GradientComputer(task, build_model(task, seed), torch.device("cpu"))
    found = computer.compute([batch])
    return TaskCheck(
        samples=found.samples,
        parameters=computer.model.parameter_count,
        loss=found.loss_sum / found.samples,
        metrics={name: total / found.samples for name, total in found.metric_sums.items()},
    )
