"""The base of a model: tensors that no update changes, such as a frozen backbone.

The base does not travel with the weights. A job has one base, in object storage, and every process
that computes with the job's model must have the same.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import safetensors
import safetensors.torch
import torch

from common.errors import CorruptError, OtherModelError
from common.learning.checkpoint import metadata_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

# Key in the metadata of a base that comes from a file, not from the task.
_FROM_FILE = "from_file"
# Remedy for weights of another model.
OTHER_TASK = "run this process with the version of the task's code that trained the model"


class Base:
    """Frozen tensors of a module.

    Attributes:
        tensors: The module's own tensors, of any type, by their names in the `state_dict`.
        from_file: True if the values come from a file, see `JobSpec.init`. Every process with such
            tensors then takes over the values, whatever its task has built.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.from_file = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, types, shapes and bytes, in hexadecimal; "" without tensors."""
        if not self.tensors:
            return ""
        total = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            total.update(msgspec.json.encode((name, str(tensor.dtype), tuple(tensor.shape))))
            total.update(_bytes_of(tensor).numpy().data)
        return total.hexdigest()

    def save(self) -> bytes:
        """Write the tensors as safetensors."""
        # The library refuses tensors that share memory, as tied ones do.
        return safetensors.torch.save(
            {n: t.detach().cpu().clone() for n, t in self.tensors.items()},
            {_FROM_FILE: "true"} if self.from_file else None,
        )

    def adopt(self, stored: bytes, redraw: Callable[[], Base]) -> None:
        """Take over the values that another process has saved.

        Unless the values come from a file, only tensors that are drawn at random may differ,
        because kinds of processors round random numbers differently. Any other difference shows
        that the task's code or its files changed.

        Args:
            stored: Bytes from `save`.
            redraw: Returns the base that the task builds with another seed.

        Raises:
            CorruptError: If the bytes are no base.
            OtherModelError: If the base is of another model; names the first difference.
        """
        try:
            tensors, self.from_file = (
                safetensors.torch.load(stored),
                _FROM_FILE in metadata_in(stored),
            )
        except (safetensors.SafetensorError, ValueError) as error:
            raise CorruptError(f"{len(stored)} bytes do not hold a base: {error}") from error
        for name in sorted(self.tensors.keys() | tensors.keys()):
            own, other = self.tensors.get(name), tensors.get(name)
            if own is None or other is None or own.shape != other.shape or own.dtype != other.dtype:
                raise _differs(name)
        changed = [n for n, own in sorted(self.tensors.items()) if not _is_same(own, tensors[n])]
        redrawn = redraw().tensors if changed and not self.from_file else {}
        for name in () if self.from_file else changed:
            if name not in redrawn or _is_same(self.tensors[name], redrawn[name]):
                raise _differs(name)
        with torch.no_grad():
            for name in changed:
                self.tensors[name].copy_(tensors[name])
        vars(self).pop("digest", None)


def _differs(name: str) -> OtherModelError:
    return OtherModelError(f"the frozen {name!r} is not the one of the job: {OTHER_TASK}")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes on the host, (n,) uint8."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
