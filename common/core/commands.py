"""What the state machines want done: a shell carries these out, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from common.core.batching import RowSlice
    from common.core.events import Source
    from common.core.messages import (
        AuditRecord,
        Claim,
        Gradient,
        GradientReady,
        LeaderStatus,
        ModelId,
        Opened,
        Quarantined,
        Reply,
        Skipped,
        UpdateApplied,
        UpdateTrigger,
    )
    from common.core.snapshots import Snapshot
    from common.core.spans import Address, LogPosition, Partition

# --- a worker's stream side ------------------------------------------------------------------


class Announce(msgspec.Struct, frozen=True, gc=False):
    """Append a claim to the control topic."""

    number: int  # to be reported back with the offset that it got
    claim: Claim
    counts: tuple[int, ...]  # rows per span of its address
    rows: tuple[RowSlice, ...] = ()  # these rows, in the order of the address


class Place(msgspec.Struct, frozen=True, gc=False):
    """Read these partitions from these positions on, as long as they are the logs known below."""

    positions: Mapping[Partition, LogPosition]


class Unplace(msgspec.Struct, frozen=True, gc=False):
    """Read nothing of a partition until it is placed again."""

    partition: Partition


class SetReading(msgspec.Struct, frozen=True, gc=False):
    """Pause or resume reading all partitions; the reason is worth a log line when it changes."""

    reading: bool
    reason: str


class Heartbeat(msgspec.Struct, frozen=True, gc=False):
    """Give a sign of life."""

    status: str


class ReadLeaderStatus(msgspec.Struct, frozen=True, gc=False):
    """Read the leader's status, then run what delivery reports are there, then report it.

    In this order: what the leader's status has decided must be known as sent.
    """


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Let go of the rows of these batches: they are settled, or were never accepted."""

    addresses: tuple[Address, ...]


class Commit(msgspec.Struct, frozen=True, gc=False):
    """Commit the settled frontier of partitions to the consumer group, for lag tools."""

    positions: Mapping[Partition, int]


WorkerCommand: TypeAlias = (
    Announce | Place | Unplace | SetReading | Heartbeat | ReadLeaderStatus | Forget | Commit
)

# --- the coordinator -------------------------------------------------------------------------


class AskLease(msgspec.Struct, frozen=True, gc=False):
    """Take or prolong the lease, and report."""

    ttl_s: float


class ReleaseLease(msgspec.Struct, frozen=True, gc=False):
    """Give the lease back if it is ours."""


class FindSnapshots(msgspec.Struct, frozen=True, gc=False):
    """Read every snapshot of a source, and the updates topic from the lowest on, and report."""

    source: Source


class RestoreSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Take the weights and the optimizer state of one of them in hand, and report."""

    snapshot: Snapshot
    members: bool = False  # hold them: there is nothing to take in hand


class Begin(msgspec.Struct, frozen=True, gc=False):
    """Lead with this epoch and the weights in hand: read control and replies from here on."""

    epoch: int
    snapshot: Snapshot


class AppendAudit(msgspec.Struct, frozen=True, gc=False):
    """Append to the updates topic."""

    record: AuditRecord


class OpenPartition(msgspec.Struct, frozen=True, gc=False):
    """Append to the control topic; what gets lost is ordered anew at the next look at streams."""

    record: Opened


class PublishModel(msgspec.Struct, frozen=True, gc=False):
    """Put the weights in hand on the board under this name.

    Where triggers say what has changed, that is enough, unless the whole is asked for.
    """

    model: ModelId
    whole: bool = True


class PostTrigger(msgspec.Struct, frozen=True, gc=False):
    """Post a trigger on the board, in another stream than before if `moves` is true."""

    trigger: UpdateTrigger
    moves: bool = False


class PutLeaderStatus(msgspec.Struct, frozen=True, gc=False):
    """Put the leader's status on the board."""

    leader_status: LeaderStatus


class AddGradient(msgspec.Struct, frozen=True, gc=False):
    """It counts: add its vector to the sum of a round, unless it stayed with its worker."""

    round: int
    gradient: Gradient | GradientReady


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Take one optimizer step with the sum of a round, which is forgotten then."""

    round: int
    update: UpdateApplied
    learning_rate: float | None  # None: as the trainer was made
    measured: bool = False  # tell how large the sum was: `Summed`


class DiscardSum(msgspec.Struct, frozen=True, gc=False):
    """Forget the sum of a round: it will not be applied."""

    round: int


class CopyWeights(msgspec.Struct, frozen=True, gc=False):
    """Copy weights and optimizer state as they are now, for the snapshot that is published next."""


class PublishSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Publish the copy: on the board, and to object storage where it is a checkpoint.

    Dead letters ordered before it must have been delivered: no later leader writes them again.
    """

    snapshot: Snapshot
    checkpoint: bool
    state: bool = False  # of the checkpoint: store it as members copy it, too, and report


class DeadLetterRecords(msgspec.Struct, frozen=True, gc=False):
    """Write records inside accepted spans that did not decode to their dead-letter topics."""

    skipped: tuple[Skipped, ...]
    topic_ids: dict[Partition, str] = {}  # Kafka's, as far as they are known


class DeadLetterBatch(msgspec.Struct, frozen=True, gc=False):
    """Write the address of a quarantined batch to the dead-letter topics."""

    record: Quarantined
    topic_ids: dict[Partition, str] = {}  # likewise


class ReadHeartbeats(msgspec.Struct, frozen=True, gc=False):
    """Read the workers' beats, and report."""


class Drop(msgspec.Struct, frozen=True, gc=False):
    """A reply that does not count; its reason is counted and logged."""

    reply: Reply
    reason: str


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Say that the job waits for a person, who looks at the reason and resumes it."""

    reason: str  # what is wrong and what to do, one line
    detail: str = ""  # what a programmer wants to see: a traceback


class AwaitCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """Say that the job waits for a checkpoint; this process looks again by itself."""

    reason: str  # which checkpoint, where it looks, what came instead, and what to do


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The job has reached its end, and its last checkpoint is published.

    Where its owner has changed it since this revision, that may not be its end any more, nor where
    its owner stopped it and does not want that any more.
    """

    reason: str
    revision: int = 0
    stopped: bool = False  # by its owner


class StepDown(msgspec.Struct, frozen=True, gc=False):
    """This process leads no longer: forget all of it."""

    reason: str


CoordinatorCommand: TypeAlias = (
    AskLease
    | ReleaseLease
    | FindSnapshots
    | RestoreSnapshot
    | Begin
    | AppendAudit
    | OpenPartition
    | PublishModel
    | PostTrigger
    | PutLeaderStatus
    | AddGradient
    | Apply
    | DiscardSum
    | CopyWeights
    | PublishSnapshot
    | DeadLetterRecords
    | DeadLetterBatch
    | ReadHeartbeats
    | Drop
    | Hold
    | AwaitCheckpoint
    | Finish
    | StepDown
)
