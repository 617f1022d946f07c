"""What happens to the stream side of a worker, and what it wants done.

Events are facts that a shell observed, handed to `on(event, now)`; commands a shell carries out, in
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from common.core.messages import Tick as Tick  # noqa: PLC0414 -- events of others, too
from common.core.spans import Assigned as Assigned  # noqa: PLC0414 -- likewise
from common.core.spans import Revoked as Revoked  # noqa: PLC0414 -- likewise

if TYPE_CHECKING:
    from common.core.batching import DecodedRun, RowSlice
    from common.core.messages import Claim, LeaderStatus, Unsettled
    from common.core.spans import Address, LogPosition, Partition

# --- events ----------------------------------------------------------------------------------


class WorkerFact(msgspec.Struct, frozen=True, gc=False):
    """Any event of a worker but a `Tick` and what its group gives or takes."""


class Decoded(WorkerFact, frozen=True):
    """Records of one partition were read and decoded."""

    run: DecodedRun


class FellBehind(WorkerFact, frozen=True):
    """A partition's log begins above the position: retention deleted records that nobody read."""

    partition: Partition
    start: int


class Truncated(WorkerFact, frozen=True):
    """A partition's log is not any more the one that its place knows; nothing is read of it."""

    partition: Partition
    recreated: bool  # its topic was deleted and created anew; else it lost its last records


class RecordBelow(WorkerFact, frozen=True):
    """A partition gave a record below its position, above all that was known of the log."""

    partition: Partition
    epoch: int  # its leader epoch; -1: not known


class EndReached(WorkerFact, frozen=True):
    """A partition's log ends at `position`, above its last record, and all records were decoded."""

    partition: Partition
    position: int


class Delivered(WorkerFact, frozen=True):
    """The indicator with this number stands in the control topic at this offset.

    Or below it, where Kafka has not said at which: then it is decided once all up to there is.
    """

    number: int
    offset: int


class LeaderStatusSeen(WorkerFact, frozen=True):
    """What the board says of the leader's status; None where there is none."""

    leader_status: LeaderStatus | None


class RoundBegan(WorkerFact, frozen=True):
    """A trigger was heard: the update before it is applied, which may give room to read."""

    epoch: int = -1  # of the leader that posted it
    unsettled: Unsettled | None = None  # as the trigger says


class SizesChanged(WorkerFact, frozen=True):
    """The job's owner changed b, or K and with it the bound."""

    batch_size: int  # b
    bound: int  # batches announced and not settled
    group_size: int = 1  # K


class Leaving(WorkerFact, frozen=True):
    """This machine will be gone soon."""


WorkerEvent: TypeAlias = WorkerFact | Tick | Assigned | Revoked

# --- commands --------------------------------------------------------------------------------


class WorkerCommand(msgspec.Struct, frozen=True, gc=False):
    """One thing that the stream side of a worker wants done."""


class Announce(WorkerCommand, frozen=True):
    """Append a claim to the control topic."""

    number: int  # to be reported back with the offset that it got
    claim: Claim
    counts: tuple[int, ...]  # rows per span of its address
    rows: tuple[RowSlice, ...] = ()  # these rows, in the order of the address


class Place(WorkerCommand, frozen=True):
    """Read these partitions from these positions on, as long as they are the logs known below."""

    positions: Mapping[Partition, LogPosition]


class Unplace(WorkerCommand, frozen=True):
    """Read nothing of a partition until it is placed again."""

    partition: Partition


class SetReading(WorkerCommand, frozen=True):
    """Pause or resume reading all partitions; the reason is worth a log line when it changes."""

    reading: bool
    reason: str


class SendHeartbeat(WorkerCommand, frozen=True):
    """Give a sign of life."""

    status: str


class ReadLeaderStatus(WorkerCommand, frozen=True):
    """Read the leader's status, then run what delivery reports are there, then report it.

    In this order: what the leader's status has decided must be known as sent.
    """


class Forget(WorkerCommand, frozen=True):
    """Let go of the rows of these batches: they are settled, or were never accepted."""

    addresses: tuple[Address, ...]


class Commit(WorkerCommand, frozen=True):
    """Commit the settled frontier of partitions to the consumer group, for lag tools."""

    positions: Mapping[Partition, int]
