"""Errors in the numbers, with the batch and the place in the task's code."""

from __future__ import annotations

import inspect
import re
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from types import TracebackType
from typing import NamedTuple

from common.errors import DollError, UserError

# Maximum number of characters, because PyTorch's messages can fill pages.
_MOST_SUMMARY = 500


class ErrorOrigin(NamedTuple):
    """A place in the user's code. It identifies repetitions of the same mistake."""

    kind: str  # type of the exception
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return the place without the file's folder, which differs between machines."""
        return f"{PurePath(self.file).name}, line {self.line}, in {self.function}"


class Raised(NamedTuple):
    """An exception that the user's code raised, prepared for display."""

    summary: str  # one line: type, message, place
    origin: ErrorOrigin
    traceback: str  # starts at the user's code


def what_was_raised(error: BaseException, task: object, caught: TracebackType | None) -> Raised:
    """Describe an exception by the place in the user's code that raised it.

    Args:
        error: The exception.
        task: The task. The place is the last frame in the task's own package, which it may name in
            an attribute `package`: frames below it are PyTorch's, those above are the caller's.
        caught: Traceback from the caller on. Frames of the caller's module are left out.
    """
    at, caller = caught, "" if caught is None else _module(caught)
    while at is not None and at.tb_next is not None and _module(at) == caller:
        at = at.tb_next
    text = "".join(traceback.format_exception(type(error), error, at))
    frames = list[TracebackType]()
    while at is not None:
        frames.append(at)
        at = at.tb_next
    own = getattr(task, "package", type(task).__module__.partition(".")[0])
    users = [frame for frame in frames if _module(frame).partition(".")[0] == own]
    code = (users or frames)[-1].tb_frame.f_code
    line = (users or frames)[-1].tb_lineno
    origin = ErrorOrigin(type(error).__name__, code.co_filename, line, code.co_name)
    return Raised(f"{one_line(error)} ({origin})", origin, text)


def one_line(error: BaseException) -> str:
    """Return type and message of an exception, like the last line of a traceback."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return text if len(text) <= _MOST_SUMMARY else f"{text[:_MOST_SUMMARY]}..."


def origin_of_method(task: object, name: str, kind: str) -> ErrorOrigin:
    """Return where a task's method is defined, for mistakes that raise nothing."""
    method = inspect.unwrap(getattr(task, name))
    code = getattr(method, "__code__", None)
    if code is None:
        return ErrorOrigin(kind, type(task).__module__, 0, name)
    return ErrorOrigin(kind, code.co_filename, code.co_firstlineno, name)


def _module(at: TracebackType) -> str:
    return str(at.tb_frame.f_globals.get("__name__", ""))


class NotFiniteError(DollError):
    """A loss or a gradient is infinite or NaN, or a metric is infinite.

    Attributes:
        batch_index: Index of the batch; None if only the sum of several shows the error.
    """

    def __init__(self, what: str, batch_index: int | None) -> None:
        where = "" if batch_index is None else f" for batch {batch_index}"
        super().__init__(f"{what} is not finite{where}")
        self.batch_index = batch_index


class NoMemoryError(UserError):
    """The memory of this machine is too small, for example for the gradient of one record."""


# Requested memory in the messages of PyTorch and NumPy.
_REQUESTED = re.compile(r"allocate ([\d.]+) ?([KMGTP]?i?B|bytes)", re.IGNORECASE)
# Free memory of a GPU in PyTorch's messages.
_FREE = re.compile(r"of which ([\d.]+) ([KMGTP]?i?B|bytes) is free")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def shortage(error: Exception) -> str:
    """Return the memory that was requested and free, and the error, in one line.

    If the error does not name the free memory, it is what this process can allocate at the moment.
    So call this function while the error's traceback keeps objects in memory.
    """
    requested, free = (pattern.search(str(error)) for pattern in (_REQUESTED, _FREE))
    rest = _quantity(*free.groups()) if free else ""
    if not free and "CUDA" not in str(error) and (there := _free_bytes()) is not None:
        rest = _quantity(str(there), "bytes")
    unknown = "an unknown amount"
    asked = _quantity(*requested.groups()) if requested else unknown
    return f"requested {asked}, free {rest or unknown}; {one_line(error)}"


def _quantity(number: str, unit: str) -> str:
    """Return a quantity of memory; bytes are converted to the largest unit that fits."""
    if unit.lower() not in ("b", "bytes"):
        return f"{number} {unit}"
    count = float(number.rstrip("."))
    power = min(max(int(count).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.{2 if power else 0}f} {_UNITS[power]}"


def _free_bytes() -> int | None:
    """Return the memory that this process can still allocate; None if the system does not say."""
    found = list[int]()
    # Other systems than Linux have no such files, and the limit of a container may be "max".
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(_MEMORY)["MemAvailable:"] << 10)
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The kernel drops cached files if memory is needed.
        found.append(limit - used + _numbers(_CGROUP / "memory.stat")["inactive_file"])
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(limit - pages * resource.getpagesize())
    return max(min(found), 0) if found else None


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number per line."""
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Run code that needs memory for something, such as "the model".

    Raises:
        NoMemoryError: If memory does not suffice. The message says how much was requested and free.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise NoMemoryError(
            f"memory does not suffice for {what} ({shortage(error)}); use machines with more memory"
        ) from error


class GpuLostError(Exception):
    """The GPU failed in the middle of a gradient, and this process cannot use it any more.

    Attributes:
        batches: Control offsets of the batches, one of which may be the cause.
    """

    def __init__(self, what: str, batches: tuple[int, ...]) -> None:
        super().__init__(what)
        self.batches = batches


def lacks_memory(error: BaseException | None) -> bool:
    """Return True if memory did not suffice. PyTorch says this only in the message."""
    words = ("not enough memory", "allocate memory", "CUDA out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


class TaskError(DollError):
    """The task's code raised on a batch. The exception is the cause of this error.

    Attributes:
        batch_index: Index of the batch; None if the task is at fault for any batch.
        summary: One line with the exception and its place in the user's code.
        origin: Equal for repetitions of the same mistake.
        traceback: Traceback from the user's code on; empty if nothing was raised.
    """

    def __init__(self, batch_index: int | None, raised: Raised) -> None:
        what = "is wrong" if batch_index is None else f"raised on batch {batch_index}"
        super().__init__(f"the task {what}: {raised.summary}")
        self.batch_index = batch_index
        self.summary, self.origin, self.traceback = raised


class WrongTaskError(TaskError):
    """A task's method returned something unusable. The task is at fault, not a batch."""

    def __init__(self, task: object, method: str, what: str) -> None:
        origin = origin_of_method(task, method, what)
        super().__init__(None, Raised(f"{what} ({origin})", origin, ""))
