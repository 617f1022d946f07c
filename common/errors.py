"""Errors that this project raises: one small tree. Each class says if a retry can help.

The root and the classes that users meet are in `doll.errors`. Here are the classes that only our
own processes distinguish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from doll.errors import (
    ConflictError,
    DollError,
    GivenError,
    NotFoundError,
    OutsideError,
    UnavailableError,
    UserError,
)

# Other modules import these from here, too. Classes defined below need no entry.
__all__ = [
    "ConflictError",
    "DollError",
    "GivenError",
    "NotFoundError",
    "OutsideError",
    "UnavailableError",
    "UserError",
]

T = TypeVar("T")


class TaskMissingError(UserError):
    """The job's task is missing in this process: not allowed here, or its package is not installed.

    This is no fault of the job: another process may have the task, and this one may get it later.
    """


class ForbiddenError(UnavailableError):
    """Kafka denied authorization. The same call works once an operator has granted the right."""


class GroupError(UnavailableError):
    """A group of members broke or could not be formed. The remaining members form another one.

    Args:
        message: What went wrong.
        unreachable: Names of members that this one has just failed to connect to. A member that is
            frozen, on a machine that still answers, is not among them.
    """

    def __init__(self, message: str, unreachable: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class LateError(UnavailableError):
    """A server did not answer in time."""


class UnreachableError(UnavailableError):
    """A server cannot be reached."""


class RefusedError(UnavailableError):
    """A server rejects our credentials, and will until a person changes them."""


class UnknownOutcomeError(UnavailableError):
    """A change was sent but not confirmed in time. It may have been made, or may still be made."""


class UnknownTopicError(OutsideError):
    """The topic does not exist, and only its owner may create it."""


class ExpiredError(OutsideError):
    """The requested records are below the log's start: retention has deleted them for good."""


class TruncatedError(OutsideError):
    """A log differs from what was read of it: acknowledged records were lost. A person must look.

    Args:
        message: What was lost, and where.
        divergent_offset: Offset at which the logs diverge; None if it is not known.
    """

    def __init__(self, message: str, divergent_offset: int | None = None) -> None:
        super().__init__(message, "kafka")
        self.divergent_offset = divergent_offset


class RecreatedError(TruncatedError):
    """A topic was deleted and created again under its name. No records of the old one remain."""

    def __init__(self, message: str) -> None:
        super().__init__(message, divergent_offset=0)


class DeliveryError(OutsideError):
    """A record was refused, or its outcome is unknown. Its writer must stop."""


class RecordTooLargeError(DeliveryError):
    """A record is larger than its topic allows. A smaller one may be written instead."""


class BrokenWriterError(DeliveryError):
    """A writer lost its place with the broker: some of its records may have arrived, or none.

    A new writer can continue, after it has checked how far the log is.
    """

    retriable: ClassVar[bool] = True


class CorruptError(OutsideError):
    """Stored bytes differ from what was written: a torn or altered checkpoint, a wrong checksum."""


class OtherModelError(CorruptError):
    """Stored weights belong to a model other than the task's: the message has the difference."""


class WireError(DollError):
    """Bytes from another process do not parse as the message they should be."""


class FutureFormatError(WireError):
    """The message is well-formed, but a newer program wrote it in a format unknown to this one.

    It must not be skipped like an invalid message, because it counts for the newer program.
    """


def decoded(
    decode: Callable[[Any], T], data: object, what: str, kind: type[DollError] = WireError
) -> T:
    """Decode untrusted data.

    Args:
        decode: Method of a msgspec decoder, or a function of ours that does not check formats.
        data: Bytes, or a text.
        what: Beginning of the error's message.
        kind: Class of the error.

    Raises:
        kind: If the decoder rejects the data.
    """
    try:
        return decode(data)
    except (ValueError, RecursionError, WireError) as error:
        raise kind(f"{what}: {error}") from error
