"""Where in the user's code an exception comes from: what a person needs to mend a task."""

from __future__ import annotations

import inspect
import traceback
from pathlib import PurePath
from types import TracebackType
from typing import NamedTuple

_MOST_SUMMARY = 500  # characters: PyTorch's messages may be pages


class Origin(NamedTuple):
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
    origin: Origin
    traceback: str  # without our own frames before the user's


def what_was_raised(error: Exception, task: object, caller: str) -> Raised:
    """Tell an exception by where the user's code raised it.

    Args:
        error: As it was caught, with its traceback.
        task: Whose code it was. Of the frames the last one in the task's own package is named:
            below it lies PyTorch, above it whoever called.
        caller: `__name__` of the module that caught it, whose frames are left out.
    """
    at = error.__traceback__
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
    origin = Origin(type(error).__name__, code.co_filename, line, code.co_name)
    return Raised(f"{one_line(error)} ({origin})", origin, text)


def one_line(error: Exception) -> str:
    """Type and message of an exception, as a traceback ends."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return text if len(text) <= _MOST_SUMMARY else f"{text[:_MOST_SUMMARY]}..."


def origin_of_method(task: object, name: str, kind: str) -> Origin:
    """Where a task's method is written, for a mistake that raises nothing."""
    method = inspect.unwrap(getattr(task, name))
    code = getattr(method, "__code__", None)
    if code is None:
        return Origin(kind, type(task).__module__, 0, name)
    return Origin(kind, code.co_filename, code.co_firstlineno, name)


def _module(at: TracebackType) -> str:
    return str(at.tb_frame.f_globals.get("__name__", ""))
