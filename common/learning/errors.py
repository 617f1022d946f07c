"""What goes wrong in the numbers: which batch it was, and whether the task or the model did it."""

from __future__ import annotations

from common.errors import DollError


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
        batch_index: Which of the batches it was.
    """

    def __init__(self, batch_index: int, cause: Exception) -> None:
        super().__init__(f"the task raised on batch {batch_index}: {type(cause).__name__}: {cause}")
        self.batch_index = batch_index
