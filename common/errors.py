"""Everything that goes wrong on purpose: one small tree, each class says whether waiting helps.

Faults of the user (`UserError`: a bad job file, a topic that does not exist) are another branch
than faults of the world (`OutsideError`: a broker that is away), so that a command can tell.
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


class TaskMissingError(UserError):
    """This process has not got a job's task: not allowed here, or its package is not installed.

    No fault of the job: another process may have it, and this one may get it.
    """


class OutsideError(DollError):
    """Kafka, Redis or object storage did not do what was asked."""


class UnavailableError(OutsideError):
    """The server is unavailable or slow: the same call may work later."""

    retriable: ClassVar[bool] = True


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
        super().__init__(message)
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


class WireError(DollError):
    """Bytes from another process do not parse as the message they should be."""


class FutureFormatError(WireError):
    """Well-formed, but of a format later than this program knows: a newer one wrote it.

    It must not be passed over, as garbage is: what it says counts for the newer program.
    """
