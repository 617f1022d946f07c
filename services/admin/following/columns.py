"""The newest effective updates of a job as compact columns: about 70 bytes for each.

    version        41  42  43  44          a Lead takes back what is above 42
    column         [0] [1] [2] [3]         then [2] and [3] are gone, and so are their samples

Versions have no holes, so a version is a place. Totals are of all updates ever seen, those that
fell out of the columns with them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from math import isnan, nan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.core.messages import UpdateApplied

KEPT = 1_000_000
_NAMES = 32  # metrics of a job, and reasons for a short group: more than tasks and modes have
_OTHER = "other"


class Row(NamedTuple):
    """One update."""

    version: int
    epoch: int
    at_s: float | None
    samples: int
    batches: int
    loss: float
    gradient_s: float | None
    revision: int
    short: str
    metrics: dict[str, float]


class Skips(NamedTuple):
    """Records of one stream that did not decode, in one update."""

    version: int
    stream: str
    records: int


class Columns:
    """Effective updates, by version.

    Args:
        kept: Updates that are kept, at least; memory holds a twentieth more.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self.clear(0)

    def clear(self, version: int) -> None:
        """Begin anew; the next update is the one after `version`."""
        self._before = version  # the first column's version is the next one
        self._epoch = array("q")
        self._at_s = array("d")
        self._samples = array("q")
        self._batches = array("i")
        self._loss = array("d")
        self._gradient_s = array("d")
        self._revision = array("i")
        self._short = array("B")
        self._metrics: dict[str, array[float]] = {}
        self._shorts = ["", _OTHER]
        self._skips = list[Skips]()  # by version; few updates have any
        self.samples = 0  # of all effective updates
        self.skipped = Counter[str]()  # by stream, likewise

    def __len__(self) -> int:
        return len(self._epoch)

    @property
    def oldest(self) -> int | None:
        """The first version that is still there; None: there is none."""
        return self._before + 1 if self._epoch else None

    @property
    def newest(self) -> int:
        """The last version that was made."""
        return self._before + len(self._epoch)

    @property
    def last_at_s(self) -> float | None:
        """When the newest was written."""
        return _known(self._at_s[-1]) if self._epoch else None

    def append(self, update: UpdateApplied, at_s: float | None) -> None:
        """Take in the next version.

        Args:
            update: It counts.
            at_s: When it was written, since 1970; None: nobody knows.
        """
        self._epoch.append(update.epoch)
        self._at_s.append(nan if at_s is None else at_s)
        self._samples.append(update.samples)
        self._batches.append(len(update.batches))
        self._loss.append(update.loss)
        self._gradient_s.append(update.gradient_s or nan)
        self._revision.append(update.revision)
        self._short.append(self._code(update.short))
        self._take_metrics(update.metrics)
        self.samples += update.samples
        if found := _skipped_in(update):
            self._skips += [Skips(update.version, *each) for each in found.items()]
            self.skipped += found
        if len(self) > self._kept + self._kept // 20:
            self._drop(0, len(self) - self._kept)
            self._before = update.version - len(self)
            self._skips = [each for each in self._skips if each.version > self._before]

    def take_back(self, version: int) -> None:
        """Forget all updates above a version."""
        first = max(0, version - self._before)
        self.samples -= sum(self._samples[first:])
        while self._skips and self._skips[-1].version > version:
            gone = self._skips.pop()
            self.skipped[gone.stream] -= gone.records
        if version < self._before:  # older than what is kept: what was before is gone for good
            samples, skipped = self.samples, self.skipped
            self.clear(version)
            self.samples, self.skipped = samples, skipped
        else:
            self._drop(first, len(self))

    def rows(self, first: int, last: int) -> Iterator[Row]:
        """Updates from one version to another, both included, as far as they are there."""
        for index in range(max(0, first - self._before - 1), min(len(self), last - self._before)):
            yield self._row(index)

    def _row(self, index: int) -> Row:
        metrics = {name: column[index] for name, column in self._metrics.items()}
        return Row(
            self._before + 1 + index,
            self._epoch[index],
            _known(self._at_s[index]),
            self._samples[index],
            self._batches[index],
            self._loss[index],
            _known(self._gradient_s[index]),
            self._revision[index],
            self._shorts[self._short[index]],
            {name: value for name, value in metrics.items() if not isnan(value)},
        )

    def _take_metrics(self, metrics: dict[str, float]) -> None:
        for name in metrics.keys() - self._metrics.keys():
            if len(self._metrics) < _NAMES:
                self._metrics[name] = array("d", [nan]) * (len(self) - 1)
        for name, column in self._metrics.items():
            column.append(metrics.get(name, nan))

    def _code(self, short: str) -> int:
        if short not in self._shorts:
            if len(self._shorts) == _NAMES:
                return self._shorts.index(_OTHER)
            self._shorts.append(short)
        return self._shorts.index(short)

    def _drop(self, first: int, end: int) -> None:
        for numbers in (*(self._epoch, self._samples, self._batches, self._revision, self._short),):
            del numbers[first:end]
        for values in (self._at_s, self._loss, self._gradient_s, *self._metrics.values()):
            del values[first:end]


def _known(value: float) -> float | None:
    return None if isnan(value) else value


def _skipped_in(update: UpdateApplied) -> Counter[str]:
    """Records of an update that did not decode, by stream."""
    found = Counter(update.skipped)
    for batch in update.batches:  # programs before format 2 said it of each batch
        for left_out in batch.skipped:
            found[left_out.topic] += left_out.records
    return found
