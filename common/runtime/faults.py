"""Faults that end an actor of a job: their kinds, and the pause after each."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from common.errors import DollError


@dataclass(frozen=True, slots=True)
class Patience:
    """Pauses before a new actor is made.

    Attributes:
        first_s: Pause after the first fault, and each time that a server is unavailable, so that
            its return is noticed soon.
        longest_s: Longest pause. Pauses double up to this.
        healthy_s: Minimum age of a healthy actor, whose end counts as a first fault.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    healthy_s: float = 60.0

    def pause_s(self, failures: int) -> float:
        """Return the pause after this number of consecutive faults."""
        return float(min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s))


def passes(error: BaseException) -> bool:
    """True if the error goes away by itself, such as a server that is unavailable."""
    return isinstance(error, DollError) and error.retriable


def reason_of(error: BaseException) -> str:
    """Return the text of an exception for a log line."""
    return str(error) if isinstance(error, DollError) else f"{type(error).__name__}: {error}"


def kind_of(error: BaseException) -> tuple[str, ...]:
    """Return a key that is equal for exceptions of one class that were raised at the same line.

    For a `DollError`, the key also contains the text, because the text says what is wrong.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (type(error).__qualname__, where, *((str(error),) * isinstance(error, DollError)))
