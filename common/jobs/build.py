"""Construction of the objects of `common.learning` that a job's specification names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.tasks import build_model, check_size, task_of
from common.learning.trainer import Trainer

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.jobs.spec import JobSpec
    from common.learning.checkpoint import Layout
    from common.learning.optimizers import Reduction


def optimizer_of(spec: JobSpec) -> OptimizerSettings:
    """Return the settings of the job's optimizer."""
    optimizer = spec.optimizer
    return OptimizerSettings(
        optimizer.name, optimizer.learning_rate, optimizer.options, optimizer.clip_norm
    )


def trainer_of(spec: JobSpec, allowed: Collection[str]) -> Callable[[], Trainer]:
    """Return a function that creates trainers with the weights of version 0.

    Args and Raises: As `parts_of`.
    """
    parts = parts_of(spec, allowed)
    return lambda: Trainer(*parts)


def parts_of(
    spec: JobSpec, allowed: Collection[str]
) -> tuple[Vector, int, OptimizerSettings, Reduction, Layout]:
    """Return the arguments of a trainer with the weights of version 0, which follow from the job.

    Args:
        spec: The job.
        allowed: Entrypoints that this process may import (DOLL_TASKS).

    Raises:
        TaskMissingError: If this process does not have the task.
        UserError: If the task or the optimizer cannot be created, or the model is too large.
    """
    task = task_of(spec, allowed)
    check_size(task)
    model = FlatModel(build_model(task, spec.seed))
    weights, parameter_count = model.vector.copy(), model.parameter_count
    return weights, parameter_count, optimizer_of(spec), spec.reduction, model.layout
