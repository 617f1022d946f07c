"""Snapshots: the state that a new leader continues from, and the choice of the best one.

A snapshot is a copy made at an update boundary. It is published only after its leader has read its
own audit records up to that point back as valid, so it is never ahead of the audit.
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
    """The protocol's part of a snapshot. Weights and optimizer state travel beside it."""

    # Epoch of the leader that wrote it. -1 for the genesis.
    by: int
    # The last update that its weights contain.
    made: ModelId
    # Offset in the updates topic up to which records are included.
    updates_position: int
    # Offset in the control topic up to which records are included.
    control_position: int
    claimed: Positions
    # Accepted batches in no update that the weights contain.
    waiting: tuple[Batch, ...] = ()
    failure_counts: dict[int, int] = {}
    # Batches put back once by `on_missing: proceed`.
    returned: tuple[int, ...] = ()
    # Batches quarantined by earlier leaders at or above `control_position`, see `ReplayFilter`.
    quarantined: tuple[Batch, ...] = ()
    # Number of samples trained since the job began.
    samples: int = 0
    # Mean loss per sample of the last updates, oldest first.
    losses: tuple[float, ...] = ()
    # Quarantined batches that an operator may still requeue.
    poison: tuple[Batch, ...] = ()
    # Number of the leader's newest record below `updates_position`.
    number: int = 0
    # State of the ledger at `control_position`.
    opened: Openings = {}
    known: LogPositions = {}
    # Number of the owner's requests to resume after a loss that Leads have carried out.
    after_loss: int = 0
    # Topic ids and leader epochs at these positions, see `LogPosition`.
    updates_topic_id: str = ""
    updates_epoch: int = -1
    control_topic_id: str = ""
    control_epoch: int = -1
    # Synchrony of the last update, if the update names one.
    synchrony: Synchrony | None = None
    # Progress in updates of the job's own K. None if it equals J.
    equivalent: float | None = None
    # If members hold the weights, a snapshot may be of any age, see `roll_forward`. `attempt` made
    # the last update, and `used` are the batches of updates at or above `control_position`.
    attempt: AttemptId | UnsetType = UNSET
    used: tuple[Batch, ...] | UnsetType = UNSET
    # Versions in storage, which members can copy.
    stored: tuple[ModelId, ...] | UnsetType = UNSET
    # Layout of the weights, as in the leader's `Lead`.
    slices: int | UnsetType = UNSET
    # Time of `made` in seconds since 1970. 0 if unknown.
    made_at_s: float = 0.0
    # Digest of the model's layout, see `UpdateTrigger`. Empty if unknown.
    digest: str = ""

    @property
    def progress(self) -> float:
        """Progress in updates of the job's own K, see `UpdateApplied.progress`."""
        return float(self.made.version) if self.equivalent is None else self.equivalent

    @property
    def in_storage(self) -> bool:
        """True if workers can load its weights and optimizer state without a holder."""
        return self.made == GENESIS or self.made in (self.stored or ())

    @property
    def has_weights(self) -> bool:
        """True if a coordinator can load the weights, because not only members hold them."""
        return self.slices is UNSET or self.in_storage

    @property
    def name(self) -> ModelId:
        """Name of its checkpoint: the writer's epoch and the version."""
        return ModelId(self.by, self.made.version)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Rank by leader, then by version, then by updates position. Higher is better."""
        return (self.by, self.made.version, self.updates_position)

    @property
    def updates(self) -> LogPosition:
        """`updates_position` with what is known of the updates topic below."""
        return LogPosition(self.updates_position, self.updates_topic_id, self.updates_epoch)

    @property
    def control(self) -> LogPosition:
        """`control_position` with what is known of the control topic below."""
        return LogPosition(self.control_position, self.control_topic_id, self.control_epoch)

    @property
    def loss(self) -> float | None:
        """Mean prequential loss of the last updates. None before the first."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def settled(self) -> Positions:
        """Positions below which every record is settled by this snapshot."""
        frontier = dict(self.claimed)
        for batch in self.waiting:
            for span in batch.address:
                frontier[span.place] = min(frontier[span.place], span.start)
        return frontier


def genesis(first: Positions, known: Mapping[Partition, LogPosition] | None = None) -> Snapshot:
    """Return the snapshot of version 0, which can always be rebuilt from the submission.

    Args:
        first: Start of every partition.
        known: Positions in the logs at the time of the submission.
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
    """Return the best snapshot that no later Lead took back, with the history from it on.

    Args:
        snapshots: Readable snapshots.
        updates: The updates topic from their lowest `updates_position` on, offsets ascending.

    Returns:
        None if every snapshot was taken back, which cannot happen to the genesis.
    """
    for snapshot in sorted(snapshots, key=lambda s: s.rank, reverse=True):
        history = History(
            *(snapshot.by, snapshot.made, snapshot.updates, snapshot.poison),
            *(snapshot.number, snapshot.after_loss, snapshot.slices),
        )
        for offset, record in updates:
            if offset >= snapshot.updates_position:
                history.feed(offset, record)
        # A Lead that counts may name a base that is no longer in the topic. Then only version 0 can
        # be proven, and the next Lead takes back everything since.
        if not history.base_lost or snapshot.by < 0:
            return snapshot, history
    return None


def roll_forward(
    snapshot: Snapshot,
    history: History,
    updates: Iterable[tuple[int, AuditRecord | None]],
    limit: ModelId | None = None,
) -> Snapshot:
    """Return the state at the newest update, whose weights members hold.

    Args:
        snapshot: The snapshot that the history began with.
        history: The history of all these records.
        updates: The updates topic from the snapshot on.
        limit: Newest version whose weights are held. None for the newest update.
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
