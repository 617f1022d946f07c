"""Pretrained weights: the tensors of a safetensors file, taken into a module by their names."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import safetensors
import torch

from common.errors import UserError
from common.learning.parameters import is_counter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

# Names that a message lists, and the length to which it cuts each of them.
_LISTED, _NAME_CHARACTERS = 3, 60


class Taken(NamedTuple):
    """Names of tensors, sorted."""

    taken: list[str]
    # Tensors of the file that were not taken.
    left: list[str]
    # Tensors of the module that keep their values.
    new: list[str]

    def __str__(self) -> str:
        return ", ".join(
            f"{len(names)} {what}{' (' * bool(names)}{_listed(names)}{')' * bool(names)}"
            for what, names in zip(("taken", "left in the file", "new"), self, strict=True)
        )


def take(module: nn.Module, path: Path, new: Sequence[str]) -> Taken:
    """Copy a file's tensors into a module, converted to the module's floating-point types.

    Args:
        module: The module. If an error is raised, it may have some of the values.
        path: The safetensors file.
        new: Patterns of names that may differ, see `InitSpec.new`.

    Raises:
        UserError: If the file is no safetensors file, or does not fit the module. The message names
            the first tensors that do not fit.
    """
    own = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }
    taken, wrong = dict[int, str](), list[str]()
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = set(file.keys())
            for name in sorted(name for name in names if not _is_named(name, new)):
                if problem := _take_one(own.get(name), file.get_tensor(name), taken):
                    wrong.append(f"{_shown(name)} {problem}")
                else:
                    taken[id(own[name])] = name
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        raise UserError(f"init: the file is not a valid safetensors file: {error}") from error
    # Tied tensors have several names, of which the file needs one. Batch counters are not in files
    # of `doll model pull`, and nothing computes with them.
    owners = dict(module.named_modules())
    kept = [
        name
        for name, tensor in own.items()
        if id(tensor) not in taken
        # A hook of the module's `state_dict` may have renamed the tensor.
        and not ((owner := owners.get(name.rpartition(".")[0])) and is_counter(owner, name))
    ]
    missing = (name for name in kept if name not in names and not _is_named(name, new))
    wrong += (f"{_shown(name)} is not in the file" for name in missing)
    if wrong:
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise UserError(
            f"init: the file does not fit the module: {'; '.join(wrong[:_LISTED])}{more}; correct"
            " the task or the file, or name these tensors in init.new"
        )
    used = {name for name, tensor in own.items() if id(tensor) in taken}
    return Taken(sorted(used), sorted(names - used), sorted(kept))


def _take_one(target: Tensor | None, value: Tensor, taken: dict[int, str]) -> str:
    """Copy one tensor; return why it does not fit, or an empty text."""
    if target is None:
        return "is not in the module"
    if value.shape != target.shape:
        return f"has shape {list(value.shape)}, expected {list(target.shape)}"
    if value.dtype != target.dtype and not (
        value.is_floating_point() and target.is_floating_point()
    ):
        return f"has type {value.dtype}, expected {target.dtype}"
    if (other := taken.get(id(target))) and not torch.equal(
        value.to(target.dtype), target.detach()
    ):
        return f"differs from {_shown(other)}, but is the same tensor in the module"
    with torch.no_grad():
        target.copy_(value)
    return ""


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shown(name: str) -> str:
    """Return a name for messages, without line breaks and other control characters."""
    return repr(name[:_NAME_CHARACTERS])


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*map(_shown, names[:_LISTED]), *(["..."] if len(names) > _LISTED else [])])
