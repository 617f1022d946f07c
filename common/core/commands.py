"""What the state machines want done: a shell carries these out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.core.events import Source
    from common.core.messages import (
        AuditRecord,
        Claim,
        Gradient,
        ModelId,
        Quarantined,
        Reply,
        Skipped,
        Standing,
        UpdateApplied,
        UpdateTrigger,
    )
    from common.core.snapshots import Snapshot
    from common.core.spans import Address, Partition

# --- a worker's stream side ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """Append a claim to the control topic; its rows are the oldest undropped ones of each span."""

    number: int  # to be reported back with the offset that it got
    claim: Claim
    counts: tuple[int, ...]  # rows per span of its address


@dataclass(frozen=True, slots=True)
class Place:
    """Read these partitions from these positions on."""

    positions: Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class DropRows:
    """Forget the decoded rows of a partition that no announced batch holds."""

    partition: Partition


@dataclass(frozen=True, slots=True)
class SetReading:
    """Pause or resume reading all partitions; the reason is worth a log line when it changes."""

    reading: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Give a sign of life."""

    status: str


@dataclass(frozen=True, slots=True)
class LookAtStanding:
    """Read the leader's standing, then run what delivery reports are there, then report it.

    In this order: what the standing has decided must be known as sent.
    """


@dataclass(frozen=True, slots=True)
class Forget:
    """Let go of the rows of these batches: they are settled, or were never accepted."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell lag tools where a checkpoint stands."""

    positions: Mapping[Partition, int]


WorkerCommand: TypeAlias = (
    Announce | Place | DropRows | SetReading | Beat | LookAtStanding | Forget | Commit
)

# --- the coordinator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskLease:
    """Take or prolong the lease, and report."""


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Give the lease back if it is ours."""


@dataclass(frozen=True, slots=True)
class FindSnapshots:
    """Read every snapshot of a source, and the updates topic from the lowest on, and report."""

    source: Source


@dataclass(frozen=True, slots=True)
class RestoreSnapshot:
    """Take the weights and the optimizer state of one of them in hand, and report."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Begin:
    """Lead with this epoch and the weights in hand: read control and replies from here on."""

    epoch: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class AppendAudit:
    """Append to the updates topic."""

    record: AuditRecord


@dataclass(frozen=True, slots=True)
class PublishModel:
    """Put the weights in hand on the board under this name."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class PostTrigger:
    """Post a trigger on the board."""

    trigger: UpdateTrigger


@dataclass(frozen=True, slots=True)
class PutStanding:
    """Put the standing on the board."""

    standing: Standing


@dataclass(frozen=True, slots=True)
class AddGradient:
    """Add this vector to the sum of the round."""

    gradient: Gradient


@dataclass(frozen=True, slots=True)
class Apply:
    """Take one optimizer step with the sum of the round, and begin a new sum."""

    update: UpdateApplied


@dataclass(frozen=True, slots=True)
class DiscardSum:
    """Forget the sum of the round: it will not be applied."""


@dataclass(frozen=True, slots=True)
class CopyWeights:
    """Copy weights and optimizer state as they are now, for the snapshot that is published next."""


@dataclass(frozen=True, slots=True)
class PublishSnapshot:
    """Publish the copy: on the board, and to object storage where it is a checkpoint.

    Dead letters ordered before it must have been delivered: no later leader writes them again.
    """

    snapshot: Snapshot
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class DeadLetterRecords:
    """Records inside accepted spans that did not decode: to their dead-letter topics."""

    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class DeadLetterBatch:
    """A quarantined batch: its address to the dead-letter topics."""

    record: Quarantined


@dataclass(frozen=True, slots=True)
class LookForWorkers:
    """Read the workers' beats, and report."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A reply that does not count; its reason is counted and logged."""

    reply: Reply
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Say that the job waits for a person, who looks at the reason and resumes it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job has reached its end, and its last checkpoint is published."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """This process leads no longer: forget all of it."""

    reason: str


CoordinatorCommand: TypeAlias = (
    AskLease
    | ReleaseLease
    | FindSnapshots
    | RestoreSnapshot
    | Begin
    | AppendAudit
    | PublishModel
    | PostTrigger
    | PutStanding
    | AddGradient
    | Apply
    | DiscardSum
    | CopyWeights
    | PublishSnapshot
    | DeadLetterRecords
    | DeadLetterBatch
    | LookForWorkers
    | Drop
    | Hold
    | Finish
    | StepDown
)
