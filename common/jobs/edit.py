"""What may be changed of a job that exists: four numbers of its specification, checked whole."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ValidationError

from common.config.validation import complaint
from common.errors import UserError
from common.jobs.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

Value: TypeAlias = float | int | None

_PATHS = {
    "deadline_s": "stop.deadline_s",  # None: it has none any more
    "group_size": "group_size",  # K
    "batch_size": "batch_size",  # b
    "learning_rate": "optimizer.learning_rate",
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
        *parents, last = _PATHS[name].split(".")
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
    pairs = ((name, attrgetter(path)) for name, path in _PATHS.items())
    return {name: value_of(new) for name, value_of in pairs if value_of(new) != value_of(old)}


def _name(path: str) -> str:
    """What whoever changes it calls the field at a path."""
    return next((name for name, known in _PATHS.items() if known == path), path)
