"""Reading of job files, as for `doll job submit`, without contacting any server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import GivenError, UserError
from common.jobs.spec import JobSpec, job_from_json
from common.learning.task_options import module_options_of, options_of
from doll.yaml_file import as_json, load_file, load_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def load_job(path: str | Path) -> JobSpec:
    """Read and check a job file, in YAML or JSON.

    A custom task is only named here. The processes that run it decide if it is allowed.

    Raises:
        UserError: If there is no such file, or the job is invalid. The message has the field's
            path, what was found and what is allowed.
    """
    spec = job_from_json(as_json(load_file(path)))
    check_options(spec)
    return spec


def parse_job(text: str) -> JobSpec:
    """Read and check the text of a job file as `load_job` does."""
    spec = job_from_json(as_json(load_text(text)))
    check_options(spec)
    return spec


def check_options(spec: JobSpec) -> None:
    """Refuse invalid options of a built-in task or a torch module.

    Raises:
        GivenError: If an option is invalid, with the field's path.
    """
    try:
        if spec.task.name:
            options_of(spec.task.name, spec.task_options)
        elif spec.task.module:
            module, _ = module_options_of(spec.task_options)
            _check_fields(spec, "inputs", module.inputs)
            _check_fields(spec, "target", (module.target,))
    except GivenError:
        raise
    except UserError as error:
        raise GivenError(("task",), str(error)) from error
    for option, size in spec.record_sizes.items():
        given = spec.task.options.get(option, size)
        if given != size:
            problem = (
                f"must be {size} as in the records, got {given}; change the field or the task's"
                " option"
            )
            raise GivenError((f"task.{option}",), problem)


def _check_fields(spec: JobSpec, option: str, names: Sequence[str]) -> None:
    """Refuse an option of the task that names a field which the records lack.

    Raises:
        GivenError: If there is no such field, with the option's path.
    """
    fields = spec.records.fields
    for name in names:
        if name not in fields:
            problem = f"must be fields of the records ({', '.join(fields)}), got {name!r}"
            raise GivenError((f"task.{option}",), problem)
