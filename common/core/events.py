"""What happens to a coordinator: facts that a shell observed, handed to `on(event, now)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from common.core.messages import Tick as Tick  # noqa: PLC0414 -- an event of others, too

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

Source: TypeAlias = Literal["hot", "all", "genesis"]  # of snapshots: board; and storage; the job


class CoordinatorFact(msgspec.Struct, frozen=True, gc=False):
    """Any event of a coordinator but a `Tick`."""


class LeaseAnswered(CoordinatorFact, frozen=True):
    """Whether this process holds the lease now."""

    held: bool


class SnapshotsFound(CoordinatorFact, frozen=True):
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


class SnapshotRestored(CoordinatorFact, frozen=True):
    """The weights of the snapshot that was asked for are in hand."""

    number: int  # `unused_number`: the epoch, should this process come to lead
    digest: str = ""  # of the model's layout; empty where members hold the weights


class LeadDelivered(CoordinatorFact, frozen=True):
    """This process's Lead record stands in the updates topic: it will be read soon."""

    candidate: str  # as the record has it: one of an earlier candidacy says nothing of this one


class AttemptFailed(CoordinatorFact, frozen=True):
    """What this process needs in order to lead failed: it steps down, and may try afresh.

    Snapshots could not be looked for, or weights fetched; or a record for the updates topic was not
    appended, or nobody knows. The shell owes this, or what the command asked for, to each
    `FindSnapshots`, to each `RestoreSnapshot` and to each `AppendAudit`.
    """

    reason: str


class SnapshotTorn(CoordinatorFact, frozen=True):
    """They cannot be read: another snapshot must do."""

    snapshot: Snapshot


class UpdatesRead(CoordinatorFact, frozen=True):
    """Further records of the updates topic, by offset; None for one that does not parse."""

    records: tuple[tuple[int, AuditRecord | None], ...]
    epoch: int = -1  # Kafka's leader epoch of all of them; -1: not known


class ControlRead(CoordinatorFact, frozen=True):
    """Further records of the control topic, by offset; None for one that does not parse."""

    records: tuple[tuple[int, ControlRecord | None], ...]
    epoch: int = -1  # Kafka's leader epoch of all of them; -1: not known


class StreamsSeen(CoordinatorFact, frozen=True):
    """Which partitions the job's streams have now; told again and again to whoever leads."""

    partitions: Mapping[Partition, str]  # Kafka's id of its topic; empty: not known
    number: int  # `unused_number`, for generations that begin with what is seen
    # Logs that are for sure not what they were, as the leader's status had them.
    diverged: Mapping[Partition, Divergence] = {}
    sure: bool = True  # whether the others are: of none it is to be seen whether it stays so
    control_end: int = 0  # of the control topic, then: who has not decided all of it knows less


class RepliesRead(CoordinatorFact, frozen=True):
    """What workers sent, well-formed: vectors of the right length, all finite."""

    replies: tuple[Reply, ...]


class StateStored(CoordinatorFact, frozen=True):
    """A checkpoint is in storage, and as members copy it: see `PublishSnapshot.state`."""

    made: ModelId


class CheckpointVerified(CoordinatorFact, frozen=True):
    """A checkpoint of this process was written and read back complete."""

    name: ModelId


class Summed(CoordinatorFact, frozen=True):
    """How large the sum of gradients was that made a model: of an `Apply` that asks for it."""

    model: ModelId
    square: float  # |gradient summed over all samples|^2


class WorkersSeen(CoordinatorFact, frozen=True):
    """Every worker with a valid beat, and what that says."""

    beats: Mapping[WorkerId, Heartbeat]


class BoardWiped(CoordinatorFact, frozen=True):
    """The board no longer has what this leader put there: Redis came back empty."""


class OrdersLost(CoordinatorFact, frozen=True):
    """The board works again, after a model or a trigger could not be put there."""


class WantedChanged(CoordinatorFact, frozen=True):
    """What the job's owner wants of it now."""

    wanted: Wanted
    after_loss: int = 0  # how often it was told to go on although Kafka lost records
    from_start: bool = False  # the last time, if need be with version 0
    read_from: ReadFrom = ""  # likewise, topics that were created anew


class SettingsChanged(CoordinatorFact, frozen=True):
    """The job's owner changed it: K, the deadline, the learning rate; a new revision."""

    settings: CoordinatorSettings


class HoldRequired(CoordinatorFact, frozen=True):
    """Something that no machine may decide alone: the job must be held."""

    reason: str
    detail: str = ""  # for a programmer: a traceback


CoordinatorEvent: TypeAlias = CoordinatorFact | Tick
