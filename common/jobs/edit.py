"""Changes of an existing job: numbers and whole blocks, validated with the rest of the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError

from common.config.validation import complaint, field_names
from common.errors import UserError
from common.jobs.spec import JobSpec

# A block as in a job file.
Block: TypeAlias = dict[str, Any]
Value: TypeAlias = float | int | str | Block | None

_PATHS = {
    # None removes the deadline.
    "deadline_s": "stop.deadline_s",
    "group_size": "group_size",  # K
    "batch_size": "batch_size",  # b
    "learning_rate": "optimizer.learning_rate",
    # None restores the default.
    "oom": "oom",
}
# None removes a block.
BLOCKS = ("synchronisation", "compression", "tuner", "aggregation")
CHANGEABLE = (*_PATHS, *BLOCKS)


def changed_spec(spec: JobSpec, changed: Mapping[str, Value]) -> JobSpec:
    """Return the specification with these values changed.

    A learning rate belongs to its K. If K changes without a new learning rate, the rate is scaled
    with K, unless the job's optimizer or `reduction` forbids that: see `JobSpec.rate_by_group`.

    Raises:
        UserError: If a field cannot be changed, or not to this value. The message names the field.
    """
    tree = json.loads(spec.model_dump_json())
    for name, value in changed.items():
        if name not in CHANGEABLE:
            raise UserError(f'change: "{name}" cannot be changed, only {", ".join(CHANGEABLE)}')
        *parents, last = _PATHS.get(name, name).split(".")
        part = tree
        for parent in parents:
            part = part[parent]
        part[last] = value
    group_size = changed.get("group_size")
    if isinstance(group_size, int) and "learning_rate" not in changed and spec.rate_by_group:
        if spec.optimizer.has_own_rates:
            raise UserError(
                "change: group_size: would scale the learning rate, but the rates of"
                " optimizer.groups cannot be changed; set learning_rate, too"
            )
        tree["optimizer"]["learning_rate"] *= group_size / spec.group_size
    try:
        made = JobSpec.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        message = complaint(error, name=_name, allowed=partial(field_names, JobSpec))
        raise UserError(f"change: {message}") from error
    among, before = made.aggregation, spec.aggregation
    if made.grouped and spec.grouped and among and before:
        for name in ("transport", "wire"):
            old, new = getattr(before, name), getattr(among, name)
            if new != old:
                raise UserError(
                    f"change: aggregation.{name}: cannot change from {old} to {new} directly;"
                    " change to aggregation.mode: board first"
                )
    return made


def differences(old: JobSpec, new: JobSpec) -> dict[str, Value]:
    """Return the changeable values that differ between two specifications, from the new one."""
    pairs = ((name, attrgetter(_PATHS.get(name, name))) for name in CHANGEABLE)
    return {name: plain(it(new)) for name, it in pairs if it(new) != it(old)}


def plain(value: BaseModel | float | str | None) -> Value:
    """Return a changeable value as plain data."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    return value


def _name(path: str) -> str:
    """Return the name of a field in a request for a change, by its path."""
    return next((name for name, known in _PATHS.items() if known == path), path)
