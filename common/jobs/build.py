"""Construction of the objects of `common.learning` that a job's specification names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.learning.errors import enough_memory
from common.learning.optimizers import OptimizerSettings
from common.learning.parameters import FlatModel, tensor_options
from common.learning.tasks import build_model, check_size, fit_base, task_of
from common.learning.trainer import Trainer

if TYPE_CHECKING:
    from common.core.messages import Vector
    from common.jobs.spec import JobSpec
    from common.learning.checkpoint import Layout
    from common.learning.optimizers import Reduction
    from common.learning.tasks import SetValues, Task
    from common.storage.store import CheckpointStore


def optimizer_of(spec: JobSpec) -> OptimizerSettings:
    """Return the settings of the job's optimizer."""
    optimizer = spec.optimizer
    return OptimizerSettings(
        optimizer.name,
        optimizer.learning_rate,
        optimizer.options,
        optimizer.clip_norm,
    )


def trainer_of(
    spec: JobSpec, allowed: Collection[str], store: CheckpointStore | None = None
) -> Callable[[], Trainer]:
    """Return a function that creates trainers with the weights of version 0.

    Args and Raises: As `parts_of`.
    """
    parts = parts_of(spec, allowed, store)
    return enough_memory("the trainer")(lambda: Trainer(*parts))


@enough_memory("the model")
def parts_of(
    spec: JobSpec,
    allowed: Collection[str],
    store: CheckpointStore | None = None,
    begin: SetValues | None = None,
) -> tuple[Vector, int, OptimizerSettings, Reduction, Layout, str]:
    """Return the arguments of a trainer with the weights of version 0, which follow from the job.

    Args:
        spec: The job.
        allowed: Entrypoints that this process may import (DOLL_TASKS).
        store: Optional. The job's checkpoints, which hold the frozen tensors. If unset, this
            process uses the ones that it builds.
        begin: Optional. Gives the module the values of a file, see `JobSpec.init`. If unset, the
            module keeps its own values until the store has others.

    Raises:
        TaskMissingError: If this process does not have the task.
        UserError: If the task or the optimizer cannot be created, or the model is too large, also
            for the memory of this machine.
        OtherModelError: If the job has other frozen tensors.
        UnavailableError: If object storage is unavailable.
    """
    task = task_of(spec, allowed)
    check_size(task)
    module = build_model(task, spec.seed)
    if begin is not None:
        begin(module)
    model = FlatModel(module)
    model.base.from_file = begin is not None
    is_final = spec.init is None or begin is not None
    share_base(model, task, spec.seed, store, write=is_final)
    optimizer = replace(
        optimizer_of(spec),
        tensors=tensor_options(model.module, spec.optimizer.groups, spec.optimizer.no_decay),
    )
    weights, count = model.vector.copy(), model.parameter_count
    return weights, count, optimizer, spec.reduction, model.layout, model.base.digest


def share_base(
    model: FlatModel, task: Task, seed: int, store: CheckpointStore | None, *, write: bool
) -> None:
    """Make a model's frozen tensors those of its job.

    Args:
        model: The task's model, built with the job's seed.
        task: The task.
        seed: The job's seed.
        store: The job's checkpoints; None if this process has no object storage.
        write: True to store the model's own base if the job has none.

    Raises:
        OtherModelError: If the job has another base. The message names the first difference.
        UnavailableError: If object storage is unavailable.
    """
    own = model.base.digest
    if store is None or not own:
        return
    try:
        stored = store.base_digest()
    except UnavailableError:
        # Without the right to list, S3 refuses to say that a name does not exist.
        if not write:
            raise
        stored = ""
    if not stored and write:
        stored = store.put_base(own, model.base.save())
    if stored:
        fit_base(model, task, seed, stored, store.base)
