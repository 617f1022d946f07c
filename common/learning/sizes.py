"""How large a task's model is, before any memory is taken for it."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from common.errors import UserError
from common.learning.parameters import training_state
from common.learning.task_options import MAX_MODEL_MIB
from common.learning.tasks import Task, build_model

MIB = 1 << 20


def check_size(task: Task) -> None:
    """Refuse a model that is too large, as far as that can be told without making it.

    Raises:
        UserError: With both sizes.
    """
    size_mb = model_mb(task)
    if size_mb is not None and size_mb > MAX_MODEL_MIB:
        raise UserError(
            f"the model takes {size_mb:,.0f} MiB, more than {MAX_MODEL_MIB:,}: make it smaller"
        )


def model_mb(task: Task) -> float | None:
    """MiB of a model's parameters and buffers; None where it only shows once they are there."""
    module = _without_memory(task)
    return None if module is None else _mb(module)


def try_model(task: Task, seed: int) -> float | None:
    """MiB of a model, which is really made where need be; None: it is too large for that.

    Whoever calls limits the memory of this process.

    Raises:
        UserError: If the task does not build a module that can be trained.
    """
    module = _without_memory(task)
    if module is None:
        try:
            module = build_model(task, seed)
        except UserError as error:
            if _lacks_memory(error.__cause__):
                return None
            raise
    training_state(module)
    return _mb(module)


def _without_memory(task: Task) -> nn.Module | None:
    """The model on a device on which tensors have shapes alone; None: it cannot be built there."""
    try:
        with torch.device("meta"):
            module = task.build()
    except Exception:  # noqa: BLE001 -- the user's code, on a device that it need not know
        return None
    return module if isinstance(module, nn.Module) else None


def _mb(module: nn.Module) -> float:
    tensors = chain(module.parameters(), module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether memory lacked; PyTorch says so in words alone."""
    words = ("not enough memory", "allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )
