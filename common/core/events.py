"""Events of a coordinator: facts that a shell observed and passes to `on(event, now)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from common.core.messages import Tick as Tick  # noqa: PLC0414 -- re-exported

if TYPE_CHECKING:
    from common.core.liveness import Heartbeat
    from common.core.losses import Divergence
    from common.core.messages import (
        AuditRecord,
        ControlRecord,
        ModelId,
        ReadFrom,
        Reply,
        Wanted,
        WorkerId,
    )
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot
    from common.core.spans import Partition

# Places of snapshots: the board, the board and storage, or the job itself.
Source: TypeAlias = Literal["hot", "all", "genesis"]


class CoordinatorFact(msgspec.Struct, frozen=True, gc=False):
    """Any event of a coordinator except a `Tick`."""


class LeaseAnswered(CoordinatorFact, frozen=True):
    """Answer to a request for the lease: True if this process holds it."""

    held: bool


class SnapshotsFound(CoordinatorFact, frozen=True):
    """The readable snapshots of a source, and the records of the updates topic after them.

    A snapshot is covered if both topics still have all records that it contains. Of the covered
    hot snapshots, only the best one is included.
    """

    source: Source
    snapshots: tuple[Snapshot, ...]
    # Starts at the lowest covered snapshot.
    updates: tuple[tuple[int, AuditRecord | None], ...]
    end: int  # end of the updates topic
    # Snapshots that are not covered, by rank, with a description of the loss.
    lost: Mapping[tuple[int, int, int], str] = {}
    # Kafka's ids of the topics that were checked. Empty if unknown.
    control_topic_id: str = ""
    updates_topic_id: str = ""
    # Only for the source "genesis": why none of the existing checkpoints can be used.
    unreadable: str = ""
    # Only for the source "all": where checkpoints are searched, and what was found there.
    storage: str = ""
    # True if storage did not answer, or not with a list.
    storage_failed: bool = False
    # Reason why a checkpoint in the list of the storage cannot be read, by name.
    torn: Mapping[ModelId, str] = {}


class SnapshotRestored(CoordinatorFact, frozen=True):
    """The weights of the requested snapshot are loaded."""

    # An `unused_number`, which becomes the epoch if this process leads.
    number: int
    # Digest of the model's layout. Empty if members hold the weights.
    digest: str = ""


class LeadDelivered(CoordinatorFact, frozen=True):
    """This process's Lead record is in the updates topic and will be read soon."""

    # Candidate in the record, which distinguishes this candidacy from earlier ones.
    candidate: str


class AttemptFailed(CoordinatorFact, frozen=True):
    """A step that this process needs to lead failed. It steps down and may try again.

    The search for snapshots or the loading of weights failed, or a record was not appended to the
    updates topic, or its fate is unknown. The shell must answer every `FindSnapshots`,
    `RestoreSnapshot` and `AppendAudit` by this event or the requested result.
    """

    reason: str


class SnapshotTorn(CoordinatorFact, frozen=True):
    """The weights of a snapshot cannot be read, so another one must be used."""

    snapshot: Snapshot


class UpdatesRead(CoordinatorFact, frozen=True):
    """The next records of the updates topic by offset, with None for one that does not parse."""

    records: tuple[tuple[int, AuditRecord | None], ...]
    # Kafka's leader epoch of all records. -1 if unknown.
    epoch: int = -1


class ControlRead(CoordinatorFact, frozen=True):
    """The next records of the control topic by offset, with None for one that does not parse."""

    records: tuple[tuple[int, ControlRecord | None], ...]
    # Kafka's leader epoch of all records. -1 if unknown.
    epoch: int = -1


class StreamsSeen(CoordinatorFact, frozen=True):
    """Current partitions of the job's streams, reported periodically to a leader."""

    # Kafka's topic id by partition. Empty if unknown.
    partitions: Mapping[Partition, str]
    # An `unused_number` for generations that begin as a result.
    number: int
    # Logs that have certainly diverged from the leader's status.
    diverged: Mapping[Partition, Divergence] = {}
    # True if the state of all other logs is certain, too.
    sure: bool = True
    # End of the control topic at that time. The leader must first decide all records below it.
    control_end: int = 0


class RepliesRead(CoordinatorFact, frozen=True):
    """Valid replies of workers: vectors have the right length and are finite."""

    replies: tuple[Reply, ...]


class StateStored(CoordinatorFact, frozen=True):
    """A checkpoint is in storage in a form that members can copy, see `PublishSnapshot.state`."""

    made: ModelId


class CheckpointVerified(CoordinatorFact, frozen=True):
    """A checkpoint of this process was written and read back complete."""

    name: ModelId


class Summed(CoordinatorFact, frozen=True):
    """Squared norm of the sum of gradients that made a model, requested by `Apply`."""

    model: ModelId
    square: float  # |gradient summed over all samples|^2


class WorkersSeen(CoordinatorFact, frozen=True):
    """All workers with a valid heartbeat, and its content."""

    beats: Mapping[WorkerId, Heartbeat]


class BoardWiped(CoordinatorFact, frozen=True):
    """Redis was wiped: the board no longer has what this leader put there."""


class OrdersLost(CoordinatorFact, frozen=True):
    """The board works again after a model or a trigger could not be put there."""


class WantedChanged(CoordinatorFact, frozen=True):
    """The owner's current requests for the job."""

    wanted: Wanted
    # Number of requests to resume although Kafka lost records.
    after_loss: int = 0
    # True if the last request permits a start from version 0.
    from_start: bool = False
    # Start in recreated topics, from the last request.
    read_from: ReadFrom = ""


class SettingsChanged(CoordinatorFact, frozen=True):
    """The owner changed K, the deadline or the learning rate of the job. The revision is new."""

    settings: CoordinatorSettings


class HoldRequired(CoordinatorFact, frozen=True):
    """The job must be held, because a person has to decide."""

    reason: str
    # Details for a programmer, such as a traceback.
    detail: str = ""


CoordinatorEvent: TypeAlias = CoordinatorFact | Tick
