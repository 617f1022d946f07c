"""What may be changed of a job that exists: four numbers of its specification, checked whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ValidationError

from common.config.validation import complaint
from common.errors import UserError
from common.jobs.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

Value: TypeAlias = float | int | None

_PATHS: dict[str, tuple[str, ...]] = {
    "deadline_s": ("stop", "deadline_s"),  # None: it has none any more
    "group_size": ("group_size",),  # K
    "batch_size": ("batch_size",),  # b
    "learning_rate": ("optimizer", "learning_rate"),
}
CHANGEABLE = tuple(_PATHS)


def changed_spec(spec: JobSpec, changed: Mapping[str, Value]) -> JobSpec:
    """The specification with these values instead.

    Raises:
        UserError: Naming the field that cannot be changed, or cannot be so.
    """
    tree = json.loads(spec.model_dump_json())
    for name, value in changed.items():
        if name not in _PATHS:
            raise UserError(
                f'change: "{name}" cannot be changed; what can is {", ".join(CHANGEABLE)}'
            )
        *parents, last = _PATHS[name]
        part = tree
        for parent in parents:
            part = part[parent]
        part[last] = value
    try:
        return JobSpec.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise UserError(f"change: {complaint(error, name=_name)}") from error


def differences(old: JobSpec, new: JobSpec) -> dict[str, Value]:
    """The changeable values in which two specifications differ, as the new one has them."""
    before, after = _values(old), _values(new)
    return {name: value for name, value in after.items() if value != before[name]}


def _values(spec: JobSpec) -> dict[str, Value]:
    return {
        "deadline_s": spec.stop.deadline_s,
        "group_size": spec.group_size,
        "batch_size": spec.batch_size,
        "learning_rate": spec.optimizer.learning_rate,
    }


def _name(path: str) -> str:
    """What whoever changes it calls the field at a path."""
    return next((name for name, steps in _PATHS.items() if ".".join(steps) == path), path)
