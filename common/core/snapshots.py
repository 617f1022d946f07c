"""What a leader must know to go on where another stopped, and which snapshot of several is the one.

A snapshot is a copy made at an update boundary and published only after its leader has read its own
audit records up to that point back as valid, so it never runs ahead of the audit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from common.core.history import History
from common.core.messages import (
    GENESIS,
    AttemptId,
    AuditRecord,
    Batch,
    LogPositions,
    ModelId,
    Opened,
    Openings,
    Positions,
    Synchrony,
    UpdateApplied,
)
from common.core.spans import LogPosition, Partition


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """The protocol's part of a snapshot; weights and optimizer state travel beside it."""

    by: int  # epoch of the leader that wrote it, -1 for the genesis
    made: ModelId  # the last update that its weights contain
    updates_position: int  # the updates topic up to here is in it
    control_position: int  # likewise the control topic
    claimed: Positions
    waiting: tuple[Batch, ...] = ()  # accepted, and in no update that its weights contain
    failure_counts: dict[int, int] = {}
    returned: tuple[int, ...] = ()  # batches put back once by `on_missing: proceed`
    # By earlier leaders, above `control_position`: see `Leader`.
    quarantined: tuple[Batch, ...] = ()
    samples: int = 0  # trained since the job began
    losses: tuple[float, ...] = ()  # of the last updates, mean per sample each, oldest first
    # Quarantined batches that an operator may still take back.
    poison: tuple[Batch, ...] = ()
    number: int = 0  # of its leader's newest record below `updates_position`
    opened: Openings = {}  # of the ledger, below `control_position`
    known: LogPositions = {}  # likewise
    after_loss: int = 0  # wishes to go on after a loss that Leads below it have carried out
    # What the topics were below these positions: see `LogPosition`.
    updates_topic_id: str = ""
    updates_epoch: int = -1
    control_topic_id: str = ""
    control_epoch: int = -1
    synchrony: Synchrony | None = None  # of the last update, where that names one
    # Updates of the job's own K that it has come to. None: as many as J.
    equivalent: float | None = None
    # Where members hold the weights, this may be of any age: see `roll_forward`. The attempt that
    # made the last update, and what updates used at or above `control_position`.
    attempt: AttemptId | UnsetType = UNSET
    used: tuple[Batch, ...] | UnsetType = UNSET
    # Versions that are in storage, where members copy them from.
    stored: tuple[ModelId, ...] | UnsetType = UNSET
    slices: int | UnsetType = UNSET  # as its leader's `Lead` says
    made_at_s: float = 0.0  # seconds since 1970, when `made` was; 0: not known
    digest: str = ""  # of the model's layout: see `UpdateTrigger`; empty: not known

    @property
    def progress(self) -> float:
        """Updates made, as its owner counts them: see `UpdateApplied.progress`."""
        return float(self.made.version) if self.equivalent is None else self.equivalent

    @property
    def in_storage(self) -> bool:
        """Whether workers find its weights and optimizer state whoever holds them otherwise."""
        return self.made == GENESIS or self.made in (self.stored or ())

    @property
    def has_weights(self) -> bool:
        """Whether they can be taken in hand: not where members alone hold them."""
        return self.slices is UNSET or self.in_storage

    @property
    def name(self) -> ModelId:
        """Name of the checkpoint that is made of it: its writer's epoch, and its version."""
        return ModelId(self.by, self.made.version)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Later is better: by leader, then by version, then by how much audit it has seen."""
        return (self.by, self.made.version, self.updates_position)

    @property
    def updates(self) -> LogPosition:
        """`updates_position`, and what is known of the updates topic below."""
        return LogPosition(self.updates_position, self.updates_topic_id, self.updates_epoch)

    @property
    def control(self) -> LogPosition:
        """Likewise of the control topic."""
        return LogPosition(self.control_position, self.control_topic_id, self.control_epoch)

    @property
    def loss(self) -> float | None:
        """Mean prequential loss of the last updates, None before the first."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def settled(self) -> Positions:
        """Positions below which every record is settled: what this snapshot covers."""
        frontier = dict(self.claimed)
        for batch in self.waiting:
            for span in batch.address:
                frontier[span.place] = min(frontier[span.place], span.start)
        return frontier


def genesis(first: Positions, known: Mapping[Partition, LogPosition] | None = None) -> Snapshot:
    """The snapshot that can always be made again, from what the job was submitted with.

    Args:
        first: Where every partition begins.
        known: What was known of the logs below, when that was resolved.
    """
    known = dict(known or {})
    opened: Openings = {
        partition: (Opened(partition, None, 0, at.topic_id, at.offset, at.epoch),)
        for partition, at in known.items()
        if at.topic_id
    }
    return Snapshot(-1, GENESIS, 0, 0, dict(first), opened=opened, known=known)


def choose(
    snapshots: Iterable[Snapshot], updates: Sequence[tuple[int, AuditRecord | None]]
) -> tuple[Snapshot, History] | None:
    """Find the best snapshot that no later Lead took back, and the history from it on.

    Args:
        snapshots: Some that could be read.
        updates: The updates topic, offsets ascending, from their lowest `updates_position` on.

    Returns:
        None if not even one holds; the genesis always does.
    """
    for snapshot in sorted(snapshots, key=lambda s: s.rank, reverse=True):
        history = History(
            *(snapshot.by, snapshot.made, snapshot.updates, snapshot.poison),
            *(snapshot.number, snapshot.after_loss, snapshot.slices),
        )
        for offset, record in updates:
            if offset >= snapshot.updates_position:
                history.feed(offset, record)
        # A Lead may have counted whose base is not in the topic any more: then version 0 alone can
        # be proven, and the next Lead takes back all that came since.
        if not history.base_lost or snapshot.by < 0:
            return snapshot, history
    return None


def roll_forward(
    snapshot: Snapshot,
    history: History,
    updates: Iterable[tuple[int, AuditRecord | None]],
    limit: ModelId | None = None,
) -> Snapshot:
    """What a leader must know to go on from the newest update, whose weights members hold.

    Args:
        snapshot: From which the history was read on.
        history: Of all these records.
        updates: The updates topic from there on.
        limit: The newest whose weights are held; None: the newest there is.
    """
    records = {
        ModelId(record.epoch, record.version): record
        for _, record in updates
        if isinstance(record, UpdateApplied)
    }
    versions = history.path[1:]
    if limit in versions:
        versions = versions[: versions.index(limit) + 1]
    elif limit == snapshot.made:
        versions = ()
    path = [records[model] for model in versions]
    if not path:
        return snapshot
    last = path[-1]
    used = {batch.offset: batch for record in path for batch in record.batches}
    return msgspec.structs.replace(
        snapshot,
        made=ModelId(last.epoch, last.version),
        waiting=tuple(batch for batch in snapshot.waiting if batch.offset not in used),
        failure_counts={o: n for o, n in snapshot.failure_counts.items() if o not in used},
        returned=tuple(offset for offset in snapshot.returned if offset not in used),
        samples=snapshot.samples + sum(record.samples for record in path),
        losses=snapshot.losses + tuple(record.loss for record in path),
        synchrony=last.synchrony or None,
        equivalent=None if last.equivalent is UNSET else last.equivalent,
        made_at_s=0.0,
        attempt=last.by,
        used=(*(snapshot.used or ()), *used.values()),
    )
