"""What goes wrong in the numbers: which batch it was, and where in the code of the task."""

from __future__ import annotations

import inspect
import traceback
from pathlib import PurePath
from types import TracebackType
from typing import NamedTuple

from common.errors import DollError

_MOST_SUMMARY = 500  # characters: PyTorch's messages may be pages


class ErrorOrigin(NamedTuple):
    """A place in the user's code. The same for each repetition of the same mistake."""

    kind: str  # type of the exception
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """For people: the file without its folder, which is another on each machine."""
        return f"{PurePath(self.file).name}, line {self.line}, in {self.function}"


class Raised(NamedTuple):
    """An exception that the user's code raised, as it is told."""

    summary: str  # one line: type, message, place
    origin: ErrorOrigin
    traceback: str  # without our own frames before the user's


def what_was_raised(error: Exception, task: object, caught: TracebackType | None) -> Raised:
    """Tell an exception by where the user's code raised it.

    Args:
        error: As it was caught.
        task: Whose code it was. Of the frames the last one in the task's own package is named:
            below it lies PyTorch, above it whoever called.
        caught: Its traceback from the caller on, whose module's frames are left out.
    """
    at, caller = caught, "" if caught is None else _module(caught)
    while at is not None and at.tb_next is not None and _module(at) == caller:
        at = at.tb_next
    text = "".join(traceback.format_exception(type(error), error, at))
    frames = list[TracebackType]()
    while at is not None:
        frames.append(at)
        at = at.tb_next
    own = type(task).__module__.partition(".")[0]
    users = [frame for frame in frames if _module(frame).partition(".")[0] == own]
    code = (users or frames)[-1].tb_frame.f_code
    line = (users or frames)[-1].tb_lineno
    origin = ErrorOrigin(type(error).__name__, code.co_filename, line, code.co_name)
    return Raised(f"{one_line(error)} ({origin})", origin, text)


def one_line(error: Exception) -> str:
    """Type and message of an exception, as a traceback ends."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return text if len(text) <= _MOST_SUMMARY else f"{text[:_MOST_SUMMARY]}..."


def origin_of_method(task: object, name: str, kind: str) -> ErrorOrigin:
    """Where a task's method is written, for a mistake that raises nothing."""
    method = inspect.unwrap(getattr(task, name))
    code = getattr(method, "__code__", None)
    if code is None:
        return ErrorOrigin(kind, type(task).__module__, 0, name)
    return ErrorOrigin(kind, code.co_filename, code.co_firstlineno, name)


def _module(at: TracebackType) -> str:
    return str(at.tb_frame.f_globals.get("__name__", ""))


class NotFiniteError(DollError):
    """A loss or a gradient is infinite or not a number, or a metric is infinite.

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
