"""What happens to the state machines: facts that a shell observed, handed to `on(event, now)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from common.core.batching import Run
    from common.core.liveness import Heartbeat
    from common.core.losses import Parted, ReadFrom
    from common.core.messages import (
        AuditRecord,
        ControlRecord,
        LeaderStatus,
        ModelId,
        Reply,
        Unsettled,
        WorkerId,
    )
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot
    from common.core.spans import Partition

Wanted: TypeAlias = Literal["running", "paused", "stopped"]
Source: TypeAlias = Literal["hot", "all", "genesis"]  # of snapshots: board; and storage; the job


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Nothing happened, but `due()` has come.

    A tick judges what did not happen in time, so a shell hands in all that it has heard first.
    """


# --- a worker's stream side ------------------------------------------------------------------


class Assigned(msgspec.Struct, frozen=True, gc=False):
    """The group gave these partitions to this member; they stay silent until placed."""

    partitions: tuple[Partition, ...]


class Revoked(msgspec.Struct, frozen=True, gc=False):
    """The group took these partitions away, with or without asking."""

    partitions: tuple[Partition, ...]


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """Records of one partition were read and decoded."""

    run: Run


class FellBehind(msgspec.Struct, frozen=True, gc=False):
    """A partition's log begins above the position: retention deleted records that nobody read."""

    partition: Partition
    start: int


class Truncated(msgspec.Struct, frozen=True, gc=False):
    """A partition's log is not any more the one that its place knows; nothing is read of it."""

    partition: Partition
    recreated: bool  # its topic was deleted and created anew; else it lost its last records


class RecordBelow(msgspec.Struct, frozen=True, gc=False):
    """A partition gave a record below its position, above all that was known of the log."""

    partition: Partition
    epoch: int  # its leader epoch; -1: not known


class EndReached(msgspec.Struct, frozen=True, gc=False):
    """A partition's log ends at `position`, above its last record, and all records were decoded."""

    partition: Partition
    position: int


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """The indicator with this number stands in the control topic at this offset.

    Or below it, where Kafka has not said at which: then it is decided once all up to there is.
    """

    number: int
    offset: int


class LeaderStatusSeen(msgspec.Struct, frozen=True, gc=False):
    """What the board says of the leader's status; None where there is none."""

    leader_status: LeaderStatus | None


class RoundBegan(msgspec.Struct, frozen=True, gc=False):
    """A trigger was heard: the update before it is applied, which may give room to read."""

    epoch: int = -1  # of the leader that posted it
    unsettled: Unsettled | None = None  # as the trigger says


class SizesChanged(msgspec.Struct, frozen=True, gc=False):
    """The job's owner changed b, or K and with it the bound."""

    batch_size: int  # b
    bound: int  # batches announced and not settled
    group_size: int = 1  # K


class Leaving(msgspec.Struct, frozen=True, gc=False):
    """This machine will be gone soon."""


WorkerEvent: TypeAlias = (
    Tick
    | Assigned
    | Revoked
    | Decoded
    | FellBehind
    | Truncated
    | RecordBelow
    | EndReached
    | Delivered
    | LeaderStatusSeen
    | RoundBegan
    | SizesChanged
    | Leaving
)

# --- the coordinator -------------------------------------------------------------------------


class LeaseAnswered(msgspec.Struct, frozen=True, gc=False):
    """Whether this process holds the lease now."""

    held: bool


class SnapshotsFound(msgspec.Struct, frozen=True, gc=False):
    """All snapshots of a source that could be read, and what the updates topic says after them.

    Of hot ones that are covered it is the best alone: see `lost`.
    """

    source: Source
    snapshots: tuple[Snapshot, ...]
    updates: tuple[tuple[int, AuditRecord | None], ...]  # from the lowest of them that is covered
    end: int  # of the updates topic
    # By rank, of snapshots that contain records which the control or the updates topic has lost:
    # which topic, and how far it reaches. All others are covered by both topics.
    lost: Mapping[tuple[int, int, int], str] = {}
    # Kafka's ids of the topics that were asked; empty: not known.
    control_topic_id: str = ""
    updates_topic_id: str = ""
    unreadable: str = ""  # of the genesis: why no checkpoint is better, though there are some
    # If the source is "all": where checkpoints are searched, and what was found there.
    storage: str = ""
    # True if storage gave no list: it did not answer, or the answer was not a list.
    storage_failed: bool = False
    # By name, why a checkpoint that storage lists cannot be read.
    torn: Mapping[ModelId, str] = {}


class SnapshotRestored(msgspec.Struct, frozen=True, gc=False):
    """The weights of the snapshot that was asked for are in hand."""

    number: int  # `unused_number`: the epoch, should this process come to lead
    digest: str = ""  # of the model's layout; empty where members hold the weights


class LeadDelivered(msgspec.Struct, frozen=True, gc=False):
    """This process's Lead record stands in the updates topic: it will be read soon."""

    candidate: str  # as the record has it: one of an earlier candidacy says nothing of this one


class AttemptFailed(msgspec.Struct, frozen=True, gc=False):
    """What this process needs in order to lead failed: it steps down, and may try afresh.

    Snapshots could not be looked for, or weights fetched; or a record for the updates topic was not
    appended, or nobody knows. The shell owes this, or what the command asked for, to each
    `FindSnapshots`, to each `RestoreSnapshot` and to each `AppendAudit`.
    """

    reason: str


class SnapshotTorn(msgspec.Struct, frozen=True, gc=False):
    """They cannot be read: another snapshot must do."""

    snapshot: Snapshot


class UpdatesRead(msgspec.Struct, frozen=True, gc=False):
    """Further records of the updates topic, by offset; None for one that does not parse."""

    records: tuple[tuple[int, AuditRecord | None], ...]
    epoch: int = -1  # Kafka's leader epoch of all of them; -1: not known


class ControlRead(msgspec.Struct, frozen=True, gc=False):
    """Further records of the control topic, by offset; None for one that does not parse."""

    records: tuple[tuple[int, ControlRecord | None], ...]
    epoch: int = -1  # Kafka's leader epoch of all of them; -1: not known


class StreamsSeen(msgspec.Struct, frozen=True, gc=False):
    """Which partitions the job's streams have now; told again and again to whoever leads."""

    partitions: Mapping[Partition, str]  # Kafka's id of its topic; empty: not known
    number: int  # `unused_number`, for generations that begin with what is seen
    parted: Mapping[
        Partition, Parted
    ] = {}  # for sure not what they were, as the leader's status had them
    sure: bool = True  # whether the others are: of none it is to be seen whether it stays so
    control_end: int = 0  # of the control topic, then: who has not decided all of it knows less


class RepliesRead(msgspec.Struct, frozen=True, gc=False):
    """What workers sent, well-formed: vectors of the right length, all finite."""

    replies: tuple[Reply, ...]


class StateStored(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint is in storage, and as members copy it: see `PublishSnapshot.state`."""

    made: ModelId


class CheckpointVerified(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint of this process was written and read back complete."""

    name: ModelId


class Summed(msgspec.Struct, frozen=True, gc=False):
    """How large the sum of gradients was that made a model: of an `Apply` that asks for it."""

    model: ModelId
    square: float  # |gradient summed over all samples|^2


class WorkersSeen(msgspec.Struct, frozen=True, gc=False):
    """Every worker with a valid beat, and what that says."""

    beats: Mapping[WorkerId, Heartbeat]


class BoardWiped(msgspec.Struct, frozen=True, gc=False):
    """The board no longer has what this leader put there: Redis came back empty."""


class OrdersLost(msgspec.Struct, frozen=True, gc=False):
    """The board works again, after a model or a trigger could not be put there."""


class WantedChanged(msgspec.Struct, frozen=True, gc=False):
    """What the job's owner wants of it now."""

    wanted: Wanted
    after_loss: int = 0  # how often it was told to go on although Kafka lost records
    from_start: bool = False  # the last time, if need be with version 0
    read_from: ReadFrom = ""  # likewise, topics that were created anew


class SettingsChanged(msgspec.Struct, frozen=True, gc=False):
    """The job's owner changed it: K, the deadline, the learning rate; a new revision."""

    settings: CoordinatorSettings


class Trouble(msgspec.Struct, frozen=True, gc=False):
    """Something that no machine may decide alone: the job must be held."""

    reason: str
    detail: str = ""  # for a programmer: a traceback


CoordinatorEvent: TypeAlias = (
    Tick
    | LeaseAnswered
    | SnapshotsFound
    | SnapshotRestored
    | LeadDelivered
    | AttemptFailed
    | SnapshotTorn
    | UpdatesRead
    | ControlRead
    | StreamsSeen
    | RepliesRead
    | StateStored
    | CheckpointVerified
    | Summed
    | WorkersSeen
    | BoardWiped
    | OrdersLost
    | WantedChanged
    | SettingsChanged
    | Trouble
)
