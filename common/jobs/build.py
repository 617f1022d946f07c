"""The objects of `common.learning` that a job's specification names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from common.data.codecs import Codec, make_codec
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel
from common.learning.sizes import check_size
from common.learning.sliced_trainer import SlicedTrainer
from common.learning.tasks import Task, build_model, check_fields, make_task
from common.learning.trainer import Trainer

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.jobs.spec import JobSpec
    from common.learning.checkpoint import Layout
    from common.learning.gradients import Reduction


def task_of(spec: JobSpec, allowed: Collection[str]) -> Task:
    """Make the job's task, checked against the fields of its records.

    Args:
        spec: The job.
        allowed: Entrypoints that this process may import (DOLL_TASKS).

    Raises:
        UserError: If it cannot be made, or reads other fields than the records have.
    """
    task = make_task(spec.task.name or spec.task.entrypoint or "", spec.task_options, allowed)
    check_fields(task, spec.records.described())
    return task


def codec_of(spec: JobSpec, wanted: Collection[str] | None = None) -> Codec:
    """Make the codec of the job's records; of some of their fields, where it says which."""
    records = spec.records
    buckets = records.hashed.buckets if records.hashed else 0
    return make_codec(records.codec, records.described(), buckets, wanted)


def optimizer_of(spec: JobSpec) -> OptimizerSettings:
    """The job's optimizer, as settings."""
    optimizer = spec.optimizer
    return OptimizerSettings(
        optimizer.name, optimizer.learning_rate, optimizer.options, optimizer.clip_norm
    )


def trainer_of(spec: JobSpec, allowed: Collection[str]) -> Callable[[], Trainer]:
    """How to make trainers with the weights of version 0, which the specification determines.

    Args and Raises: As `sliced_trainer_of`, which is for workers that own slices of the weights.
    """
    parts = _parts(spec, allowed)
    return lambda: Trainer(*parts)


def sliced_trainer_of(
    spec: JobSpec, allowed: Collection[str], count: int
) -> Callable[[], SlicedTrainer]:
    """How to make a worker's numbers with the weights of version 0, where slices have owners.

    Args:
        spec: The job.
        allowed: Entrypoints that this process may import (DOLL_TASKS).
        count: How many slices there are.

    Raises:
        TaskMissingError: If this process has not got the task.
        UserError: If the task or the optimizer cannot be made, or the model is too large.
    """
    parts = _parts(spec, allowed)
    return lambda: SlicedTrainer(*parts, count=count)


def _parts(
    spec: JobSpec, allowed: Collection[str]
) -> tuple[Vector, int, OptimizerSettings, Reduction, Layout]:
    task = task_of(spec, allowed)
    check_size(task)
    model = FlatModel(build_model(task, spec.seed))
    weights, parameter_count = model.vector.copy(), model.parameter_count
    return weights, parameter_count, optimizer_of(spec), spec.reduction, model.layout
