"""Commands of a coordinator, which a shell executes in order.

If a command says "report", the shell passes the result to the coordinator as an event.
"""

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
    """Any command of a coordinator."""


class AskLease(CoordinatorCommand, frozen=True):
    """Acquire or renew the lease, and report."""

    ttl_s: float


class ReleaseLease(CoordinatorCommand, frozen=True):
    """Release the lease if this process holds it."""


class FindSnapshots(CoordinatorCommand, frozen=True):
    """Read all snapshots of a source and the updates topic from the lowest one on, and report."""

    source: Source


class RestoreSnapshot(CoordinatorCommand, frozen=True):
    """Load the weights and the optimizer state of a snapshot, and report."""

    snapshot: Snapshot
    # True if members hold the weights, so that there is nothing to load.
    members: bool = False


class Begin(CoordinatorCommand, frozen=True):
    """Begin to lead with this epoch and the loaded weights. Read the control topic and replies."""

    epoch: int
    snapshot: Snapshot


class AppendAudit(CoordinatorCommand, frozen=True):
    """Append a record to the updates topic."""

    record: AuditRecord


class OpenPartition(CoordinatorCommand, frozen=True):
    """Append a record to the control topic. If it is lost, the next poll of streams repeats it."""

    record: Opened


class PublishModel(CoordinatorCommand, frozen=True):
    """Publish the current weights on the board under this name.

    If triggers contain the changes of the weights and `whole` is False, nothing is published.
    """

    model: ModelId
    whole: bool = True


class PostTrigger(CoordinatorCommand, frozen=True):
    """Post a trigger on the board, in a new stream if `moves` is True."""

    trigger: UpdateTrigger
    moves: bool = False


class PutLeaderStatus(CoordinatorCommand, frozen=True):
    """Put the leader's status on the board."""

    leader_status: LeaderStatus


class AddGradient(CoordinatorCommand, frozen=True):
    """Add the vector of a counted gradient to its round's sum, unless it stayed in its worker."""

    round: int
    gradient: Gradient | GradientReady


class Apply(CoordinatorCommand, frozen=True):
    """Take one optimizer step with the sum of a round, then drop the sum."""

    round: int
    update: UpdateApplied
    # None for the trainer's own rate.
    learning_rate: float | None
    # True to report the squared norm of the sum (`Summed`).
    measured: bool = False


class DiscardSum(CoordinatorCommand, frozen=True):
    """Drop the sum of a round that will not be applied."""

    round: int


class CopyWeights(CoordinatorCommand, frozen=True):
    """Copy the current weights and optimizer state for the next published snapshot."""


class PublishSnapshot(CoordinatorCommand, frozen=True):
    """Publish the copy on the board and, if it is a checkpoint, in object storage.

    Earlier dead letters must have been delivered, because no later leader writes them again.
    """

    snapshot: Snapshot
    checkpoint: bool
    # True to store a checkpoint also in a form that members can copy, and report that.
    state: bool = False


class DeadLetterRecords(CoordinatorCommand, frozen=True):
    """Write records of accepted spans that did not decode to their dead-letter topics."""

    skipped: tuple[Skipped, ...]
    # Kafka's topic ids, as far as they are known.
    topic_ids: dict[Partition, str] = {}


class DeadLetterBatch(CoordinatorCommand, frozen=True):
    """Write the address of a quarantined batch to the dead-letter topics."""

    record: Quarantined
    # Kafka's topic ids, as far as they are known.
    topic_ids: dict[Partition, str] = {}


class ReadHeartbeats(CoordinatorCommand, frozen=True):
    """Read the workers' heartbeats, and report."""


class Drop(CoordinatorCommand, frozen=True):
    """Count and log a reply that does not count."""

    reply: Reply
    reason: str


class Hold(CoordinatorCommand, frozen=True):
    """Report that the job is held until a person resumes it."""

    # Description of the problem and what to do, one line.
    reason: str
    # Details for a programmer, such as a traceback.
    detail: str = ""


class AwaitCheckpoint(CoordinatorCommand, frozen=True):
    """Report that the job waits for a checkpoint. This process searches again by itself."""

    # The missing checkpoint, the place of the search, its result, and what to do.
    reason: str


class Finish(CoordinatorCommand, frozen=True):
    """Report that the job has reached its end and its last checkpoint is published.

    This may be outdated if the owner has changed the job since `revision`, or no longer wants to
    stop it.
    """

    reason: str
    revision: int = 0
    # True if the owner stopped the job.
    stopped: bool = False


class StepDown(CoordinatorCommand, frozen=True):
    """Report that this process no longer leads, and drop the leader's state."""

    reason: str
    # Version to which the job falls back, because no member holds a newer one.
    fallback: int | None = None
