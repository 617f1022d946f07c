"""Which fields of a record a prediction needs: a label, which the loss alone reads, it has not.

A task need not say it, so it is seen: the fields that `forward` asks for, given records of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.data.fields import Field  # noqa: TC001 -- NamedTuple reads it when run

if TYPE_CHECKING:
    from common.learning.tasks import Task

_ROWS = 2


class _Noted(Mapping[str, Tensor]):
    """Columns that note which of them are asked for."""

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
    """Columns of some records of zeros."""
    return {
        field.name: torch.from_numpy(np.zeros((_ROWS, *field.shape), field.dtype))
        for field in fields
    }


class Forward(NamedTuple):
    """What goes into a prediction, and what comes out."""

    fields: tuple[Field, ...]
    output_shape: tuple[int, ...]  # of one record; -1: not known


def forward_of(task: Task, module: nn.Module, fields: Sequence[Field]) -> Forward:
    """See what `forward` reads: all fields, where it does not take records of zeros.

    Args:
        task: What is learned.
        module: Its network, in evaluation mode.
        fields: Of its records.
    """
    device = next(module.parameters()).device
    noted = _Noted({name: column.to(device) for name, column in zeros_of(fields).items()})
    try:
        with torch.inference_mode():
            outputs = task.forward(module, noted)
    except Exception:  # noqa: BLE001 -- the user's code may raise anything; its records will tell
        return Forward(tuple(fields), (-1,))
    read = tuple(field for field in fields if field.name in noted.read)
    return Forward(read, tuple(outputs.shape[1:]))
