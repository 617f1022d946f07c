"""Which updates count: a pure fold over the updates topic.

Several processes may have believed that they lead; their records interleave in the topic. This
fold, and nothing else, says who led when, which updates made the model and which batches are
quarantined. The coordinator, `doll audit` and a takeover all use it.

    record   Lead(-1) J=1    J=2    Lead(70) J=3    J=2
             epoch 70               base J=1 of 70  of 80
                                    epoch 80
    epoch    70       70     70     80       80     80
    path     -        1      1 2    1        1      1 2'     J=3 of epoch 70 comes too late: void

An epoch is a number that its Lead carries, and that is used once: offsets come again where Kafka
loses records that it had acknowledged. A leader numbers its updates and quarantines, and only its
next one counts: so what it wrote after a record that was lost is void, as is what comes twice.

A quarantine outlives every Lead. An operator may end it (`Requeued`), or make it final before its
records are produced anew (`Replayed`): of the two, what comes first counts, and then the other does
not. Batches are compared by value: a record about one that was not quarantined changes nothing.
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
    """The fold: feed it every record of the updates topic from a known point on, in order.

    Args:
        epoch: Of the Lead in force at `position`, -1 for none.
        base: The last effective update at `position`: where this reader's knowledge begins.
        position: Offset of the next record to feed, and what is known of the topic below.
        poison: Batches that are quarantined at `position` and may be taken back.
        number: Of the newest record that counts of the leader in force, 0 for none.
        after_loss: Wishes to go on after a loss that Leads have carried out at `position`.
        slices: Of the Lead in force: see `Lead.slices`.
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
        # Public attributes are to be read alone. A Lead counts only where whoever is to hold the
        # weights can have its base: so `slices` says that of the newest update, too.
        self.after_loss = after_loss
        self.slices = slices
        # Epoch of the newest Lead that carried a wish out; -1: none that this reader has read. What
        # it found of earlier leaders and passed over is of no concern any more.
        self.judged = -1
        self.epoch = epoch
        self.number = number
        self.log = LogPosition.of(position)  # of the next record, and what is known below it
        self.base_lost = False  # a Lead took back the update that this reader began with
        self._path = [base]
        self._checkpoints = list[ModelId]()  # that count, oldest first
        self._quarantined = dict[int, Quarantined]()
        self._poison = {batch.offset: batch for batch in poison}
        self._requeued = dict[int, Batch]()

    @property
    def head(self) -> ModelId:
        """The newest effective update."""
        return self._path[-1]

    @property
    def checkpoint(self) -> ModelId | None:
        """Name of the newest checkpoint in storage that no Lead has taken back, if there is one.

        A checkpoint that was named below the snapshot that a reader began with is not known, and
        not better than that snapshot: each leader only adds to what it began with.
        """
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def path(self) -> tuple[ModelId, ...]:
        """Effective updates, oldest first, beginning with the base of this reader."""
        return tuple(self._path)

    @property
    def position(self) -> int:
        """Offset of the next record to feed."""
        return self.log.offset

    @property
    def quarantined(self) -> dict[int, Quarantined]:
        """Batches that it saw quarantined, and that still are, by control offset; a copy."""
        return dict(self._quarantined)

    @property
    def poison(self) -> tuple[Batch, ...]:
        """Quarantined batches that an operator may take back or replay, oldest quarantine first."""
        return tuple(self._poison.values())

    @property
    def requeued(self) -> dict[int, Batch]:
        """Batches that it saw taken back, and not quarantined since, likewise; a copy."""
        return dict(self._requeued)

    def feed(  # noqa: PLR0911 -- one line per record
        self, offset: int, record: AuditRecord | None, epoch: int = -1
    ) -> bool:
        """Fold the record at `offset` (None: does not parse); True where it counts.

        Args:
            offset: In the updates topic.
            record: What stands there.
            epoch: Kafka's leader epoch of the record; -1: not known.

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
                return False  # no decision

    def forget_batch(self, offset: int) -> None:
        """Let nobody take back the batch at this control offset: its claim was lost.

        Its records are in other batches.
        """
        self._poison.pop(offset, None)

    def forget_before(self, version: int) -> None:
        """Drop updates and checkpoints older than `version`, but for the newest of each.

        Call it if no later Lead that concerns this reader has an older base.
        """
        for kept in (self._path, self._checkpoints):
            kept[:-1] = [each for each in kept[:-1] if each.version >= version]

    def _lead(self, lead: Lead) -> bool:
        if lead.after != self.epoch:
            return False  # it names another Lead than the one in force: somebody was faster
        if lead.exact and lead.base != self.head:
            return False  # an update came between: the members hold that one
        while len(self._path) > 1 and self._path[-1].version > lead.base.version:
            self._path.pop()
        while self._checkpoints and self._checkpoints[-1].version > lead.base.version:
            self._checkpoints.pop()
        if self._path[-1] != lead.base:
            # Below what this reader knows, or of another chain: the snapshot it began with is worth
            # nothing any more.
            self.base_lost = True
            self._path = [lead.base]
        self.epoch, self.number = lead.epoch, 0
        self.slices = lead.slices
        if lead.after_loss > self.after_loss:
            self.after_loss, self.judged = lead.after_loss, self.epoch
        return True

    def _is_next(self, record: UpdateApplied | Quarantined) -> bool:
        """Whether it is of the leader in force, and that leader's next one."""
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
            return False  # it is quarantined already, perhaps for good
        self._quarantined[offset] = record
        self._requeued.pop(offset, None)
        self._poison.pop(offset, None)  # of another batch, whose claim was lost
        if not record.expired:
            self._poison[offset] = record.batch
        return True

    def _store(self, record: CheckpointStored) -> bool:
        """True if the checkpoint is of the leader in force, of a version in force, and newer."""
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
        """Nobody can take it back from now on."""
        if self._poison.get(batch.offset) != batch:
            return False
        del self._poison[batch.offset]
        return True
