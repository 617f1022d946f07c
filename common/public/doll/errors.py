"""What a user of DOLL may have to handle: the root of the tree of errors and its first branches.

Faults of the user (`UserError`: a bad job file, a job that does not exist) are another branch
than faults of the world (`OutsideError`: a service that is away), so that a program can tell. Each
class says whether waiting helps.
"""

from __future__ import annotations

from typing import ClassVar


class DollError(Exception):
    """Root of the tree."""

    retriable: ClassVar[bool] = False


class UserError(DollError):
    """Something a person gave us makes no sense; the message names the field and what to do."""


class GivenError(UserError):
    """What a person asks makes no sense; knows the fields, whose names differ by who was asked."""

    def __init__(self, fields: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{', '.join(fields)}: {problem}")
        self.fields = fields
        self.problem = problem


class NotFoundError(UserError):
    """What a person names is not there: a job, a version of a model."""


class ConflictError(UserError):
    """What a person wants contradicts what is there, or what somebody else did meanwhile."""


class OutsideError(DollError):
    """Kafka, Redis or object storage did not do what was asked.

    Args:
        message: What went wrong.
        server: Optional. Which one: `kafka`, `redis` or `storage`. If unset, nobody knows.
    """

    def __init__(self, message: str = "", server: str = "") -> None:
        super().__init__(message)
        self.server = server


class UnavailableError(OutsideError):
    """The server is unavailable or slow: the same call may work later."""

    retriable: ClassVar[bool] = True
