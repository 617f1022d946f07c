"""Names of the tensors that a task's `forward` returns: one, or several in a container."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

# Name of an output that is a single tensor, and beginning of the names of a tuple's tensors.
OUTPUT = "output"


def tensors_of(outputs: object) -> dict[str, Tensor]:
    """Return the tensors in the return value of a `forward` by name.

    A single tensor is called `output`, and those of a tuple or list are called `output_0`,
    `output_1` and so on. In a dict, a named tuple, a dataclass or an output of Hugging Face they
    have the names there. Elements that are not tensors are left out, as are tensors inside them.
    """
    if isinstance(outputs, Tensor):
        return {OUTPUT: outputs}
    found = dict[str, object]()
    if isinstance(outputs, Mapping):
        found = {str(name): value for name, value in outputs.items()}
    elif isinstance(outputs, tuple | list):
        names = getattr(outputs, "_fields", [f"{OUTPUT}_{n}" for n in range(len(outputs))])
        found = dict(zip(names, outputs, strict=True))
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        found = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def outputs_of(outputs: object, count: int) -> dict[str, Tensor]:
    """Return those tensors of `tensors_of` that have a row for each of `count` records."""
    tensors = tensors_of(outputs).items()
    return {name: tensor for name, tensor in tensors if tensor.shape[:1] == (count,)}


def detached(outputs: Any) -> Any:  # noqa: ANN401 -- whatever the task returns
    """Return the outputs of a `forward`, with all their tensors detached from the graph."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        made = copy(outputs) if isinstance(outputs, dict) else dict(outputs)
        for name, value in outputs.items():
            made[name] = detached(value)
        return made
    if isinstance(outputs, tuple | list):
        parts = map(detached, outputs)
        return outputs._make(parts) if hasattr(outputs, "_make") else type(outputs)(parts)
    if is_dataclass(outputs) and not isinstance(outputs, type):
        names = [field.name for field in fields(outputs) if field.init]
        return replace(outputs, **{name: detached(getattr(outputs, name)) for name in names})
    return outputs
