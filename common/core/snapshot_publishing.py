"""When to take a snapshot, and when it may be seen: not before its audit is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from common.core.commands import AppendAudit, CopyWeights, PublishSnapshot

if TYPE_CHECKING:
    from common.core.history import History
    from common.core.messages import Batch, Quarantined, UpdateApplied
    from common.core.settings import CoordinatorSettings
    from common.core.snapshots import Snapshot


# Looks at the streams that Kafka answered, after which an own record that was not read back is
# taken for lost; one that is only late does no harm to who leads next.
LOOKS = 15
_NEARLY = 1e-6  # of an update: ten tenths may come to a little less than one


def is_offered(before: float, after: float, every_updates: int) -> bool:
    """Whether a version is offered: one of each so many updates, however many versions those are.

    Args:
        before: `UpdateApplied.progress` of the version before.
        after: Of this one.
        every_updates: Of the job's evaluation.
    """
    return (after + _NEARLY) // every_updates > (before + _NEARLY) // every_updates


@dataclass(slots=True)
class _LastSnapshot:
    """Where the job stood when a kind of snapshot was last taken."""

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
        """Whether the job has moved since, and for so long or by so many updates."""
        if progress == self.progress and control_position == self.control_position:
            return False
        if every_s is not None and now - self.at >= every_s:
            return True
        return every_updates is not None and progress - self.progress >= every_updates


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy that waits until the audit up to it has been read back."""

    snapshot: Snapshot
    checkpoint: bool
    after: int  # own audit records that must be read back first


class SnapshotSchedule:
    """A leader's audit records on their way, and its snapshots.

    Args:
        snapshot: Where this leader began.
        history: What is read of the updates topic, its Lead record included; somebody feeds it.
    """

    def __init__(
        self, settings: CoordinatorSettings, snapshot: Snapshot, history: History, now: float
    ) -> None:
        self._settings = settings
        self._history = history
        self._appended = 0
        # Position of each partition below which the newest checkpoint has settled everything.
        self.settled = snapshot.settled
        self._looked = (0, 0)  # the last own record that was read back at a look; looks since
        self._pending: _Pending | None = None
        progress, position = snapshot.progress, snapshot.control_position
        self._hot = _LastSnapshot(now, progress, position)
        self._checkpoint = _LastSnapshot(now, progress, position)

    @property
    def unread(self) -> int:
        """Own audit records that have not been read back yet."""
        return self._appended - self._history.number

    def look(self) -> None:
        """Kafka was asked for something else, and answered."""
        number, looks = self._history.number, self._looked[1] + 1
        waits = self.unread > 0 and number == self._looked[0]
        self._looked = number, looks if waits else 0

    @property
    def lost(self) -> bool:
        """Whether an own audit record was lost with the topic's tail, and none came behind it."""
        return self._looked[1] >= LOOKS

    @property
    def pending(self) -> bool:
        """Whether a copy waits to be published."""
        return self._pending is not None

    def append(self, record: UpdateApplied | Quarantined) -> AppendAudit:
        """Number an audit record, which is on its way now."""
        self._appended += 1
        return AppendAudit(msgspec.structs.replace(record, number=self._appended))

    def requeue(self, batch: Batch) -> None:
        """A batch was taken out of quarantine: in a copy that is published later it waits, too.

        The record that says so will be below that snapshot's position, so nobody reads it again.
        """
        pending = self._pending
        if pending is None:
            return
        copied = pending.snapshot
        if batch.offset < copied.control_position:
            waiting = (*copied.waiting, batch)
            ordered = tuple(sorted(waiting, key=lambda each: each.offset))
            copied = msgspec.structs.replace(copied, waiting=ordered)
        else:  # its claim is replayed after a takeover, and then it must not be left out
            rest = tuple(q for q in copied.quarantined if q != batch)
            copied = msgspec.structs.replace(copied, quarantined=rest)
        self._pending = _Pending(copied, pending.checkpoint, pending.after)

    def due(self) -> float | None:
        """When the next snapshot is due by time alone."""
        if self._pending is not None:
            return None
        return min((previous.at + every_s for previous, every_s in self._clocks()), default=None)

    def consider(
        self, now: float, progress: float, control_position: int
    ) -> Literal["hot", "checkpoint"] | None:
        """Which kind of snapshot is due, if any; one that would say nothing new is not."""
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
                previous.at = now  # due, but nothing is new: look again one interval later
        return None

    def take(
        self, snapshot: Snapshot, now: float, *, checkpoint: bool
    ) -> tuple[CopyWeights | PublishSnapshot, ...]:
        """Take a snapshot now; one that was pending is replaced by it, and its purpose kept."""
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
        """Publish what waited for records that were read back by now."""
        pending = self._pending
        if pending is None or self._history.number < pending.after:
            return ()
        self._pending = None
        # Exactly here, neither earlier nor later, the history's head is what the weights contain.
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
