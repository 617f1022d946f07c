"""Which of the models that leaders offer count, and what of them was told already: a pure fold.

A leader offers a version before anybody can read its audit record, and one that was taken back is
worth nothing. And a leader names the weights that it began with by its own epoch, the history by
that of whoever made them:

    record   Lead(-1) J=1         J=40    Lead, base J=40   J=41    Evaluated (70, 40)
             epoch 70                     epoch 80
    path     -        (70, 1)     (70,40) (70, 40)          (80,41)
    (70, 40)  is itself;  (80, 40) is (70, 40) from its Lead on;  (70, 41) never was
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from common.core.messages import GENESIS, Batch, Evaluated, Lead, ModelId, UpdateApplied
from common.core.partial_history import PartialHistory
from common.core.snapshot_publishing import is_offered

if TYPE_CHECKING:
    from common.core.messages import AuditRecord

_KEPT = 8  # versions whose next records are known: an evaluator is rarely two behind
_REMEMBERED = 1000  # versions: a takeover goes back by some of them at most


class _Next(NamedTuple):
    """The first batches of a stream that the model learned from after a version."""

    version: int  # of the update that they are of
    batches: tuple[Batch, ...]


class OfferedVersions:
    """The fold over a job's updates topic, in bounded memory.

    Args:
        every_updates: Each n-th version is offered.
        start: Offset of the first record that is still there.
    """

    def __init__(self, every_updates: int, start: int = 0) -> None:
        self._every = every_updates
        self._start = start
        self._history = PartialHistory(start)
        self._began = dict[int, ModelId]()  # by epoch of a Lead that counted: its first weights
        self._after = dict[int, dict[str, _Next]]()  # by version that is offered, and stream
        self._progress = list[tuple[int, float]]()  # of the last versions, ascending
        self._offered = list[int]()  # versions, ascending
        self._tested = list[int]()  # likewise
        self._predicted = list[int]()

    @property
    def tested(self) -> int:
        """The newest version that was tried on a test set, by anybody; -1: none."""
        return self._tested[-1] if self._tested else -1

    @property
    def predicted(self) -> int:
        """The newest version by which records were predicted, likewise."""
        return self._predicted[-1] if self._predicted else -1

    def feed(self, offset: int, record: AuditRecord | None) -> None:
        """Fold the record at `offset` (None: does not parse).

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
        """What the history calls a model that is offered; None: it does not count, or not yet."""
        if model == GENESIS:
            return model
        canonical = self._began.get(model.epoch)
        if canonical is None or canonical.version != model.version:
            canonical = model
        return canonical if self._history.find(model.version) == canonical else None

    def may_come(self, model: ModelId) -> bool:
        """Whether a model that does not count may yet: its record, or its leader's, is unread."""
        if model.epoch == self._history.epoch:
            return model.version > self._history.version
        return model.epoch > self._history.epoch

    def after(self, name: ModelId) -> dict[str, tuple[Batch, ...]]:
        """By stream, the first batches of it that were learned from after this version.

        Of streams that come before the next version that is offered; the others are not there.
        """
        if self._history.find(name.version) != name:
            return {}
        found = self._after.get(name.version, {})
        return {stream: next_.batches for stream, next_ in found.items()}

    def offered_between(self, one: int, other: int) -> int:
        """How many versions between these two were offered."""
        return sum(one < version < other for version in self._offered)

    def _learned(self, update: UpdateApplied) -> None:
        before = self._progress[-1][1] if self._progress else update.progress - 1
        if self._offered:
            offered = self._offered[-1]
        else:  # the first weights; or a version of before all that is still there
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
    """Keep them ascending, and few."""
    if not versions or version > versions[-1]:
        versions.append(version)
        del versions[:-_REMEMBERED]
