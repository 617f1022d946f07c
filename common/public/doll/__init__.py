"""Public Python API of DOLL. Each name is imported on first access.

    job = doll.Client("http://doll:8080").submit("digits.yaml")
    for update in job.updates():
        print(update.version, update.loss)

    class Spend(doll.Task): ...                    # a task of your own
    print(doll.check_task(Spend(features=3), batch))

The distribution `doll-client` has the client alone. `Task`, `ModuleTask`, `check_task`, `JobSpec`
and `load_job` need the distribution `doll`, too. `__init__.pyi` declares the types.
"""

from __future__ import annotations

from importlib import import_module

from doll.distribution import load

_NAMES = {
    "common.data.fields": "Input",
    "common.jobs.job_file": "load_job",
    "common.jobs.spec": "JobSpec",
    "common.learning.errors": "NotFiniteError TaskError WrongTaskError",
    "common.learning.module_task": "ModuleTask",
    "common.learning.task_check": "TaskCheck check_task",
    "common.learning.tasks": "Task",
    "doll.client": "Client",
    "doll.errors": "ConflictError DollError NotFoundError OutsideError UnavailableError UserError",
    "doll.job": "Job Model Status Update",
    "doll.live": "Live",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = import_module(home) if home.startswith("doll.") else load(home)
    except ImportError as error:
        raise ImportError(f"doll.{name}: {error}") from error
    found: object = getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
