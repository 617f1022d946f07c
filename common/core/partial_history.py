"""Which updates count, for somebody who may come when the topic's beginning is gone.

`common.core.history` decides. Where retention, or the small log of an embedded broker, has deleted
the first records, the Lead in force at the first one that is left is guessed from the records: of
leaders whose Lead nobody can read any more, the newest that wrote is taken for the one in force,
until a Lead counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.core.history import History
from common.core.messages import AuditRecord, Lead, ModelId, UpdateApplied

if TYPE_CHECKING:
    from msgspec import UnsetType


_REMEMBERED = 1000  # updates of the path: who goes back further is believed by its version alone


class PartialHistory(History):
    """The fold over the updates topic, in bounded memory.

    Args:
        start: Offset of the first record that is still there.
    """

    def __init__(self, start: int = 0) -> None:
        super().__init__(position=start)
        self._guesses = start > 0
        self._forget_at = 2 * _REMEMBERED

    @property
    def version(self) -> int:
        """J of the newest effective update."""
        return self.head.version

    @property
    def known_slices(self) -> int | UnsetType | None:
        """Who holds the weights, as the Lead in force says; None: it is not known."""
        return None if self._guesses or self.epoch < 0 else self.slices

    def find(self, version: int) -> ModelId | None:
        """The effective update that made a version; None: there is none, or it is forgotten."""
        place = version - self._path[0].version
        return self._path[place] if 0 <= place < len(self._path) else None

    def holds(self, model: ModelId) -> bool:
        """Whether a version is part of the effective history.

        One that is older than what is remembered is believed: it was, when somebody told of it.
        """
        return model.version < self._path[0].version or self.find(model.version) == model

    def feed(self, offset: int, record: AuditRecord | None, epoch: int = -1) -> bool:
        """Fold the record at `offset`, as `History.feed` does; begin anew with an unseen leader."""
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
        """Whom a record shows to lead by a Lead from before the first record; its base."""
        match record:
            case UpdateApplied() if self._guesses and record.epoch > self.epoch:
                return ModelId(record.epoch, record.version - 1)
            case Lead(exact=True) if self._guesses and record.after > self.epoch:
                return record.base  # it counts for what is its head alone
            case Lead() if self._guesses and record.after > self.epoch:
                return ModelId(record.after, record.base.version)
            case _:
                return None
