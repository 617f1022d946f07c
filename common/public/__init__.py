"""What users of DOLL import: `import doll`. Each name is loaded when it is first asked for.

    class Spend(doll.Task): ...                    # a task of your own
    print(doll.check_task(Spend(features=3), batch))
    spec = doll.load_job("spending.yaml")

Nothing of ours imports it: the installed package is called `doll`, and lies here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.errors import DollError, UserError
    from common.jobs.spec import JobSpec
    from common.learning.errors import NotFiniteError, TaskError, WrongTaskError
    from common.learning.fields import Input
    from common.learning.tasks import Task
    from common.public.job_file import load_job
    from common.public.task_check import TaskCheck, check_task

__all__ = [
    "DollError",
    "Input",
    "JobSpec",
    "NotFiniteError",
    "Task",
    "TaskCheck",
    "TaskError",
    "UserError",
    "WrongTaskError",
    "check_task",
    "load_job",
]
_HOMES = {
    "DollError": "common.errors",
    "Input": "common.learning.fields",
    "JobSpec": "common.jobs.spec",
    "NotFiniteError": "common.learning.errors",
    "Task": "common.learning.tasks",
    "TaskCheck": "common.public.task_check",
    "TaskError": "common.learning.errors",
    "UserError": "common.errors",
    "WrongTaskError": "common.learning.errors",
    "check_task": "common.public.task_check",
    "load_job": "common.public.job_file",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
