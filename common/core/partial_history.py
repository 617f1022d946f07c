"""History for readers of an updates topic whose beginning may be gone.

`common.core.history` decides which updates count. If retention, or the small log of an embedded
broker, has deleted the first records, the Lead in force at the first remaining record is inferred:
of the leaders whose Lead is gone, the newest that wrote is considered in force until a Lead counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.history import History
from common.core.messages import AuditRecord, Lead, ModelId, UpdateApplied

if TYPE_CHECKING:
    from msgspec import UnsetType


# Number of updates that are remembered. An older one is believed by its version alone.
_REMEMBERED = 1000


class PartialHistory(History):
    """The fold over the updates topic in bounded memory.

    Args:
        start: Offset of the first record that still exists.
    """

    def __init__(self, start: int = 0) -> None:
        super().__init__(position=start)
        # True while the Lead in force is inferred.
        self._guesses = start > 0
        self._forget_at = 2 * _REMEMBERED

    @property
    def version(self) -> int:
        """J of the newest effective update."""
        return self.head.version

    @property
    def known_slices(self) -> int | UnsetType | None:
        """Layout of the weights in the Lead in force. None if unknown."""
        return None if self._guesses or self.epoch < 0 else self.slices

    def find(self, version: int) -> ModelId | None:
        """Return the effective update that made a version, or None if it is not known."""
        place = version - self._path[0].version
        return self._path[place] if 0 <= place < len(self._path) else None

    def holds(self, model: ModelId) -> bool:
        """True if a version is part of the effective history.

        A version older than the remembered ones is believed, because it was effective when it was
        reported.
        """
        return model.version < self._path[0].version or self.find(model.version) == model

    def feed(self, offset: int, record: AuditRecord | None, epoch: int = -1) -> bool:
        """Fold the record at `offset` like `History.feed`.

        If the record reveals a leader whose Lead is gone, the fold begins again with that leader.
        """
        unseen = self._unseen_leader(record)
        if unseen is not None:
            before = max(record.number - 1, 0) if isinstance(record, UpdateApplied) else 0
            led = record.after if isinstance(record, Lead) else unseen.epoch
            super().__init__(led, unseen, offset, self.poison, before)
        counts = super().feed(offset, record, epoch)
        self._guesses = self._guesses and not (counts and isinstance(record, Lead))
        if counts and self.version >= self._forget_at:
            self.forget_before(self.version - _REMEMBERED)
            self._forget_at = self.version + _REMEMBERED
        return counts

    def _unseen_leader(self, record: AuditRecord | None) -> ModelId | None:
        """Return the base of a leader that a record reveals, but whose Lead is gone."""
        match record:
            case UpdateApplied() if self._guesses and record.epoch > self.epoch:
                return ModelId(record.epoch, record.version - 1)
            case Lead(exact=True) if self._guesses and record.after > self.epoch:
                # The Lead only counts on top of its base.
                return record.base
            case Lead() if self._guesses and record.after > self.epoch:
                return ModelId(record.after, record.base.version)
            case _:
                return None
