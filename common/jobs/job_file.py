"""Reads a job file as `doll job submit` does, and reaches no server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.jobs.spec import JobSpec, check_options, job_from_json
from doll.yaml_file import as_json, load_file

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
