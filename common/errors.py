"""Everything that goes wrong on purpose: one small tree, each class says whether waiting helps.

Its root and the branches that users meet are `doll.errors`; what only our own processes tell apart
is here.
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

# Imported from here, too. What is defined below needs no entry.
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
    """This process has not got a job's task: not allowed here, or its package is not installed.

    No fault of the job: another process may have it, and this one may get it.
    """


class ForbiddenError(UnavailableError):
    """Kafka refuses a right: the same call works once an operator has added the right."""


class GroupError(UnavailableError):
    """A group of members broke, or could not be formed: those who are left form another.

    Args:
        message: What went wrong.
        unreachable: Names of members to whom this one could not connect just now. One that answers
            no more although its machine does, as it is frozen, is not among them.
    """

    def __init__(self, message: str, unreachable: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class LateError(UnavailableError):
    """A server did not answer in time."""


class UnreachableError(UnavailableError):
    """There is no connection to a server."""


class RefusedError(UnavailableError):
    """A server does not accept our credentials, until a person changes that."""


class UnknownOutcomeError(UnavailableError):
    """A change was sent and not confirmed in time: it may have been made, or may still be made."""


class UnknownTopicError(OutsideError):
    """The topic does not exist and nobody but its owner may create it."""


class ExpiredError(OutsideError):
    """Records below the log's start were asked for: retention has deleted them for ever."""


class TruncatedError(OutsideError):
    """A log is not any more what was read of it: acknowledged records were lost, see to it.

    Args:
        message: What was lost, and where.
        divergent_offset: From here on the log is another one; None: not known.
    """

    def __init__(self, message: str, divergent_offset: int | None = None) -> None:
        super().__init__(message, "kafka")
        self.divergent_offset = divergent_offset


class RecreatedError(TruncatedError):
    """A topic was deleted and created anew under its name: nothing of the old one is left."""

    def __init__(self, message: str) -> None:
        super().__init__(message, divergent_offset=0)


class DeliveryError(OutsideError):
    """A record's fate is unknown or it was refused: its writer must not go on."""


class RecordTooLargeError(DeliveryError):
    """A record is larger than what its topic takes: a smaller one may be written instead of it."""


class BrokenWriterError(DeliveryError):
    """A writer lost its place with the broker: some of its records may have arrived, or none.

    Another writer can go on: whoever makes one looks first how far the log is.
    """

    retriable: ClassVar[bool] = True


class CorruptError(OutsideError):
    """Stored bytes are not what was written: a torn or altered checkpoint, a wrong checksum."""


class OtherModelError(CorruptError):
    """Stored weights are of another model than the task's: says the first difference."""


class WireError(DollError):
    """Bytes from another process do not parse as the message they should be."""


class FutureFormatError(WireError):
    """Well-formed, but of a format later than this program knows: a newer one wrote it.

    It must not be passed over, as garbage is: what it says counts for the newer program.
    """


def decoded(
    decode: Callable[[Any], T], data: object, what: str, kind: type[DollError] = WireError
) -> T:
    """Decode what anybody may have written.

    Args:
        decode: Method of a decoder of msgspec, or a function of ours that knows no formats.
        data: Bytes, or a text.
        what: Beginning of the error's message.
        kind: Class of the error.

    Raises:
        kind: If the data are nothing that the decoder knows.
    """
    try:
        return decode(data)
    except (ValueError, RecursionError, WireError) as error:
        raise kind(f"{what}: {error}") from error
