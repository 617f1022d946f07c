"""What goes wrong in the numbers: which batch it was, and whether the task or the model did it."""

from __future__ import annotations

from common.errors import DollError
from common.learning.origin import Raised, origin_of_method


class NotFiniteError(DollError):
    """A loss, a metric or a gradient is infinite or not a number.

    Attributes:
        batch_index: Which of the batches it was; None where only their sum shows it.
    """

    def __init__(self, what: str, batch_index: int | None) -> None:
        where = "" if batch_index is None else f" for batch {batch_index}"
        super().__init__(f"{what} is not finite{where}")
        self.batch_index = batch_index


class TaskError(DollError):
    """The task's own code raised on a batch; its exception is the cause.

    Attributes:
        batch_index: Which of the batches it was; None where none is to blame.
        summary: One line: what was raised, and where in the user's code.
        origin: The same for each repetition.
        traceback: From the user's code on; empty where nothing was raised.
    """

    def __init__(self, batch_index: int | None, raised: Raised) -> None:
        what = "is wrong" if batch_index is None else f"raised on batch {batch_index}"
        super().__init__(f"the task {what}: {raised.summary}")
        self.batch_index = batch_index
        self.summary, self.origin, self.traceback = raised


class WrongTaskError(TaskError):
    """What a task's method returned cannot be used, whatever the data: no batch is to blame."""

    def __init__(self, task: object, method: str, what: str) -> None:
        origin = origin_of_method(task, method, what)
        super().__init__(None, Raised(f"{what} ({origin})", origin, ""))
