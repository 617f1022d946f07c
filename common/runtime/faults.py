"""Faults that end a part in a job: of which kind they are, and how long to wait after one."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from common.errors import DollError


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait before an actor is made anew."""

    first_s: float = 1.0  # and each time that a server was away: its return must be noticed
    longest_s: float = 60.0  # doubled up to here
    healthy_s: float = 60.0  # an actor that lasted for so long was well: what ends it is new

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures in a row."""
        return float(min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s))


def passes(error: BaseException) -> bool:
    """True if it is over by itself: a server that is away."""
    return isinstance(error, DollError) and error.retriable


def reason_of(error: BaseException) -> str:
    """Return what an exception says, for a log line."""
    return str(error) if isinstance(error, DollError) else f"{type(error).__name__}: {error}"


def kind_of(error: BaseException) -> tuple[str, ...]:
    """What makes two exceptions one to whoever reads of them: the class, and where it was raised.

    Of our own the text too, which says what is wrong and with what.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (type(error).__qualname__, where, *((str(error),) * isinstance(error, DollError)))
