"""What happens to the state machines: facts that a shell observed, handed to `on(event, now)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.core.batching import Run
    from common.core.messages import AuditRecord, Claim, Reply, Standing, WorkerId
    from common.core.snapshots import Snapshot
    from common.core.spans import Partition

Wanted: TypeAlias = Literal["running", "paused", "stopped"]
Source: TypeAlias = Literal["hot", "all", "genesis"]  # of snapshots: board; and storage; the job


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened, but `due()` has come."""


# --- a worker's stream side ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assigned:
    """The group gave these partitions to this member; they stay silent until placed."""

    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class Revoked:
    """The group took these partitions away, with or without asking."""

    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Records of one partition were read and decoded."""

    run: Run


@dataclass(frozen=True, slots=True)
class FellBehind:
    """A partition's log begins above the position: retention deleted records that nobody read."""

    partition: Partition
    start: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The indicator with this number stands in the control topic at this offset."""

    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class StandingSeen:
    """What the board says of the leader's standing; None where there is none."""

    standing: Standing | None


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """A trigger was heard: the update before it is applied, and the standing will say so."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """This machine will be gone soon."""


WorkerEvent: TypeAlias = (
    Tick
    | Assigned
    | Revoked
    | Decoded
    | FellBehind
    | Delivered
    | StandingSeen
    | RoundBegan
    | Leaving
)

# --- the coordinator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """Whether this process holds the lease now."""

    held: bool


@dataclass(frozen=True, slots=True)
class SnapshotsFound:
    """All snapshots of a source that could be read, and what the updates topic says after them."""

    source: Source
    snapshots: tuple[Snapshot, ...]
    updates: tuple[tuple[int, AuditRecord | None], ...]  # from the lowest of them on
    end: int  # of the updates topic; 0: nobody ever led


@dataclass(frozen=True, slots=True)
class SnapshotRestored:
    """The weights of the snapshot that was asked for are in hand."""


@dataclass(frozen=True, slots=True)
class SnapshotTorn:
    """They cannot be read: another snapshot must do."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class UpdatesRead:
    """Further records of the updates topic, by offset; None for one that does not parse."""

    records: tuple[tuple[int, AuditRecord | None], ...]


@dataclass(frozen=True, slots=True)
class ControlRead:
    """Further records of the control topic, by offset; None for one that does not parse."""

    records: tuple[tuple[int, Claim | None], ...]


@dataclass(frozen=True, slots=True)
class RepliesRead:
    """What workers sent, well-formed: vectors of the right length, all finite."""

    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """Every worker with a valid beat, and its status."""

    statuses: Mapping[WorkerId, str]


@dataclass(frozen=True, slots=True)
class BoardWiped:
    """The board no longer has what this leader put there: Redis came back empty."""


@dataclass(frozen=True, slots=True)
class WantedChanged:
    """What the job's owner wants of it now."""

    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that no machine may decide alone: the job must be held."""

    reason: str


CoordinatorEvent: TypeAlias = (
    Tick
    | LeaseAnswered
    | SnapshotsFound
    | SnapshotRestored
    | SnapshotTorn
    | UpdatesRead
    | ControlRead
    | RepliesRead
    | WorkersSeen
    | BoardWiped
    | WantedChanged
    | Trouble
)
