"""What a coordinator wants done: a shell carries it out, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from common.core.events import Source
    from common.core.messages import (
        AuditRecord,
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
    from common.core.spans import Partition


class CoordinatorCommand(msgspec.Struct, frozen=True, gc=False):
    """One thing that a coordinator wants done."""


class AskLease(CoordinatorCommand, frozen=True):
    """Take or prolong the lease, and report."""

    ttl_s: float


class ReleaseLease(CoordinatorCommand, frozen=True):
    """Give the lease back if it is ours."""


class FindSnapshots(CoordinatorCommand, frozen=True):
    """Read every snapshot of a source, and the updates topic from the lowest on, and report."""

    source: Source


class RestoreSnapshot(CoordinatorCommand, frozen=True):
    """Take the weights and the optimizer state of one of them in hand, and report."""

    snapshot: Snapshot
    members: bool = False  # hold them: there is nothing to take in hand


class Begin(CoordinatorCommand, frozen=True):
    """Lead with this epoch and the weights in hand: read control and replies from here on."""

    epoch: int
    snapshot: Snapshot


class AppendAudit(CoordinatorCommand, frozen=True):
    """Append to the updates topic."""

    record: AuditRecord


class OpenPartition(CoordinatorCommand, frozen=True):
    """Append to the control topic; what gets lost is ordered anew at the next look at streams."""

    record: Opened


class PublishModel(CoordinatorCommand, frozen=True):
    """Put the weights in hand on the board under this name.

    Where triggers say what has changed, that is enough, unless the whole is asked for.
    """

    model: ModelId
    whole: bool = True


class PostTrigger(CoordinatorCommand, frozen=True):
    """Post a trigger on the board, in another stream than before if `moves` is true."""

    trigger: UpdateTrigger
    moves: bool = False


class PutLeaderStatus(CoordinatorCommand, frozen=True):
    """Put the leader's status on the board."""

    leader_status: LeaderStatus


class AddGradient(CoordinatorCommand, frozen=True):
    """It counts: add its vector to the sum of a round, unless it stayed with its worker."""

    round: int
    gradient: Gradient | GradientReady


class Apply(CoordinatorCommand, frozen=True):
    """Take one optimizer step with the sum of a round, which is forgotten then."""

    round: int
    update: UpdateApplied
    learning_rate: float | None  # None: as the trainer was made
    measured: bool = False  # tell how large the sum was: `Summed`


class DiscardSum(CoordinatorCommand, frozen=True):
    """Forget the sum of a round: it will not be applied."""

    round: int


class CopyWeights(CoordinatorCommand, frozen=True):
    """Copy weights and optimizer state as they are now, for the snapshot that is published next."""


class PublishSnapshot(CoordinatorCommand, frozen=True):
    """Publish the copy: on the board, and to object storage where it is a checkpoint.

    Dead letters ordered before it must have been delivered: no later leader writes them again.
    """

    snapshot: Snapshot
    checkpoint: bool
    state: bool = False  # of the checkpoint: store it as members copy it, too, and report


class DeadLetterRecords(CoordinatorCommand, frozen=True):
    """Write records inside accepted spans that did not decode to their dead-letter topics."""

    skipped: tuple[Skipped, ...]
    topic_ids: dict[Partition, str] = {}  # Kafka's, as far as they are known


class DeadLetterBatch(CoordinatorCommand, frozen=True):
    """Write the address of a quarantined batch to the dead-letter topics."""

    record: Quarantined
    topic_ids: dict[Partition, str] = {}  # likewise


class ReadHeartbeats(CoordinatorCommand, frozen=True):
    """Read the workers' beats, and report."""


class Drop(CoordinatorCommand, frozen=True):
    """A reply that does not count; its reason is counted and logged."""

    reply: Reply
    reason: str


class Hold(CoordinatorCommand, frozen=True):
    """Say that the job waits for a person, who looks at the reason and resumes it."""

    reason: str  # what is wrong and what to do, one line
    detail: str = ""  # what a programmer wants to see: a traceback


class AwaitCheckpoint(CoordinatorCommand, frozen=True):
    """Say that the job waits for a checkpoint; this process looks again by itself."""

    reason: str  # which checkpoint, where it looks, what came instead, and what to do


class Finish(CoordinatorCommand, frozen=True):
    """The job has reached its end, and its last checkpoint is published.

    Where its owner has changed it since this revision, that may not be its end any more, nor where
    its owner stopped it and does not want that any more.
    """

    reason: str
    revision: int = 0
    stopped: bool = False  # by its owner


class StepDown(CoordinatorCommand, frozen=True):
    """This process leads no longer: forget all of it."""

    reason: str
