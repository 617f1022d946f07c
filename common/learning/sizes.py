"""How large a task's model is, before any memory is taken for it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from common.errors import UserError

if TYPE_CHECKING:
    from common.learning.tasks import Task

MIB = 1 << 20


def check_size(task: Task, max_model_mb: int) -> None:
    """Refuse a model that is too large, as far as that can be told without making it.

    Args:
        task: What makes it.
        max_model_mb: MiB that its numbers may take.

    Raises:
        UserError: With both sizes.
    """
    size_mb = model_mb(task)
    if size_mb is not None and size_mb > max_model_mb:
        raise UserError(
            f"the model takes {size_mb:,.0f} MiB, more than the {max_model_mb:,} that"
            " DOLL_MAX_MODEL_MB allows: make it smaller, or allow more"
        )


def model_mb(task: Task) -> float | None:
    """MiB of a model's parameters and buffers; None where it only shows once they are there."""
    try:
        with torch.device("meta"):
            module = task.build()
        tensors = chain(module.parameters(), module.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB
    except Exception:  # noqa: BLE001 -- the user's code, on a device that it need not know
        return None
