"""Schedule of snapshots. A snapshot is published only after its audit is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from common.core.commands import AppendAudit, CopyWeights, PublishSnapshot
from common.core.messages import GENESIS

if TYPE_CHECKING:
    from common.core.history import History
    from common.core.messages import Batch, Quarantined, UpdateApplied
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot


# Answered polls of the streams after which an unread own record counts as lost. A record
# that is only late does no harm to the next leader.
LOOKS = 15
# Tolerance of rounding errors in the progress: ten tenths may be slightly less than one.
_NEARLY = 1e-6


def is_offered(before: float, after: float, every_updates: int) -> bool:
    """Return True if a version is offered to evaluators: one per `every_updates` of progress.

    Args:
        before: `UpdateApplied.progress` of the version before.
        after: `UpdateApplied.progress` of this version.
        every_updates: Interval of the job's evaluations.
    """
    return (after + _NEARLY) // every_updates > (before + _NEARLY) // every_updates


@dataclass(slots=True)
class _LastSnapshot:
    """State of the job when a kind of snapshot was last taken."""

    at: float
    progress: float
    control_position: int

    def is_due(
        self,
        now: float,
        progress: float,
        control_position: int,
        every_s: float | None,
        every_updates: int | None,
    ) -> bool:
        """True if progress or control position has changed, and an interval has passed."""
        if progress == self.progress and control_position == self.control_position:
            return False
        if every_s is not None and now - self.at >= every_s:
            return True
        return every_updates is not None and progress - self.progress >= every_updates


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy that waits until the audit up to it is read back."""

    snapshot: Snapshot
    checkpoint: bool
    # Number of own audit records that must be read back first.
    after: int


class SnapshotSchedule:
    """A leader's unread audit records, and its snapshots.

    Args:
        snapshot: The snapshot that this leader started from.
        history: Fold of the updates topic, including its Lead record. The owner feeds it.
    """

    def __init__(
        self, settings: CoordinatorSettings, snapshot: Snapshot, history: History, now: float
    ) -> None:
        self._settings = settings
        self._history = history
        self._appended = 0
        # Positions below which the newest checkpoint has settled everything.
        self.settled = snapshot.settled
        # Number of the last record read back, and polls since then.
        self._looked = (0, 0)
        self._pending: _Pending | None = None
        progress, position = snapshot.progress, snapshot.control_position
        self._hot = _LastSnapshot(now, progress, position)
        # The version may only be on the board or held by members, and nothing may change any more.
        # So this leader takes one checkpoint, even without a change. Version 0 can be built again.
        saved = progress if snapshot.made == GENESIS else float("-inf")
        self._checkpoint = _LastSnapshot(now, saved, position)

    @property
    def unread(self) -> int:
        """Number of own audit records that are not read back yet."""
        return self._appended - self._history.number

    def look(self) -> None:
        """Record that Kafka answered a poll of the streams."""
        number, looks = self._history.number, self._looked[1] + 1
        waits = self.unread > 0 and number == self._looked[0]
        self._looked = number, looks if waits else 0

    @property
    def lost(self) -> bool:
        """True if an own audit record was probably lost with the tail of the topic."""
        return self._looked[1] >= LOOKS

    @property
    def pending(self) -> bool:
        """True if a copy waits to be published."""
        return self._pending is not None

    def append(self, record: UpdateApplied | Quarantined) -> AppendAudit:
        """Number an audit record and return the command that appends it."""
        self._appended += 1
        return AppendAudit(msgspec.structs.replace(record, number=self._appended))

    def requeue(self, batch: Batch) -> None:
        """Add a requeued batch to the pending copy.

        A leader that starts from the snapshot does not read the `Requeued` record, which is below
        the snapshot's position.
        """
        pending = self._pending
        if pending is None:
            return
        copied = pending.snapshot
        if batch.offset < copied.control_position:
            waiting = (*copied.waiting, batch)
            ordered = tuple(sorted(waiting, key=lambda each: each.offset))
            copied = msgspec.structs.replace(copied, waiting=ordered)
        # A takeover replays its claim, and must not ignore it.
        else:
            rest = tuple(q for q in copied.quarantined if q != batch)
            copied = msgspec.structs.replace(copied, quarantined=rest)
        self._pending = _Pending(copied, pending.checkpoint, pending.after)

    def due(self) -> float | None:
        """Return when the next snapshot is due by time alone."""
        if self._pending is not None:
            return None
        return min((previous.at + every_s for previous, every_s in self._clocks()), default=None)

    def consider(
        self, now: float, progress: float, control_position: int
    ) -> Literal["hot", "checkpoint"] | None:
        """Return the kind of snapshot that is due, or None.

        Without changes nothing is due, except one checkpoint of the version that the leader started
        from.
        """
        if self._pending is not None:
            return None
        settings, moved_to = self._settings, (now, progress, control_position)
        last = self._checkpoint
        every = settings.checkpoint_every_s, settings.checkpoint_every_updates
        records = control_position - last.control_position
        if last.is_due(*moved_to, *every) or records >= settings.checkpoint_every_control_records:
            return "checkpoint"
        if self._hot.is_due(*moved_to, settings.hot_every_s, settings.hot_every_updates):
            return "hot"
        for previous, every_s in self._clocks():
            if now >= previous.at + every_s:
                # Nothing has changed. Check again one interval later.
                previous.at = now
        return None

    def take(
        self, snapshot: Snapshot, now: float, *, checkpoint: bool
    ) -> tuple[CopyWeights | PublishSnapshot, ...]:
        """Take a snapshot now. It replaces a pending one, and is a checkpoint if that was one."""
        checkpoint = checkpoint or (self._pending is not None and self._pending.checkpoint)
        previous = _LastSnapshot(now, snapshot.progress, snapshot.control_position)
        self._hot = previous
        if checkpoint:
            self._checkpoint = _LastSnapshot(now, previous.progress, previous.control_position)
        self._pending = _Pending(snapshot, checkpoint, self._appended)
        return (CopyWeights(), *self.publish())

    def _clocks(self) -> list[tuple[_LastSnapshot, float]]:
        settings = self._settings
        every = (
            (self._hot, settings.hot_every_s),
            (self._checkpoint, settings.checkpoint_every_s),
        )
        return [(previous, every_s) for previous, every_s in every if every_s is not None]

    def publish(self) -> tuple[PublishSnapshot, ...]:
        """Publish the pending copy if its records were read back."""
        pending = self._pending
        if pending is None or self._history.number < pending.after:
            return ()
        self._pending = None
        # At this moment the history's head is exactly what the weights contain.
        log = self._history.log
        snapshot = msgspec.structs.replace(
            pending.snapshot,
            updates_position=log.offset,
            updates_topic_id=log.topic_id,
            updates_epoch=log.epoch,
            poison=self._history.poison,
            number=self._history.number,
            after_loss=self._history.after_loss,
        )
        return (PublishSnapshot(snapshot, pending.checkpoint),)
