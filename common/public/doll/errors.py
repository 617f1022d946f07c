"""Errors that a user of DOLL may handle.

`UserError` is a mistake of the user, such as a bad job file. `OutsideError` is a fault of another
system, such as a service that cannot be reached. `retriable` says if the same call may work later.
"""

from __future__ import annotations

from typing import ClassVar


class DollError(Exception):
    """Root of all errors of DOLL.

    Attributes:
        retriable: True if the same call may succeed later.
    """

    retriable: ClassVar[bool] = False


class UserError(DollError):
    """Invalid input; the message names the field and says what to do."""


class GivenError(UserError):
    """Invalid fields of a request.

    The fields are separate from the problem, because the API and the command line name the same
    field differently.

    Args:
        fields: Names of the fields.
        problem: Error message without the names.
    """

    def __init__(self, fields: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{', '.join(fields)}: {problem}")
        self.fields = fields
        self.problem = problem


class NotFoundError(UserError):
    """A job, a version of a model or another named thing does not exist."""


class ConflictError(UserError):
    """The request conflicts with the current state or with somebody else's change."""


class OutsideError(DollError):
    """A server failed: the admin service, Kafka, Redis, object storage or another one.

    Args:
        message: Error message.
        server: Optional. `kafka`, `redis` or `storage`. If unset, unknown or another server.
    """

    def __init__(self, message: str = "", server: str = "") -> None:
        super().__init__(message)
        self.server = server


class UnavailableError(OutsideError):
    """The server is unavailable or slow. The same call may work later."""

    retriable: ClassVar[bool] = True
