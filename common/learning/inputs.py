"""Find the fields that a prediction needs. Labels are not among them: only the loss reads them.

Tasks need not declare these fields. Instead, `forward` runs on records of zeros, and the fields
that it reads are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.data.fields import Field  # noqa: TC001 -- NamedTuple needs it at run time
from common.learning.named_outputs import outputs_of

if TYPE_CHECKING:
    from common.learning.tasks import Task

# No usual size of another axis, so that only outputs with a row for each record have it.
_ROWS = 7


class _Noted(Mapping[str, Tensor]):
    """Columns that record which of them are read."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns
        self.read = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def zeros_of(fields: Sequence[Field]) -> dict[str, Tensor]:
    """Return columns of some records of zeros."""
    return {
        field.name: torch.from_numpy(np.zeros((_ROWS, *field.shape), field.dtype))
        for field in fields
    }


class Forward(NamedTuple):
    """Fields that a prediction reads, and its outputs."""

    fields: tuple[Field, ...]
    # Shape of each output for one record, by name. Empty if `forward` fails on records of zeros.
    outputs: Mapping[str, tuple[int, ...]]


def forward_of(task: Task, module: nn.Module, fields: Sequence[Field]) -> Forward:
    """Return the fields that `forward` reads; all fields if it fails on records of zeros.

    Args:
        task: The task.
        module: The task's network, in evaluation mode.
        fields: Fields of the records.
    """
    device = next(module.parameters()).device
    noted = _Noted({name: column.to(device) for name, column in zeros_of(fields).items()})
    try:
        with torch.inference_mode():
            outputs = outputs_of(task.forward(module, noted), _ROWS)
    except Exception:  # noqa: BLE001 -- the user's code may raise anything
        return Forward(tuple(fields), {})
    read = tuple(field for field in fields if field.name in noted.read)
    return Forward(read, {name: tuple(each.shape[1:]) for name, each in outputs.items()})
