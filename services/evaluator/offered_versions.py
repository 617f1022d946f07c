"""Pure fold over the updates topic: which offered versions are part of the job's history.

The fold also knows which results were reported. A leader offers a version before its audit record
can be read, and a later leader may take it back; then nobody should evaluate it. Besides, a version
may have two ids: a leader names its base weights with its own epoch, and the history names them
with the epoch of the leader that made them:

    record   Lead(-1) J=1         J=40    Lead, base J=40   J=41    Evaluated (70, 40)
             epoch 70                     epoch 80
    path     -        (70, 1)     (70,40) (70, 40)          (80,41)

An offer (70, 40) is the version (70, 40). An offer (80, 40) is the same version, from the second
Lead on. An offer (70, 41) is not part of the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import GENESIS, Batch, Evaluated, Lead, ModelId, UpdateApplied
from common.core.partial_history import PartialHistory
from common.core.snapshot_publishing import is_offered

if TYPE_CHECKING:
    from common.core.messages import AuditRecord

# Number of offered versions whose next batches are kept; an evaluator is rarely two versions late.
_KEPT = 8
# Number of versions remembered, more than a takeover takes back.
_REMEMBERED = 1000


class _Next(NamedTuple):
    """The first batches of a stream that the model learned from after a version."""

    # Version of the update that contains them.
    version: int
    batches: tuple[Batch, ...]


class OfferedVersions:
    """Fold over a job's updates topic, in bounded memory.

    Args:
        every_updates: Every n-th version is offered.
        start: Offset of the first record that still exists.
    """

    def __init__(self, every_updates: int, start: int = 0) -> None:
        self._every = every_updates
        self._start = start
        self._history = PartialHistory(start)
        # Base version of each Lead that counted, by its epoch.
        self._began = dict[int, ModelId]()
        # The next batches, by offered version and stream.
        self._after = dict[int, dict[str, _Next]]()
        # Versions and their progress, ascending.
        self._progress = list[tuple[int, float]]()
        # Offered versions, ascending.
        self._offered = list[int]()
        # Versions evaluated on the test set, ascending.
        self._tested = list[int]()
        self._predicted = list[int]()

    @property
    def tested(self) -> int:
        """Newest version that any evaluator evaluated on the test set, or -1."""
        return self._tested[-1] if self._tested else -1

    @property
    def predicted(self) -> int:
        """Newest version that any evaluator evaluated on following records, or -1."""
        return self._predicted[-1] if self._predicted else -1

    def feed(self, offset: int, record: AuditRecord | None) -> None:
        """Fold the record at `offset`; a malformed record is None.

        Raises:
            ValueError: If `offset` was fed before.
        """
        counts = self._history.feed(offset, record)
        match record:
            case Lead() if counts:
                self._began[self._history.epoch] = self._history.head
                self._take_back(self._history.version)
            case UpdateApplied() if counts:
                self._learned(record)
            case Evaluated() if self._history.holds(record.model):
                if record.test:
                    _append(self._tested, record.model.version)
                if record.prequential:
                    _append(self._predicted, record.model.version)
            case _:
                pass

    def name(self, model: ModelId) -> ModelId | None:
        """Return the history's id of an offered model, or None if the history lacks it (so far)."""
        if model == GENESIS:
            return model
        canonical = self._began.get(model.epoch)
        if canonical is None or canonical.version != model.version:
            canonical = model
        return canonical if self._history.find(model.version) == canonical else None

    def may_come(self, model: ModelId) -> bool:
        """Return True if a model may be in records of the updates topic that were not read yet."""
        if model.epoch == self._history.epoch:
            return model.version > self._history.version
        return model.epoch > self._history.epoch

    def after(self, name: ModelId) -> dict[str, tuple[Batch, ...]]:
        """Return the first batches of each stream that the model learned from after this version.

        Streams without a batch before the next offered version are left out.
        """
        if self._history.find(name.version) != name:
            return {}
        found = self._after.get(name.version, {})
        return {stream: next_.batches for stream, next_ in found.items()}

    def offered_between(self, one: int, other: int) -> int:
        """Return the number of offered versions between these two."""
        return sum(one < version < other for version in self._offered)

    def _learned(self, update: UpdateApplied) -> None:
        before = self._progress[-1][1] if self._progress else update.progress - 1
        if self._offered:
            offered = self._offered[-1]
        # Version 0, or the last offer from before the first record that still exists.
        else:
            offered = (update.version - 1) // self._every * self._every if self._start else 0
        if is_offered(before, update.progress, self._every):
            _append(self._offered, update.version)
        self._progress.append((update.version, update.progress))
        del self._progress[:-_REMEMBERED]
        known = self._after.setdefault(offered, {})
        by_stream = dict[str, list[Batch]]()
        for batch in update.batches:
            for stream in {span.topic for span in batch.address} - known.keys():
                by_stream.setdefault(stream, []).append(batch)
        for stream, batches in by_stream.items():
            known[stream] = _Next(update.version, tuple(batches))
        for old in sorted(self._after)[:-_KEPT]:
            del self._after[old]

    def _take_back(self, version: int) -> None:
        for versions in (self._tested, self._predicted, self._offered):
            while versions and versions[-1] > version:
                versions.pop()
        while self._progress and self._progress[-1][0] > version:
            self._progress.pop()
        for known in self._after.values():
            for stream in [stream for stream, each in known.items() if each.version > version]:
                del known[stream]


def _append(versions: list[int], version: int) -> None:
    """Append a version if it is newer than the last, and drop the oldest."""
    if not versions or version > versions[-1]:
        versions.append(version)
        del versions[:-_REMEMBERED]
