"""Types of `doll` for type checkers. At run time, `__init__.py` imports each name on access."""

from common.data.fields import Input
from common.jobs.job_file import load_job
from common.jobs.spec import JobSpec
from common.learning.errors import NotFiniteError, TaskError, WrongTaskError
from common.learning.module_task import ModuleTask
from common.learning.task_check import TaskCheck, check_task
from common.learning.tasks import Task
from doll.client import Client
from doll.errors import (
    ConflictError,
    DollError,
    NotFoundError,
    OutsideError,
    UnavailableError,
    UserError,
)
from doll.job import Job, Model, Status, Update
from doll.live import Live

__all__ = [
    "Client",
    "ConflictError",
    "DollError",
    "Input",
    "Job",
    "JobSpec",
    "Live",
    "Model",
    "ModuleTask",
    "NotFiniteError",
    "NotFoundError",
    "OutsideError",
    "Status",
    "Task",
    "TaskCheck",
    "TaskError",
    "UnavailableError",
    "Update",
    "UserError",
    "WrongTaskError",
    "check_task",
    "load_job",
]
