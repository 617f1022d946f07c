"""How large a task's model is, without taking its memory where that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.learning.parameters import training_state
from common.learning.tasks import build_model

if TYPE_CHECKING:
    from common.learning.tasks import Task

_BYTES = 4  # of a float32


def model_bytes(task: Task, seed: int) -> int | None:
    """What a model's parameters and buffers take, in bytes; None: that cannot be told here.

    On the meta device tensors have shapes and no memory. A task that cannot build there builds
    really: whoever calls limits the memory of this process.

    Raises:
        UserError: If the task does not build a module that can be trained.
    """
    try:
        with torch.device("meta"):
            module = build_model(task, seed)
    except UserError:  # it is wrong, or looks at values while it builds
        try:
            module = build_model(task, seed)
        except UserError as error:
            if _of_memory(error.__cause__):
                return None
            raise
    parameters, buffers = training_state(module)
    return _BYTES * sum(tensor.numel() for tensor in (*parameters.values(), *buffers.values()))


def _of_memory(error: BaseException | None) -> bool:
    """Whether memory lacked; PyTorch says so in words alone."""
    words = ("not enough memory", "allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )
