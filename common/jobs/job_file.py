"""Reads a job file as `doll job submit` does, and reaches no server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import GivenError, UserError
from common.jobs.spec import JobSpec, job_from_json
from common.learning.task_options import options_of
from doll.yaml_file import as_json, load_file, load_text

if TYPE_CHECKING:
    from pathlib import Path


def load_job(path: str | Path) -> JobSpec:
    """Read and check a job file, YAML or JSON.

    A task of your own is only named: whether it may run is decided where it runs.

    Raises:
        UserError: If there is no such file, or with the field's path, what was found and what is
            allowed.
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
    """Refuse options that make no sense for a built-in task.

    Raises:
        GivenError: By the field.
    """
    if spec.task.name:
        try:
            options_of(spec.task.name, spec.task_options)
        except UserError as error:
            raise GivenError(("task",), str(error)) from error
    for option, size in spec.record_sizes.items():
        given = spec.task.options.get(option, size)
        if given != size:
            problem = (
                f"the records have {size}, got {given}: change the field or the options of the task"
            )
            raise GivenError((f"task.{option}",), problem)
