"""The history of a job: a pure fold over the updates topic that decides which updates count.

Several processes may have believed that they lead, so their records interleave in the topic. This
fold alone decides who led when, which updates made the model and which batches are quarantined. The
coordinator, `doll audit` and a takeover all use it.

    record   Lead(-1) J=1    J=2    Lead(70) J=3    J=2
             epoch 70               base J=1 of 70  of 80
                                    epoch 80
    epoch    70       70     70     80       80     80
    path     -        1      1 2    1        1      1 2'     J=3 of epoch 70 comes too late: void

A Lead carries its epoch, a number that is never used again. Its offset would not do, because Kafka
reuses offsets after it loses acknowledged records. A leader numbers its updates and quarantines,
and only its next number counts. Records that it wrote after a lost one are therefore void, and so
are duplicates.

A quarantine outlives every Lead. An operator may end it (`Requeued`), or make it final before its
records are produced again (`Replayed`). The first of the two counts, and then the other does not.
Batches are compared by value: a record about a batch that is not quarantined has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from common.core.messages import (
    GENESIS,
    AuditRecord,
    Batch,
    CheckpointStored,
    Drifted,
    Evaluated,
    Lead,
    ModelId,
    Quarantined,
    Replayed,
    Requeued,
    UpdateApplied,
)
from common.core.spans import LogPosition


class History:
    """The fold. Feed it every record of the updates topic from a known point on, in order.

    Args:
        epoch: Epoch of the Lead in force at `position`, or -1.
        base: The last effective update at `position`, where this reader's knowledge begins.
        position: Offset or `LogPosition` of the next record.
        poison: Quarantined batches at `position` that may still be requeued.
        number: Number of the newest record of the leader in force that counts, or 0.
        after_loss: Number of the owner's requests to resume after a loss that Leads have carried
            out at `position`.
        slices: `Lead.slices` of the Lead in force.
    """

    def __init__(
        self,
        epoch: int = -1,
        base: ModelId = GENESIS,
        position: int | LogPosition = 0,
        poison: Iterable[Batch] = (),
        number: int = 0,
        after_loss: int = 0,
        slices: int | UnsetType = UNSET,
    ) -> None:
        # Public attributes are read-only for others. `slices` also describes the newest update,
        # because a Lead counts only if the new holders of the weights can have its base.
        self.after_loss = after_loss
        self.slices = slices
        # Epoch of the newest Lead that carried out a request to resume after a loss, or -1 if this
        # reader has seen none. Snapshots of earlier leaders that it ignored no longer matter.
        self.judged = -1
        self.epoch = epoch
        self.number = number
        # Position of the next record.
        self.log = LogPosition.of(position)
        # True if a Lead took back the update that this reader began with.
        self.base_lost = False
        self._path = [base]
        # Checkpoints that count, oldest first.
        self._checkpoints = list[ModelId]()
        self._quarantined = dict[int, Quarantined]()
        self._poison = {batch.offset: batch for batch in poison}
        self._requeued = dict[int, Batch]()

    @property
    def head(self) -> ModelId:
        """The newest effective update."""
        return self._path[-1]

    @property
    def checkpoint(self) -> ModelId | None:
        """Name of the newest stored checkpoint that no Lead has taken back, if any.

        Checkpoints that the topic names before this reader's first record are unknown. None of them
        is better than the snapshot that the reader began with, because a leader only adds updates.
        """
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def path(self) -> tuple[ModelId, ...]:
        """Effective updates, oldest first, beginning with this reader's base."""
        return tuple(self._path)

    @property
    def position(self) -> int:
        """Offset of the next record."""
        return self.log.offset

    @property
    def quarantined(self) -> dict[int, Quarantined]:
        """Copy of the quarantines in force that this reader has seen, by control offset."""
        return dict(self._quarantined)

    @property
    def poison(self) -> tuple[Batch, ...]:
        """Quarantined batches that an operator may requeue or replay, oldest quarantine first."""
        return tuple(self._poison.values())

    @property
    def requeued(self) -> dict[int, Batch]:
        """Copy of the requeued batches that this reader has seen, by control offset."""
        return dict(self._requeued)

    def feed(  # noqa: PLR0911 -- one line per record
        self, offset: int, record: AuditRecord | None, epoch: int = -1
    ) -> bool:
        """Fold the record at `offset`, and return True if it counts.

        Args:
            offset: Offset in the updates topic.
            record: The record, or None if it does not parse.
            epoch: Kafka's leader epoch of the record. -1 if unknown.

        Raises:
            ValueError: If `offset` was fed before.
        """
        if offset < self.position:
            raise ValueError(f"audit record {offset} comes after {self.position - 1} was fed")
        self.log = self.log._replace(offset=offset + 1, epoch=epoch)
        match record:
            case Lead():
                return self._lead(record)
            case UpdateApplied():
                return self._update(record)
            case Quarantined():
                return self._quarantine(record)
            case Requeued():
                return self._requeue(record.batch)
            case Replayed():
                return self._finalise(record.batch)
            case CheckpointStored():
                return self._store(record)
            case Evaluated() | Drifted() | None:
                # These records are no decisions.
                return False

    def forget_batch(self, offset: int) -> None:
        """Make the quarantine of the batch at this offset final, because its claim was lost.

        Other batches contain its records.
        """
        self._poison.pop(offset, None)

    def forget_before(self, version: int) -> None:
        """Drop updates and checkpoints older than `version`, except for the newest of each.

        Call it only if no later Lead with an older base concerns this reader.
        """
        for kept in (self._path, self._checkpoints):
            kept[:-1] = [each for each in kept[:-1] if each.version >= version]

    def _lead(self, lead: Lead) -> bool:
        if lead.after != self.epoch:
            # It names another Lead than the one in force: another candidate was faster.
            return False
        if lead.exact and lead.base != self.head:
            # The members hold a later update.
            return False
        while len(self._path) > 1 and self._path[-1].version > lead.base.version:
            self._path.pop()
        while self._checkpoints and self._checkpoints[-1].version > lead.base.version:
            self._checkpoints.pop()
        if self._path[-1] != lead.base:
            # The base is older than the update that this reader began with, or of another chain. So
            # the snapshot that the reader began with is void.
            self.base_lost = True
            self._path = [lead.base]
        self.epoch, self.number = lead.epoch, 0
        self.slices = lead.slices
        if lead.after_loss > self.after_loss:
            self.after_loss, self.judged = lead.after_loss, self.epoch
        return True

    def _is_next(self, record: UpdateApplied | Quarantined) -> bool:
        """True if the record is the next one of the leader in force."""
        return record.epoch == self.epoch and record.number in (0, self.number + 1)

    def _update(self, update: UpdateApplied) -> bool:
        if not self._is_next(update) or update.version != self.head.version + 1:
            return False
        self.number = update.number or self.number
        self._path.append(ModelId(update.epoch, update.version))
        return True

    def _quarantine(self, record: Quarantined) -> bool:
        offset = record.batch.offset
        if not self._is_next(record):
            return False
        self.number = record.number or self.number
        known = self._quarantined.get(offset)
        if record.batch in (known and known.batch, self._poison.get(offset)):
            # The batch is quarantined already, perhaps finally.
            return False
        self._quarantined[offset] = record
        self._requeued.pop(offset, None)
        # Any batch that is still here is another one, whose claim at this offset was lost.
        self._poison.pop(offset, None)
        if not record.expired:
            self._poison[offset] = record.batch
        return True

    def _store(self, record: CheckpointStored) -> bool:
        """Add a checkpoint if it is newer, and its leader and version are in force."""
        known = self.checkpoint
        if record.epoch != self.epoch or record.version > self.head.version:
            return False
        if known is not None and known >= record.name:
            return False
        self._checkpoints.append(record.name)
        return True

    def _requeue(self, batch: Batch) -> bool:
        if not self._finalise(batch):
            return False
        self._quarantined.pop(batch.offset, None)
        self._requeued[batch.offset] = batch
        return True

    def _finalise(self, batch: Batch) -> bool:
        """Make a quarantine final."""
        if self._poison.get(batch.offset) != batch:
            return False
        del self._poison[batch.offset]
        return True
