"""Events and commands of a worker's reading side.

Events are facts that a shell observed and passes to `on(event, now)`. Commands are executed by the
shell in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from common.core.messages import Tick as Tick  # noqa: PLC0414 -- re-exported
from common.core.spans import Assigned as Assigned  # noqa: PLC0414 -- re-exported
from common.core.spans import Revoked as Revoked  # noqa: PLC0414 -- re-exported

if TYPE_CHECKING:
    from common.core.batching import DecodedRun, RowSlice
    from common.core.messages import Claim, LeaderStatus, Unsettled
    from common.core.spans import Address, LogPosition, Partition

# --- events ----------------------------------------------------------------------------------


class WorkerFact(msgspec.Struct, frozen=True, gc=False):
    """Any event of a worker except a `Tick` and assignments by its group."""


class Decoded(WorkerFact, frozen=True):
    """Records of one partition were read and decoded."""

    run: DecodedRun


class FellBehind(WorkerFact, frozen=True):
    """A partition's log begins above the position: retention deleted unread records."""

    partition: Partition
    start: int


class Truncated(WorkerFact, frozen=True):
    """A partition's log is not the one that its place describes. Nothing more is read from it."""

    partition: Partition
    # True if the topic was recreated. Otherwise the log lost its last records.
    recreated: bool


class RecordBelow(WorkerFact, frozen=True):
    """A partition returned a record below its position, but above the known part of the log."""

    partition: Partition
    # Leader epoch of the record. -1 if unknown.
    epoch: int


class EndReached(WorkerFact, frozen=True):
    """A partition's log ends at `position`, above its last record, and all records were decoded."""

    partition: Partition
    position: int


class Delivered(WorkerFact, frozen=True):
    """The claim with this number is in the control topic at this offset.

    If Kafka did not return the offset, this is an upper bound of it.
    """

    number: int
    offset: int


class LeaderStatusSeen(WorkerFact, frozen=True):
    """The leader's status on the board, or None if it is missing."""

    leader_status: LeaderStatus | None


class RoundBegan(WorkerFact, frozen=True):
    """A trigger arrived: the update before it is applied, which may give room to read."""

    # Epoch of the leader that posted it.
    epoch: int = -1
    # Counts of unsettled batches in the trigger.
    unsettled: Unsettled | None = None


class SizesChanged(WorkerFact, frozen=True):
    """The job's owner changed b, or K and with it the bound."""

    batch_size: int  # b
    # Maximum number of claimed and unsettled batches.
    bound: int
    group_size: int = 1  # K


class Leaving(WorkerFact, frozen=True):
    """The machine will stop soon."""


WorkerEvent: TypeAlias = WorkerFact | Tick | Assigned | Revoked

# --- commands --------------------------------------------------------------------------------


class WorkerCommand(msgspec.Struct, frozen=True, gc=False):
    """Any command of a worker's reading side."""


class Announce(WorkerCommand, frozen=True):
    """Append a claim to the control topic."""

    # Number to report with the resulting offset.
    number: int
    claim: Claim
    counts: tuple[int, ...]  # rows per span of its address
    # The batch's rows, in the order of the address.
    rows: tuple[RowSlice, ...] = ()


class Place(WorkerCommand, frozen=True):
    """Read these partitions from these positions, if the logs match what is known of them."""

    positions: Mapping[Partition, LogPosition]


class Unplace(WorkerCommand, frozen=True):
    """Read nothing from a partition until it is placed again."""

    partition: Partition


class SetReading(WorkerCommand, frozen=True):
    """Pause or resume reading all partitions. Log a change of the reason."""

    reading: bool
    reason: str


class SendHeartbeat(WorkerCommand, frozen=True):
    """Send a heartbeat."""

    status: str


class ReadLeaderStatus(WorkerCommand, frozen=True):
    """Read the leader's status, then process pending delivery reports, then report the status.

    The order matters: the claims that the status has decided must be known as delivered.
    """


class Forget(WorkerCommand, frozen=True):
    """Drop the rows of these batches, which are settled or were never accepted."""

    addresses: tuple[Address, ...]


class Commit(WorkerCommand, frozen=True):
    """Commit the settled frontier of partitions to the consumer group, for lag tools."""

    positions: Mapping[Partition, int]
